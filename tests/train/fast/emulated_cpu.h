// The instructions of AVX-512 and AMX that the kernels use, in plain C++: g++ -march=haswell -include this file. So their
// code for these CPUs runs on any CPU with AVX2, slowly, with what it computes and in which order.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512BW__ 1
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1
#define syscall(...) 0L  // Linux lets the process use tiles

namespace emulated {

template <class To, class From> To as(const From &x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
// N numbers of type T.
template <class T, int N> struct Many {
    T of[N];
};
// Sets the number i of a vector of N numbers of type T to make(i).
template <class V, class T, int N = sizeof(V) / sizeof(T), class Make> V each(Make make) {
    Many<T, N> y;
    for (int i = 0; i < N; i++) y.of[i] = make(i);
    return as<V>(y);
}
template <class T, class V> T number(const V &x, int i) {
    T y;
    std::memcpy(&y, reinterpret_cast<const char *>(&x) + size_t(i) * sizeof(T), sizeof y);
    return y;
}
template <class T> T from_memory(const void *p, int i) {
    T y;
    std::memcpy(&y, static_cast<const char *>(p) + size_t(i) * sizeof(T), sizeof y);
    return y;
}
template <class T, class V, class Mask> void store_masked(void *p, Mask mask, const V &x) {
    for (int i = 0; i < int(sizeof(V) / sizeof(T)); i++) {
        T y = number<T>(x, i);
        if (mask >> i & 1) std::memcpy(static_cast<char *>(p) + size_t(i) * sizeof(T), &y, sizeof y);
    }
}
template <class V, class T, class Mask> V load_masked(Mask mask, const void *p) {
    return each<V, T>([&](int i) { return mask >> i & 1 ? from_memory<T>(p, i) : T(0); });
}
inline float wide(uint16_t x) { return as<float>(uint32_t(x) << 16); }
inline uint16_t rounded_to_bf16(float x) {
    uint32_t bits = as<uint32_t>(x);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    if ((bits & 0x7f800000) == 0) return uint16_t(bits >> 31 << 15);  // numbers below 1e-38 become zero
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class V, class T> V permute(const V &a, const __m512i &order, const V &b) {
    const int n = sizeof(V) / sizeof(T);
    return each<V, T>([&](int i) {
        int from = sizeof(T) == 8 ? int(number<int64_t>(order, i)) : number<int32_t>(order, i);
        return from & n ? number<T>(b, from & (n - 1)) : number<T>(a, from & (n - 1));
    });
}
// Interleaves the lower (or upper) four words of each 128 bits.
inline __m512i unpack(const __m512i &a, const __m512i &b, int half) {
    return each<__m512i, uint16_t>([&](int i) {
        int from = i / 8 * 8 + half * 4 + i % 8 / 2;
        return number<uint16_t>(i % 2 ? b : a, from);
    });
}
// Folds the halves of a vector, as GCC does for _mm512_reduce_*.
template <class Fold> float reduce(__m512 x, Fold fold) {
    auto y = as<Many<float, 16>>(x);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) y.of[i] = fold(y.of[i], y.of[i + n]);
    return y.of[0];
}
inline __m512 fused(const __m512 &x, const __m512 &y, const __m512 &sum) {
    return each<__m512, float>(
        [&](int i) { return std::fma(number<float>(x, i), number<float>(y, i), number<float>(sum, i)); });
}
inline __m512 dot_bf16(__m512 sums, const __m512i &a, const __m512i &b) {
    return each<__m512, float>([&](int i) {
        float sum = number<float>(sums, i);
        sum += wide(number<uint16_t>(a, 2 * i + 1)) * wide(number<uint16_t>(b, 2 * i + 1));
        return sum + wide(number<uint16_t>(a, 2 * i)) * wide(number<uint16_t>(b, 2 * i));
    });
}

inline __mmask16 is_less(const __m512 &a, const __m512 &b) {
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= uint32_t(number<float>(a, i) < number<float>(b, i)) << i;
    return __mmask16(mask);
}
inline __mmask16 is_not_less(const __m256i &a, const __m256i &b) {
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= uint32_t(number<uint16_t>(a, i) >= number<uint16_t>(b, i)) << i;
    return __mmask16(mask);
}
template <class T, class V, class Test> uint32_t mask_of(const V &a, const V &b, Test test) {
    uint32_t mask = 0;
    for (int i = 0; i < int(sizeof(V) / sizeof(T)); i++) mask |= uint32_t(test(number<T>(a, i), number<T>(b, i))) << i;
    return mask;
}

// Eight tiles of 16 rows with 64 bytes.
inline thread_local uint32_t tiles[8][16][16];
inline void load_tile(int tile, const void *p, int64_t stride) {
    for (int i = 0; i < 16; i++) std::memcpy(tiles[tile][i], static_cast<const char *>(p) + i * stride, 64);
}
inline void store_tile(int tile, void *p, int64_t stride) {
    for (int i = 0; i < 16; i++) std::memcpy(static_cast<char *>(p) + i * stride, tiles[tile][i], 64);
}
inline void multiply_tiles(int sums, int a, int b) {
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 16; j++) {
                uint32_t x = tiles[a][i][k], y = tiles[b][k][j];
                float sum = as<float>(tiles[sums][i][j]);
                sum += wide(uint16_t(x)) * wide(uint16_t(y));
                tiles[sums][i][j] = as<uint32_t>(sum + wide(uint16_t(x >> 16)) * wide(uint16_t(y >> 16)));
            }
}

inline __m512i set64(int64_t h, int64_t g, int64_t f, int64_t e, int64_t d, int64_t c, int64_t b, int64_t a) {
    return as<__m512i>(Many<int64_t, 8>{{a, b, c, d, e, f, g, h}});
}
template <class... Words> __m512i set32(Words... words) {
    Many<int32_t, 16> y{{words...}};
    return each<__m512i, int32_t>([&](int i) { return y.of[15 - i]; });
}

} // namespace emulated

