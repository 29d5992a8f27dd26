// What attention needs beside simd.h: sums of four lanes, numbers in 16 bits, aligned room.
#pragma once
#include <vector>

#include "simd.h"

// Scores of at most four lanes: a vector holds four sums of each lane, four inputs apart, which is the
// order of sums in wider blocks too. Where this has no fast form, all blocks have LANES lanes.
#ifdef __AVX512F__
constexpr bool HAS_QUADS = true;
inline Vec repeat_quad(const float* p) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))}; }
// [lane][sum] of four slots -> [slot][lane] of their totals
inline Vec total_quads(Vec a, Vec b, Vec c, Vec d) {
    const __m512 ab_low = _mm512_unpacklo_ps(a.v, b.v), ab_high = _mm512_unpackhi_ps(a.v, b.v);
    const __m512 cd_low = _mm512_unpacklo_ps(c.v, d.v), cd_high = _mm512_unpackhi_ps(c.v, d.v);
    const __m512 sum0 = _mm512_shuffle_ps(ab_low, cd_low, 0x44), sum1 = _mm512_shuffle_ps(ab_low, cd_low, 0xee);
    const __m512 sum2 = _mm512_shuffle_ps(ab_high, cd_high, 0x44), sum3 = _mm512_shuffle_ps(ab_high, cd_high, 0xee);
    const __m512 total = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(sum0, sum1), sum2), sum3);
    const __m512i turned = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return {_mm512_permutexvar_ps(turned, total)};
}
inline Vec max_of_quads(Vec a) {
    const __m512 half = _mm512_max_ps(a.v, _mm512_shuffle_f32x4(a.v, a.v, 0x4e));
    return {_mm512_max_ps(half, _mm512_shuffle_f32x4(half, half, 0xb1))};
}
#else
constexpr bool HAS_QUADS = false;
inline Vec repeat_quad(const float* p) { return load(p); }
inline Vec total_quads(Vec a, Vec, Vec, Vec) { return a; }
inline Vec max_of_quads(Vec a) { return a; }
#endif
constexpr int QUAD = 4;
inline int64_t block_size(int64_t lanes) { return HAS_QUADS && lanes <= LANES - QUAD ? QUAD : LANES; }

// To the nearest number in 16 bits; what is too large for them becomes the largest.
inline uint16_t to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);  // not a number
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7bff);
    if (size < 0x38800000) {  // less than the smallest with a leading bit: a multiple of 2^-24
        float whole;
        std::memcpy(&whole, &size, sizeof whole);
        return (uint16_t)(sign | (uint32_t)std::nearbyint(whole * 16777216.0f));
    }
    return (uint16_t)(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}

// Floats that begin with a cache line, so that no vector lies in two.
class Buffer {
  public:
    float* of(int64_t size) {
        if ((int64_t)room.size() < size + LANES) room.resize(size + LANES);
        return (float*)(((uintptr_t)room.data() + 63) / 64 * 64);
    }

  private:
    std::vector<float> room;
};
