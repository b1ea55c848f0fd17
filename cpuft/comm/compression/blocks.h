// Gradients as blocks of 256 numbers with codes of 8 or 4 bits, in one pass over memory each way.
// `cpuft/comm/compression/int8.py` has the same in plain torch, with the same results to the bit.
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

inline int64_t code_bytes(int64_t numbers, int64_t bits) { return numbers * bits / 8; }
inline int64_t message_bytes(int64_t length, int64_t bits) { return code_bytes(length, bits) + length / CODES * 4; }

// A byte of 4-bit codes holds code j of a block in its low half, and code j + 128 in its high half.
inline void pack_codes(const int8_t *wide, int8_t *packed) {
    for (int64_t j = 0; j < CODES / 2; j++)
        packed[j] = int8_t((uint8_t(wide[j]) & 15) | uint8_t(uint8_t(wide[j + CODES / 2]) << 4));
}

// Returns the codes of a block as one byte each: where they are, or in `room`.
inline const int8_t *unpack_codes(const int8_t *codes, int8_t *room, int64_t bits) {
    if (bits == 8) return codes;
    for (int64_t j = 0; j < CODES / 2; j++) {
        uint8_t both = uint8_t(codes[j]);
        room[j] = int8_t(uint8_t((both & 15) ^ 8) - 8);
        room[j + CODES / 2] = int8_t(uint8_t((both >> 4) ^ 8) - 8);
    }
    return room;
}

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
#elif defined(__AVX2__)  // GCC converts vectors number by number
    const __m256i low = _mm256_set1_epi32(0x0c080400), fours = _mm256_shuffle_epi8((__m256i)x, low);
    const int32_t first = _mm256_extract_epi32(fours, 0), second = _mm256_extract_epi32(fours, 4);
    std::memcpy(codes, &first, 4);
    std::memcpy(codes + 4, &second, 4);
#else
    codes_of_vec low = __builtin_convertvector(x, codes_of_vec);
    std::memcpy(codes, &low, sizeof low);
#endif
}

// Writes the codes of 256 numbers, puts the error of each number in its place, and returns the scale.
inline float encode_block(float *x, int8_t *to, int64_t bits, uint32_t zero) {
    alignas(64) int8_t room[CODES];
    int8_t *codes = bits == 8 ? to : room;
    // As integers, magnitudes have the same order, infinities come after numbers, and NaNs come last.
    ivec most{};
    for (int64_t j = 0; j < CODES; j += W) {
        ivec size = read<ivec>(x + j) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int32_t largest = 0;
    for (int64_t i = 0; i < W; i++) largest = most[i] > largest ? most[i] : largest;
    float scale = as_float(uint32_t(largest)) / (bits == 8 ? 127.0f : 7.0f);
    if (scale < FLT_MIN) scale = FLT_MIN;  // a block of zeros needs a scale that is not zero
    if (!(scale <= FLT_MAX)) {
        std::memset(to, 0, size_t(code_bytes(CODES, bits)));
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
    if (bits != 8) pack_codes(codes, to);
    return scale;
}

// Encodes `numbers + unsent` as one message for each rank, for shares of `length` numbers, with zeros after the `count`
// numbers that there are. `unsent` may be null: there is none. The errors go to `error`, which may be `unsent`.
template <class T>
void encode_blocks(const T *numbers, const float *unsent, float *error, int8_t *messages, int64_t count, int64_t ranks,
                   int64_t length, int64_t bits, int) {
    uint32_t zero = hidden_zero();
    alignas(64) float x[CODES];
    for (int64_t rank = 0; rank < ranks; rank++) {
        int8_t *message = messages + rank * message_bytes(length, bits);
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
            float scale = encode_block(x, message + code_bytes(start, bits), bits, zero);
            std::memcpy(message + code_bytes(length, bits) + start / CODES * 4, &scale, 4);
            if (n) std::memcpy(error + first, x, size_t(n) * 4);
        }
    }
}

// Encodes the mean of all ranks' messages, and adds the error of the mean times the number of ranks to the first
// `count` numbers of `error`. T is of no account.
template <class T>
void average_blocks(const int8_t *received, int8_t *message, float *error, int64_t count, int64_t ranks, int64_t length,
                    int64_t bits, int) {
    uint32_t zero = hidden_zero();
    alignas(64) float x[CODES];
    alignas(64) int8_t room[CODES];
    float size = float(ranks);
    for (int64_t start = 0; start < length; start += CODES) {
        for (int64_t rank = 0; rank < ranks; rank++) {
            const int8_t *from = received + rank * message_bytes(length, bits);
            float scale;
            std::memcpy(&scale, from + code_bytes(length, bits) + start / CODES * 4, 4);
            const int8_t *codes = unpack_codes(from + code_bytes(start, bits), room, bits);
            for (int64_t j = 0; j < CODES; j += W) {
                vec v = rounded(get_codes(codes + j) * scale, zero);
                if (rank) v += read<vec>(x + j);
                std::memcpy(x + j, &v, sizeof v);
            }
        }
        for (int64_t j = 0; j < CODES; j += W) {
            vec v = read<vec>(x + j) / size;
            std::memcpy(x + j, &v, sizeof v);
        }
        float scale = encode_block(x, message + code_bytes(start, bits), bits, zero);
        std::memcpy(message + code_bytes(length, bits) + start / CODES * 4, &scale, 4);
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
void decode_blocks(const int8_t *messages, T *numbers, int64_t count, int64_t ranks, int64_t length, int64_t bits,
                   int) {
    alignas(64) int8_t room[CODES];
    for (int64_t rank = 0; rank < ranks; rank++) {
        const int8_t *from = messages + rank * message_bytes(length, bits);
        for (int64_t start = 0; start < length && rank * length + start < count; start += CODES) {
            T *to = numbers + rank * length + start;
            int64_t left = count - rank * length - start, n = left < CODES ? left : CODES, j = 0;
            float scale;
            std::memcpy(&scale, from + code_bytes(length, bits) + start / CODES * 4, 4);
            const int8_t *codes = unpack_codes(from + code_bytes(start, bits), room, bits);
            for (; j + W <= n; j += W) {
                vec v = get_codes(codes + j) * scale;
                if constexpr (sizeof(T) == 2) {
                    half y = narrow(v);
                    std::memcpy(to + j, &y, sizeof y);
                } else {
                    std::memcpy(to + j, &v, sizeof v);
                }
            }
            for (; j < n; j++) store(to[j], float(codes[j]) * scale);
        }
    }
}

} // namespace
