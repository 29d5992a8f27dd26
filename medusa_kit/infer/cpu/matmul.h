// out = x W^T for a few rows of x, W packed in panels of 16 outputs and expanded in registers.
//
// Every output is one chain of fused multiply-adds over the inputs in order, whatever the number of
// rows and threads. So a row's result has the same bits alone and among others.
#pragma once
#include "integers.h"

// Codes of six bits of sixteen inputs, as bytes in the order of INT8's.
inline const uint8_t* six_bits(const uint8_t* codes, uint8_t* to) {
    const uint8_t* high = codes + HIGH_BITS;
    for (int octet = 0; octet < 2; ++octet)
        for (int odd = 0; odd < 2; ++odd)
            for (int i = 0; i < 4 * LANES; ++i)
                to[(octet * 2 + odd) * 4 * LANES + i] =
                    (uint8_t)(((codes[octet * 4 * LANES + i] >> 4 * odd & 15) | (high[i] >> 2 * (2 * octet + odd) & 3) << 4) - 32);
    return to;
}

// V panels side by side, read eight inputs at a time.
template <int KIND, int V> struct Panels {
    static constexpr int GROUP = group_of(KIND), BYTES = bytes_a_group(KIND);
    const uint8_t* at[V];
    const uint8_t* codes[V];
    const uint8_t* factors[V];
    Vec scale[V], offset[V];
    Nibbles nibbles[V];
    uint8_t whole_codes[V][KIND == INT6_SUPER ? GROUP * LANES : 1];  // of six bits, in eight

    Panels(const uint8_t* data, int64_t stride) {
        for (int v = 0; v < V; ++v) {
            at[v] = codes[v] = factors[v] = data + v * stride;
            scale[v] = offset[v] = splat(0.0f);
        }
    }

    void begin(int octet) {
        const int within = octet % (GROUP / OCTET);
        for (int v = 0; v < V; ++v) {
            if (is_super(KIND) && octet % (SUPER / OCTET) == 0) {
                factors[v] = at[v];
                at[v] += factor_bytes(KIND);
            }
            if (within == 0) {
                if (has_scale(KIND)) scale[v] = load_scale<KIND>(at[v], factors[v]);
                if (has_offset(KIND)) offset[v] = load_offset<KIND>(at[v], factors[v]);
                codes[v] = at[v] + header_bytes(KIND);
                if (KIND == INT6_SUPER) codes[v] = six_bits(codes[v], whole_codes[v]);
                at[v] += BYTES;
                prefetch(at[v] + 3 * BYTES, BYTES);
            }
            if (is_int4(KIND)) nibbles[v] = load_nibbles(codes[v]);
        }
    }
    void end() {
        for (int v = 0; v < V; ++v) codes[v] += KIND == INT6_SUPER ? OCTET * LANES : octet_bytes(KIND);
    }
    template <int I> Vec weight(int v) const {
        if constexpr (KIND == F32) return load((const float*)codes[v] + I * LANES);
        if constexpr (KIND == BF16) return load_bf16((const uint16_t*)codes[v] + I * LANES);
        if constexpr (is_int4(KIND)) return fma(nibble<I>(nibbles[v]), scale[v], offset[v]);
        Vec code = load_code<I / 2>(codes[v] + I % 2 * 4 * LANES);  // four bytes of even inputs, then four of odd ones
        if constexpr (has_offset(KIND)) return fma(code, scale[v], offset[v]);
        return code * scale[v];
    }
};

// Transposes each block, which is the layout that `multiply` reads.
inline void transpose_rows(const float* x, int rows, int64_t width, int64_t inputs, float* x_t, int part, int parts) {
    const int64_t from = inputs * part / parts, to = inputs * (part + 1) / parts;
    for (int b = 0; b < num_blocks(rows); ++b) {
        const int first = block_start(rows, b), n = block_start(rows, b + 1) - first;
        float* out = x_t + first * inputs;
        for (int64_t k = from; k < to; ++k)
            for (int row = 0; row < n; ++row) out[k * n + row] = k < width ? x[(first + row) * width + k] : 0.0f;
    }
}

