// Kernels that make in one pass over memory what eager torch makes in one pass for each operator: these operations cost
// memory traffic, not arithmetic. The file uses no torch headers: kernels are functions on pointers, loaded through
// ctypes, so that any compiler with OpenMP builds them in seconds and they work with every version of torch. The Python
// caller of each kernel has the same computation in plain torch, and tests compare both.
//
// Loops process one vector of numbers at a time. The last numbers of a row are loaded with a mask and not one by one:
// attention's rows are as short as a sentence, and a scalar loop took half of their time.

#include "activations.h"
#include "attention.h"
#include "disentangled.h"
#include "encoder_layer.h"
#include "first_token.h"
#include "int8_products.h"
#include "norms.h"
#include "large_products.h"
#include "../../comm/compression/blocks.h"
#include "../../comm/compression/factors.h"
#include "../../vectors.h"
#include <algorithm>
#include <cmath>
#include <omp.h>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int64_t BLOCK = 1024;

template <class T>
void dropout(const T *x, T *y, int64_t n, uint64_t seed, uint32_t threshold, float scale, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Lanes lanes(BLOCK);
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < n; start += BLOCK) {
            int64_t count = n - start < BLOCK ? n - start : BLOCK;
            const uint16_t *bits = lanes.fill(seed, start, count);
            for (int64_t j = 0; j < count; j += W) {
                int64_t m = lanes_of(j, count);
                put(y + start + j, keep(get(x + start + j, m) * scale, bits + j, threshold), m);
            }
        }
    }
}

// y = gelu(x + bias), and its slope there unless `slope` is null.
template <class T>
void gelu_forward(const T *x, const T *bias, T *y, T *slope, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0, at = i * cols; j < cols; j += W, at += W) {
            int64_t m = lanes_of(j, cols);
            vec v = get(x + at, m) + get(bias + j, m);
            Activation a = gelu<T>(v);
            put(y + at, a.value, m);
            if (slope) put(slope + at, a.slope, m);
        }
}

// dx = dy * slope. The bias's gradient, which is the column sums of dx, is added to `dbias`.
template <class T>
void gelu_backward(const T *dy, const T *slope, T *dx, float *dbias, int64_t rows, int64_t cols, int threads) {
    ThreadSums line(threads, cols);
#pragma omp parallel num_threads(threads)
    {
        float *mine = line.of(omp_get_thread_num());
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0, at = i * cols; j < cols; j += W, at += W) {
                int64_t m = lanes_of(j, cols);
                vec d = get(dy + at, m) * get(slope + at, m);
                put(dx + at, d, m);
                put(mine + j, get(mine + j, m) + d, m);
            }
    }
    line.add_to(dbias, 0, size_t(cols));
}

// y = activation(x1) * x2, where x1 and x2 are the halves of x's rows, which have 2 * cols numbers.
template <Gate gate, class T>
void glu_rows(const T *x, T *y, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0, at = i * cols; j < cols; j += W) {
            int64_t m = lanes_of(j, cols);
            put(y + at + j, activate<gate, T>(get(x + 2 * at + j, m)).value * get(x + 2 * at + cols + j, m), m);
        }
}

template <Gate gate, class T>
void glu_gradients(const T *dy, const T *x, T *dx, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0, at = i * cols; j < cols; j += W) {
            int64_t m = lanes_of(j, cols);
            vec d = get(dy + at + j, m);
            Activation a = activate<gate, T>(get(x + 2 * at + j, m));
            put(dx + 2 * at + j, d * get(x + 2 * at + cols + j, m) * a.slope, m);
            put(dx + 2 * at + cols + j, d * a.value, m);
        }
}

template <class T> void glu_forward(const T *x, T *y, int64_t rows, int64_t cols, int64_t gate, int threads) {
    (gate == SILU ? glu_rows<SILU, T> : gate == GELU ? glu_rows<GELU, T> : glu_rows<GELU_TANH, T>)(x, y, rows, cols,
                                                                                                  threads);
}

template <class T>
void glu_backward(const T *dy, const T *x, T *dx, int64_t rows, int64_t cols, int64_t gate, int threads) {
    (gate == SILU ? glu_gradients<SILU, T> : gate == GELU ? glu_gradients<GELU, T> : glu_gradients<GELU_TANH, T>)(
        dy, x, dx, rows, cols, threads);
}

