// For powersgd, in one pass over memory: the sum of a gradient and of what has not been sent of earlier gradients.
// `cpuft/comm/compression/powersgd.py` has the same in plain torch.

#pragma once

#include "../../vectors.h"
#include <omp.h>
#include <type_traits>

namespace {

// Rows of a gradient that are computed together, two vectors of each at a time: 16 vectors are in registers with
// AVX-512, and 8 with AVX2, which has half the registers.
constexpr int64_t GRADIENT_ROWS = W == 16 ? 8 : 4;

// `add_gradient` for a block of N rows and V vectors of each row, of which the last one has `lanes` numbers. The
// pointers point to the first number of the block; `left` points to the column of its first row.
template <int64_t N, int64_t V, class T>
void add_gradient_block(const T *gradient, T *unsent, const float *left, const float *right, int64_t rows,
                        int64_t cols, int64_t rank, int64_t lanes) {
    vec x[N][V];
    for (int64_t i = 0; i < N; i++) {
        __builtin_prefetch(gradient + (i + N) * cols);
        __builtin_prefetch(unsent + (i + N) * cols);
        for (int64_t v = 0; v < V; v++)
            x[i][v] = get(unsent + i * cols + v * W, lanes) + get(gradient + i * cols + v * W, lanes);
    }
    for (int64_t k = 0; left && k < rank; k++) {
        vec y[V];
        for (int64_t v = 0; v < V; v++) y[v] = get(right + k * cols + v * W, lanes);
        for (int64_t i = 0; i < N; i++)
            for (int64_t v = 0; v < V; v++) x[i][v] -= left[k * rows + i] * y[v];
    }
    for (int64_t i = 0; i < N; i++)
        for (int64_t v = 0; v < V; v++) put(unsent + i * cols + v * W, x[i][v], lanes);
}

// unsent (rows, cols) += gradient - left^T right, for what was sent last as left (rank, rows) and right (rank, cols);
// null: nothing was sent.
template <class T>
void add_gradient(const T *gradient, T *unsent, const float *left, const float *right, int64_t rows, int64_t cols,
                  int64_t rank, int threads) {
    auto add_rows = [&](auto count, int64_t row) {
        constexpr int64_t N = decltype(count)::value;
        const float *own = left ? left + row : nullptr;
        const T *g = gradient + row * cols;
        T *u = unsent + row * cols;
        int64_t j = 0;
        for (; j + 2 * W <= cols; j += 2 * W)
            add_gradient_block<N, 2>(g + j, u + j, own, right + j, rows, cols, rank, W);
        for (; j < cols; j += W)
            add_gradient_block<N, 1>(g + j, u + j, own, right + j, rows, cols, rank, lanes_of(j, cols));
    };
    int64_t blocks = (rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * GRADIENT_ROWS, end = begin + GRADIENT_ROWS < rows ? begin + GRADIENT_ROWS : rows;
        if (end - begin == GRADIENT_ROWS)
            add_rows(std::integral_constant<int64_t, GRADIENT_ROWS>(), begin);
        else
            for (int64_t row = begin; row < end; row++) add_rows(std::integral_constant<int64_t, 1>(), row);
    }
}

} // namespace
