// The passes over activations that eager torch makes one operator at a time, each made once: memory traffic, not
// arithmetic, is what they cost. No torch headers: plain functions on plain pointers, loaded through ctypes, so that
// any compiler with OpenMP builds them in seconds and they fit every torch. Each has a plain torch twin beside its
// Python caller, and a test holds the two equal.
//
// Loops are written for the compiler's own vectoriser: branch-free bodies, `omp simd` where a sum is reordered.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float load(float value) { return value; }
inline float load(bf16 value) { return as_float(uint32_t(value.bits) << 16); }

inline void store(float &to, float value) { to = value; }

// Round to nearest even, as torch does. A NaN stays one because its quiet bit is set first.
inline void store(bf16 &to, float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// exp by Cephes' expf: 2^n times a polynomial of degree 5, relative error 2e-7.
inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = std::floor(x * 1.44269504088896341f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * as_float(uint32_t(int32_t(n) + 127) << 23);
}

// Word i of the stream of `seed`: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
// generators"). Being a function of its index, it needs no state between threads, and backward makes the same mask
// again instead of reading it from memory.
inline uint64_t random_word(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// 16 random bits an element, four elements a word.
struct Lanes {
    std::vector<uint64_t> words;
    explicit Lanes(int64_t longest) : words(size_t(longest / 4 + 3)) {}
    const uint16_t *fill(uint64_t seed, int64_t first, int64_t count) {
        uint64_t base = uint64_t(first) / 4;
        int64_t n = (first + count + 3) / 4 - int64_t(base);
        uint64_t *out = words.data();
        for (int64_t i = 0; i < n; i++) out[i] = random_word(seed, base + uint64_t(i));
        return reinterpret_cast<const uint16_t *>(out) + first % 4;
    }
};

constexpr int64_t BLOCK = 1024;

template <class T>
void dropout(const T *x, T *y, int64_t n, uint64_t seed, uint32_t threshold, float scale, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Lanes lanes(BLOCK);
#pragma omp for schedule(static)
        for (int64_t start = 0; start < n; start += BLOCK) {
            int64_t count = n - start < BLOCK ? n - start : BLOCK;
            const uint16_t *bits = lanes.fill(seed, start, count);
            for (int64_t j = 0; j < count; j++)
                store(y[start + j], bits[j] >= threshold ? load(x[start + j]) * scale : 0.0f);
        }
    }
}

template <class T>
void norm_forward(const T *x, const T *residual, const float *weight, const float *bias, T *sum, T *y, float *mean,
                  float *rstd, int64_t rows, int64_t cols, uint64_t seed, uint32_t threshold, float scale, float eps,
                  int threads) {
#pragma omp parallel num_threads(threads)
    {
        Lanes lanes(cols);
        std::vector<float> line(static_cast<size_t>(cols));
        float *h = line.data();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            const T *xi = x + i * cols, *ri = residual + i * cols;
            T *si = sum + i * cols, *yi = y + i * cols;
            if (threshold) {
                const uint16_t *bits = lanes.fill(seed, i * cols, cols);
                for (int64_t j = 0; j < cols; j++)
                    store(si[j], load(ri[j]) + (bits[j] >= threshold ? load(xi[j]) * scale : 0.0f));
            } else {
                for (int64_t j = 0; j < cols; j++) store(si[j], load(ri[j]) + load(xi[j]));
            }
            float total = 0, squares = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t j = 0; j < cols; j++) {
                h[j] = load(si[j]);
                total += h[j];
            }
            float mu = total / float(cols);
#pragma omp simd reduction(+ : squares)
            for (int64_t j = 0; j < cols; j++) squares += (h[j] - mu) * (h[j] - mu);
            float r = 1.0f / std::sqrt(squares / float(cols) + eps);
            for (int64_t j = 0; j < cols; j++) store(yi[j], (h[j] - mu) * r * weight[j] + bias[j]);
            mean[i] = mu;
            rstd[i] = r;
        }
    }
}

