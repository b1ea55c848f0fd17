// The passes over activations that eager torch makes one operator at a time, each made once: memory traffic, not
// arithmetic, is what they cost. No torch headers: plain functions on plain pointers, loaded through ctypes, so that
// any compiler with OpenMP builds them in seconds and they fit every torch. Each has a plain torch twin beside its
// Python caller, and a test holds the two equal.
//
// Loops go over a vector's numbers at a time. The few last of a row are a masked load, not so many scalar steps:
// attention's rows are as short as a sentence, and half of their time went there.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif
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

// A vector of floats, as wide as the processor's. Operators and ?: work lane by lane on GCC's and Clang's vector types,
// whatever the hardware, and become its instructions where it has that width: wider ones are taken apart, number by
// number where they are compared.
#ifdef __AVX512BW__
constexpr int64_t W = 16;
#else
constexpr int64_t W = 8;
#endif
typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t half __attribute__((vector_size(2 * W)));

inline vec all(float x) { return vec{} + x; }

// What stands at p, which need not be aligned.
template <class V> inline V read(const void *p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

const int32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
const ivec LANE = read<ivec>(NUMBERS);

inline vec widen(half x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

// As store() rounds.
inline half narrow(vec x) {
    uvec bits = (uvec)x, up = bits + 0x7fffu + ((bits >> 16) & 1u);
    up = x != x ? bits | 0x400000u : up;
    return __builtin_convertvector(up >> 16, half);
}

#ifdef __AVX512BW__
inline __mmask16 first_of(int64_t n) { return __mmask16((1u << n) - 1u); }
inline vec get(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(first_of(n), p); }
inline vec get(const bf16 *p, int64_t n) {  // GCC makes more of this than of widen()
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_of(n), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void put(float *p, vec x, int64_t n) { _mm512_mask_storeu_ps(p, first_of(n), x); }
inline void put(bf16 *p, vec x, int64_t n) {
#ifdef __AVX512BF16__
    // Unlike torch's rounding, this takes numbers below 1e-38 for zero.
    _mm256_mask_storeu_epi16(p, first_of(n), (__m256i)_mm512_cvtneps_pbh(x));
#else
    _mm256_mask_storeu_epi16(p, first_of(n), (__m256i)narrow(x));
#endif
}
inline vec keep(vec x, const uint16_t *bits, uint32_t threshold) {
    __m256i limit = _mm256_set1_epi16(int16_t(threshold));
    return _mm512_maskz_mov_ps(_mm256_cmpge_epu16_mask(read<__m256i>(bits), limit), x);
}
inline float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
inline float most_of(vec x) { return _mm512_reduce_max_ps(x); }
#else
// The few last of a row: AVX2 masks numbers of 32 bits only, others go through a vector of their own.
template <class V, class T> inline V read_part(const T *p, int64_t n) {
    V x{};
    std::memcpy(&x, p, size_t(n) * sizeof(T));
    return x;
}
#ifdef __AVX2__
inline vec get_part(const float *p, int64_t n) { return _mm256_maskload_ps(p, (__m256i)(LANE < int32_t(n))); }
inline void put_part(float *p, vec x, int64_t n) { _mm256_maskstore_ps(p, (__m256i)(LANE < int32_t(n)), x); }
#else
inline vec get_part(const float *p, int64_t n) { return read_part<vec>(p, n); }
inline void put_part(float *p, vec x, int64_t n) { std::memcpy(p, &x, size_t(n) * 4); }
#endif
inline vec get(const float *p, int64_t n) { return n < W ? get_part(p, n) : read<vec>(p); }
inline vec get(const bf16 *p, int64_t n) { return widen(n < W ? read_part<half>(p, n) : read<half>(p)); }
inline void put(float *p, vec x, int64_t n) {
    if (n < W)
        put_part(p, x, n);
    else
        std::memcpy(p, &x, sizeof x);
}
inline void put(bf16 *p, vec x, int64_t n) {
    half y = narrow(x);
    std::memcpy(p, &y, n < W ? size_t(n) * 2 : sizeof y);
}
inline vec keep(vec x, const uint16_t *bits, uint32_t threshold) {
    return __builtin_convertvector(read<half>(bits), ivec) >= int32_t(threshold) ? x : vec{};
}
inline float sum_of(vec x) {
    for (int64_t n = W / 2; n; n /= 2)
        for (int64_t i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
}
inline float most_of(vec x) {
    for (int64_t n = W / 2; n; n /= 2)
        for (int64_t i = 0; i < n; i++) x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
    return x[0];
}
#endif

inline int64_t lanes_of(int64_t j, int64_t cols) { return cols - j < W ? cols - j : W; }

// exp by Cephes' expf: 2^n times a polynomial of degree 5, relative error 2e-7. Adding 1.5 * 2^23 rounds to a whole
// number and leaves it in the low bits.
inline vec exp_of(vec x) {
    x = x < -87.0f ? all(-87.0f) : (x > 88.0f ? all(88.0f) : x);
    vec shifted = x * 1.44269504088896341f + 12582912.0f;
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)(((ivec)shifted + 127) << 23);
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

// 16 random bits an element, four elements a word. Whole vectors are filled, so up to 16 elements too many.
struct Lanes {
    std::vector<uint64_t> words;
    explicit Lanes(int64_t longest) : words(size_t(longest / 4 + 24)) {}
    const uint16_t *fill(uint64_t seed, int64_t first, int64_t count) {
        uint64_t base = uint64_t(first) / 4;
        int64_t n = ((first + count + W + 3) / 4 - int64_t(base) + 7) / 8 * 8;
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
            for (int64_t j = 0; j < count; j += W) {
                int64_t m = lanes_of(j, count);
                put(y + start + j, keep(get(x + start + j, m) * scale, bits + j, threshold), m);
            }
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
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            const T *xi = x + i * cols, *ri = residual + i * cols;
            T *si = sum + i * cols, *yi = y + i * cols;
            const uint16_t *bits = threshold ? lanes.fill(seed, i * cols, cols) : nullptr;
            vec total{}, squares{};
            for (int64_t j = 0; j < cols; j += W) {
                int64_t m = lanes_of(j, cols);
                vec v = get(xi + j, m);
                if (bits) v = keep(v * scale, bits + j, threshold);
                put(si + j, get(ri + j, m) + v, m);
                total += get(si + j, m);  // as backward will read it
            }
            float mu = sum_of(total) / float(cols);
            for (int64_t j = 0; j < cols; j += W) {
                int64_t m = lanes_of(j, cols);
                vec d = LANE < int32_t(m) ? get(si + j, m) - mu : vec{};
                squares += d * d;
            }
            float r = 1.0f / std::sqrt(sum_of(squares) / float(cols) + eps);
            for (int64_t j = 0; j < cols; j += W) {
                int64_t m = lanes_of(j, cols);
                put(yi + j, (get(si + j, m) - mu) * r * get(weight + j, m) + get(bias + j, m), m);
            }
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
        std::vector<float> line(static_cast<size_t>(2 * cols));
        float *dw = line.data(), *db = dw + cols;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            const T *dyi = dy + i * cols, *si = sum + i * cols;
            T *dxi = dx + i * cols, *dri = dresidual + i * cols;
            const uint16_t *bits = threshold ? lanes.fill(seed, i * cols, cols) : nullptr;
            float mu = mean[i], r = rstd[i];
            vec ones{}, hats{};
            for (int64_t j = 0; j < cols; j += W) {
                int64_t m = lanes_of(j, cols);
                vec d = get(dyi + j, m), z = (get(si + j, m) - mu) * r;  // where d is masked, products are 0
                put(dw + j, get(dw + j, m) + d * z, m);
                put(db + j, get(db + j, m) + d, m);
                vec g = d * get(weight + j, m);
                ones += g;
                hats += g * z;
            }
            float first = sum_of(ones) / float(cols), second = sum_of(hats) / float(cols);
            for (int64_t j = 0; j < cols; j += W) {
                int64_t m = lanes_of(j, cols);
                vec z = (get(si + j, m) - mu) * r;
                vec d = (get(dyi + j, m) * get(weight + j, m) - first - z * second) * r;
                put(dri + j, d, m);
                if (bits) put(dxi + j, keep(d * scale, bits + j, threshold), m);
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
#pragma omp parallel num_threads(threads)
    {
        Lanes lanes(keys);
        std::vector<float> line(static_cast<size_t>(keys + W));
        float *e = line.data();
        // Three loops, as divisions for each row cost as much as a short row.
#pragma omp for collapse(3) schedule(static)
        for (int64_t n = 0; n < batch; n++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t q = 0; q < queries; q++) {
                    int64_t i = (n * heads + h) * queries + q;
                    const T *si = scores + i * keys;
                    T *pi = probs + i * keys, *di = dropped + i * keys;
                    const float *b = bias ? bias + n * batch_stride + h * head_stride + q * query_stride : nullptr;
                    vec tops = all(-INFINITY), totals{};
                    for (int64_t j = 0; j < keys; j += W) {
                        int64_t m = lanes_of(j, keys);
                        vec v = get(si + j, m) * factor;
                        if (b) v += get(b + j, m);
                        v = LANE < int32_t(m) ? v : all(-INFINITY);
                        put(e + j, v, W);
                        tops = v > tops ? v : tops;
                    }
                    float top = most_of(tops);
                    // exp_of stops at exp(-87), 1e-38: what a mask shuts out has to be exactly nothing.
                    for (int64_t j = 0; j < keys; j += W) {
                        vec v = get(e + j, W) - top;
                        v = v < -87.0f ? vec{} : exp_of(v);
                        put(e + j, v, W);
                        totals += v;
                    }
                    float share = 1.0f / sum_of(totals);
                    const uint16_t *bits = threshold ? lanes.fill(seed, i * keys, keys) : nullptr;
                    for (int64_t j = 0; j < keys; j += W) {
                        int64_t m = lanes_of(j, keys);
                        vec v = get(e + j, W) * share;
                        put(pi + j, v, m);
                        if (bits) put(di + j, keep(v * scale, bits + j, threshold), m);
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
        vec totals{};
        for (int64_t j = 0; j < keys; j += W) {
            int64_t m = lanes_of(j, keys);
            totals += get(di + j, m) * get(gi + j, m);
        }
        float total = sum_of(totals);
        for (int64_t j = 0; j < keys; j += W) {
            int64_t m = lanes_of(j, keys);
            vec kept = get(di + j, m) != 0.0f ? get(gi + j, m) * scale : vec{};
            put(gi + j, get(pi + j, m) * (kept - total) * factor, m);
        }
    }
}

// gelu(x) = x cdf(x) and its slope cdf(x) + x pdf(x), one exponential for both. The normal distribution's cdf by
// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
template <class T> void gelu(const T *x, T *y, T *slope, int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t end = start + BLOCK < n ? start + BLOCK : n;
        for (int64_t i = start; i < end; i += W) {
            int64_t m = lanes_of(i, end);
            vec v = get(x + i, m);
            vec a = v < 0.0f ? -v : v;
            vec bell = exp_of(v * v * -0.5f);
            vec t = 1.0f / (a * (0.3275911f * 0.70710678118654752f) + 1.0f);
            vec tail = t * 1.061405429f - 1.453152027f;
            tail = tail * t + 1.421413741f;
            tail = tail * t - 0.284496736f;
            tail = tail * t + 0.254829592f;
            tail = tail * t * bell * 0.5f;
            vec cdf = v < 0.0f ? tail : 1.0f - tail;
            put(y + i, v * cdf, m);
            put(slope + i, v * bell * 0.39894228040143268f + cdf, m);
        }
    }
}

// sums += the sum of all rows of x: a linear layer's bias gets that of its output's gradient.
template <class T> void column_sums(const T *x, float *sums, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> line(static_cast<size_t>(cols));
        float *mine = line.data();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j += W) {
                int64_t m = lanes_of(j, cols);
                put(mine + j, get(mine + j, m) + get(x + i * cols + j, m), m);
            }
#pragma omp critical
        for (int64_t j = 0; j < cols; j++) sums[j] += mine[j];
    }
}

// Rows of x as whole numbers from -127 to 127 times a scale for each row, every column counting `factors` times first
// (null: once). Magnitudes are compared as bits, by which a NaN is the largest: its row's scale says so.
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
        // As in exp_of; GCC narrows plain loops to bytes well, and vectors lane by lane.
        for (int64_t j = 0; j < cols; j++) yi[j] = int8_t(as_bits(value(j) * inverse + 12582912.0f));
    }
}

// A product of rows of 8-bit numbers, times the scales of its rows and of its columns, plus the columns' bias (null:
// no scales, no bias). y may be where the product is.
template <class T>
void dequantise(const int32_t *product, const float *scales, const float *columns, const float *bias, T *y,
                int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const float *pi = reinterpret_cast<const float *>(product) + i * cols;
        for (int64_t j = 0; j < cols; j += W) {
            int64_t m = lanes_of(j, cols);
            vec v = __builtin_convertvector((ivec)get(pi + j, m), vec) * scales[i];
            if (columns) v *= get(columns + j, m);
            if (bias) v += get(bias + j, m);
            put(y + i * cols + j, v, m);
        }
    }
}

// A head's share of a row, 64 bytes at a time where it is that long: a copy of known length is one load and one store.
inline void copy(void *to, const void *from, size_t bytes) {
    if (bytes % 64) {
        std::memcpy(to, from, bytes);
        return;
    }
    for (size_t i = 0; i < bytes; i += 64)
        std::memcpy(static_cast<char *>(to) + i, static_cast<const char *>(from) + i, 64);
}

// Rows side by side to heads: x (rows, parts * heads * size) -> y (parts, batch, heads, length, size). Row
// rows_of[b * length + t] belongs to token t of b, none where that is negative: zeros. Null: rows in order.
template <class T>
void split_heads(const T *x, const int64_t *rows_of, T *y, int64_t parts, int64_t batch, int64_t heads, int64_t length,
                 int64_t size, int threads) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t k = 0; k < parts * heads; k++) {
            T *to = y + ((k / heads * batch + b) * heads + k % heads) * length * size;
            for (int64_t t = 0; t < length; t++, to += size) {
                int64_t place = b * length + t, row = rows_of ? rows_of[place] : place;
                if (row < 0)
                    std::memset(to, 0, size_t(size) * sizeof(T));
                else
                    copy(to, x + (row * parts * heads + k) * size, size_t(size) * sizeof(T));
            }
        }
}

