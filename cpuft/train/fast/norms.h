// Layer norm and RMSNorm, with the dropout and the residual before them; and the sums of columns.

#pragma once

#include "../../vectors.h"
#include <cmath>
#include <omp.h>

namespace {

// Calls f(j, m, k) for each vector of a row: it has m numbers from column j on. If rows consist of groups of four whole
// vectors, k is the number in the group, so that sums of a row are four independent chains, and no masks are needed.
// Functions capture pointers by value: through references, they would be read again after each store.
template <bool WHOLE, class F> [[gnu::always_inline]] inline void each_vector(int64_t cols, F f) {
    for (int64_t j = 0; j < cols; j += WHOLE ? 4 * W : W)
        if constexpr (WHOLE)
            f(j, W, 0), f(j + W, W, 1), f(j + 2 * W, W, 2), f(j + 3 * W, W, 3);
        else
            f(j, lanes_of(j, cols), 0);
}
inline float sum_of_four(const vec *x) { return sum_of((x[0] + x[1]) + (x[2] + x[3])); }

// y = norm(sum), where sum = residual + dropout(x + shift). The norm is layer norm, or RMSNorm if `mean` is null. shift,
// residual, weight and bias may be null: there is none. If `sum` is null, there is only the norm, and dropout after it: y
// = dropout(norm(x)).
template <bool WHOLE, class T>
void norm_rows(const T *x, const T *shift, const T *residual, const float *weight, const float *bias, T *sum, T *y,
               float *mean, float *rstd, int64_t rows, int64_t cols, uint64_t seed, uint32_t threshold, float scale,
               float eps, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Lanes lanes(cols);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < rows; i++) {
            const T *xi = x + i * cols, *si = sum ? sum + i * cols : xi;
            T *yi = y + i * cols;
            const uint16_t *bits = threshold ? lanes.fill(seed, i * cols, cols) : nullptr;
            const uint16_t *bits_after = sum ? nullptr : bits;
            if (sum)
                each_vector<WHOLE>(cols, [=](int64_t j, int64_t m, int64_t) {
                    vec v = get(xi + j, m);
                    if (shift) v += get(shift + j, m);
                    if (bits) v = keep(v * scale, bits + j, threshold);
                    if (residual) v += get(residual + i * cols + j, m);
                    put(sum + i * cols + j, v, m);
                });
            vec total[4]{}, squares[4]{};  // of the sum rounded to T, as backward reads it
            if (mean)
                each_vector<WHOLE>(cols, [=, &total](int64_t j, int64_t m, int64_t k) { total[k] += get(si + j, m); });
            float mu = sum_of_four(total) / float(cols);
            each_vector<WHOLE>(cols, [=, &squares](int64_t j, int64_t m, int64_t k) {
                vec d = get(si + j, m) - mu;
                if (!WHOLE) d = LANE < int32_t(m) ? d : vec{};
                squares[k] += d * d;
            });
            float r = 1.0f / std::sqrt(sum_of_four(squares) / float(cols) + eps);
            each_vector<WHOLE>(cols, [=](int64_t j, int64_t m, int64_t) {
                vec w = weight ? get(weight + j, m) : all(1.0f), b = bias ? get(bias + j, m) : vec{};
                vec v = (get(si + j, m) - mu) * r * w + b;
                put(yi + j, bits_after ? keep(v * scale, bits_after + j, threshold) : v, m);
            });
            if (mean) mean[i] = mu;
            rstd[i] = r;
        }
    }
}

template <class T>
void norm_forward(const T *x, const T *shift, const T *residual, const float *weight, const float *bias, T *sum, T *y,
                  float *mean, float *rstd, int64_t rows, int64_t cols, uint64_t seed, uint32_t threshold, float scale,
                  float eps, int threads) {
    (cols % (4 * W) ? norm_rows<false, T> : norm_rows<true, T>)(x, shift, residual, weight, bias, sum, y, mean, rstd,
                                                                rows, cols, seed, threshold, scale, eps, threads);
}

