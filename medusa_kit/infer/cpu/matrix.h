// The layout of weights in memory, and how the rows that they multiply are cut into blocks.
#pragma once
#include <algorithm>
#include <utility>

#include "pool.h"
#include "simd.h"

// The kinds that `packing.py` writes. A group shares a scale (and an offset) for each output;
// HALF: both in 16 bits, which hold them exactly. SUPER: both are bytes times 16-bit factors that all
// groups of 256 inputs share, as in Q4_K and Q6_K of GGUF files.
enum Kind { F32, BF16, INT4, INT8, INT8_OFFSET, INT8_FINE, INT8_FINE_OFFSET, INT4_HALF, INT8_OFFSET_HALF, INT4_SUPER, INT6_SUPER };

struct Matrix {  // mirrored in kernels.py
    int64_t kind, outputs, inputs;  // as the model has them; panels are padded with zeros
    const uint8_t* data;            // [panels (an even number)][inputs / group][...]; SUPER: [panels][inputs / 256][...]
    const float* bias;              // [outputs], or null
    int64_t digits;                 // integers.h: 3 keep a number of x as float32 does, 2 are 16 bits, 1 is 8
};

template <class F> inline void with_kind(const Matrix& m, F f) {
    switch (m.kind) {
        case F32: return f(std::integral_constant<int, F32>{});
        case BF16: return f(std::integral_constant<int, BF16>{});
        case INT4: return f(std::integral_constant<int, INT4>{});
        case INT8: return f(std::integral_constant<int, INT8>{});
        case INT8_OFFSET: return f(std::integral_constant<int, INT8_OFFSET>{});
        case INT8_FINE: return f(std::integral_constant<int, INT8_FINE>{});
        case INT8_FINE_OFFSET: return f(std::integral_constant<int, INT8_FINE_OFFSET>{});
        case INT4_HALF: return f(std::integral_constant<int, INT4_HALF>{});
        case INT8_OFFSET_HALF: return f(std::integral_constant<int, INT8_OFFSET_HALF>{});
        case INT4_SUPER: return f(std::integral_constant<int, INT4_SUPER>{});
        case INT6_SUPER: return f(std::integral_constant<int, INT6_SUPER>{});
    }
}

// The same with the number of digits, which only kinds that are multiplied as integers have.
template <class F> inline void with_form(const Matrix& m, F f) {
    with_kind(m, [&](auto KIND) {
#ifdef MK_INTEGERS
        if constexpr (KIND >= INT4) {
            if (m.digits == 1) return f(KIND, std::integral_constant<int, 1>{});
            if (m.digits == 2) return f(KIND, std::integral_constant<int, 2>{});
        }
#endif
        f(KIND, std::integral_constant<int, 3>{});
    });
}