// What happens to the heads of queries, or to those of keys, before attention: RMSNorm over a head, unless eps is
// negative, and a rotation of its first 2 * half numbers, number j together with number half + j, by an angle of the row.
struct Turn {
    const float *weight;  // null: ones
    float eps;
    int64_t size, half;

    // One over the root mean square of a head.
    template <class T> float inverse_root(const T *x) const {
        if (eps < 0.0f) return 1.0f;
        vec squares{};
        for (int64_t j = 0; j < size; j += W) {
            vec v = get(x + j, lanes_of(j, size));
            squares += v * v;
        }
        return 1.0f / std::sqrt(sum_of(squares) / float(size) + eps);
    }
    vec weights(int64_t j, int64_t m) const { return weight ? get(weight + j, m) : all(1.0f); }

    // y may have the same memory as x.
    template <class T> void forward(const T *x, const float *cos, const float *sin, T *y) const {
        float r = inverse_root(x);
        auto normed = [&](int64_t j, int64_t m) { return get(x + j, m) * r * weights(j, m); };
        for (int64_t j = 0; j < half; j += W) {
            int64_t m = lanes_of(j, half);
            vec a = normed(j, m), b = normed(half + j, m), c = get(cos + j, m), s = get(sin + j, m);
            put(y + j, a * c - b * s, m);
            put(y + half + j, b * c + a * s, m);
        }
        for (int64_t j = 2 * half; j < size; j += W) put(y + j, normed(j, lanes_of(j, size)), lanes_of(j, size));
    }

    // `line` is memory for `size` numbers; the gradient of the weight is added to `dweight`. x is read for the norm only.
    template <class T>
    void backward(const T *dy, const T *x, const float *cos, const float *sin, T *dx, float *line,
                  float *dweight) const {
        for (int64_t j = 0; j < half; j += W) {
            int64_t m = lanes_of(j, half);
            vec a = get(dy + j, m), b = get(dy + half + j, m), c = get(cos + j, m), s = get(sin + j, m);
            put(line + j, a * c + b * s, m);
            put(line + half + j, b * c - a * s, m);
        }
        for (int64_t j = 2 * half; j < size; j += W)
            put(line + j, get(dy + j, lanes_of(j, size)), lanes_of(j, size));
        float r = 1.0f, second = 0.0f;
        if (eps >= 0.0f) {
            r = inverse_root(x);
            vec hats{};
            for (int64_t j = 0; j < size; j += W) {
                int64_t m = lanes_of(j, size);
                vec d = get(line + j, m) * get(x + j, m) * r;
                put(dweight + j, get(dweight + j, m) + d, m);
                hats += d * weights(j, m);
            }
            second = sum_of(hats) / float(size);
        }
        for (int64_t j = 0; j < size; j += W) {
            int64_t m = lanes_of(j, size);
            vec d = get(line + j, m) * weights(j, m);
            if (eps >= 0.0f) d = (d - get(x + j, m) * r * second) * r;
            put(dx + j, d, m);
        }
    }
};

// Rows have `queries` heads, then `keys` heads, then `values` numbers that are copied. Those of cos and sin have `half`
// numbers; half is 0 for no rotation. y may have the same memory as x.
template <class T>
void rotate_forward(const T *x, const float *cos, const float *sin, const float *query_weight, const float *key_weight,
                    T *y, int64_t rows, int64_t queries, int64_t keys, int64_t values, int64_t size, int64_t half,
                    float query_eps, float key_eps, int threads) {
    Turn query{query_weight, query_eps, size, half}, key{key_weight, key_eps, size, half};
    int64_t turned = (queries + keys) * size, width = turned + values;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const T *xi = x + i * width;
        T *yi = y + i * width;
        for (int64_t h = 0; h < queries + keys; h++)
            (h < queries ? query : key).forward(xi + h * size, cos + i * half, sin + i * half, yi + h * size);
        if (x != y) std::memcpy(yi + turned, xi + turned, size_t(values) * sizeof(T));
    }
}