// Lays rows out for the kind of the weights, as `product` reads them.
template <int KIND, int DIGITS>
inline void lay_out_for(const Matrix& m, const float* x, int rows, float* x_t, int part, int parts) {
#ifdef MK_INTEGERS
    if constexpr (by_integers(KIND, DIGITS)) return lay_out_integers<KIND, DIGITS>(x, rows, m.inputs, x_t, part, parts);
    else
#endif
    transpose_rows(x, rows, m.inputs, padded(m.inputs, group_of(KIND)), x_t, part, parts);
}
inline void lay_out(const Matrix& m, const float* x, int rows, float* x_t, int part, int parts) {
    with_form(m, [&](auto KIND, auto DIGITS) { lay_out_for<KIND, DIGITS>(m, x, rows, x_t, part, parts); });
}
// The same for the rows from `row` to before `end`, and inputs from `from` to before `to`, multiples of
// PIECE. `x`: the first of these inputs of row `row`; the next row's are `apart` numbers later.
constexpr int64_t PIECE = 32;  // inputs; of whole groups of every kind
template <int KIND, int DIGITS>
inline void lay_out_piece_for(const Matrix& m, const float* x, int64_t apart, int rows, int row, int end, int64_t from, int64_t to, float* x_t) {
    const int64_t inputs = padded(m.inputs, group_of(KIND));
    to = std::min(to, inputs);
#ifdef MK_INTEGERS
    if constexpr (by_integers(KIND, DIGITS)) {
        constexpr int GROUP = group_of(KIND);
        constexpr int64_t UNITS = units_a_group<KIND, DIGITS>();
        for (; row < end; ++row, x += apart) {
            float* at = x_t + (row * inputs + from) / GROUP * UNITS;
            for (int64_t k = from; k < to; k += GROUP, at += UNITS)
                lay_out_group<KIND, DIGITS>(x + k - from, m.inputs - k, at);
        }
        return;
    } else
#endif
    for (int block = 0; row < end; ++row, x += apart) {
        while (block_start(rows, block + 1) <= row) ++block;
        const int first = block_start(rows, block), n = block_start(rows, block + 1) - first;
        float* at = x_t + first * inputs + row - first;
        for (int64_t k = from; k < to; ++k) at[k * n] = k < m.inputs ? x[k - from] : 0.0f;
    }
}
inline void lay_out_piece(const Matrix& m, const float* x, int64_t apart, int rows, int row, int end, int64_t from, int64_t to, float* x_t) {
    with_form(m, [&](auto KIND, auto DIGITS) { lay_out_piece_for<KIND, DIGITS>(m, x, apart, rows, row, end, from, to, x_t); });
}
// The number of floats that rows of `width` take once laid out.
inline int64_t room_for(int64_t rows, int64_t width) { return rows * std::max(padded(width, 32), integers_room(width)); }

// Computes the panels from `panel` to before `end`, an even number, and passes each tile [rows, V * 16]
// to `finish(panel, V, tile)`. Compiled in a file for each number of digits (products.h).
template <int DIGITS>
void product_of_digits(const Matrix& m, const float* x_t, int rows, int64_t panel, int64_t end, const AnyFinish& finish);
inline void product_of_panels(const Matrix& m, const float* x_t, int rows, int64_t panel, int64_t end, const AnyFinish& finish) {
    with_form(m, [&](auto, auto DIGITS) { product_of_digits<DIGITS>(m, x_t, rows, panel, end, finish); });
}

// One phase: this thread's equal share of all panels.
inline void product(const Matrix& m, const float* x_t, int rows, int id, int threads, const AnyFinish& finish) {
    const int64_t pairs = padded(m.outputs, 2 * LANES) / (2 * LANES);
    product_of_panels(m, x_t, rows, 2 * (pairs * id / threads), 2 * (pairs * (id + 1) / threads), finish);
}

// Lays rows out and multiplies them, in all threads, which have read x_t [room_for(rows, inputs)] and
// written `x` before; they have all done so afterwards.
template <class Finish>
inline void multiply_together(const Matrix& m, const float* x, int rows, float* x_t, int id, Pool& p, Finish finish) {
    lay_out(m, x, rows, x_t, id, p.active());
    p.barrier(id);
    product(m, x_t, rows, id, p.active(), AnyFinish(finish));
    p.barrier(id);
}

// The usual finish: sets out[row][output] to the result with its bias, or adds that to it.
template <bool ADD> struct Write {
    const Matrix& m;
    float* out;
    int rows;
    int64_t apart;  // numbers from one row of `out` to the next
    void operator()(int64_t panel, int V, const float* tile) const {
        const int64_t first = panel * LANES, count = std::min<int64_t>(V * LANES, m.outputs - first);
        for (int row = 0; row < rows; ++row) {
            float* to = out + row * apart + first;
            const float* from = tile + row * V * LANES;
            for (int64_t o = 0; o < count; ++o) {
                const float value = m.bias ? from[o] + m.bias[first + o] : from[o];
                to[o] = ADD ? to[o] + value : value;
            }
        }
    }
};

// The largest few numbers of each row with their columns, largest first, equal ones by column.
class Best {
  public:
    typedef std::pair<float, int64_t> Found;
    int count;

    Best(int rows, int count) : count(count), found(rows * count) {
        for (int i = 0; i < rows * count; ++i) found[i] = {-INFINITY, i % count};
    }
    const Found* of(int row) const { return &found[row * count]; }

    void insert(int row, float value, int64_t column) {
        Found* sorted = &found[row * count];
        const Found one{value, column};
        if (!(value > -INFINITY && before(one, sorted[count - 1]))) return;
        int place = count - 1;
        for (; place > 0 && before(one, sorted[place - 1]); --place) sorted[place] = sorted[place - 1];
        sorted[place] = one;
    }
    // Columns side by side.
    void insert_all(int row, const float* values, int64_t size, int64_t column) {
        const float& last = found[row * count + count - 1].first;
        for (int64_t i = 0; i < size; i += LANES) {
            if (i + LANES <= size && !any_from(load(values + i), last)) continue;
            for (int64_t j = i; j < std::min(i + LANES, size); ++j)
                if (values[j] >= last) insert(row, values[j], column + j);
        }
    }
    // Adds what another thread found.
    void join(int row, const Best& other) {
        for (int i = 0; i < count; ++i) insert(row, other.of(row)[i].first, other.of(row)[i].second);
    }

  private:
    std::vector<Found> found;

    static bool before(const Found& one, const Found& other) {
        return one.first > other.first || (one.first == other.first && one.second < other.second);
    }
};
