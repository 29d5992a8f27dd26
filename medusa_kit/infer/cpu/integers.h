// The products of matmul.h by dot products of integers, for weights of 4 or 8 bits.
//
// A group of a row of x becomes integers times a step, cut into digits of 8 bits that the processor
// multiplies. The sums of a group are then exact, and scales and offsets apply once a group instead of
// once a weight. With three digits the rounding error is below 2^-23 of the group's largest number, as
// in float32; with two it is below 2^-15, with one 1/254. As in matmul.h, a row's result has the same
// bits alone and among others. With one or two digits it also has the same bits at every level: integers
// and sums of scaled ones are the same there.
#pragma once
#include "matrix.h"

#ifdef MK_INTEGERS
constexpr bool by_integers(int kind, int digits) { return has_scale(kind) && (MK_INTEGERS == 512 || digits < 3 || kind != INT6_SUPER); }
constexpr int added_to(int kind) { return is_int4(kind) ? 0 : kind == INT6_SUPER ? 32 : 128; }  // codes as unsigned bytes

// One row's share of a group: [3] factors by which the sums of digits are joined, the group's sum, [3]
// initial sums of digits and one unused, then the digits. A row has its groups side by side.
constexpr int HEADER = 8, SUM = 3;
inline void write_header(float* to, float step, float upper, int32_t sum) {
    to[0] = upper * step;
    to[1] = step;
    to[SUM] = (float)((double)sum * step);
}

