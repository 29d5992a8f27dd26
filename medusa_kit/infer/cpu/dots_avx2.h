// Dot products of integers in registers of eight outputs: AVX-VNNI, or AVX2 alone.
//
// AVX2 multiplies bytes by vpmaddubsw, whose sums of two products have 16 bits. With codes of four
// bits the sums of a whole group fit. With eight they would not, so codes and numbers become 16 bits.
#pragma once
#include "matrix.h"

constexpr int SLICE = 8;  // outputs in one register
typedef __m256 Part;      // a float of each
typedef __m256i Whole;    // an integer of each

inline Part part_of(float x) { return _mm256_set1_ps(x); }
inline Part load_part(const float* p) { return _mm256_loadu_ps(p); }
inline Part load_part(const uint16_t* halves) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves)); }
template <bool SIGNED> inline Part load_bytes_part(const uint8_t* bytes) {
    const __m128i eight = _mm_loadl_epi64((const __m128i*)bytes);
    return _mm256_cvtepi32_ps(SIGNED ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight));
}
inline void store_part(float* p, Part x) { _mm256_storeu_ps(p, x); }
inline Part times(Part x, Part y) { return _mm256_mul_ps(x, y); }
inline Part fused(Part x, Part y, Part z) { return _mm256_fmadd_ps(x, y, z); }
inline Part to_part(Whole x) { return _mm256_cvtepi32_ps(x); }
inline Whole whole_of(int32_t x) { return _mm256_set1_epi32(x); }
inline Whole plus(Whole x, Whole y) { return _mm256_add_epi32(x, y); }
inline Whole times_256(Whole x) { return _mm256_slli_epi32(x, 8); }
// Keeps the order of additions, which is free in integers: g++ puts them off, and runs out of registers.
inline Whole in_order(Whole sum) {
    asm("" : "+x"(sum));
    return sum;
}
inline Whole load_whole(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Codes of six bits as bytes that are 32 too large: inputs 0, 2, 4, 6 of each eight, or 1, 3, 5, 7.
template <int ODD> inline Whole six_bits_of(const uint8_t* codes, int octet) {
    const Whole words = load_whole(codes), high = load_whole(codes + HIGH_BITS - octet * 64);
    const Whole low = _mm256_and_si256(ODD ? _mm256_srli_epi32(words, 4) : words, _mm256_set1_epi8(15));
    const Whole placed = octet == 0 ? _mm256_slli_epi32(high, ODD ? 2 : 4) : ODD ? _mm256_srli_epi32(high, 2) : high;
    return _mm256_or_si256(low, _mm256_and_si256(placed, _mm256_set1_epi8(48)));
}

// Signed bytes, as with AVX-512: two pieces of four inputs. Digits: [octets][DIGITS][2].
template <int KIND, int DIGITS> struct InBytes {
    static constexpr int SUMS = DIGITS, PIECES = 2, APART = 2, UNITS = DIGITS * group_of(KIND) / 4;
    static constexpr int PANELS_OF_ONE_ROW = 2, PANELS = 1, ROWS_AT_ONCE = DIGITS == 3 ? 2 : 4;
    static int rows_at_once(int) { return ROWS_AT_ONCE; }

    static constexpr int digits_at(int octet) { return octet * SUMS * PIECES; }
    template <int P> static Whole piece(const uint8_t* codes, int octet) {
        if constexpr (is_int4(KIND)) {
            const Whole words = load_whole(codes);
            return _mm256_and_si256(P ? _mm256_srli_epi32(words, 4) : words, _mm256_set1_epi8(15));
        } else if constexpr (KIND == INT6_SUPER) {
            return six_bits_of<P>(codes, octet);
        } else {
            return _mm256_xor_si256(load_whole(codes + 64 * P), _mm256_set1_epi8((char)0x80));
        }
    }
#ifdef __AVXVNNI__
    static Whole first_sum(int32_t initial) { return is_int4(KIND) ? _mm256_setzero_si256() : whole_of(initial); }
    static Whole add_dots(Whole sum, Whole piece, Whole digit) { return in_order(_mm256_dpbusd_avx_epi32(sum, piece, digit)); }
    static Whole total(Whole sum) { return sum; }
#else
    static_assert(!is_int4(KIND) || group_of(KIND) / 4 * 2 * 15 * 128 <= 32767, "sums of 16 bits");
    static Whole first_sum(int32_t) { return _mm256_setzero_si256(); }
    static Whole add_dots(Whole sum, Whole piece, Whole digit) {
        return in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(piece, digit)));
    }
    static Whole total(Whole sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif
    static void write_digits(__m256i whole, int32_t* to, __m256i& sums) {
        const __m256i middle = _mm256_set1_epi32(0x808080);
        // plus 128 in each byte, whose highest bit then changes: signed bytes that add up to the number
        const __m256i digits = _mm256_xor_si256(_mm256_add_epi32(whole, middle), middle);
        const __m128i bytes = DIGITS == 3   ? _mm_setr_epi8(2, 10, 6, 14, 1, 9, 5, 13, 0, 8, 4, 12, 3, 11, 7, 15)
                              : DIGITS == 2 ? _mm_setr_epi8(1, 9, 5, 13, 0, 8, 4, 12, 2, 10, 6, 14, 3, 11, 7, 15)
                                            : _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
        const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(digits), bytes);     // of inputs 0, 2, 1, 3
        const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(digits, 1), bytes);  // of 4, 6, 5, 7
        const __m128i first = _mm_unpacklo_epi16(low, high), last = _mm_unpackhi_epi16(low, high);
        if (DIGITS == 1) _mm_storel_epi64((__m128i*)to, first);
        else _mm_storeu_si128((__m128i*)to, first);
        if (DIGITS == 3) _mm_storel_epi64((__m128i*)(to + 4), last);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_set_m128i(last, first));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static void write_sums(float* to, float step, __m256i sums) {
        alignas(32) int32_t parts[8];
        _mm256_store_si256((__m256i*)parts, sums);
        int32_t* header = (int32_t*)to;
        int32_t sum[DIGITS];
        for (int k = 0; k < DIGITS; ++k) {
            sum[k] = parts[2 * k] + parts[2 * k + 1];
            header[4 + k] = -added_to(KIND) * sum[k];
        }
        write_header(to, step, 65536, of_digits(sum, DIGITS));
    }
};

