// The products of matmul.h by integer dot instructions (AVX-512 VNNI), for weights of 4 or 8 bits.
//
// A group of a row of x becomes 24-bit integers times a power of two, cut into three signed bytes.
// The sums of a group are then exact, and scales and offsets apply once a group instead of once a
// weight. The rounding error is below 2^-23 of the group's largest number, as in float32.
// As in matmul.h, a row's result has the same bits alone and among others.
#pragma once
#include "matrix.h"

constexpr int DIGITS = 3;
// One row's share of a group: [65536 step, 256 step, step, sum], [DIGITS] initial integer sums, then
// the digits, four inputs of one digit (a quad) in an int. The rows of a block are interleaved.
constexpr int64_t units_a_group(int group) { return 4 + DIGITS + DIGITS * group / 4; }

#ifdef MK_VNNI
constexpr bool by_vnni(int kind) { return has_scale(kind); }
constexpr int QUAD_BLOCK = 6;  // rows whose sums stay in registers

struct Shares { float* factors; int32_t *starts, *digits; };

// Pointers to the part of row `row` of `n` in a group; its digits are DIGITS * n ints apart.
inline Shares share_of(float* group, int n, int row) {
    int32_t* starts = (int32_t*)(group + 4 * n);
    return {group + 4 * row, starts + DIGITS * row, starts + DIGITS * n + DIGITS * row};
}

// Writes `count` numbers of a group, and zeros after them, as fixed-point numbers.
template <int GROUP> inline void lay_out_group(const float* x, int64_t count, int n, int row, float* group) {
    constexpr int PARTS = GROUP / LANES;
    __m512 part[PARTS], most = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int i = 0; i < PARTS; ++i) {
        const int64_t here = std::clamp<int64_t>(count - i * LANES, 0, LANES);
        part[i] = _mm512_maskz_loadu_ps((__mmask16)((1u << here) - 1), x + (here ? i * LANES : 0));
        most = _mm512_max_ps(most, _mm512_abs_ps(part[i]));
        odd = _mm512_add_ps(odd, _mm512_mul_ps(part[i], _mm512_setzero_ps()));  // NaN if not finite
    }
    // three signed bytes reach 0.996 of 2^23
    const float largest = std::max(_mm512_reduce_max_ps(most), 1e-30f) * 1.004f;
    const int exponent = std::min(std::ilogb(largest), 126) + 1;
    const __m512 inverse = _mm512_set1_ps(std::ldexp(1.0f, 23 - exponent));
    const __m128i by_quad = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const Shares to = share_of(group, n, row);
    __m512i sums[DIGITS] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int i = 0; i < PARTS; ++i) {
        __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse));
        for (int k = DIGITS - 1; k >= 0; --k) {  // the lowest digit first
            const __m512i digit = k == 0 ? rest : _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
            rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, digit), 8);
            sums[k] = _mm512_add_epi32(sums[k], digit);
            alignas(16) int32_t packed[4];
            _mm_store_si128((__m128i*)packed, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(digit), by_quad));
            for (int q = 0; q < 4; ++q) to.digits[(4 * i + q) * DIGITS * n + k] = packed[q];
        }
    }
    const float step = std::ldexp(1.0f, exponent - 23) + _mm512_reduce_add_ps(odd);
    int64_t total = 0;
    for (int k = 0; k < DIGITS; ++k) {
        const int32_t sum = _mm512_reduce_add_epi32(sums[k]);
        to.starts[k] = -128 * sum;  // signed codes are read as code + 128
        to.factors[k] = step * (float)(1 << 8 * (DIGITS - 1 - k));
        total = 256 * total + sum;
    }
    to.factors[3] = (float)((double)total * step);
}