inline float power_of_two(int exponent) {  // of a normal number
    const int32_t bits = (exponent + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

// What makes integers of a group: a power of two, or for one digit, where a lost bit is half of the
// accuracy, 1/127 of the largest number. Beside infinity and NaN, what the integers cannot hold, from
// about 2^127 on, is no number.
struct GroupScale {
    float inverse, step;
    GroupScale(uint32_t bits, int digits) {  // of the largest absolute number
        float largest;
        std::memcpy(&largest, &bits, sizeof largest);
        if (digits == 1) {
            of_one_digit(largest, bits >= 0x7f000000);
            return;
        }
        const int top = 8 * digits - 1;
        largest = std::max(largest, 1e-30f) * 1.004f;  // signed bytes reach 0.996 of 2^15 and of 2^23
        uint32_t scaled;
        std::memcpy(&scaled, &largest, sizeof scaled);
        const int exponent = (int)(scaled >> 23) - 126;
        const bool odd = exponent > 127;
        inverse = power_of_two(odd ? 0 : top - exponent);
        step = odd ? NAN : power_of_two(exponent - top);
    }

  private:
    void of_one_digit(float largest, bool odd) {
        step = std::max(largest, 1e-30f) * (1 / 127.0f);
        uint32_t bits;
        std::memcpy(&bits, &step, sizeof bits);
        bits = (bits + 255) & ~255u;  // of 16 bits, rounded up: dots_avx512.h multiplies it exactly
        std::memcpy(&step, &bits, sizeof step);
        inverse = odd ? 0 : 1 / step;
        if (odd) step = NAN;
    }
};

// The number that signed digits stand for, the first one the highest.
inline int32_t of_digits(const int32_t* digits, int count) {
    int32_t number = digits[0];
    for (int k = 1; k < count; ++k) number = number * 256 + digits[k];
    return number;
}

#if MK_INTEGERS == 512
#include "dots_avx512.h"
#elif MK_INTEGERS == 256
#include "dots_avx2.h"
#else
#include "dots_neon.h"
#endif

template <int KIND, int DIGITS> constexpr int64_t units_a_group() { return HEADER + Dots<KIND, DIGITS>::UNITS; }
inline int64_t integers_room(int64_t width) { return padded(width, 32) / 16 * units_a_group<INT8_FINE, 3>(); }  // the most

template <int KIND, int DIGITS>
inline void lay_out_integers(const float* x, int rows, int64_t width, float* x_q, int part, int parts) {
    constexpr int GROUP = group_of(KIND);
    const int64_t groups = padded(width, GROUP) / GROUP, from = groups * part / parts, to = groups * (part + 1) / parts;
    for (int row = 0; row < rows; ++row)
        for (int64_t g = from; g < to; ++g)
            lay_out_group<KIND, DIGITS>(x + row * width + g * GROUP, width - g * GROUP, x_q + (row * groups + g) * units_a_group<KIND, DIGITS>());
}

#if MK_INTEGERS != 512
// The dot product of a group from its sums.
template <int KIND, int DIGITS> inline Part joined(const Whole* dots, int apart, const float* factors) {
    typedef Dots<KIND, DIGITS> D;
    if constexpr (D::SUMS == 1) return times(to_part(D::total(dots[0])), part_of(factors[1]));
    Whole low = D::total(dots[apart]);
    if constexpr (DIGITS == 2)  // the whole number has room
        return times(to_part(plus(times_256(D::total(dots[0])), low)), part_of(factors[1]));
    if (D::SUMS == 3) low = plus(times_256(low), D::total(dots[(D::SUMS - 1) * apart]));
    const Part dot = times(to_part(low), part_of(factors[1]));
    return fused(to_part(D::total(dots[0])), part_of(factors[0]), dot);
}
#endif

// Adds a group to the sum of a row: its dot product times scales, and its offsets.
template <int KIND, int DIGITS>
inline Part add_group(Part sum, const Whole* dots, int apart, const float* factors, Part scale, Part offset) {
    sum = fused(joined<KIND, DIGITS>(dots, apart, factors), scale, sum);
    return has_offset(KIND) ? fused(offset, part_of(factors[SUM]), sum) : sum;
}

constexpr int SLICES = LANES / SLICE;  // of a panel

template <int KIND> inline Part load_header(const uint8_t* header, const uint8_t* factors, int slice) {
    if constexpr (is_super(KIND))
        return times(load_part((const uint16_t*)factors + slice * SLICE),
                     load_bytes_part<KIND == INT6_SUPER>(header + slice * SLICE));
    else if constexpr (scale_bytes(KIND) == 2) return load_part((const uint16_t*)header + slice * SLICE);
    else return load_part((const float*)header + slice * SLICE);
}

// What is asked of memory while other weights are multiplied: some lines for each of their groups.
struct Ahead {
    const uint8_t* from;
    int lines;
    void ask() {
        for (int line = 0; line < lines; ++line, from += 64) prefetch_far(from);
    }
};

// tile[n][v * 16 ..] of rows `width` panels wide, for N rows and V panels; x_q from `lay_out`.
// Unrolled by pragma, so that the sums stay in registers: in memory they cost more than the products.
template <int KIND, int DIGITS, int V, int N>
inline void multiply_integers(const uint8_t* data, int64_t stride, int64_t inputs, const float* x_q, float* tile, int width,
                              Ahead ahead) {
    typedef Dots<KIND, DIGITS> D;
    constexpr int GROUP = group_of(KIND), BYTES = bytes_a_group(KIND), S = V * SLICES;
    const int64_t apart = inputs / GROUP * units_a_group<KIND, DIGITS>();  // of rows
    Part sum[N][S];
    for (auto& row : sum) for (auto& part : row) part = part_of(0.0f);
    const uint8_t* factors = data;
    for (int64_t group = 0; group < inputs / GROUP; ++group, data += BYTES, x_q += units_a_group<KIND, DIGITS>()) {
        if (is_super(KIND) && group % groups_a_factor(KIND) == 0) {
            factors = data;
            data += factor_bytes(KIND);
        }
        ahead.ask();
        const int32_t* x = (const int32_t*)x_q;
        Whole dots[N][D::SUMS][S];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 3
            for (int k = 0; k < D::SUMS; ++k)
#pragma GCC unroll 4
                for (int s = 0; s < S; ++s) dots[n][k][s] = D::first_sum(x[n * apart + 4 + k]);
#pragma GCC unroll 4
        for (int octet = 0; octet < GROUP / OCTET; ++octet) {
            const int32_t* digits = x + HEADER + D::digits_at(octet);
            const uint8_t* codes = data + header_bytes(KIND) + octet * octet_bytes(KIND);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) prefetch(codes + v * stride + 3 * BYTES, octet_bytes(KIND));
            unroll([&](auto q) {
                Whole pieces[S];
#pragma GCC unroll 4
                for (int s = 0; s < S; ++s)
                    pieces[s] = D::template piece<q>(codes + s / SLICES * stride + s % SLICES * 4 * SLICE, octet);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n)
#pragma GCC unroll 3
                    for (int k = 0; k < D::SUMS; ++k) {
                        const Whole digit = whole_of(digits[n * apart + D::APART * k + q]);
#pragma GCC unroll 4
                        for (int s = 0; s < S; ++s) dots[n][k][s] = D::add_dots(dots[n][k][s], pieces[s], digit);
                    }
            }, std::make_integer_sequence<int, D::PIECES>{});
        }
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            const uint8_t* header = data + s / SLICES * stride;
            const uint8_t* factor = factors + s / SLICES * stride;
            const Part scale = load_header<KIND>(header, factor, s % SLICES);
            const Part offset = has_offset(KIND) ? load_header<KIND>(header + header_bytes(KIND) / 2, factor + factor_bytes(KIND) / 2, s % SLICES) : part_of(0.0f);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sum[n][s] = add_group<KIND, DIGITS>(sum[n][s], &dots[n][0][s], S, x_q + n * apart, scale, offset);
        }
    }
    for (int n = 0; n < N; ++n) for (int s = 0; s < S; ++s) store_part(tile + n * width * LANES + s * SLICE, sum[n][s]);
}

