// For powersgd, in one pass over memory: the sum of a gradient and of what has not been sent of earlier gradients, and
// the first factor of this sum.
// `cpuft/comm/compression/powersgd.py` has the same in plain torch.

#pragma once

#include "../../vectors.h"
#include <omp.h>
#include <type_traits>

namespace {

// Rows of a gradient that are computed at a time. A number of a factor is read once for all of them.
constexpr int64_t GRADIENT_ROWS = 4;

// `add_and_project` for N rows. `left` and `p` point to the column of the first of these rows.
template <int64_t N, class T>
void add_and_project_rows(const T *gradient, float *unsent, const float *left, const float *right, const float *q,
                          float *p, int64_t rows, int64_t cols, int64_t rank) {
    for (int64_t j = 0; j < cols; j += W) {
        int64_t m = lanes_of(j, cols);
        vec x[N];
        for (int64_t i = 0; i < N; i++) x[i] = get(unsent + i * cols + j, m) + get(gradient + i * cols + j, m);
        for (int64_t k = 0; left && k < rank; k++) {
            vec y = get(right + k * cols + j, m);
            for (int64_t i = 0; i < N; i++) x[i] -= left[k * rows + i] * y;
        }
        for (int64_t i = 0; i < N; i++) put(unsent + i * cols + j, x[i], m);
    }
    for (int64_t k = 0; k < rank; k++) {
        vec sums[N]{};
        for (int64_t j = 0; j < cols; j += W) {
            int64_t m = lanes_of(j, cols);
            vec y = get(q + k * cols + j, m);
            for (int64_t i = 0; i < N; i++) sums[i] += get(unsent + i * cols + j, m) * y;
        }
        for (int64_t i = 0; i < N; i++) p[k * rows + i] = sum_of(sums[i]);
    }
}

// unsent (rows, cols) += gradient - left^T right, for what was sent last as left (rank, rows) and right (rank, cols);
// null: nothing was sent. Then p (rank, rows) = q unsent^T, for q (rank, cols).
template <class T>
void add_and_project(const T *gradient, float *unsent, const float *left, const float *right, const float *q, float *p,
                     int64_t rows, int64_t cols, int64_t rank, int threads) {
    int64_t blocks = (rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * GRADIENT_ROWS, end = begin + GRADIENT_ROWS < rows ? begin + GRADIENT_ROWS : rows;
        auto run = [&](auto count, int64_t row) {
            const float *own = left ? left + row : nullptr;
            add_and_project_rows<count>(gradient + row * cols, unsent + row * cols, own, right, q, p + row, rows, cols,
                                        rank);
        };
        if (end - begin == GRADIENT_ROWS)
            run(std::integral_constant<int64_t, GRADIENT_ROWS>(), begin);
        else
            for (int64_t row = begin; row < end; row++) run(std::integral_constant<int64_t, 1>(), row);
    }
}

} // namespace