#define _tile_loadd(tile, p, stride) emulated::load_tile(tile, p, stride)
#define _tile_stream_loadd(tile, p, stride) emulated::load_tile(tile, p, stride)
#define _tile_stored(tile, p, stride) emulated::store_tile(tile, p, stride)
#define _tile_zero(tile) std::memset(emulated::tiles[tile], 0, sizeof emulated::tiles[tile])
#define _tile_dpbf16ps(sums, a, b) emulated::multiply_tiles(sums, a, b)
#define _tile_loadconfig(p) static_cast<void>(p)
#define _tile_storeconfig(p) static_cast<void>(p)

#define _mm512_maskz_loadu_epi16(mask, p) emulated::load_masked<__m512i, uint16_t>(mask, p)
#define _mm256_maskz_loadu_epi16(mask, p) emulated::load_masked<__m256i, uint16_t>(mask, p)
#define _mm512_maskz_loadu_ps(mask, p) emulated::load_masked<__m512, float>(mask, p)
#define _mm512_mask_storeu_ps(p, mask, x) emulated::store_masked<float>(p, mask, x)
#define _mm512_mask_storeu_epi16(p, mask, x) emulated::store_masked<uint16_t>(p, mask, x)
#define _mm256_mask_storeu_epi16(p, mask, x) emulated::store_masked<uint16_t>(p, mask, x)
#define _mm512_storeu_ps(p, x) emulated::store_masked<float>(p, 0xffffu, x)
#define _mm512_store_si512(p, x) emulated::store_masked<float>(p, 0xffffu, x)
#define _mm512_storeu_si512(p, x) emulated::store_masked<float>(p, 0xffffu, x)
#define _mm512_stream_si512(p, x) emulated::store_masked<float>(p, 0xffffu, x)
#define _mm512_loadu_si512(p) emulated::load_masked<__m512i, float>(0xffffu, p)
#define _mm512_setzero_si512() __m512i{}
#define _mm512_set1_epi16(x) emulated::each<__m512i, int16_t>([&](int) { return x; })
#define _mm512_set1_epi32(x) emulated::each<__m512i, int32_t>([&](int) { return x; })
#define _mm512_set_epi64 emulated::set64
#define _mm512_set_epi32 emulated::set32
#define _mm512_permutex2var_epi64(a, order, b) emulated::permute<__m512i, int64_t>(a, order, b)
#define _mm512_permutex2var_epi32(a, order, b) emulated::permute<__m512i, int32_t>(a, order, b)
#define _mm512_permutex2var_ps(a, order, b) emulated::permute<__m512, float>(a, order, b)
#define _mm512_unpacklo_epi16(a, b) emulated::unpack(a, b, 0)
#define _mm512_unpackhi_epi16(a, b) emulated::unpack(a, b, 1)
#define _mm512_castsi512_ps(x) emulated::as<__m512>(x)
#define _mm512_slli_epi32(x, bits) \
    emulated::each<__m512i, uint32_t>([&, y = x](int i) { return emulated::number<uint32_t>(y, i) << bits; })