// x, the rows before forward, may be null without norms. The gradients of the norms' weights are added to
// `query_grad` and `key_grad`; null: they are not wanted.
template <class T>
void rotate_backward(const T *dy, const T *x, const float *cos, const float *sin, const float *query_weight,
                     const float *key_weight, T *dx, float *query_grad, float *key_grad, int64_t rows, int64_t queries,
                     int64_t keys, int64_t values, int64_t size, int64_t half, float query_eps, float key_eps,
                     int threads) {
    Turn query{query_weight, query_eps, size, half}, key{key_weight, key_eps, size, half};
    int64_t turned = (queries + keys) * size, width = turned + values;
    ThreadSums sums(threads, 3 * size);
#pragma omp parallel num_threads(threads)
    {
        float *line = sums.of(omp_get_thread_num()), *dquery = line + size, *dkey = dquery + size;
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < rows; i++) {
            const T *dyi = dy + i * width, *xi = x ? x + i * width : dyi;
            T *dxi = dx + i * width;
            for (int64_t h = 0; h < queries + keys; h++)
                (h < queries ? query : key)
                    .backward(dyi + h * size, xi + h * size, cos + i * half, sin + i * half, dxi + h * size, line,
                              h < queries ? dquery : dkey);
            std::memcpy(dxi + turned, dyi + turned, size_t(values) * sizeof(T));
        }
    }
    sums.add_to(query_grad, size_t(size), size_t(size));
    sums.add_to(key_grad, size_t(2 * size), size_t(size));
}

// Quantise rows of x, after multiplying each column by its number of `factors` (null: by 1), to whole numbers from -127
// to 127 and one scale for each row. Magnitudes are compared by their bits, so that a NaN is the largest and becomes
// the scale of its row.
template <class T>
void quantise_rows(const T *x, const float *__restrict factors, int8_t *y, float *scales, int64_t rows, int64_t cols,
                   int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const T *__restrict xi = x + i * cols;
        int8_t *__restrict yi = y + i * cols;
        auto value = [=](int64_t j) { return factors ? load(xi[j]) * factors[j] : load(xi[j]); };
        int32_t top = 0;
        for (int64_t j = 0; j < cols; j++) {
            int32_t bits = int32_t(as_bits(value(j)) & 0x7fffffffu);
            top = bits > top ? bits : top;
        }
        float most = as_float(uint32_t(top)), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        scales[i] = most / 127.0f;
        // Rounds as exp_of does. GCC narrows a plain loop to bytes well, but vectors lane by lane.
        for (int64_t j = 0; j < cols; j++) yi[j] = int8_t(as_bits(value(j) * inverse + 12582912.0f));
    }
}

// y = product of 8-bit matrices, times the scales of its rows and of its columns, plus the bias of its columns.
// `columns` and `bias` may be null. y may have the same memory as the product.
template <class T>
void dequantise(const int32_t *product, const float *scales, const float *columns, const float *bias, T *y,
                int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const float *pi = reinterpret_cast<const float *>(product) + i * cols;
        for (int64_t j = 0; j < cols; j += W) {
            int64_t m = lanes_of(j, cols);
            put(y + i * cols + j, dequantised((ivec)get(pi + j, m), scales[i], columns, bias, j, m), m);
        }
    }
}

// y = 8-bit weights times the scale of their row.
template <class T>
void dequantise_rows(const int8_t *x, const float *scales, T *y, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const int8_t *__restrict xi = x + i * cols;
        T *__restrict yi = y + i * cols;
        const float scale = scales[i];
        for (int64_t j = 0; j < cols; j++) store(yi[j], float(xi[j]) * scale);
    }
}

