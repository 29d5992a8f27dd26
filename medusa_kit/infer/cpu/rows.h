// Single rows of a packed matrix as float32, by the arithmetic of its products: the same bits.
#pragma once
#include "matmul.h"

template <int KIND> inline void expand_row(const Matrix& m, int64_t row, float factor, float* out) {
    const int64_t groups = padded(m.inputs, group_of(KIND)) / group_of(KIND);
    Panels<KIND, 1> panels(m.data + row / LANES * groups * bytes_a_group(KIND), 0);
    const int lane = (int)(row % LANES);
    float eight[OCTET][LANES];
    for (int64_t first = 0; first < m.inputs; first += OCTET) {
        panels.begin((int)(first / OCTET));
        unroll([&](auto i) { store(eight[i], panels.template weight<i>(0)); }, std::make_integer_sequence<int, OCTET>{});
        panels.end();
        const int64_t count = std::min<int64_t>(OCTET, m.inputs - first);
        for (int64_t i = 0; i < count; ++i) out[first + i] = eight[i][lane] * factor;
    }
}

inline void expand_row(const Matrix& m, int64_t row, float factor, float* out) {
    switch (m.kind) {
        case F32: return expand_row<F32>(m, row, factor, out);
        case BF16: return expand_row<BF16>(m, row, factor, out);
        case INT4: return expand_row<INT4>(m, row, factor, out);
        case INT8: return expand_row<INT8>(m, row, factor, out);
        case INT8_OFFSET: return expand_row<INT8_OFFSET>(m, row, factor, out);
        case INT8_FINE: return expand_row<INT8_FINE>(m, row, factor, out);
        case INT8_FINE_OFFSET: return expand_row<INT8_FINE_OFFSET>(m, row, factor, out);
        case INT4_HALF: return expand_row<INT4_HALF>(m, row, factor, out);
        case INT8_OFFSET_HALF: return expand_row<INT8_OFFSET_HALF>(m, row, factor, out);
    }
}
