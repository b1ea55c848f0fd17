// int8 blocks of gradients, in one pass over memory each way. `cpuft/comm/compression/int8.py` has the same in plain
// torch, with the same results to the bit: ranks with and without kernels may train together.
//
// Kernels for communication use one thread, because they run while the other threads compute the backward pass.

#pragma once

#include "../../vectors.h"
#include <cfloat>

namespace {

constexpr int64_t CODES = 256;  // numbers that share a scale
typedef int8_t codes_of_vec __attribute__((vector_size(W)));

// A zero that the compiler does not know. x ^ zero keeps it from merging a product and a sum into one operation that
// rounds once, which would give other bits than torch.
inline uint32_t hidden_zero() {
    static volatile uint32_t zero = 0;
    return zero;
}

inline vec rounded(vec x, uint32_t zero) { return (vec)((uvec)x ^ zero); }

inline int64_t message_bytes(int64_t length) { return length + length / CODES * 4; }

inline vec get_codes(const int8_t *codes) {
#if defined(__AVX512BW__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
    return __builtin_convertvector(read<codes_of_vec>(codes), vec);
#endif
}

inline void put_codes(int8_t *codes, ivec x) {
#if defined(__AVX512BW__)
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8((__m512i)x));
#else
    codes_of_vec low = __builtin_convertvector(x, codes_of_vec);
    std::memcpy(codes, &low, sizeof low);
#endif
}

// Writes the codes of 256 numbers, puts the error of each number in its place, and returns the scale.
inline float encode_block(float *x, int8_t *codes, uint32_t zero) {
    // As integers, magnitudes have the same order, infinities come after numbers, and NaNs come last.
    ivec most{};
    for (int64_t j = 0; j < CODES; j += W) {
        ivec size = read<ivec>(x + j) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int32_t largest = 0;
    for (int64_t i = 0; i < W; i++) largest = most[i] > largest ? most[i] : largest;
    float scale = as_float(uint32_t(largest)) / 127.0f;
    if (scale < FLT_MIN) scale = FLT_MIN;  // a block of zeros needs a scale that is not zero
    if (!(scale <= FLT_MAX)) {
        std::memset(codes, 0, CODES);
        for (int64_t j = 0; j < CODES; j++) x[j] = as_float(0x7fc00000u);
        return scale;
    }
    for (int64_t j = 0; j < CODES; j += W) {
        vec v = read<vec>(x + j);
        // Adding 1.5 * 2^23 rounds to a whole number, half to even, and leaves its low byte in the lowest bits.
        vec shifted = v / scale + 12582912.0f;
        put_codes(codes + j, (ivec)shifted);
        vec error = v - rounded((shifted - 12582912.0f) * scale, zero);
        std::memcpy(x + j, &error, sizeof error);
    }
    return scale;
}

// Encodes `numbers + unsent` as one message for each rank, for shares of `length` numbers, with zeros after the `count`
// numbers that there are. `unsent` may be null: there is none. The errors go to `error`, which may be `unsent`.
template <class T>
void encode_blocks(const T *numbers, const float *unsent, float *error, int8_t *messages, int64_t count, int64_t ranks,
                   int64_t length, int) {
    uint32_t zero = hidden_zero();
    alignas(64) float x[CODES];
    for (int64_t rank = 0; rank < ranks; rank++) {
        int8_t *message = messages + rank * message_bytes(length);
        for (int64_t start = 0; start < length; start += CODES) {
            int64_t first = rank * length + start, left = count - first;
            int64_t n = left < 0 ? 0 : left < CODES ? left : CODES;
            if (n < CODES) std::memset(x, 0, sizeof x);
            for (int64_t j = 0; j < n; j += W) {
                int64_t m = lanes_of(j, n);
                vec v = get(numbers + first + j, m);
                if (unsent) v += get(unsent + first + j, m);
                put(x + j, v, m);
            }
            float scale = encode_block(x, message + start, zero);
            std::memcpy(message + length + start / CODES * 4, &scale, 4);
            if (n) std::memcpy(error + first, x, size_t(n) * 4);
        }
    }
}

// Encodes the mean of all ranks' messages, and adds the error of the mean times the number of ranks to the first
// `count` numbers of `error`. T is of no account.
template <class T>
void average_blocks(const int8_t *received, int8_t *message, float *error, int64_t count, int64_t ranks, int64_t length,
                    int) {
    uint32_t zero = hidden_zero();
    alignas(64) float x[CODES];
    float size = float(ranks);
    for (int64_t start = 0; start < length; start += CODES) {
        for (int64_t rank = 0; rank < ranks; rank++) {
            const int8_t *codes = received + rank * message_bytes(length);
            float scale;
            std::memcpy(&scale, codes + length + start / CODES * 4, 4);
            for (int64_t j = 0; j < CODES; j += W) {
                vec v = rounded(get_codes(codes + start + j) * scale, zero);
                if (rank) v += read<vec>(x + j);
                std::memcpy(x + j, &v, sizeof v);
            }
        }
        for (int64_t j = 0; j < CODES; j += W) {
            vec v = read<vec>(x + j) / size;
            std::memcpy(x + j, &v, sizeof v);
        }
        float scale = encode_block(x, message + start, zero);
        std::memcpy(message + length + start / CODES * 4, &scale, 4);
        int64_t n = count - start < CODES ? count - start : CODES;
        for (int64_t j = 0; j < n; j += W) {
            int64_t m = lanes_of(j, n);
            put(error + start + j, get(error + start + j, m) + rounded(read<vec>(x + j) * size, zero), m);
        }
    }
}

// Writes the first `count` numbers of the ranks' messages. Rounding to bf16 must not depend on the CPU, because all
// ranks need the same bits: put() rounds the smallest numbers to zero on some.
template <class T>
void decode_blocks(const int8_t *messages, T *numbers, int64_t count, int64_t ranks, int64_t length, int) {
    for (int64_t rank = 0; rank < ranks; rank++) {
        const int8_t *codes = messages + rank * message_bytes(length);
        for (int64_t start = 0; start < length && rank * length + start < count; start += CODES) {
            T *to = numbers + rank * length + start;
            int64_t left = count - rank * length - start, n = left < CODES ? left : CODES, j = 0;
            float scale;
            std::memcpy(&scale, codes + length + start / CODES * 4, 4);
            for (; j + W <= n; j += W) {
                vec v = get_codes(codes + start + j) * scale;
                if constexpr (sizeof(T) == 2) {
                    half y = narrow(v);
                    std::memcpy(to + j, &y, sizeof y);
                } else {
                    std::memcpy(to + j, &v, sizeof v);
                }
            }
            for (; j < n; j++) store(to[j], float(codes[start + j]) * scale);
        }
    }
}

} // namespace