// A thread's panels, as `product_of_panels` of matmul.h.
//
// The weights of the next panels are read from memory while these are multiplied, an equal part
// during each block of rows, so that memory does not stand still while many rows are computed.
template <int KIND, int DIGITS>
inline void product_by_integers(const Matrix& m, const float* x_q, int rows, int64_t panel, int64_t end, const AnyFinish& finish) {
    typedef Dots<KIND, DIGITS> D;
    const int64_t groups = padded(m.inputs, group_of(KIND)) / group_of(KIND);
    const int64_t inputs = groups * group_of(KIND), stride = panel_bytes(KIND, groups);
    const int most = D::rows_at_once(rows);
    alignas(64) float tile[MAX_ROWS * 2 * LANES];
    const int64_t all = padded(m.outputs, 2 * LANES) / LANES;  // this or another thread's
    auto ahead = [&](int part, int parts) {
        const int lines = panel + 2 < all ? (int)((2 * stride - 1) / (64 * groups * parts)) + 1 : 0;
        return Ahead{m.data + (panel + 2) * stride + part * lines * groups * 64, lines};
    };
    for (; panel < end; panel += 2) {
        if (D::PANELS < D::PANELS_OF_ONE_ROW && rows == 1) {
            multiply_integers<KIND, DIGITS, 2, 1>(m.data + panel * stride, stride, inputs, x_q, tile, 2, ahead(0, 1));
        } else {
            const int blocks = num_blocks(rows, most);
            for (int v = 0; v < 2; v += D::PANELS)
                for (int b = 0; b < blocks; ++b) {
                    const int start = block_start(rows, b, most), n = block_start(rows, b + 1, most) - start;
                    const float* x = x_q + start * groups * units_a_group<KIND, DIGITS>();
                    const Ahead part = ahead(v / D::PANELS * blocks + b, 2 / D::PANELS * blocks);
                    with_rows(n, [&](auto N) {
                        if constexpr (N <= D::ROWS_AT_ONCE)
                            multiply_integers<KIND, DIGITS, D::PANELS, N>(m.data + (panel + v) * stride, stride, inputs, x,
                                                                          tile + start * 2 * LANES + v * LANES, 2, part);
                    });
                }
        }
        finish(panel, 2, tile);
    }
}

#else
constexpr bool by_integers(int, int) { return false; }
inline int64_t integers_room(int64_t) { return 0; }
#endif
