// Norms by the root of the mean square, and rotary embedding, of one row or head.
#pragma once
#include "simd.h"

// In double, as sixteen sums that do not wait for each other.
inline double sum_of_squares(const float* x, int64_t size) {
    double sums[LANES] = {};
    const int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; ++j) sums[j] += (double)x[i + j] * x[i + j];
    for (int64_t i = whole; i < size; ++i) sums[i - whole] += (double)x[i] * x[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
    return sums[0];
}

inline float rms_factor(const float* x, int64_t size, float epsilon) {
    return 1.0f / std::sqrt((float)(sum_of_squares(x, size) / (double)size) + epsilon);
}

inline void scale_by(const float* __restrict__ x, const float* __restrict__ weight, float factor, int64_t size,
                     float* __restrict__ out) {
    for (int64_t i = 0; i < size; ++i) out[i] = weight[i] * (x[i] * factor);
}

inline void rms_norm_in_place(float* x, const float* weight, int64_t size, float epsilon) {
    const float factor = rms_factor(x, size, epsilon);
    for (int64_t i = 0; i < size; ++i) x[i] = weight[i] * (x[i] * factor);
}

inline void rotate(float* x, const float* __restrict__ cos, const float* __restrict__ sin, int64_t size) {
    const int64_t half = size / 2;
    float *__restrict__ first = x, *__restrict__ second = x + half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a * cos[i] - b * sin[i];
        second[i] = b * cos[half + i] + a * sin[half + i];
    }
}
