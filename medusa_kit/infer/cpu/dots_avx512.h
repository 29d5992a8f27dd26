// Dot products of integers by AVX-512 VNNI: four bytes of each of sixteen outputs an instruction.
#pragma once
#include "matrix.h"

constexpr int SLICE = 16;  // outputs in one register
typedef __m512 Part;       // a float of each
typedef __m512i Whole;     // an integer of each

inline Part part_of(float x) { return _mm512_set1_ps(x); }
inline Part load_part(const float* p) { return _mm512_loadu_ps(p); }
inline Part load_part(const uint16_t* halves) { return load_half(halves).v; }
template <bool SIGNED> inline Part load_bytes_part(const uint8_t* bytes) {
    return SIGNED ? load_signed_bytes(bytes).v : load_bytes(bytes).v;
}
inline void store_part(float* p, Part x) { _mm512_storeu_ps(p, x); }
inline Part times(Part x, Part y) { return _mm512_mul_ps(x, y); }
inline Part fused(Part x, Part y, Part z) { return _mm512_fmadd_ps(x, y, z); }
inline Whole whole_of(int32_t x) { return _mm512_set1_epi32(x); }

// A group's numbers are cut into signed bytes, and codes read as unsigned bytes in two pieces of four
// inputs: 0, 2, 4, 6 and 1, 3, 5, 7 of each eight. Digits: for every sixteen inputs [DIGITS][4].
template <int KIND, int DIGITS> struct Dots {
    static constexpr int SUMS = DIGITS, PIECES = 2, APART = 4, UNITS = DIGITS * group_of(KIND) / 4;
    static constexpr int PANELS_OF_ONE_ROW = 2, PANELS = 2;  // multiplied at once
    // Rows multiplied at once: as many as stay in registers. Of many rows with three digits, three are
    // faster.
    static constexpr int ROWS_AT_ONCE = DIGITS == 1 ? 6 : 4;
    static int rows_at_once(int rows) { return DIGITS == 3 && rows > 4 ? 3 : ROWS_AT_ONCE; }

    static constexpr int digits_at(int octet) { return octet / 2 * 4 * DIGITS + octet % 2 * 2; }
    static Whole first_sum(int32_t initial) { return whole_of(initial); }
    template <int P> static Whole piece(const uint8_t* codes, int octet) {
        if constexpr (is_int4(KIND)) {
            const __m512i words = _mm512_loadu_si512(codes);
            return _mm512_and_si512(P ? _mm512_srli_epi32(words, 4) : words, _mm512_set1_epi8(15));
        } else if constexpr (KIND == INT6_SUPER) {
            const __m512i words = _mm512_loadu_si512(codes), high = _mm512_loadu_si512(codes + HIGH_BITS - octet * 64);
            const __m512i low = _mm512_and_si512(P ? _mm512_srli_epi32(words, 4) : words, _mm512_set1_epi8(15));
            const __m512i placed = octet == 0 ? _mm512_slli_epi32(high, P ? 2 : 4) : P ? _mm512_srli_epi32(high, 2) : high;
            return _mm512_or_si512(low, _mm512_and_si512(placed, _mm512_set1_epi8(48)));
        } else {
            return _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * P), _mm512_set1_epi8((char)0x80));
        }
    }
    static Whole add_dots(Whole sum, Whole piece, Whole digit) { return _mm512_dpbusd_epi32(sum, piece, digit); }
};

// A digit's sum starts at the bits of a number whose lowest bit is worth the digit's step. So it is
// that number plus the sum times the step, read as a float: neither conversions nor products, which
// would compete with the dot products for the same units. Infinite for numbers above 2^110, whose
// products are then no numbers.
inline float start_of(float step) { return 1.5f * (1 << 23) * step; }
template <int KIND, int DIGITS> inline Part joined(const Whole* dots, int apart, const float* starts) {
    // One digit's step is no power of two, so its sum starts at that of 1 and is multiplied; a step of 16
    // bits times that start is exact.
    if constexpr (DIGITS == 1)
        return _mm512_fmadd_ps(_mm512_castsi512_ps(dots[0]), part_of(starts[1]), part_of(starts[0]));
    auto sum = [&](int k) { return _mm512_castsi512_ps(dots[k * apart]); };
    // Both starts of the two lowest digits leave with the higher one: an exact difference.
    auto lowest = _mm512_add_ps(_mm512_sub_ps(sum(DIGITS - 2), part_of(starts[DIGITS - 2])), sum(DIGITS - 1));
    if constexpr (DIGITS == 2) return lowest;
    return _mm512_add_ps(_mm512_sub_ps(sum(0), part_of(starts[0])), lowest);
}

// Writes `count` numbers of a group, and zeros after them, as integers.
template <int KIND, int DIGITS> inline void lay_out_group(const float* x, int64_t count, float* to) {
    constexpr int PARTS = group_of(KIND) / LANES;
    __m512 part[PARTS];
    __m512i most = _mm512_setzero_si512();  // as bits, which order absolute numbers, infinity and NaN last
    for (int i = 0; i < PARTS; ++i) {
        const int64_t here = std::clamp<int64_t>(count - i * LANES, 0, LANES);
        part[i] = _mm512_maskz_loadu_ps((__mmask16)((1u << here) - 1), x + (here ? i * LANES : 0));
        most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(part[i])));
    }
    const GroupScale scale(_mm512_reduce_max_epu32(most), DIGITS);
    const __m512 inverse = _mm512_set1_ps(scale.inverse);
    const __m512i by_quad = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m512i by_digit = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(  // the highest digit first
        DIGITS == 3   ? _mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15)
        : DIGITS == 2 ? _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 2, 6, 10, 14, 3, 7, 11, 15)
                      : _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i middle = _mm512_set1_epi32(0x808080);
    int32_t* header = (int32_t*)to;
    __m512i sums = _mm512_setzero_si512();
    for (int i = 0; i < PARTS; ++i) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse));
        // plus 128 in each byte, whose highest bit then changes: signed bytes that add up to the number
        __m512i digits = _mm512_xor_si512(_mm512_add_epi32(whole, middle), middle);
        digits = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(by_quad, digits), bytes);
        digits = _mm512_permutexvar_epi32(by_digit, digits);
        _mm512_mask_storeu_epi32(header + HEADER + 4 * DIGITS * i, (1 << 4 * DIGITS) - 1, digits);
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), digits);
    }
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
    const int32_t sum[3] = {_mm_cvtsi128_si32(_mm512_castsi512_si128(sums)),
                                 _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(sums, 1)),
                                 _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(sums, 2))};
    to[SUM] = (float)((double)of_digits(sum, DIGITS) * scale.step);
    for (int k = 0; k < DIGITS; ++k) {
        const float from = start_of(DIGITS == 1 ? 1.0f : scale.step * (float)(1 << 8 * (DIGITS - 1 - k)));
        int32_t start;
        std::memcpy(&start, &from, sizeof start);
        to[k] = k == DIGITS - 2 ? from + start_of(scale.step) : from;
        header[4 + k] = start - added_to(KIND) * sum[k];
    }
    if (DIGITS == 1) {
        to[0] = -start_of(scale.step);
        to[1] = scale.step;
    }
}
