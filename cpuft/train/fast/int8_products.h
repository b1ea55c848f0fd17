// Products of matrices of 8-bit integers on Arm, with SMMLA (of i8mm) or SDOT (of dotprod). torch makes those of x86-64.
//
// A step multiplies four vectors of 16 numbers of A with four of B, and adds each product to its own vector of four sums.
// A vector has 8 numbers of two rows of A, or of two columns of B, for SMMLA, which sums up all four pairs; and 16 numbers
// of one row or column for SDOT, whose four sums are parts of one. Both factors are packed in the order of these steps.

#pragma once

#include "../../vectors.h"
#include <algorithm>
#include <omp.h>

namespace {

// Columns j to j + m of a row of sums, times the row's scale and the columns' scales, plus their bias.
inline vec dequantised(ivec sums, float scale, const float *columns, const float *bias, int64_t j, int64_t m) {
    vec v = __builtin_convertvector(sums, vec) * scale;
    if (columns) v *= get(columns + j, m);
    if (bias) v += get(bias + j, m);
    return v;
}

#if defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_INT8_PRODUCTS

// A block of C has LINES rows and columns, and a step RUN numbers of each of them.
#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int64_t LINES = 8, RUN = 8;
inline ivec add_products(ivec sums, int8x16_t a, int8x16_t b) { return vmmlaq_s32(sums, a, b); }
inline void write_sums(const ivec (&sums)[4][4], int32_t (&c)[LINES][LINES]) {
    for (int64_t r = 0; r < 4; r++)
        for (int64_t n = 0; n < 4; n++) {
            vst1_s32(&c[2 * r][2 * n], vget_low_s32(sums[r][n]));
            vst1_s32(&c[2 * r + 1][2 * n], vget_high_s32(sums[r][n]));
        }
}
#else
constexpr int64_t LINES = 4, RUN = 16;
inline ivec add_products(ivec sums, int8x16_t a, int8x16_t b) { return vdotq_s32(sums, a, b); }
inline void write_sums(const ivec (&sums)[4][4], int32_t (&c)[LINES][LINES]) {
    for (int64_t r = 0; r < 4; r++)
        vst1q_s32(c[r], vpaddq_s32(vpaddq_s32(sums[r][0], sums[r][1]), vpaddq_s32(sums[r][2], sums[r][3])));
}
#endif
constexpr int64_t STEP_BYTES = LINES * RUN;
// Blocks of C in each direction that a thread makes one after another: their rows of A stay in the second-level cache.
constexpr int64_t GROUP = 8;

// LINES rows of x, (rows, inner), from `first` on, in the order of steps. Numbers that are missing are zeros.
inline void pack_strip(const int8_t *x, int64_t rows, int64_t inner, int64_t first, int8_t *strip) {
    for (int64_t k = 0; k < inner; k += RUN)
        for (int64_t row = first; row < first + LINES; row++, strip += RUN)
            if (row < rows && k + RUN <= inner) {
                std::memcpy(strip, x + row * inner + k, RUN);
            } else {
                std::memset(strip, 0, RUN);
                if (row < rows) std::memcpy(strip, x + row * inner + k, size_t(inner - k));
            }
}

inline void multiply_strips(const int8_t *a, const int8_t *b, int64_t steps, int32_t (&c)[LINES][LINES]) {
    ivec sums[4][4]{};
    for (int64_t k = 0; k < steps; k++, a += STEP_BYTES, b += STEP_BYTES) {
        int8x16_t right[4];
#pragma GCC unroll 4
        for (int64_t n = 0; n < 4; n++) right[n] = vld1q_s8(b + 16 * n);
#pragma GCC unroll 4
        for (int64_t r = 0; r < 4; r++) {
            int8x16_t left = vld1q_s8(a + 16 * r);
#pragma GCC unroll 4
            for (int64_t n = 0; n < 4; n++) sums[r][n] = add_products(sums[r][n], left, right[n]);
        }
    }
    write_sums(sums, c);
}
#endif

// y (rows, cols) = the product of a (rows, inner) and b, stored as (cols, inner), times the scales of its rows and of its
// columns, plus the bias of its columns. `columns` and `bias` may be null. `room` is memory for both factors with rows
// and cols filled up to multiples of 8, and inner to one of 16. *done is 1 if y has been computed: this CPU can.
template <class T>
void int8_product(const int8_t *a, const int8_t *b, const float *scales, const float *columns, const float *bias, T *y,
                  int8_t *room, int64_t *done, int64_t rows, int64_t cols, int64_t inner, int threads) {
    *done = 0;
#ifdef HAS_INT8_PRODUCTS
    int64_t steps = (inner + RUN - 1) / RUN, bytes = steps * STEP_BYTES;
    int64_t strips = (rows + LINES - 1) / LINES, panels = (cols + LINES - 1) / LINES;
    const int8_t *packed = room + strips * bytes;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t n = 0; n < strips + panels; n++)
            if (n < strips)
                pack_strip(a, rows, inner, n * LINES, room + n * bytes);
            else
                pack_strip(b, cols, inner, (n - strips) * LINES, room + n * bytes);
#pragma omp for collapse(2) schedule(static)
        for (int64_t top = 0; top < strips; top += GROUP)
            for (int64_t left = 0; left < panels; left += GROUP)
                for (int64_t p = left; p < std::min(panels, left + GROUP); p++)
                    for (int64_t s = top; s < std::min(strips, top + GROUP); s++) {
                        int32_t sums[LINES][LINES];
                        multiply_strips(room + s * bytes, packed + p * bytes, steps, sums);
                        for (int64_t i = s * LINES; i < std::min(rows, (s + 1) * LINES); i++)
                            for (int64_t j = p * LINES; j < std::min(cols, (p + 1) * LINES); j += W) {
                                int64_t m = std::min(W, cols - j);
                                ivec found = read<ivec>(&sums[i - s * LINES][j - p * LINES]);
                                put(y + i * cols + j, dequantised(found, scales[i], columns, bias, j, m), m);
                            }
                    }
    }
    *done = 1;
#endif
}

} // namespace