// y[i] = first_table[first[i]] + second_table[second[i]] + third_table[third[i]]. A table that is null is left out.
// *outside becomes 1 if an index is not a row of its table; then y is undefined.
template <class T>
void add_table_rows(const T *first_table, const T *second_table, const T *third_table, const int64_t *first,
                    const int64_t *second, const int64_t *third, T *y, int64_t *outside, int64_t rows, int64_t cols,
                    int64_t first_rows, int64_t second_rows, int64_t third_rows, int threads) {
    *outside = 0;
    auto row_of = [=](const T *table, const int64_t *numbers, int64_t i, int64_t size) {
        if (numbers[i] >= 0 && numbers[i] < size) return table + numbers[i] * cols;
#pragma omp atomic write
        *outside = 1;
        return table;
    };
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const T *a = row_of(first_table, first, i, first_rows);
        const T *b = second_table ? row_of(second_table, second, i, second_rows) : nullptr;
        const T *c = third_table ? row_of(third_table, third, i, third_rows) : nullptr;
        for (int64_t j = 0; j < cols; j += W) {
            int64_t m = lanes_of(j, cols);
            vec v = get(a + j, m);
            if (c) v += get(c + j, m);
            if (b) v += get(b + j, m);
            put(y + i * cols + j, v, m);
        }
    }
}

// Groups the numbers ids[0] to ids[count - 1] of table rows: rows[u] is number u of those that occur, ascending, without
// `left_out`, and order[starts[u]] to order[starts[u + 1] - 1] are the ascending places where it occurs. `found` gets
// the number of rows. It takes a tenth of the time of torch's sort and unique.
template <class T>
void group_rows(const int64_t *ids, int64_t *order, int64_t *starts, int64_t *rows, int64_t *found, int64_t count,
                int64_t table_rows, int64_t left_out, int) {
    std::vector<int32_t> places(static_cast<size_t>(table_rows));  // how often a row occurs, then its next place
    for (int64_t i = 0; i < count; i++) places[size_t(ids[i])]++;
    int64_t taken = 0, u = 0;
    for (int64_t row = 0; row < table_rows; row++) {
        int32_t &place = places[size_t(row)];
        if (!place || row == left_out) continue;
        rows[u] = row, starts[u++] = taken;
        taken += std::exchange(place, int32_t(taken));
    }
    starts[u] = taken, *found = u;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] != left_out) order[places[size_t(ids[i])]++] = i;
}

// Row places[u] of y, or row u if `places` is null, becomes the sum of the rows order[starts[u]] to order[starts[u + 1] -
// 1] of x: the gradient of a table's row.
template <class T>
void sum_table_rows(const T *x, const int64_t *order, const int64_t *starts, const int64_t *places, T *y, int64_t rows,
                    int64_t cols, int threads) {
    constexpr int64_t STRIP = 8 * W;  // columns that a thread adds up at a time: few rows may have many summands
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int64_t u = 0; u < rows; u++)
        for (int64_t first = 0; first < cols; first += STRIP) {
            vec sums[STRIP / W]{};
            int64_t end = cols - first < STRIP ? cols : first + STRIP;
            for (int64_t i = starts[u]; i < starts[u + 1]; i++)
                for (int64_t j = first; j < end; j += W)
                    sums[(j - first) / W] += get(x + order[i] * cols + j, lanes_of(j, end));
            for (int64_t j = first; j < end; j += W)
                put(y + (places ? places[u] : u) * cols + j, sums[(j - first) / W], lanes_of(j, end));
        }
}

// squares[b] = the sum of the squares of `n` numbers from x + b * BLOCK on, for each of N blocks: 16 partial sums of
// rounded products on all CPUs. Several blocks at a time, because the additions of one wait for each other.
template <int64_t N, class G> void square_blocks(const G *x, int64_t n, uint32_t zero, float *squares) {
    vec sums[N][PARTIAL_SUMS / W]{};
    auto add = [&](vec &sum, vec v) { sum += rounded(v * v, zero); };
    int64_t i = 0;
    for (; i + PARTIAL_SUMS <= n; i += PARTIAL_SUMS)
#pragma GCC unroll 4
        for (int64_t b = 0; b < N; b++)
#pragma GCC unroll 4
            for (int64_t k = 0; k < PARTIAL_SUMS / W; k++) add(sums[b][k], get(x + b * BLOCK + i + k * W, W));
    for (int64_t b = 0; b < N; b++) {
        for (int64_t j = i, k = 0; j < n; j += W, k++) add(sums[b][k], get(x + b * BLOCK + j, lanes_of(j, n)));
        float lanes[PARTIAL_SUMS];
        std::memcpy(lanes, sums[b], sizeof lanes);
        for (int64_t half = PARTIAL_SUMS / 2; half; half /= 2)
            for (int64_t k = 0; k < half; k++) lanes[k] += lanes[k + half];
        squares[b] = lanes[0];
    }
}