// The reverse of split_heads: what stands at a token without a row is dropped.
template <class T>
void join_heads(const T *y, const int64_t *rows_of, T *x, int64_t parts, int64_t batch, int64_t heads, int64_t length,
                int64_t size, int threads) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t k = 0; k < parts * heads; k++) {
            const T *from = y + ((k / heads * batch + b) * heads + k % heads) * length * size;
            for (int64_t t = 0; t < length; t++, from += size) {
                int64_t place = b * length + t, row = rows_of ? rows_of[place] : place;
                if (row >= 0) copy(x + (row * parts * heads + k) * size, from, size_t(size) * sizeof(T));
            }
        }
}

// *sum += the squares of the numbers of all `count` gradients.
template <class G>
void square_sum(const G *const *grads, const int64_t *sizes, double *sum, int64_t count, int threads) {
    double all_squares = 0;
#pragma omp parallel num_threads(threads) reduction(+ : all_squares)
    for (int64_t k = 0; k < count; k++) {
        const G *grad = grads[k];
        int64_t n = sizes[k];
#pragma omp for schedule(static) nowait
        for (int64_t start = 0; start < n; start += BLOCK) {
            int64_t end = start + BLOCK < n ? start + BLOCK : n;
            vec squares{};
            for (int64_t i = start; i < end; i += W) {
                vec g = get(grad + i, lanes_of(i, end));
                squares += g * g;
            }
            all_squares += double(sum_of(squares));
        }
    }
    *sum += all_squares;
}

