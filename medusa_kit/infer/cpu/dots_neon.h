// Dot products of integers by NEON's sdot: four signed bytes of each of four outputs an instruction.
#pragma once
#include <arm_neon.h>

#include "matrix.h"

constexpr int SLICE = 4;     // outputs in one register
typedef float32x4_t Part;    // a float of each
typedef int32x4_t Whole;     // an integer of each

inline Part part_of(float x) { return vdupq_n_f32(x); }
inline Part load_part(const float* p) { return vld1q_f32(p); }
inline Part load_part(const uint16_t* halves) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves))); }
template <bool SIGNED> inline Part load_bytes_part(const uint8_t* bytes) {
    float four[4];
    for (int i = 0; i < 4; ++i) four[i] = SIGNED ? (float)(int8_t)bytes[i] : (float)bytes[i];
    return vld1q_f32(four);
}
inline void store_part(float* p, Part x) { vst1q_f32(p, x); }
inline Part times(Part x, Part y) { return vmulq_f32(x, y); }
inline Part fused(Part x, Part y, Part z) { return vfmaq_f32(z, x, y); }
inline Part to_part(Whole x) { return vcvtq_f32_s32(x); }
inline Whole whole_of(int32_t x) { return vdupq_n_s32(x); }
inline Whole plus(Whole x, Whole y) { return vaddq_s32(x, y); }
inline Whole times_256(Whole x) { return vshlq_n_s32(x, 8); }

// A group's numbers are cut into signed bytes; two pieces of four inputs: 0, 2, 4, 6 and 1, 3, 5, 7 of
// each eight. Digits: [octets][DIGITS][2].
template <int KIND, int DIGITS> struct Dots {
    static constexpr int SUMS = DIGITS, PIECES = 2, APART = 2, UNITS = DIGITS * group_of(KIND) / 4;
    static constexpr int PANELS_OF_ONE_ROW = 1, PANELS = 1, ROWS_AT_ONCE = DIGITS == 1 ? 4 : DIGITS == 2 ? 3 : 2;
    static int rows_at_once(int) { return ROWS_AT_ONCE; }

    static constexpr int digits_at(int octet) { return octet * DIGITS * PIECES; }
    static Whole first_sum(int32_t) { return vdupq_n_s32(0); }
    template <int P> static Whole piece(const uint8_t* codes, int octet) {
        if constexpr (is_int4(KIND)) {
            const uint8x16_t words = vld1q_u8(codes);
            return vreinterpretq_s32_u8(P ? vshrq_n_u8(words, 4) : vandq_u8(words, vdupq_n_u8(15)));
        } else if constexpr (KIND == INT6_SUPER) {
            const uint8x16_t words = vld1q_u8(codes), high = vld1q_u8(codes + HIGH_BITS - octet * 64);
            const uint8x16_t low = P ? vshrq_n_u8(words, 4) : vandq_u8(words, vdupq_n_u8(15));
            const uint8x16_t two = vandq_u8(vshlq_u8(high, vdupq_n_s8((int8_t)(-2 * (2 * octet + P)))), vdupq_n_u8(3));
            const uint8x16_t six = vorrq_u8(low, vshlq_n_u8(two, 4));
            return vreinterpretq_s32_u8(vsubq_u8(six, vdupq_n_u8(32)));
        } else {
            return vreinterpretq_s32_u8(vld1q_u8(codes + 64 * P));
        }
    }
    static Whole add_dots(Whole sum, Whole piece, Whole digit) {
        return vdotq_s32(sum, vreinterpretq_s8_s32(piece), vreinterpretq_s8_s32(digit));
    }
    static Whole total(Whole sum) { return sum; }
};

// Writes `count` numbers of a group, and zeros after them, as integers.
template <int KIND, int DIGITS> inline void lay_out_group(const float* x, int64_t count, float* to) {
    typedef Dots<KIND, DIGITS> D;
    constexpr int GROUP = group_of(KIND);
    uint32_t bits[GROUP] = {}, most = 0;  // as bits, which order absolute numbers, infinity and NaN last
    std::memcpy(bits, x, std::clamp<int64_t>(count, 0, GROUP) * sizeof(float));
    for (uint32_t one : bits) most = std::max(most, one & 0x7fffffff);
    const GroupScale scale(most, DIGITS);
    float part[GROUP];
    std::memcpy(part, bits, sizeof bits);
    int32_t whole[GROUP], sum = 0;
    for (int i = 0; i < GROUP; i += 4)
        vst1q_s32(whole + i, vcvtnq_s32_f32(vmulq_f32(vld1q_f32(part + i), vdupq_n_f32(scale.inverse))));
    int8_t* digits = (int8_t*)((int32_t*)to + HEADER);
    for (int i = 0; i < GROUP; ++i) {
        // plus 128 in each byte, whose highest bit then changes: signed bytes that add up to the number
        const uint32_t bytes = ((uint32_t)whole[i] + 0x808080) ^ 0x808080;
        int8_t* at = digits + 4 * (D::digits_at(i / OCTET) + i % 2) + i % OCTET / 2;
        for (int k = 0; k < DIGITS; ++k) at[4 * D::APART * k] = (int8_t)(bytes >> 8 * (DIGITS - 1 - k));
        sum = (int32_t)((uint32_t)sum + (uint32_t)whole[i]);  // wraps where a number is none
    }
    write_header(to, scale.step, 65536, sum);
}