// *sum += the sum of the squares of all numbers of `count` gradients. It has the same bits on all CPUs and with any
// number of threads, because all ranks scale their gradients by it: blocks are added in their order.
template <class G>
void square_sum(const G *const *grads, const int64_t *sizes, double *sum, int64_t count, int threads) {
    constexpr int64_t AT_ONCE = 4;
    std::vector<int64_t> first(size_t(count) + 1);
    for (int64_t k = 0; k < count; k++) first[size_t(k) + 1] = first[size_t(k)] + (sizes[k] + BLOCK - 1) / BLOCK;
    std::vector<float> squares(static_cast<size_t>(first.back()));
    uint32_t zero = hidden_zero();
#pragma omp parallel num_threads(threads)
    for (int64_t k = 0; k < count; k++) {
        float *of_blocks = squares.data() + first[size_t(k)];
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < sizes[k]; start += AT_ONCE * BLOCK) {
            const G *x = grads[k] + start;
            float *to = of_blocks + start / BLOCK;
            int64_t left = sizes[k] - start;
            if (left >= AT_ONCE * BLOCK)
                square_blocks<AT_ONCE>(x, BLOCK, zero, to);
            else
                for (; left > 0; left -= BLOCK, x += BLOCK)
                    square_blocks<1>(x, std::min(BLOCK, left), zero, to++);
        }
    }
    for (float one : squares) *sum += double(one);
}

struct Adam {
    // One minus each beta: these small numbers are not exact as differences of numbers near 1.
    float rest1, rest2, eps, shrink, pull, step, root, gain;
};

// With explicit fma, the result does not depend on which products and sums the compiler joins: ranks need the same
// weights.
template <class G>
void adamw_block(float *master, bf16 *compute, const G *grad, float *first, float *second, int64_t n, Adam a) {
    for (int64_t i = 0; i < n; i++) {
        float p = master[i];
        float g = std::fma(load(grad[i]), a.gain, a.pull * p);
        float m = std::fma(g - first[i], a.rest1, first[i]);
        float v = std::fma(std::fma(g, g, -second[i]), a.rest2, second[i]);
        first[i] = m;
        second[i] = v;
        master[i] = std::fma(p, a.shrink, -(a.step * m / std::fma(std::sqrt(v), a.root, a.eps)));
    }
    if (compute)
        for (int64_t i = 0; i < n; i++) store(compute[i], master[i]);
}

template <class G> bool is_still(const G *grad, const float *first, const float *second, int64_t n) {
    vec any{};
    for (int64_t i = 0; i < n; i += W) {
        int64_t m = lanes_of(i, n);
        vec g = get(grad + i, m), f = get(first + i, m);
        any += (g < 0.0f ? -g : g) + (f < 0.0f ? -f : f) + get(second + i, m);
        ivec some = any != 0.0f;
        if (i == 0 && sum_of(some ? all(1.0f) : vec{}) != 0.0f) return false;
    }
    return sum_of(any != 0.0f ? all(1.0f) : vec{}) == 0.0f;
}

