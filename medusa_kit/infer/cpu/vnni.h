// The products of matmul.h by integer dot instructions (AVX-512 VNNI), for weights of 4 or 8 bits.
//
// A group of a row of x becomes 24-bit integers times a power of two, cut into three signed bytes.
// The sums of a group are then exact, and scales and offsets apply once a group instead of once a
// weight. The rounding error is below 2^-23 of the group's largest number, as in float32.
// As in matmul.h, a row's result has the same bits alone and among others.
#pragma once
#include "matrix.h"

constexpr int DIGITS = 3;
// One row's share of a group: [65536 step, step, sum, unused], [DIGITS] initial integer sums and one
// unused, then the digits: for every sixteen inputs [DIGITS][4], four inputs of one digit (a quad)
// in an int. A row has its groups side by side, whatever other rows there are.
constexpr int HEADER = 8;
constexpr int64_t units_a_group(int group) { return HEADER + DIGITS * group / 4; }

#ifdef MK_VNNI
constexpr bool by_vnni(int kind) { return has_scale(kind); }
// Rows multiplied at once: four at most stay in registers, and of many rows three are faster.
inline int quad_block(int rows) { return rows <= 4 ? 4 : 3; }

inline float power_of_two(int exponent) {  // of a normal number
    const int32_t bits = (exponent + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

// Writes `count` numbers of a group, and zeros after them, as fixed-point numbers.
template <int GROUP> inline void lay_out_group(const float* x, int64_t count, float* to) {
    constexpr int PARTS = GROUP / LANES;
    __m512 part[PARTS];
    __m512i most = _mm512_setzero_si512();  // as bits, which order absolute numbers, infinity and NaN last
    for (int i = 0; i < PARTS; ++i) {
        const int64_t here = std::clamp<int64_t>(count - i * LANES, 0, LANES);
        part[i] = _mm512_maskz_loadu_ps((__mmask16)((1u << here) - 1), x + (here ? i * LANES : 0));
        most = _mm512_max_epu32(most, _mm512_castps_si512(_mm512_abs_ps(part[i])));
    }
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool odd = bits >= 0x7f800000;  // no number
    // three signed bytes reach 0.996 of 2^23
    largest = std::max(odd ? 1.0f : largest, 1e-30f) * 1.004f;
    uint32_t scaled;
    std::memcpy(&scaled, &largest, sizeof scaled);
    const int exponent = std::min((int)(scaled >> 23) - 127, 126) + 1;
    const __m512 inverse = _mm512_set1_ps(power_of_two(23 - exponent));
    const __m512i by_quad = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m512i by_digit = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15));
    const __m512i middle = _mm512_set1_epi32(0x808080);
    int32_t* header = (int32_t*)to;
    __m512i sums = _mm512_setzero_si512();
    for (int i = 0; i < PARTS; ++i) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse));
        // plus 128 in each byte, whose highest bit then changes: signed bytes that add up to the number
        __m512i digits = _mm512_xor_si512(_mm512_add_epi32(whole, middle), middle);
        digits = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(by_quad, digits), bytes);
        digits = _mm512_permutexvar_epi32(by_digit, digits);
        _mm512_mask_storeu_epi32(header + HEADER + 4 * DIGITS * i, 0xfff, digits);
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), digits);
    }
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
    const int32_t sum[DIGITS] = {_mm_cvtsi128_si32(_mm512_castsi512_si128(sums)),
                                 _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(sums, 1)),
                                 _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(sums, 2))};
    const float step = odd ? NAN : power_of_two(exponent - 23);
    to[0] = 65536 * step;
    to[1] = step;
    to[2] = (float)((double)((sum[0] * 256 + sum[1]) * 256 + sum[2]) * step);
    for (int k = 0; k < DIGITS; ++k) header[4 + k] = -128 * sum[k];  // signed codes are read as code + 128
}

template <int GROUP>
inline void lay_out_quads(const float* x, int rows, int64_t width, int64_t inputs, float* x_q, int part, int parts) {
    const int64_t groups = inputs / GROUP, from = groups * part / parts, to = groups * (part + 1) / parts;
    for (int row = 0; row < rows; ++row)
        for (int64_t g = from; g < to; ++g)
            lay_out_group<GROUP>(x + row * width + g * GROUP, width - g * GROUP, x_q + (row * groups + g) * units_a_group(GROUP));
}