struct Adam {
    float beta1, beta2, eps, shrink, pull, step, root, gain;
};

template <class G>
void adamw_block(float *master, bf16 *compute, const G *grad, float *first, float *second, int64_t n, Adam a) {
    for (int64_t i = 0; i < n; i++) {
        float p = master[i];
        float g = load(grad[i]) * a.gain + a.pull * p;
        float m = first[i] + (g - first[i]) * (1.0f - a.beta1);
        float v = second[i] * a.beta2 + g * g * (1.0f - a.beta2);
        first[i] = m;
        second[i] = v;
        master[i] = p * a.shrink - a.step * m / (std::sqrt(v) * a.root + a.eps);
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

// AdamW (Loshchilov, Hutter 2019), or Adam with decay added to the gradient, on fp32 masters, in one pass with the
// rounding to the compute weights (null: there are none), for `count` parameters. Gradients count `gain` times. A
// block whose gradient and moments are all zero is left alone when there is no decay: that is most of an embedding
// table, and the result is the same. Where it is known of rows of `widths` numbers (awake: zero for those; null: it is
// not known), nobody reads them to find out.
template <class G>
void adamw(float *const *master, bf16 *const *compute, const G *const *grad, float *const *first,
           float *const *second, const uint8_t *const *awake, const int64_t *sizes, const int64_t *widths,
           int64_t count, float beta1, float beta2, float eps, float shrink,
           float pull, float step, float root, float gain, int threads) {
    Adam a{beta1, beta2, eps, shrink, pull, step, root, gain};
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
            adamw_block(master[k] + start, compute[k] ? compute[k] + start : nullptr, g, m, v, n, a);
        }
    }
}

} // namespace

// Each kernel by its name and element type, as an address: the arguments are those of the template.
#define EXPORT(name)                                                                                                  \
    extern "C" {                                                                                                      \
    void *name##_fp32 = reinterpret_cast<void *>(&name<float>);                                                 \
    void *name##_bf16 = reinterpret_cast<void *>(&name<bf16>);                                                  \
    }
EXPORT(dropout)
EXPORT(norm_forward)
EXPORT(norm_backward)
EXPORT(softmax_forward)
EXPORT(softmax_backward)
EXPORT(gelu)
EXPORT(column_sums)
EXPORT(quantise_rows)
EXPORT(dequantise)
EXPORT(split_heads)
EXPORT(join_heads)
EXPORT(square_sum)
EXPORT(adamw)
