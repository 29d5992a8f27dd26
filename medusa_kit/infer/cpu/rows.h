// Single rows of a packed matrix as float32, by the arithmetic of its products: the same bits.
#pragma once
#include "matmul.h"

template <int KIND> inline void expand_row(const Matrix& m, int64_t row, float factor, float* out) {
    const int64_t groups = padded(m.inputs, group_of(KIND)) / group_of(KIND);
    Panels<KIND, 1> panels(m.data + row / LANES * panel_bytes(KIND, groups), 0);
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
    with_kind(m, [&](auto KIND) { expand_row<KIND>(m, row, factor, out); });
}