// Codes of eight inputs of a panel as unsigned bytes, two quads: inputs 0, 2, 4, 6 and 1, 3, 5, 7.
template <int KIND> inline void load_quads(const uint8_t* codes, __m512i (&quads)[2]) {
    if constexpr (is_int4(KIND)) {
        const __m512i words = _mm512_loadu_si512(codes), low = _mm512_set1_epi8(15);
        quads[0] = _mm512_and_si512(words, low);
        quads[1] = _mm512_and_si512(_mm512_srli_epi32(words, 4), low);
    } else {
        const __m512i half = _mm512_set1_epi8((char)0x80);
        quads[0] = _mm512_xor_si512(_mm512_loadu_si512(codes), half);
        quads[1] = _mm512_xor_si512(_mm512_loadu_si512(codes + 64), half);
    }
}

// Adds a group to the sum of a row: its integers, times scales and step, and its offsets.
template <bool OFFSET>
inline Vec add_group(Vec sum, const __m512i* dots, int apart, const float* factors, Vec scale, Vec offset) {
    const __m512i low = _mm512_add_epi32(_mm512_slli_epi32(dots[apart], 8), dots[2 * apart]);
    Vec dot = Vec{_mm512_cvtepi32_ps(low)} * splat(factors[1]);
    dot = fma(Vec{_mm512_cvtepi32_ps(dots[0])}, splat(factors[0]), dot);
    sum = fma(dot, scale, sum);
    return OFFSET ? fma(offset, splat(factors[2]), sum) : sum;
}

// tile[n][v * 16 ..] of rows `width` panels wide, for N rows and V panels; x_q from `lay_out`.
// Unrolled by pragma, so that the sums stay in registers: in memory they cost more than the products.
template <int KIND, int V, int N>
inline void multiply_quads(const uint8_t* data, int64_t stride, int64_t inputs, const float* x_q, float* tile, int width) {
    constexpr int GROUP = group_of(KIND), BYTES = bytes_a_group(KIND);
    const int64_t apart = inputs / GROUP * units_a_group(GROUP);  // of rows
    Vec sum[N][V];
    for (auto& row : sum) for (auto& part : row) part = splat(0.0f);
    for (int64_t group = 0; group < inputs / GROUP; ++group, data += BYTES, x_q += units_a_group(GROUP)) {
        const int32_t* x = (const int32_t*)x_q;
        __m512i dots[N][DIGITS][V];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 3
            for (int k = 0; k < DIGITS; ++k)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) dots[n][k][v] = is_int4(KIND) ? _mm512_setzero_si512() : _mm512_set1_epi32(x[n * apart + 4 + k]);
#pragma GCC unroll 4
        for (int octet = 0; octet < GROUP / OCTET; ++octet) {
            const int32_t* digits = x + HEADER + octet / 2 * 4 * DIGITS + octet % 2 * 2;
            __m512i quads[V][2];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const uint8_t* codes = data + v * stride + header_bytes(KIND) + octet * octet_bytes(KIND);
                load_quads<KIND>(codes, quads[v]);
                for (int line = 0; line < octet_bytes(KIND); line += 64)
                    _mm_prefetch((const char*)codes + 3 * BYTES + line, _MM_HINT_T0);
            }
#pragma GCC unroll 2
            for (int q = 0; q < 2; ++q)
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n)
#pragma GCC unroll 3
                    for (int k = 0; k < DIGITS; ++k) {
                        const __m512i digit = _mm512_set1_epi32(digits[n * apart + 4 * k + q]);
#pragma GCC unroll 4
                        for (int v = 0; v < V; ++v) dots[n][k][v] = _mm512_dpbusd_epi32(dots[n][k][v], quads[v][q], digit);
                    }
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const uint8_t* header = data + v * stride;
            const Vec scale = load_scale<KIND>(header), offset = has_offset(KIND) ? load_offset<KIND>(header) : splat(0.0f);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sum[n][v] = add_group<has_offset(KIND)>(sum[n][v], &dots[n][0][v], V, x_q + n * apart, scale, offset);
        }
    }
    for (int n = 0; n < N; ++n) for (int v = 0; v < V; ++v) store(tile + (n * width + v) * LANES, sum[n][v]);
}

#else
constexpr bool by_vnni(int) { return false; }
#endif
