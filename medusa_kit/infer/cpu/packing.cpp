// Rows of GGUF files, from the blocks in which they lie to the layout of matrix.h, and to bfloat16.
#include "blocks.h"
#include "matrix.h"

struct StoredRows {  // mirrored in kernels.py
    int64_t stored, kind, rows, inputs;  // kind: of the packed matrix; 16 divides the rows that are packed
    const uint8_t* const* from;          // where each row lies; null: a row of zeros
    uint8_t* to;
};

namespace {

using namespace gguf;

constexpr int NOT_FINITE = 1, NOT_HALVES = 2, FIVE_BITS = 4;

// A kind's codes are never negative where it has offsets.
constexpr int shift_of(int stored) { return stored == Q4_0 ? 8 : 0; }

template <int STORED> int properties(const uint8_t* from, int64_t blocks) {
    int found = 0;
    for (int64_t i = 0; i < blocks; ++i, from += stored_bytes(STORED)) {
        if (!is_finite_block<STORED>(from)) found |= NOT_FINITE;
        if constexpr (STORED == Q4_0) {
            if (!is_half(-8 * from_half(half_at(from)))) found |= NOT_HALVES;
        } else if constexpr (STORED == Q5_K) {
            for (int byte = 0; byte < 32; ++byte) found |= from[16 + byte] ? FIVE_BITS : 0;
            if (found & NOT_HALVES) continue;
            Block block;
            read_scales<STORED>(from, block);
            for (int group = 0; group < 8; ++group)
                if (!is_half(block.scales[group]) || !is_half(block.offsets[group])) found |= NOT_HALVES;
        }
    }
    return found;
}

// What equal weights can be stored as in several ways has one: no codes without a scale, no multiples
// without a factor, offsets for the middle of a range.
template <int STORED> void as_packed(Block& block) {
    if constexpr (shift_of(STORED) != 0) {
        for (int i = 0; i < 32; ++i) block.codes[i] = (int8_t)(block.codes[i] + shift_of(STORED));
        block.offsets[0] = -shift_of(STORED) * block.scales[0];
    }
    constexpr int S = stored_group(STORED);
    for (int group = 0; group < num_groups(STORED); ++group)
        if (block.scales[group] == 0) std::memset(block.codes + S * group, 0, S);
    if constexpr (is_k(STORED))
        for (int part = 0; part < 2; ++part)
            if ((block.factors[part] & 0x7FFF) == 0) std::memset(block.multiples[part], 0, 16);
}

inline uint64_t eight(const int8_t* codes) {
    uint64_t all;
    std::memcpy(&all, codes, 8);
    return all;
}
inline uint32_t nibbles(uint64_t codes) {
    codes &= 0x0F0F0F0F0F0F0F0F;
    codes = (codes | codes >> 4) & 0x00FF00FF00FF00FF;
    codes = (codes | codes >> 8) & 0x0000FFFF0000FFFF;
    return (uint32_t)(codes | codes >> 16);
}
inline uint32_t even_bytes(uint64_t codes) {
    codes &= 0x00FF00FF00FF00FF;
    codes = (codes | codes >> 8) & 0x0000FFFF0000FFFF;
    return (uint32_t)(codes | codes >> 16);
}

template <class Number, class F> uint8_t* write_lanes(uint8_t* to, F number) {
    for (int lane = 0; lane < LANES; ++lane) {
        const Number one = number(lane);
        std::memcpy(to + lane * sizeof(Number), &one, sizeof(Number));
    }
    return to + LANES * sizeof(Number);
}

template <int STORED> uint8_t* write_codes(const Block* lanes, int first, uint8_t* to) {
    constexpr int OCTETS = stored_group(STORED) / OCTET;
    constexpr uint64_t MIDDLE = STORED == Q6_K ? 0x2020202020202020 : 0;
    for (int octet = 0; octet < OCTETS; ++octet) {
        auto codes = [&](int lane) { return eight(lanes[lane].codes + first + OCTET * octet); };
        if constexpr (STORED == Q5_0 || STORED == Q5_1 || STORED == Q8_0 || STORED == Q5_K) {
            to = write_lanes<uint32_t>(to, [&](int lane) { return even_bytes(codes(lane)); });
            to = write_lanes<uint32_t>(to, [&](int lane) { return even_bytes(codes(lane) >> 8); });
        } else to = write_lanes<uint32_t>(to, [&](int lane) { return nibbles(codes(lane)); });
    }
    if constexpr (STORED == Q6_K)
        to = write_lanes<uint32_t>(to, [&](int lane) {
            uint32_t high = 0;
            for (int octet = 0; octet < OCTETS; ++octet) {
                const uint64_t upper = (eight(lanes[lane].codes + first + OCTET * octet) ^ MIDDLE) >> 4 & 0x0303030303030303;
                high |= even_bytes(upper) << 4 * octet | even_bytes(upper >> 8) << (4 * octet + 2);
            }
            return high;
        });
    return to;
}

template <int STORED> uint8_t* write_block(const Block* lanes, bool halves, uint8_t* to) {
    constexpr bool super = STORED == Q4_K || STORED == Q6_K, offsets = has_minimum(STORED) || shift_of(STORED) != 0;
    if constexpr (super)
        for (int part = 0; part < 1 + offsets; ++part)
            to = write_lanes<uint16_t>(to, [&](int lane) { return lanes[lane].factors[part]; });
    for (int group = 0; group < num_groups(STORED); ++group) {
        for (int part = 0; part < 1 + offsets; ++part) {
            auto number = [&](int lane) { return part ? lanes[lane].offsets[group] : lanes[lane].scales[group]; };
            if constexpr (super) to = write_lanes<uint8_t>(to, [&](int lane) { return lanes[lane].multiples[part][group]; });
            else if (halves) to = write_lanes<uint16_t>(to, [&](int lane) { return to_half(number(lane)); });
            else to = write_lanes<float>(to, number);
        }
        to = write_codes<STORED>(lanes, stored_group(STORED) * group, to);
    }
    return to;
}

template <int STORED> void pack_panel(const StoredRows& rows, int64_t panel, int64_t panel_size) {
    const bool halves = scale_bytes((int)rows.kind) == 2;
    Block lanes[LANES] = {};
    uint8_t* to = rows.to + panel * panel_size;
    for (int64_t block = 0; block < rows.inputs / numbers_of(STORED); ++block) {
        for (int lane = 0; lane < LANES; ++lane) {
            const uint8_t* from = rows.from[panel * LANES + lane];
            if (from == nullptr) continue;
            read_block<STORED>(from + block * stored_bytes(STORED), lanes[lane]);
            as_packed<STORED>(lanes[lane]);
        }
        to = write_block<STORED>(lanes, halves, to);
    }
}

inline uint16_t to_bfloat16(float value) {  // of a finite number, as torch rounds
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <int STORED> void expand_row(const StoredRows& rows, int64_t row) {
    constexpr int S = stored_group(STORED);
    uint16_t* to = (uint16_t*)rows.to + row * rows.inputs;
    Block block;
    for (int64_t first = 0; first < rows.inputs; first += numbers_of(STORED)) {
        read_block<STORED>(rows.from[row] + first / numbers_of(STORED) * stored_bytes(STORED), block);
        for (int group = 0; group < num_groups(STORED); ++group) {
            const float scale = block.scales[group], offset = has_minimum(STORED) ? block.offsets[group] : 0;
            const int8_t* codes = block.codes + S * group;
            for (int i = 0; i < S; ++i) {
                float value = scale * (float)codes[i];
                if constexpr (has_minimum(STORED)) value += offset;
                to[first + S * group + i] = to_bfloat16(value);
            }
        }
    }
}

// Calls one(i) for all i below `count`, by several threads.
template <class F> void each(int64_t count, int threads, F one) {
    Pool& p = pool(threads);
    p.run([&](int id) {
        const int64_t last = count * (id + 1) / p.active();
        for (int64_t i = count * id / p.active(); i < last; ++i) one(i);
    });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
// NOT_FINITE, NOT_HALVES and FIVE_BITS, of all rows together.
int64_t mk_stored_properties(const StoredRows* rows, int threads) {
    std::atomic<int> found{0};
    with_stored(rows->stored, [&](auto STORED) {
        each(rows->rows, threads, [&](int64_t row) {
            if (rows->from[row]) found |= properties<STORED>(rows->from[row], rows->inputs / numbers_of(STORED));
        });
    });
    return found;
}

// to [rows / 16][...] = the rows as `kind`.
void mk_pack(const StoredRows* rows, int threads) {
    const int64_t panel_size = panel_bytes((int)rows->kind, rows->inputs / group_of((int)rows->kind));
    with_stored(rows->stored, [&](auto STORED) {
        each(rows->rows / LANES, threads, [&](int64_t panel) { pack_panel<STORED>(*rows, panel, panel_size); });
    });
}

// to [rows, inputs] = the rows in bfloat16, by the arithmetic of the gguf package.
void mk_expand(const StoredRows* rows, int threads) {
    with_stored(rows->stored, [&](auto STORED) {
        each(rows->rows, threads, [&](int64_t row) { expand_row<STORED>(*rows, row); });
    });
}
}
#pragma GCC visibility pop
