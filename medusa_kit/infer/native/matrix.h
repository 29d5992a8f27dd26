// How weights lie in memory, and how the rows that meet them are cut into blocks.
#pragma once
#include <algorithm>
#include <utility>

#include "pool.h"
#include "simd.h"

// How weights lie; `packing.py` writes them. A group shares a scale (and an offset) for each output.
enum Kind { F32, BF16, INT4, INT8, INT8_OFFSET, INT8_FINE, INT8_FINE_OFFSET };

struct Matrix {  // mirrored in kernels.py
    int64_t kind, outputs, inputs;  // as the model has them; panels are padded with zeros
    const uint8_t* data;            // [panels (an even number)][inputs / group][...]
    const float* bias;              // [outputs], or null
};

constexpr int OCTET = 8;
constexpr bool has_scale(int kind) { return kind >= INT4; }
constexpr bool has_offset(int kind) { return kind == INT4 || kind == INT8_OFFSET || kind == INT8_FINE_OFFSET; }
constexpr int group_of(int kind) { return kind < INT4 ? OCTET : kind < INT8_FINE ? 32 : 16; }
constexpr int bytes_a_group(int kind) {
    const int one = kind == F32 ? 32 : kind == BF16 ? 16 : kind == INT4 ? 4 : 8;  // half bytes
    return group_of(kind) * LANES * one / 8 + LANES * 4 * (has_scale(kind) + has_offset(kind));
}
inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows of x are multiplied in blocks of at most BLOCK.
#ifdef __AVX512F__
constexpr int BLOCK = 8;
#else
constexpr int BLOCK = 3;
#endif
constexpr int MAX_ROWS = 64;
inline int num_blocks(int rows, int most = BLOCK) { return (rows + most - 1) / most; }
inline int block_start(int rows, int block, int most = BLOCK) { return rows * block / num_blocks(rows, most); }

template <class F> inline void with_rows(int n, F f) {
    switch (n) {
        case 1: return f(std::integral_constant<int, 1>{});
        case 2: return f(std::integral_constant<int, 2>{});
        case 3: return f(std::integral_constant<int, 3>{});
#ifdef __AVX512F__
        case 4: return f(std::integral_constant<int, 4>{});
        case 5: return f(std::integral_constant<int, 5>{});
        case 6: return f(std::integral_constant<int, 6>{});
        case 7: return f(std::integral_constant<int, 7>{});
        case 8: return f(std::integral_constant<int, 8>{});
#endif
    }
}