constexpr int OCTET = 8;
constexpr bool is_int4(int kind) { return kind == INT4 || kind == INT4_HALF || kind == INT4_SUPER; }
constexpr bool is_super(int kind) { return kind >= INT4_SUPER; }
constexpr bool has_scale(int kind) { return kind >= INT4; }
constexpr bool has_offset(int kind) { return has_scale(kind) && kind != INT8 && kind != INT8_FINE && kind != INT6_SUPER; }
constexpr int group_of(int kind) {
    return !has_scale(kind) ? OCTET : kind == INT8_FINE || kind == INT8_FINE_OFFSET || kind == INT6_SUPER ? 16 : 32;
}
constexpr int scale_bytes(int kind) { return is_super(kind) ? 1 : kind >= INT4_HALF ? 2 : 4; }
constexpr int header_bytes(int kind) { return LANES * scale_bytes(kind) * (has_scale(kind) + has_offset(kind)); }
constexpr int octet_bytes(int kind) {  // of the codes of eight inputs of a panel; of six bits, the lower four
    return OCTET * LANES * (kind == F32 ? 8 : kind == BF16 ? 4 : is_int4(kind) || kind == INT6_SUPER ? 1 : 2) / 2;
}
constexpr int HIGH_BITS = OCTET * LANES;  // where the upper two bits of a group's six lie among its codes
constexpr int code_bytes(int kind) { return group_of(kind) / OCTET * octet_bytes(kind) + (kind == INT6_SUPER ? HIGH_BITS / 2 : 0); }
constexpr int bytes_a_group(int kind) { return header_bytes(kind) + code_bytes(kind); }
constexpr int SUPER = 256;  // inputs that share factors
constexpr int factor_bytes(int kind) { return is_super(kind) ? LANES * 2 * (1 + has_offset(kind)) : 0; }
constexpr int groups_a_factor(int kind) { return SUPER / group_of(kind); }
// Of a panel, where `groups` fill whole factors.
constexpr int64_t panel_bytes(int kind, int64_t groups) {
    return groups * bytes_a_group(kind) + (is_super(kind) ? groups / groups_a_factor(kind) * factor_bytes(kind) : 0);
}
// The scale of a group; `factors`: of the SUPER inputs that it is among.
template <int KIND> inline Vec load_scale(const uint8_t* header, const uint8_t* factors) {
    if constexpr (KIND == INT4_SUPER) return load_half((const uint16_t*)factors) * load_bytes(header);
    else if constexpr (is_super(KIND)) return load_half((const uint16_t*)factors) * load_signed_bytes(header);
    else if constexpr (scale_bytes(KIND) == 2) return load_half((const uint16_t*)header);
    else return load((const float*)header);
}
template <int KIND> inline Vec load_offset(const uint8_t* header, const uint8_t* factors) {
    return load_scale<KIND>(header + header_bytes(KIND) / 2, factors + factor_bytes(KIND) / 2);
}
inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline void prefetch(const uint8_t* from, int bytes) {
#if defined(__x86_64__)
    for (int line = 0; line < bytes; line += 64) _mm_prefetch((const char*)from + line, _MM_HINT_T0);
#else
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(from + line);
#endif
}

inline void prefetch_far(const uint8_t* line) {  // into a cache that holds some panels
#if defined(__x86_64__)
    _mm_prefetch((const char*)line, _MM_HINT_T1);
#else
    __builtin_prefetch(line, 0, 2);
#endif
}

// What becomes of each tile [rows, V * 16] of products, whose first panel is `panel`: a reference to any
// `finish(panel, V, tile)`, so that products are compiled once and not for each of them.
struct AnyFinish {
    const void* finish;
    void (*call)(const void*, int64_t, int, const float*);

    template <class Finish>
    explicit AnyFinish(const Finish& one)
        : finish(&one), call([](const void* of, int64_t panel, int V, const float* tile) { (*(const Finish*)of)(panel, V, tile); }) {}
    void operator()(int64_t panel, int V, const float* tile) const { call(finish, panel, V, tile); }
};

template <class F, int... I> inline void unroll(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

// Rows of x are multiplied in blocks of at most BLOCK.
#ifdef __AVX512F__
constexpr int BLOCK = 8;
#else
constexpr int BLOCK = 3;
#endif
constexpr int MAX_ROWS = 256;  // of one call; mirrored in kernels.py
inline int num_blocks(int rows, int most = BLOCK) { return (rows + most - 1) / most; }
inline int block_start(int rows, int block, int most = BLOCK) { return rows * block / num_blocks(rows, most); }

template <class F> inline void with_rows(int n, F f) {
    switch (n) {
        case 1: return f(std::integral_constant<int, 1>{});
        case 2: return f(std::integral_constant<int, 2>{});
        case 3: return f(std::integral_constant<int, 3>{});
        case 4: return f(std::integral_constant<int, 4>{});
#ifdef __AVX512F__
        case 5: return f(std::integral_constant<int, 5>{});
        case 6: return f(std::integral_constant<int, 6>{});
        case 7: return f(std::integral_constant<int, 7>{});
        case 8: return f(std::integral_constant<int, 8>{});
#endif
    }
}