// Integers of 16 bits, and codes likewise: four pieces of two inputs, (0, 4), (2, 6), (1, 5), (3, 7).
// Numbers of up to 16 bits are one such integer, those of 24 bits two halves of twelve. But for numbers
// of 16 bits, codes are times 256, which leaves them in the upper byte: the lower half is in (-2048,
// 2048] and codes are at least -128, so the sums of 32 inputs fit into 32 bits.
template <int KIND, int DIGITS> struct InHalves {
    static constexpr int SUMS = DIGITS == 3 ? 2 : 1, PIECES = 4, APART = 4, UNITS = SUMS * group_of(KIND) / 2;
    static constexpr int PANELS_OF_ONE_ROW = 2, PANELS = 1, ROWS_AT_ONCE = DIGITS == 3 ? 3 : 4;
    static constexpr bool TIMES_256 = DIGITS != 2;
    static int rows_at_once(int) { return ROWS_AT_ONCE; }

    static constexpr int digits_at(int octet) { return octet * SUMS * PIECES; }
    static Whole first_sum(int32_t) { return _mm256_setzero_si256(); }
    template <int P> static Whole piece(const uint8_t* codes, int octet) {
        const Whole four = four_codes<P / 2>(codes, octet), low = _mm256_slli_epi16(four, 8);
        if (TIMES_256) return P % 2 ? _mm256_and_si256(four, _mm256_set1_epi16((short)0xff00)) : low;
        return _mm256_srai_epi16(P % 2 ? four : low, 8);
    }
    template <int ODD> static Whole four_codes(const uint8_t* codes, int octet) {
        if constexpr (KIND == INT6_SUPER) return _mm256_sub_epi8(six_bits_of<ODD>(codes, octet), _mm256_set1_epi8(32));
        return load_whole(codes + ODD * 64);
    }
    static Whole add_dots(Whole sum, Whole piece, Whole digit) {
        return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(piece, digit)));
    }
    static Whole total(Whole sum) { return sum; }
    static void write_digits(__m256i whole, int32_t* to, __m256i& sums) {
        sums = _mm256_add_epi32(sums, whole);
        if (SUMS == 1) return write_pairs(_mm256_and_si256(whole, _mm256_set1_epi32(0xffff)), to);
        const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(2047)), 12);
        const __m256i low = _mm256_sub_epi32(whole, _mm256_slli_epi32(high, 12));
        write_pairs(high, to);
        write_pairs(low, to + PIECES);
    }
    static void write_pairs(__m256i digits, int32_t* to) {
        const __m128i last = _mm_slli_epi32(_mm256_extracti128_si256(digits, 1), 16);
        const __m128i pairs = _mm_blend_epi16(_mm256_castsi256_si128(digits), last, 0xaa);  // (0, 4), (1, 5), ...
        _mm_storeu_si128((__m128i*)to, _mm_shuffle_epi32(pairs, _MM_SHUFFLE(3, 1, 2, 0)));
    }
    static void write_sums(float* to, float step, __m256i sums) {
        alignas(32) int32_t parts[8];
        _mm256_store_si256((__m256i*)parts, sums);
        int32_t sum = 0;
        for (int32_t part : parts) sum += part;
        write_header(to, step, 4096, sum);
        if (!TIMES_256) return;
        to[0] *= 1.0f / 256;
        to[1] *= 1.0f / 256;
    }
};

#ifdef __AVXVNNI__
template <int KIND, int DIGITS> struct Dots : InBytes<KIND, DIGITS> {};
#else
template <int KIND, int DIGITS>
struct Dots : std::conditional_t<is_int4(KIND), InBytes<KIND, DIGITS>, InHalves<KIND, DIGITS>> {};
#endif

// Writes `count` numbers of a group, and zeros after them, as integers.
template <int KIND, int DIGITS> inline void lay_out_group(const float* x, int64_t count, float* to) {
    constexpr int GROUP = group_of(KIND), OCTETS = GROUP / OCTET;
    alignas(32) float padded_group[GROUP];
    if (count < GROUP) {
        std::fill(padded_group, padded_group + GROUP, 0.0f);
        std::copy(x, x + std::max<int64_t>(count, 0), padded_group);
        x = padded_group;
    }
    const __m256i sign = _mm256_set1_epi32((int)0x80000000);
    __m256i most = _mm256_setzero_si256();  // as bits, which order absolute numbers, infinity and NaN last
    for (int i = 0; i < OCTETS; ++i)
        most = _mm256_max_epu32(most, _mm256_andnot_si256(sign, load_whole((const uint8_t*)(x + i * OCTET))));
    __m128i two = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    two = _mm_max_epu32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(1, 0, 3, 2)));
    two = _mm_max_epu32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)));
    const GroupScale scale((uint32_t)_mm_cvtsi128_si32(two), DIGITS);
    const __m256 inverse = _mm256_set1_ps(scale.inverse);
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < OCTETS; ++i) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i * OCTET), inverse));
        Dots<KIND, DIGITS>::write_digits(whole, (int32_t*)to + HEADER + Dots<KIND, DIGITS>::digits_at(i), sums);
    }
    Dots<KIND, DIGITS>::write_sums(to, scale.step, sums);
}