// dresidual is the gradient of `sum`, given that of y, in dy, and that which `sum` has otherwise, in dsum (null: none).
// dx is that of x; it is dresidual if nothing was dropped before the norm, but maybe after it. The gradients of the norm's
// weight and bias, and of the shift, are added to `dweight`, `dbias` and `dshift`, each of which may be null. `mean` is
// null for RMSNorm.
template <bool WHOLE, class T>
void norm_gradients(const T *dy, const T *dsum, const T *sum, const float *mean, const float *rstd,
                    const float *weight, T *dx, T *dresidual, float *dweight, float *dbias, float *dshift, int64_t rows,
                    int64_t cols, uint64_t seed, uint32_t threshold, float scale, int threads) {
    ThreadSums line(threads, 3 * cols);
#pragma omp parallel num_threads(threads)
    {
        Lanes lanes(cols);
        float *dw = line.of(omp_get_thread_num()), *db = dw + cols, *ds = db + cols;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < rows; i++) {
            const T *dyi = dy + i * cols, *si = sum + i * cols;
            T *dxi = dx + i * cols, *dri = dresidual + i * cols;
            const uint16_t *bits = threshold ? lanes.fill(seed, i * cols, cols) : nullptr;
            const uint16_t *bits_after = dx == dresidual ? bits : nullptr, *bits_before = bits_after ? nullptr : bits;
            auto grad = [=](int64_t j, int64_t m) {
                vec d = get(dyi + j, m);
                return bits_after ? keep(d * scale, bits_after + j, threshold) : d;
            };
            float mu = mean ? mean[i] : 0.0f, r = rstd[i];
            vec ones[4]{}, hats[4]{};
            each_vector<WHOLE>(cols, [=, &ones, &hats](int64_t j, int64_t m, int64_t k) {
                vec d = grad(j, m), z = (get(si + j, m) - mu) * r;  // where d is masked, it and its products are 0
                vec w = weight ? get(weight + j, m) : all(1.0f);
                if (dweight) put(dw + j, get(dw + j, m) + d * z, m);
                if (dbias) put(db + j, get(db + j, m) + d, m);
                vec g = d * w;
                ones[k] += g;
                hats[k] += g * z;
            });
            float first = mean ? sum_of_four(ones) / float(cols) : 0.0f, second = sum_of_four(hats) / float(cols);
            each_vector<WHOLE>(cols, [=](int64_t j, int64_t m, int64_t) {
                vec w = weight ? get(weight + j, m) : all(1.0f);
                vec z = (get(si + j, m) - mu) * r;
                vec d = (grad(j, m) * w - first - z * second) * r;
                if (dsum) d += get(dsum + i * cols + j, m);
                put(dri + j, d, m);
                if (bits_before) {
                    d = keep(d * scale, bits_before + j, threshold);
                    put(dxi + j, d, m);
                }
                if (dshift) put(ds + j, get(ds + j, m) + d, m);
            });
        }
    }
    line.add_to(dweight, 0, size_t(cols));
    line.add_to(dbias, size_t(cols), size_t(cols));
    line.add_to(dshift, size_t(2 * cols), size_t(cols));
}

template <class T>
void norm_backward(const T *dy, const T *dsum, const T *sum, const float *mean, const float *rstd, const float *weight,
                   T *dx, T *dresidual, float *dweight, float *dbias, float *dshift, int64_t rows, int64_t cols,
                   uint64_t seed, uint32_t threshold, float scale, int threads) {
    (cols % (4 * W) ? norm_gradients<false, T> : norm_gradients<true, T>)(
        dy, dsum, sum, mean, rstd, weight, dx, dresidual, dweight, dbias, dshift, rows, cols, seed, threshold, scale,
        threads);
}

// sums += the sum of all rows of x. The gradient of a linear layer's bias is this sum of its output's gradient.
template <class T> void column_sums(const T *x, float *sums, int64_t rows, int64_t cols, int threads) {
    ThreadSums line(threads, cols);
#pragma omp parallel num_threads(threads)
    {
        float *mine = line.of(omp_get_thread_num());
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j += W) {
                int64_t m = lanes_of(j, cols);
                put(mine + j, get(mine + j, m) + get(x + i * cols + j, m), m);
            }
    }
    line.add_to(sums, 0, size_t(cols));
}

} // namespace
