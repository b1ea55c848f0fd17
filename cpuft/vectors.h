// Vectors of floats with the processor's width, loads and stores of them, exp, and the random bits of dropout.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#include <memory>
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

// A vector of floats with the processor's width. On the vector types of GCC and Clang, operators and ?: work lane by
// lane on any hardware, and become single instructions where the hardware has that width. The compiler splits wider
// vectors, and comparisons of these number by number.
#if defined(__AVX512BW__)
constexpr int64_t W = 16;
#elif defined(__aarch64__)  // GCC keeps vectors that are wider than NEON's in memory
constexpr int64_t W = 4;
#else
constexpr int64_t W = 8;
#endif
typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t half __attribute__((vector_size(2 * W)));

// 0 + x would be an addition, because it makes 0 of -0; x - 0 is x.
inline vec all(float x) { return x - vec{}; }

// Reads a V from p, which need not be aligned.
template <class V> inline V read(const void *p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

const int32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
const ivec LANE = read<ivec>(NUMBERS);

inline vec widen(half x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

// Rounds as store() does.
inline half narrow(vec x) {
    uvec bits = (uvec)x, up = bits + 0x7fffu + ((bits >> 16) & 1u);
    up = x != x ? bits | 0x400000u : up;
    return __builtin_convertvector(up >> 16, half);
}

#ifdef __AVX512BW__
inline __mmask16 first_of(int64_t n) { return __mmask16((1u << n) - 1u); }
inline vec get(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(first_of(n), p); }
inline vec get(const bf16 *p, int64_t n) {  // GCC compiles this to faster code than widen()
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_of(n), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// A full vector is stored without a mask: AMD's Zen 4 cannot read what a masked store wrote until it is in the cache.
inline void put(float *p, vec x, int64_t n) {
    if (n == W)
        _mm512_storeu_ps(p, x);
    else
        _mm512_mask_storeu_ps(p, first_of(n), x);
}
inline void put(bf16 *p, vec x, int64_t n) {
#ifdef __AVX512BF16__
    // Unlike torch's rounding, this instruction rounds numbers below 1e-38 to zero.
    __m256i y = (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m256i y = (__m256i)narrow(x);
#endif
    if (n == W)
        _mm256_storeu_si256((__m256i *)p, y);
    else
        _mm256_mask_storeu_epi16(p, first_of(n), y);
}
inline vec keep(vec x, const uint16_t *bits, uint32_t threshold) {
    __m256i limit = _mm256_set1_epi16(int16_t(threshold));
    return _mm512_maskz_mov_ps(_mm256_cmpge_epu16_mask(read<__m256i>(bits), limit), x);
}
// Interleave the numbers of two vectors: those of their first halves, and those of their second halves.
inline ivec zip_first(ivec x, ivec y) {
    const __m512i order = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (ivec)_mm512_permutex2var_epi32((__m512i)x, order, (__m512i)y);
}
inline ivec zip_second(ivec x, ivec y) {
    const __m512i order = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    return (ivec)_mm512_permutex2var_epi32((__m512i)x, order, (__m512i)y);
}
// 1 / x, accurate to one unit in the last place, in a sixth of a division's time: a 14-bit estimate and one Newton
// step.
inline vec inverse(vec x) {
    vec r = _mm512_rcp14_ps(x);
    return r * (2.0f - x * r);
}
inline vec fused(vec x, vec y, vec sum) { return _mm512_fmadd_ps(x, y, sum); }
inline float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
inline float most_of(vec x) { return _mm512_reduce_max_ps(x); }
#else
inline vec inverse(vec x) { return 1.0f / x; }
// x * y + sum, rounded once. Which products and sums a compiler joins by itself depends on the CPU for which it tunes,
// so sums that need the same bits on all ranks are made of these.
inline vec fused(vec x, vec y, vec sum) {
#if defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(x, y, sum);
#elif defined(__aarch64__)
    return vfmaq_f32(sum, x, y);
#else
    for (int64_t i = 0; i < W; i++) sum[i] = std::fma(x[i], y[i], sum[i]);
    return sum;
#endif
}
// Loads and stores of the last numbers of a row. AVX2 can mask 32-bit numbers only; others are copied to a vector.
template <class V, class T> inline V read_part(const T *p, int64_t n) {
    V x{};
    std::memcpy(&x, p, size_t(n) * sizeof(T));
    return x;
}
#ifdef __AVX2__
inline ivec zip_first(ivec x, ivec y) {
    __m256i low = _mm256_unpacklo_epi32((__m256i)x, (__m256i)y), high = _mm256_unpackhi_epi32((__m256i)x, (__m256i)y);
    return (ivec)_mm256_permute2x128_si256(low, high, 0x20);
}
inline ivec zip_second(ivec x, ivec y) {
    __m256i low = _mm256_unpacklo_epi32((__m256i)x, (__m256i)y), high = _mm256_unpackhi_epi32((__m256i)x, (__m256i)y);
    return (ivec)_mm256_permute2x128_si256(low, high, 0x31);
}
inline vec get_part(const float *p, int64_t n) { return _mm256_maskload_ps(p, (__m256i)(LANE < int32_t(n))); }
inline void put_part(float *p, vec x, int64_t n) { _mm256_maskstore_ps(p, (__m256i)(LANE < int32_t(n)), x); }
#else
#ifdef __aarch64__
inline ivec zip_first(ivec x, ivec y) { return vzip1q_s32(x, y); }
inline ivec zip_second(ivec x, ivec y) { return vzip2q_s32(x, y); }
#else
inline ivec zip_first(ivec x, ivec y) {
    return ivec{x[0], y[0], x[1], y[1], x[2], y[2], x[3], y[3]};
}
inline ivec zip_second(ivec x, ivec y) {
    return ivec{x[4], y[4], x[5], y[5], x[6], y[6], x[7], y[7]};
}
#endif
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

// exp as in expf of the Cephes library: 2^n times a polynomial of degree 5, relative error 2e-7. Adding 1.5 * 2^23
// rounds to a whole number and leaves it in the low bits.
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
// generators"). As a function of the index, it needs no state that threads share, and backward computes the same mask
// again instead of reading it from memory.
inline uint64_t random_word(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// 16 random bits for each element, four elements in a word. It fills whole vectors, up to 16 elements too many.
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

// Sums of columns to which several threads add. Each thread has a line of its own, and `add_to` adds the lines in the
// order of the threads. So sums have the same bits in every run with as many threads, whichever thread ends first.
class ThreadSums {
    size_t length;
    std::unique_ptr<float[]> lines;
    std::vector<char> is_used;  // by thread: OpenMP may give fewer threads than were asked for

  public:
    ThreadSums(int threads, int64_t columns)
        // Lines are a cache line apart, so that no two threads write to the same one.
        : length((size_t(columns) + 31) / 16 * 16), lines(new float[length * size_t(threads)]),
          is_used(size_t(threads)) {}

    // The line of a thread, which calls this once: zeros. So the thread that adds to the memory is the first to use it.
    float *of(int thread) {
        is_used[size_t(thread)] = 1;
        float *line = lines.get() + size_t(thread) * length;
        std::memset(line, 0, length * sizeof(float));
        return line;
    }

    // Add the sums of `count` columns from `first` on to `sums`, which may be null: there is nothing to do then.
    void add_to(float *sums, size_t first, size_t count) const {
        for (size_t thread = 0; sums && thread < is_used.size(); thread++) {
            const float *line = lines.get() + thread * length + first;
            for (size_t j = 0; j < (is_used[thread] ? count : 0); j++) sums[j] += line[j];
        }
    }
};

} // namespace