template <int GROUP>
inline void lay_out_quads(const float* x, int rows, int64_t width, int64_t inputs, float* x_q, int part, int parts) {
    const int64_t groups = inputs / GROUP, from = groups * part / parts, to = groups * (part + 1) / parts;
    for (int b = 0; b < num_blocks(rows, QUAD_BLOCK); ++b) {
        const int first = block_start(rows, b, QUAD_BLOCK), n = block_start(rows, b + 1, QUAD_BLOCK) - first;
        float* out = x_q + first * groups * units_a_group(GROUP);
        for (int64_t g = from; g < to; ++g)
            for (int row = 0; row < n; ++row)
                lay_out_group<GROUP>(x + (first + row) * width + g * GROUP, width - g * GROUP, n, row,
                                     out + g * n * units_a_group(GROUP));
    }
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

// tile[n][v * 16 ..] of rows `width` panels wide, for N rows and V panels; x_q from `lay_out`.
// Unrolled by pragma, so that the sums stay in registers: in memory they cost more than the products.
template <int KIND, int V, int N>
inline void multiply_quads(const uint8_t* data, int64_t stride, int64_t inputs, const float* x_q, float* tile, int width) {
    constexpr int GROUP = group_of(KIND), BYTES = bytes_a_group(KIND);
    Vec sum[N][V];
    for (auto& row : sum) for (auto& part : row) part = splat(0.0f);
    for (int64_t group = 0; group < inputs / GROUP; ++group, data += BYTES, x_q += N * units_a_group(GROUP)) {
        const int32_t* starts = (const int32_t*)(x_q + 4 * N);
        const int32_t* digits = starts + DIGITS * N;
        __m512i dots[N * DIGITS][V];
#pragma GCC unroll 24
        for (int i = 0; i < N * DIGITS; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) dots[i][v] = is_int4(KIND) ? _mm512_setzero_si512() : _mm512_set1_epi32(starts[i]);
        for (int octet = 0; octet < GROUP / OCTET; ++octet, digits += 2 * DIGITS * N) {
            __m512i quads[V][2];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const uint8_t* codes = data + v * stride + header_bytes(KIND) + octet * octet_bytes(KIND);
                load_quads<KIND>(codes, quads[v]);
                for (int line = 0; line < octet_bytes(KIND); line += 64)
                    _mm_prefetch((const char*)codes + 3 * BYTES + line, _MM_HINT_T0);
            }
#pragma GCC unroll 48
            for (int i = 0; i < 2 * DIGITS * N; ++i) {
                const __m512i x = _mm512_set1_epi32(digits[i]);
                auto& to = dots[i % (DIGITS * N)];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) to[v] = _mm512_dpbusd_epi32(to[v], quads[v][i / (DIGITS * N)], x);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const uint8_t* header = data + v * stride;
            const Vec scale = load_scale<KIND>(header), offset = has_offset(KIND) ? load_offset<KIND>(header) : splat(0.0f);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                const float* factor = x_q + 4 * n;
                Vec dot = Vec{_mm512_cvtepi32_ps(dots[DIGITS * n][v])} * splat(factor[0]);
                dot = fma(Vec{_mm512_cvtepi32_ps(dots[DIGITS * n + 1][v])}, splat(factor[1]), dot);
                dot = fma(Vec{_mm512_cvtepi32_ps(dots[DIGITS * n + 2][v])}, splat(factor[2]), dot);
                sum[n][v] = fma(dot, scale, sum[n][v]);
                if (has_offset(KIND)) sum[n][v] = fma(offset, splat(factor[3]), sum[n][v]);
            }
        }
    }
    for (int n = 0; n < N; ++n) for (int v = 0; v < V; ++v) store(tile + (n * width + v) * LANES, sum[n][v]);
}

// Two panels side by side for a block of rows: tile[row][2 * 16].
template <int KIND>
inline void multiply_two(const uint8_t* data, int64_t stride, int64_t inputs, const float* x_q, int rows, float* tile) {
    with_rows(rows, [&](auto N) {
        if constexpr (N > QUAD_BLOCK) return;
        else if constexpr (N <= 3) return multiply_quads<KIND, 2, N>(data, stride, inputs, x_q, tile, 2);
        else {
            multiply_quads<KIND, 1, N>(data, stride, inputs, x_q, tile, 2);
            multiply_quads<KIND, 1, N>(data + stride, stride, inputs, x_q, tile + LANES, 2);
        }
    });
}

#else
constexpr bool by_vnni(int) { return false; }
#endif
