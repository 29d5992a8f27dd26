// Products of rows and weights, for numbers of DIGITS digits (integers.h).
//
// Most of the library's compile time is theirs. Each number of digits has its file, so that a build
// takes as long as the longest of them where there are cores enough.
#pragma once
#include "matmul.h"

// tile[n][v * 16 ..] for N rows; x_t [inputs, N].
template <int KIND, int V, int N>
inline void multiply(const uint8_t* data, int64_t stride, int64_t inputs, const float* x_t, float* tile) {
    Panels<KIND, V> panels(data, stride);
    Vec sum[N][V];
    for (auto& row : sum) for (auto& part : row) part = splat(0.0f);
    for (int64_t octet = 0; octet < inputs / OCTET; ++octet, x_t += OCTET * N) {
        panels.begin((int)octet);
        unroll([&](auto i) {
            Vec w[V];
            for (int v = 0; v < V; ++v) w[v] = panels.template weight<i>(v);
            for (int n = 0; n < N; ++n) {
                const Vec x = splat(x_t[i * N + n]);
                for (int v = 0; v < V; ++v) sum[n][v] = fma(x, w[v], sum[n][v]);
            }
        }, std::make_integer_sequence<int, OCTET>{});
        panels.end();
    }
    for (int n = 0; n < N; ++n) for (int v = 0; v < V; ++v) store(tile + (n * V + v) * LANES, sum[n][v]);
}

// For more rows than one block: weights are expanded once into the cache, and every block reads them.
template <int V, int N>
inline void multiply_expanded(const float* weights, int num_inputs, const float* x_t, float* tile) {
    Vec sum[N][V];
    for (int n = 0; n < N; ++n) for (int v = 0; v < V; ++v) sum[n][v] = load(tile + (n * V + v) * LANES);
    for (int k = 0; k < num_inputs; ++k) {
        Vec w[V];
        for (int v = 0; v < V; ++v) w[v] = load(weights + (k * V + v) * LANES);
        for (int n = 0; n < N; ++n) {
            const Vec x = splat(x_t[k * N + n]);
            for (int v = 0; v < V; ++v) sum[n][v] = fma(x, w[v], sum[n][v]);
        }
    }
    for (int n = 0; n < N; ++n) for (int v = 0; v < V; ++v) store(tile + (n * V + v) * LANES, sum[n][v]);
}

template <int KIND>
inline void multiply_many(const uint8_t* data, int64_t stride, int64_t inputs, const float* x_t, int rows, float* tile) {
    constexpr int V = 2, SLAB = 4;  // octets expanded at a time: 4 KB
    Panels<KIND, V> panels(data, stride);
    float weights[SLAB * OCTET * V * LANES];
    std::fill(tile, tile + (int64_t)rows * V * LANES, 0.0f);
    const int octets = (int)(inputs / OCTET);
    for (int first = 0; first < octets; first += SLAB) {
        const int count = std::min(SLAB, octets - first);
        for (int octet = 0; octet < count; ++octet) {
            panels.begin(first + octet);
            unroll([&](auto i) {
                for (int v = 0; v < V; ++v)
                    store(weights + ((octet * OCTET + i) * V + v) * LANES, panels.template weight<i>(v));
            }, std::make_integer_sequence<int, OCTET>{});
            panels.end();
        }
        for (int b = 0; b < num_blocks(rows); ++b) {
            const int start = block_start(rows, b), n = block_start(rows, b + 1) - start;
            with_rows(n, [&](auto N) {
                multiply_expanded<V, N>(weights, count * OCTET, x_t + start * inputs + (int64_t)first * OCTET * n,
                                        tile + start * V * LANES);
            });
        }
    }
}

// Few rows need many panels at once, for enough independent additions.
template <int KIND>
inline void product_expanded(const Matrix& m, const float* x_t, int rows, int64_t panel, int64_t end, const AnyFinish& finish) {
    const int64_t inputs = padded(m.inputs, group_of(KIND));
    const int64_t stride = panel_bytes(KIND, inputs / group_of(KIND));
    alignas(64) float tile[MAX_ROWS * 2 * LANES];
    auto run = [&](auto V, auto N) {
        for (; panel + V <= end; panel += V) {
            multiply<KIND, V, N>(m.data + panel * stride, stride, inputs, x_t, tile);
            finish(panel, (int)V, tile);
        }
    };
    using std::integral_constant;
#ifdef __AVX512F__
    if (rows == 1) run(integral_constant<int, 6>{}, integral_constant<int, 1>{});
    if (rows == 2) run(integral_constant<int, 4>{}, integral_constant<int, 2>{});
    if (rows == 3) run(integral_constant<int, 4>{}, integral_constant<int, 3>{});
#else
    if (rows == 1) run(integral_constant<int, 4>{}, integral_constant<int, 1>{});
#endif
    if (rows <= BLOCK) return with_rows(rows, [&](auto N) { run(integral_constant<int, 2>{}, N); });
    for (; panel < end; panel += 2) {
        multiply_many<KIND>(m.data + panel * stride, stride, inputs, x_t, rows, tile);
        finish(panel, 2, tile);
    }
}

template <int KIND, int DIGITS>
inline void product_of_form(const Matrix& m, const float* x_t, int rows, int64_t panel, int64_t end, const AnyFinish& finish) {
#ifdef MK_INTEGERS
    if constexpr (by_integers(KIND, DIGITS)) return product_by_integers<KIND, DIGITS>(m, x_t, rows, panel, end, finish);
    else
#endif
    return product_expanded<KIND>(m, x_t, rows, panel, end, finish);
}

template <int DIGITS>
void product_of_digits(const Matrix& m, const float* x_t, int rows, int64_t panel, int64_t end, const AnyFinish& finish) {
    with_kind(m, [&](auto KIND) {  // kinds that are not multiplied as integers have 3 (`with_form`)
        if constexpr (DIGITS == 3 || by_integers(KIND, DIGITS)) product_of_form<KIND, DIGITS>(m, x_t, rows, panel, end, finish);
    });
}