// Gradients of the norm's weight and bias are added to what `dweight` and `dbias` hold.
template <class T>
void norm_backward(const T *dy, const T *sum, const float *mean, const float *rstd, const float *weight, T *dx,
                   T *dresidual, float *dweight, float *dbias, int64_t rows, int64_t cols, uint64_t seed,
                   uint32_t threshold, float scale, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Lanes lanes(cols);
        std::vector<float> line(static_cast<size_t>(4 * cols));
        float *g = line.data(), *hat = g + cols, *dw = hat + cols, *db = dw + cols;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            const T *dyi = dy + i * cols, *si = sum + i * cols;
            T *dxi = dx + i * cols, *dri = dresidual + i * cols;
            float mu = mean[i], r = rstd[i], first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
            for (int64_t j = 0; j < cols; j++) {
                float d = load(dyi[j]), z = (load(si[j]) - mu) * r;
                dw[j] += d * z;
                db[j] += d;
                hat[j] = z;
                g[j] = d * weight[j];
                first += g[j];
                second += g[j] * z;
            }
            first /= float(cols);
            second /= float(cols);
            if (threshold) {
                const uint16_t *bits = lanes.fill(seed, i * cols, cols);
                for (int64_t j = 0; j < cols; j++) {
                    float d = (g[j] - first - hat[j] * second) * r;
                    store(dri[j], d);
                    store(dxi[j], bits[j] >= threshold ? d * scale : 0.0f);
                }
            } else {
                for (int64_t j = 0; j < cols; j++) store(dri[j], (g[j] - first - hat[j] * second) * r);
            }
        }
#pragma omp critical
        for (int64_t j = 0; j < cols; j++) {
            dweight[j] += dw[j];
            dbias[j] += db[j];
        }
    }
}

// scores: (batch, heads, queries, keys). bias: added to the scaled scores, with its own strides, keys next to each
// other, or null. probs: softmax. dropped: probs after dropout, scaled.
template <class T>
void softmax_forward(const T *scores, const float *bias, T *probs, T *dropped, int64_t batch, int64_t heads,
                     int64_t queries, int64_t keys, int64_t batch_stride, int64_t head_stride, int64_t query_stride,
                     float factor, uint64_t seed, uint32_t threshold, float scale, int threads) {
    int64_t rows = batch * heads * queries;
#pragma omp parallel num_threads(threads)
    {
        Lanes lanes(keys);
        std::vector<float> line(static_cast<size_t>(keys));
        float *e = line.data();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            const T *si = scores + i * keys;
            T *pi = probs + i * keys, *di = dropped + i * keys;
            float top = -INFINITY, total = 0;
            if (bias) {
                const float *b = bias + i / (heads * queries) * batch_stride + i / queries % heads * head_stride +
                                 i % queries * query_stride;
#pragma omp simd reduction(max : top)
                for (int64_t j = 0; j < keys; j++) {
                    e[j] = load(si[j]) * factor + b[j];
                    top = e[j] > top ? e[j] : top;
                }
            } else {
#pragma omp simd reduction(max : top)
                for (int64_t j = 0; j < keys; j++) {
                    e[j] = load(si[j]) * factor;
                    top = e[j] > top ? e[j] : top;
                }
            }
            // exp_of stops at exp(-87), 1e-38: what a mask shuts out has to be exactly nothing.
#pragma omp simd reduction(+ : total)
            for (int64_t j = 0; j < keys; j++) {
                e[j] = e[j] - top < -87.0f ? 0.0f : exp_of(e[j] - top);
                total += e[j];
            }
            float share = 1.0f / total;
            for (int64_t j = 0; j < keys; j++) store(pi[j], e[j] * share);
            if (threshold) {
                const uint16_t *bits = lanes.fill(seed, i * keys, keys);
                for (int64_t j = 0; j < keys; j++)
                    store(di[j], bits[j] >= threshold ? e[j] * share * scale : 0.0f);
            }
        }
    }
}

// grad: in, of the dropped probabilities; out, of the unscaled scores.
// sum(probs * dprobs) = sum(dropped * ddropped), and where `dropped` is zero the probability was dropped or is zero.
template <class T>
void softmax_backward(const T *probs, const T *dropped, T *grad, int64_t rows, int64_t keys, float factor, float scale,
                      int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const T *pi = probs + i * keys, *di = dropped + i * keys;
        T *gi = grad + i * keys;
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < keys; j++) total += load(di[j]) * load(gi[j]);
        for (int64_t j = 0; j < keys; j++) {
            float kept = load(di[j]) != 0.0f ? load(gi[j]) * scale : 0.0f;
            store(gi[j], load(pi[j]) * (kept - total) * factor);
        }
    }
}

// gelu(x) = x cdf(x) and its slope cdf(x) + x pdf(x), one exponential for both. The normal distribution's cdf by
// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
template <class T> void gelu(const T *x, T *y, T *slope, int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t end = start + BLOCK < n ? start + BLOCK : n;
        for (int64_t i = start; i < end; i++) {
            float v = load(x[i]);
            float a = std::fabs(v) * 0.70710678118654752f;
            float bell = exp_of(-0.5f * v * v);
            float t = 1.0f / (1.0f + 0.3275911f * a);
            float tail = t * (0.254829592f +
                              t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
            tail *= 0.5f * bell;
            float cdf = v < 0.0f ? tail : 1.0f - tail;
            store(y[i], v * cdf);
            store(slope[i], cdf + v * bell * 0.39894228040143268f);
        }
    }
}