#define _mm512_cvtepu16_epi32(x) \
    emulated::each<__m512i, uint32_t>([&, y = x](int i) { return uint32_t(emulated::number<uint16_t>(y, i)); })
#define _mm512_cvtepi8_epi32(x) \
    emulated::each<__m512i, int32_t>([&, y = x](int i) { return int32_t(emulated::number<int8_t>(y, i)); })
#define _mm512_cvtepi32_ps(x) \
    emulated::each<__m512, float>([&, y = x](int i) { return float(emulated::number<int32_t>(y, i)); })
#define _mm512_cvtepi32_epi8(x) \
    emulated::each<__m128i, int8_t>([&, y = x](int i) { return int8_t(emulated::number<int32_t>(y, i)); })
#define _mm512_cvtneps_pbh(x) \
    emulated::each<__m256i, uint16_t>([&, y = x](int i) { return emulated::rounded_to_bf16(emulated::number<float>(y, i)); })
#define _mm512_cvtne2ps_pbh(high, low) \
    emulated::each<__m512i, uint16_t>([&, h = high, l = low](int i) { \
        return emulated::rounded_to_bf16(emulated::number<float>(i < 16 ? l : h, i % 16)); \
    })
#define _mm512_fmadd_ps(x, y, sum) emulated::fused(x, y, sum)
#define _mm512_dpbf16_ps(sums, a, b) emulated::dot_bf16(sums, emulated::as<__m512i>(a), emulated::as<__m512i>(b))
#define _mm512_maskz_mov_ps(mask, x) \
    emulated::each<__m512, float>([&, m = mask, y = x](int i) { return m >> i & 1 ? emulated::number<float>(y, i) : 0.0f; })
#define _mm512_maskz_mov_epi16(mask, x) \
    emulated::each<__m512i, uint16_t>( \
        [&, m = mask, y = x](int i) { return m >> i & 1 ? emulated::number<uint16_t>(y, i) : uint16_t(0); })
#define _mm512_mask_mov_ps(other, mask, x) \
    emulated::each<__m512, float>([&, o = other, m = mask, y = x](int i) { \
        return emulated::number<float>(m >> i & 1 ? y : o, i); \
    })
#define _mm512_min_ps(a, b) \
    emulated::each<__m512, float>([&, x = a, y = b](int i) { \
        float l = emulated::number<float>(x, i), r = emulated::number<float>(y, i); \
        return l < r ? l : r; \
    })
#define _mm512_max_ps(a, b) \
    emulated::each<__m512, float>([&, x = a, y = b](int i) { \
        float l = emulated::number<float>(x, i), r = emulated::number<float>(y, i); \
        return l > r ? l : r; \
    })
#define _mm512_cmp_ps_mask(a, b, comparison) emulated::is_less(a, b)
#define _mm256_cmpge_epu16_mask(a, b) emulated::is_not_less(a, b)
#define _mm512_cmpge_epu16_mask(a, b) emulated::mask_of<uint16_t>(a, b, [](uint16_t x, uint16_t y) { return x >= y; })
#define _mm512_test_epi32_mask(a, b) \
    __mmask16(emulated::mask_of<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return (x & y) != 0; }))
// x without its whole part, and y times two to the power of that.
#define _mm512_reduce_ps(x, rounding) \
    emulated::each<__m512, float>([&, y = x](int i) { \
        return emulated::number<float>(y, i) - std::floor(emulated::number<float>(y, i)); \
    })
#define _mm512_scalef_ps(y, x) \
    emulated::each<__m512, float>([&, a = y, b = x](int i) { \
        float power = std::floor(emulated::number<float>(b, i)); \
        return std::ldexp(emulated::number<float>(a, i), int(std::fmax(-1000.0f, std::fmin(1000.0f, power)))); \
    })
#define _mm512_rcp14_ps(x) \
    emulated::each<__m512, float>([&, y = x](int i) { return 1.0f / emulated::number<float>(y, i); })
#define _mm512_reduce_add_ps(x) emulated::reduce(x, [](float a, float b) { return a + b; })
#define _mm512_reduce_max_ps(x) emulated::reduce(x, [](float a, float b) { return a > b ? a : b; })
