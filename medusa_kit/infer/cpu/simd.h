// Sixteen floats at a time: AVX-512, AVX2, or vectors that any g++ or clang++ compiles.
// MK_INTEGERS: the bits of the registers in which integers.h multiplies, where it can.
// Compiled with -ffp-contract=off, so that only `fma` is a fused multiply-add.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int LANES = 16;

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#ifdef __AVX512VNNI__
#define MK_INTEGERS 512
#define MK_ISA "avx512-vnni"
#else
#define MK_ISA "avx512"
#endif
struct Vec { __m512 v; };
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec vmax(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec vmin(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round_even(Vec a) { return {_mm512_roundscale_ps(a.v, 0)}; }
inline Vec keep_where_above(Vec a, Vec test, float limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test.v, _mm512_set1_ps(limit), _CMP_GT_OQ), a.v)};
}
inline bool any_from(Vec a, float limit) { return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_GE_OQ) != 0; }
inline Vec times_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline Vec load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Vec load_bytes(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline Vec load_signed_bytes(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline Vec load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Byte B of the four of each lane, as a float.
template <int B> inline Vec load_code(const uint8_t* p) {
    const __m512i high = _mm512_slli_epi32(_mm512_loadu_si512(p), 24 - 8 * B);
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(high, 24))};
}
// Eight four-bit numbers for each lane; one table look-up turns sixteen of them into floats.
struct Nibbles { __m512i v; };
inline Nibbles load_nibbles(const void* p) { return {_mm512_loadu_si512(p)}; }
template <int I> inline Vec nibble(Nibbles q) {
    const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(q.v, 4 * I), table)};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define MK_INTEGERS 256
#ifdef __AVXVNNI__
#define MK_ISA "avx-vnni"
#else
#define MK_ISA "avx2"
#endif
struct Vec { __m256 a, b; };
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec operator+(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec operator-(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec operator*(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec operator/(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec fma(Vec x, Vec y, Vec z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Vec vmax(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vec vmin(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Vec round_even(Vec x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec keep_where_above(Vec x, Vec test, float limit) {
    const __m256 edge = _mm256_set1_ps(limit);
    return {_mm256_and_ps(x.a, _mm256_cmp_ps(test.a, edge, _CMP_GT_OQ)),
            _mm256_and_ps(x.b, _mm256_cmp_ps(test.b, edge, _CMP_GT_OQ))};
}
inline bool any_from(Vec x, float limit) {
    const __m256 edge = _mm256_set1_ps(limit);
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, edge, _CMP_GE_OQ), _mm256_cmp_ps(x.b, edge, _CMP_GE_OQ))) != 0;
}
inline __m256 power_of_two(__m256 n) {
    __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Vec times_power_of_two(Vec x, Vec n) {
    return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
inline Vec load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline Vec load_bytes(const uint8_t* p) {
    auto half = [](const uint8_t* q) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)q))); };
    return {half(p), half(p + 8)};
}
inline Vec load_signed_bytes(const uint8_t* p) {
    auto half = [](const uint8_t* q) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q))); };
    return {half(p), half(p + 8)};
}
inline Vec load_bf16(const uint16_t* p) {
    auto half = [](const uint16_t* q) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)q));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    };
    return {half(p), half(p + 8)};
}
template <int B> inline Vec load_code(const uint8_t* p) {
    auto half = [](const uint8_t* q) {
        const __m256i high = _mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)q), 24 - 8 * B);
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 24));
    };
    return {half(p), half(p + 32)};
}
struct Nibbles { __m256i a, b; };
inline Nibbles load_nibbles(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
template <int I> inline Vec nibble(Nibbles q) {
    const __m256i low = _mm256_set1_epi32(15);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(q.a, 4 * I), low)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(q.b, 4 * I), low))};
}

#else  // the compiler's vector extension, which it maps to what the machine has
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && !defined(MK_PLAIN)
#define MK_INTEGERS 128
#define MK_ISA "neon-dot"
#else
#define MK_ISA "plain"
#endif
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
struct Vec { Floats v; };
inline Vec load(const float* p) { Vec r; std::memcpy(&r, p, sizeof r); return r; }
inline void store(float* p, Vec a) { std::memcpy(p, &a, sizeof a); }
inline Vec splat(float x) { return {Floats{} + x}; }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }  // exact products with weights, so the same bits
inline Vec vmax(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec vmin(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec round_even(Vec a) { return {(a.v + 12582912.0f) - 12582912.0f}; }  // for |a| < 2^22
inline Vec keep_where_above(Vec a, Vec test, float limit) { return {test.v > limit ? a.v : Floats{}}; }
inline bool any_from(Vec a, float limit) {
    bool any = false;
    for (int i = 0; i < LANES; ++i) any |= a.v[i] >= limit;
    return any;
}
inline Vec times_power_of_two(Vec a, Vec n) {
    Ints bits = (__builtin_convertvector(n.v, Ints) + 127) << 23;
    Vec power;
    std::memcpy(&power, &bits, sizeof bits);
    return a * power;
}
inline Vec load_half(const uint16_t* p) {
    Vec r;
    for (int i = 0; i < LANES; ++i) {
        const int exponent = p[i] >> 10 & 31, fraction = p[i] & 1023;
        const float size = exponent ? std::ldexp(1.0f + fraction / 1024.0f, exponent - 15) : std::ldexp((float)fraction, -24);
        r.v[i] = p[i] >> 15 ? -size : size;
    }
    return r;
}
inline Vec load_bytes(const uint8_t* p) {
    Vec r;
    for (int i = 0; i < LANES; ++i) r.v[i] = (float)p[i];
    return r;
}
inline Vec load_signed_bytes(const uint8_t* p) {
    Vec r;
    for (int i = 0; i < LANES; ++i) r.v[i] = (float)(int8_t)p[i];
    return r;
}
inline Vec load_bf16(const uint16_t* p) {
    uint32_t bits[LANES];
    for (int i = 0; i < LANES; ++i) bits[i] = (uint32_t)p[i] << 16;
    return load((const float*)bits);
}
template <int B> inline Vec load_code(const uint8_t* p) {
    Vec r;
    for (int i = 0; i < LANES; ++i) r.v[i] = (float)(int8_t)p[4 * i + B];
    return r;
}
struct Nibbles { Ints v; };
inline Nibbles load_nibbles(const void* p) { Nibbles q; std::memcpy(&q, p, sizeof q); return q; }
template <int I> inline Vec nibble(Nibbles q) { return {__builtin_convertvector((q.v >> (4 * I)) & 15, Floats)}; }
#endif

// e^x by reduction to |r| <= ln2 / 2 and a polynomial (Cephes' coefficients), within 2 ulp.
// x is clamped to [-87.3, 88.3]; e^-87.3 is about the smallest normal number.
inline Vec vexp(Vec x) {
    x = vmin(vmax(x, splat(-87.3f)), splat(88.3f));
    Vec n = round_even(x * splat(1.44269504088896341f));
    Vec r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    return times_power_of_two(p, n);
}
inline Vec vtanh(Vec x) {  // 1 - 2 / (e^2x + 1): exact at both ends
    return splat(1.0f) - splat(2.0f) / (vexp(x + x) + splat(1.0f));
}