// AdamW (Loshchilov, Hutter 2019), or Adam with decay added to the gradient, on the fp32 masters of `count` parameters,
// in one pass with the rounding to the compute weights (null: there are none). Gradients are multiplied by `gain`.
// Without decay, a block whose gradient and moments are all zero is skipped, which does not change the result: that is
// most of an embedding. For a parameter with rows of `widths` numbers, `awake` is zero for rows that are known to be
// such blocks, so that they need not be read to find out; null where this is unknown. Each number of `steps`, how often
// a parameter was updated, is increased first. `rates` are the learning rate and both betas.
template <class G>
void adamw(float *const *master, bf16 *const *compute, const G *const *grad, float *const *first,
           float *const *second, const uint8_t *const *awake, float *const *steps, const int64_t *sizes,
           const int64_t *widths, const double *rates, int64_t count, float eps, float shrink, float pull, float gain,
           int threads) {
    std::vector<Adam> settings;
    for (int64_t k = 0; k < count; k++) {
        // pow of doubles would need glibc 2.29, but the wheel promises 2.28; that of long doubles needs no new one.
        auto power = [](long double x, long double exponent) { return double(std::pow(x, exponent)); };
        long double number = *steps[k] += 1.0f;
        double step = rates[0] / (1.0 - power(rates[1], number)), root = power(1.0 - power(rates[2], number), -0.5L);
        settings.push_back({float(1.0 - rates[1]), float(1.0 - rates[2]), eps, shrink, pull, float(step), float(root),
                            gain});
    }
    bool skips = shrink == 1.0f && pull == 0.0f;
#pragma omp parallel num_threads(threads)
    for (int64_t k = 0; k < count; k++) {
        const uint8_t *wakes = skips ? awake[k] : nullptr;
        int64_t block = wakes ? widths[k] : BLOCK;
#pragma omp for schedule(dynamic, 16) nowait
        for (int64_t start = 0; start < sizes[k]; start += block) {
            if (wakes && !wakes[start / block]) continue;
            int64_t n = sizes[k] - start < block ? sizes[k] - start : block;
            const G *g = grad[k] + start;
            float *m = first[k] + start, *v = second[k] + start;
            if (skips && !wakes && is_still(g, m, v, n)) continue;
            adamw_block(master[k] + start, compute[k] ? compute[k] + start : nullptr, g, m, v, n,
                        settings[size_t(k)]);
        }
    }
}

// A letter for each type of a kernel's parameters, by which Python calls it (cpuft/kernels.py).
template <class T> constexpr char letter() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_same_v<T, int64_t>) return 'q';
    if (std::is_same_v<T, uint64_t>) return 'Q';
    if (std::is_same_v<T, uint32_t>) return 'I';
    if (std::is_same_v<T, int>) return 'i';
    return std::is_same_v<T, float> ? 'f' : 0;
}

template <class... T> struct Letters {
    static constexpr char text[] = {letter<T>()..., 0};
};

struct Kernel {
    const char *name, *letters;
    void *fp32, *bf16; // the function for each type of elements
};

template <class... T, class... U> Kernel describe(const char *name, void (*fp32)(T...), void (*bf16)(U...)) {
    static_assert(((letter<T>() != 0) && ...), "a parameter has a type without a letter");
    static_assert(((std::is_pointer_v<T> || std::is_same_v<T, U>) && ...), "an element must be given by its address");
    return {name, Letters<T...>::text, reinterpret_cast<void *>(fp32), reinterpret_cast<void *>(bf16)};
}

#define KERNEL(name) describe(#name, &name<float>, &name<bf16>)

} // namespace

// All kernels; the last entry has no name.
extern "C" {
Kernel cpuft_kernels[] = {
    KERNEL(dropout),
    KERNEL(norm_forward),
    KERNEL(norm_backward),
    KERNEL(attention_forward),
    KERNEL(attention_backward),
    KERNEL(disentangled_forward),
    KERNEL(disentangled_backward),
    KERNEL(gelu_forward),
    KERNEL(gelu_backward),
    KERNEL(glu_forward),
    KERNEL(glu_backward),
    KERNEL(rotate_forward),
    KERNEL(rotate_backward),
    KERNEL(column_sums),
    KERNEL(attention_half_forward),
    KERNEL(attention_half_backward),
    KERNEL(feed_forward_half_forward),
    KERNEL(feed_forward_half_backward),
    KERNEL(first_token_half_forward),
    KERNEL(first_token_half_backward),
    KERNEL(matrix_product),
    KERNEL(quantise_rows),
    KERNEL(int8_product),
    KERNEL(dequantise),
    KERNEL(dequantise_rows),
    KERNEL(add_table_rows),
    KERNEL(group_rows),
    KERNEL(sum_table_rows),
    KERNEL(square_sum),
    KERNEL(adamw),
    KERNEL(encode_blocks),
    KERNEL(average_blocks),
    KERNEL(decode_blocks),
    KERNEL(orthonormalise),
    KERNEL(make_first_factors),
    KERNEL(make_second_factors),
    KERNEL(write_products),
    {},
};
}