// AdamW (Loshchilov, Hutter 2019), or Adam with decay added to the gradient, on fp32 masters, in one pass with the
// rounding to the compute weights. A block whose gradient and moments are all zero is left alone when there is no
// decay: that is most of an embedding table, and the result is the same.
template <class G>
void adamw(float *master, bf16 *compute, const G *grad, float *first, float *second, int64_t n, float beta1,
           float beta2, float eps, float shrink, float pull, float step, float root, int threads) {
    bool skips = shrink == 1.0f && pull == 0.0f;
#pragma omp parallel for schedule(static) num_threads(threads) if (n > 16 * BLOCK)
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t end = start + BLOCK < n ? start + BLOCK : n;
        if (skips) {
            float any = 0;
#pragma omp simd reduction(+ : any)
            for (int64_t i = start; i < end; i++)
                any += std::fabs(load(grad[i])) + std::fabs(first[i]) + std::fabs(second[i]);
            if (any == 0.0f) continue;
        }
        for (int64_t i = start; i < end; i++) {
            float p = master[i];
            float g = load(grad[i]) + pull * p;
            float m = first[i] + (g - first[i]) * (1.0f - beta1);
            float v = second[i] * beta2 + g * g * (1.0f - beta2);
            first[i] = m;
            second[i] = v;
            master[i] = p * shrink - step * m / (std::sqrt(v) * root + eps);
        }
        if (compute)
            for (int64_t i = start; i < end; i++) store(compute[i], master[i]);
    }
}

} // namespace

#define EACH_TYPE(T, suffix)                                                                                          \
    void dropout_##suffix(const T *x, T *y, int64_t n, uint64_t seed, uint32_t threshold, float scale, int threads) { \
        dropout(x, y, n, seed, threshold, scale, threads);                                                            \
    }                                                                                                                 \
    void norm_forward_##suffix(const T *x, const T *residual, const float *weight, const float *bias, T *sum, T *y,   \
                               float *mean, float *rstd, int64_t rows, int64_t cols, uint64_t seed,                   \
                               uint32_t threshold, float scale, float eps, int threads) {                             \
        norm_forward(x, residual, weight, bias, sum, y, mean, rstd, rows, cols, seed, threshold, scale, eps,          \
                     threads);                                                                                        \
    }                                                                                                                 \
    void norm_backward_##suffix(const T *dy, const T *sum, const float *mean, const float *rstd, const float *weight, \
                                T *dx, T *dresidual, float *dweight, float *dbias, int64_t rows, int64_t cols,        \
                                uint64_t seed, uint32_t threshold, float scale, int threads) {                        \
        norm_backward(dy, sum, mean, rstd, weight, dx, dresidual, dweight, dbias, rows, cols, seed, threshold, scale, \
                      threads);                                                                                       \
    }                                                                                                                 \
    void softmax_forward_##suffix(const T *scores, const float *bias, T *probs, T *dropped, int64_t batch,            \
                                  int64_t heads, int64_t queries, int64_t keys, int64_t batch_stride,                 \
                                  int64_t head_stride, int64_t query_stride, float factor, uint64_t seed,             \
                                  uint32_t threshold, float scale, int threads) {                                     \
        softmax_forward(scores, bias, probs, dropped, batch, heads, queries, keys, batch_stride, head_stride,         \
                        query_stride, factor, seed, threshold, scale, threads);                                       \
    }                                                                                                                 \
    void softmax_backward_##suffix(const T *probs, const T *dropped, T *grad, int64_t rows, int64_t keys,             \
                                   float factor, float scale, int threads) {                                          \
        softmax_backward(probs, dropped, grad, rows, keys, factor, scale, threads);                                   \
    }                                                                                                                 \
    void gelu_##suffix(const T *x, T *y, T *slope, int64_t n, int threads) { gelu(x, y, slope, n, threads); }         \
    void adamw_##suffix(float *master, bf16 *compute, const T *grad, float *first, float *second, int64_t n,          \
                        float beta1, float beta2, float eps, float shrink, float pull, float step, float root,        \
                        int threads) {                                                                                \
        adamw(master, compute, grad, first, second, n, beta1, beta2, eps, shrink, pull, step, root, threads);   \
    }

extern "C" {
EACH_TYPE(float, fp32)
EACH_TYPE(bf16, bf16)
}
