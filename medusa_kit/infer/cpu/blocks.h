// Blocks of GGUF files, read as codes, scales and offsets.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gguf {  // other files have functions of the same names

enum Stored { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };  // GGUF's numbers

template <class F> inline void with_stored(int64_t stored, F f) {
    switch (stored) {
        case Q4_0: return f(std::integral_constant<int, Q4_0>{});
        case Q4_1: return f(std::integral_constant<int, Q4_1>{});
        case Q5_0: return f(std::integral_constant<int, Q5_0>{});
        case Q5_1: return f(std::integral_constant<int, Q5_1>{});
        case Q8_0: return f(std::integral_constant<int, Q8_0>{});
        case Q4_K: return f(std::integral_constant<int, Q4_K>{});
        case Q5_K: return f(std::integral_constant<int, Q5_K>{});
        case Q6_K: return f(std::integral_constant<int, Q6_K>{});
    }
}

constexpr bool is_k(int stored) { return stored >= Q4_K; }
constexpr int numbers_of(int stored) { return is_k(stored) ? 256 : 32; }
constexpr int stored_bytes(int stored) {
    return stored == Q4_0 ? 18 : stored == Q4_1 ? 20 : stored == Q5_0 ? 22 : stored == Q5_1 ? 24 : stored == Q8_0 ? 34
         : stored == Q4_K ? 144 : stored == Q5_K ? 176 : 210;
}
constexpr int stored_group(int stored) { return stored == Q6_K ? 16 : 32; }
constexpr int num_groups(int stored) { return numbers_of(stored) / stored_group(stored); }
constexpr bool has_minimum(int stored) { return stored == Q4_1 || stored == Q5_1 || stored == Q4_K || stored == Q5_K; }

inline float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * (float)mantissa;
    const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
// Of numbers that 16 bits hold exactly; what becomes of others is not equal to them.
inline uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const int exponent = (int)(bits >> 23 & 255) - 112;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (exponent >= 31) return sign | 0x7C00;
    if (exponent > 0) return (uint16_t)(sign | exponent << 10 | (bits >> 13 & 1023));
    return (uint16_t)(sign | (uint32_t)((bits >> 31 ? -value : value) * 0x1p24f));
}
inline bool is_half(float value) { return from_half(to_half(value)) == value; }

// w = codes * scales + offsets, group by group. Of Q4_K and Q6_K scales are `multiples` of factors.
struct Block {
    int8_t codes[256];
    float scales[16], offsets[16];
    uint8_t multiples[2][16];
    uint16_t factors[2];
};

inline uint16_t half_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    return half;
}
inline bool is_finite(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

// Where the factors of all scales (and offsets) of a block lie.
constexpr int factor_at(int stored) { return stored == Q6_K ? 208 : 0; }
template <int STORED> inline bool is_finite_block(const uint8_t* from) {
    return is_finite(half_at(from + factor_at(STORED))) && (!has_minimum(STORED) || is_finite(half_at(from + 2)));
}

inline void low_and_high(const uint8_t* bytes, int count, int8_t* codes) {
    for (int i = 0; i < count; ++i) codes[i] = bytes[i] & 15;
    for (int i = 0; i < count; ++i) codes[count + i] = (int8_t)(bytes[i] >> 4);
}

template <int STORED> inline void read_codes(const uint8_t* from, int8_t* codes) {
    if constexpr (STORED == Q8_0) std::memcpy(codes, from + 2, 32);
    else if constexpr (STORED == Q6_K) {
        for (int half = 0; half < 2; ++half)
            for (int part = 0; part < 4; ++part) {
                const uint8_t* low = from + 64 * half + 32 * (part % 2);
                const uint8_t* high = from + 128 + 32 * half;
                int8_t* out = codes + 128 * half + 32 * part;
                for (int i = 0; i < 32; ++i)
                    out[i] = (int8_t)(((low[i] >> 4 * (part / 2) & 15) | (high[i] >> 2 * part & 3) << 4) - 32);
            }
    } else if constexpr (is_k(STORED)) {
        for (int pair = 0; pair < 4; ++pair)
            low_and_high(from + (STORED == Q5_K ? 48 : 16) + 32 * pair, 32, codes + 64 * pair);
        if constexpr (STORED == Q5_K)
            for (int group = 0; group < 8; ++group)
                for (int i = 0; i < 32; ++i) codes[32 * group + i] |= (int8_t)((from[16 + i] >> group & 1) << 4);
    } else {
        low_and_high(from + stored_bytes(STORED) - 16, 16, codes);
        if constexpr (STORED == Q5_0 || STORED == Q5_1) {
            uint32_t fifth;
            std::memcpy(&fifth, from + stored_bytes(STORED) - 20, 4);
            for (int i = 0; i < 32; ++i) codes[i] |= (int8_t)((fifth >> i & 1) << 4);
        }
        constexpr int middle = STORED == Q4_0 ? 8 : STORED == Q5_0 ? 16 : 0;
        for (int i = 0; i < 32; ++i) codes[i] = (int8_t)(codes[i] - middle);
    }
}

template <int STORED> inline void read_scales(const uint8_t* from, Block& to) {
    to.factors[0] = half_at(from + factor_at(STORED));
    const float factor = from_half(to.factors[0]);
    if constexpr (!is_k(STORED)) {
        to.scales[0] = factor;
        if constexpr (has_minimum(STORED)) to.offsets[0] = from_half(half_at(from + 2));
    } else if constexpr (STORED == Q6_K) {
        std::memcpy(to.multiples[0], from + 192, 16);
        for (int group = 0; group < 16; ++group) to.scales[group] = factor * (float)(int8_t)to.multiples[0][group];
    } else {
        const uint8_t *low = from + 4, *minima = from + 8, *high = from + 12;
        const uint16_t minimum = half_at(from + 2);
        to.factors[1] = minimum ^ 0x8000;
        for (int i = 0; i < 4; ++i) {
            to.multiples[0][i] = low[i] & 63;
            to.multiples[1][i] = minima[i] & 63;
            to.multiples[0][4 + i] = (uint8_t)((high[i] & 15) | (low[i] >> 2 & 48));
            to.multiples[1][4 + i] = (uint8_t)(high[i] >> 4 | (minima[i] >> 2 & 48));
        }
        for (int group = 0; group < 8; ++group) {
            to.scales[group] = factor * (float)to.multiples[0][group];
            to.offsets[group] = -(from_half(minimum) * (float)to.multiples[1][group]);
        }
    }
}

// Not inline: gcc 12 makes vectors of what reads the scales before they are written.
template <int STORED> __attribute__((noinline)) void read_block(const uint8_t* from, Block& to) {
    read_codes<STORED>(from, to.codes);
    read_scales<STORED>(from, to);
}

}  // namespace gguf
