// Products of the kernels outside Python, for processors that are emulated.
//
// Reads matrices with inputs and numbers of rows from a file, and writes the results one after
// another: for each matrix all rows, then the first few of them, as often as the file asks.
#include <cstdio>
#include <cstdlib>

#include "decoder.cpp"

template <class T> std::vector<T> read(FILE* file, int64_t count) {
    std::vector<T> all(count);
    if (fread(all.data(), sizeof(T), count, file) != (size_t)count) std::abort();
    return all;
}

int main(int, char** arguments) {
    FILE *in = fopen(arguments[1], "rb"), *out = fopen(arguments[2], "wb");
    std::puts(mk_isa());
    const int64_t matrices = read<int64_t>(in, 1)[0];
    for (int64_t i = 0; i < matrices; ++i) {
        const auto head = read<int64_t>(in, 7);  // kind, outputs, inputs, bytes, rows, how many parts, digits
        const auto data = read<uint8_t>(in, head[3]);
        const auto x = read<float>(in, head[4] * head[2]);
        const auto parts = read<int64_t>(in, 2 * head[5]);  // rows, threads
        const Matrix matrix{head[0], head[1], head[2], data.data(), nullptr, head[6]};
        for (int64_t part = 0; part < head[5]; ++part) {
            std::vector<float> result(parts[2 * part] * head[1]);
            mk_linear(&matrix, x.data(), (int)parts[2 * part], result.data(), (int)parts[2 * part + 1]);
            fwrite(result.data(), sizeof(float), result.size(), out);
        }
    }
    return fclose(out);
}
