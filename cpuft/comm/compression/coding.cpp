// Blocks of 8-bit numbers with one scale each, as in coding.py, which describes them and has the same computation in
// plain torch. Results are the same to the bit: ranks with and without kernels may work in one job, and all of them must
// end with the same parameters. So products are rounded before they are added.
//
// These loops are plain ones, because GCC narrows a plain loop to bytes well, but vectors lane by lane.

#pragma GCC optimize("fp-contract=off")
#pragma STDC FP_CONTRACT OFF

#include "../../vectors.h"
#include <cfloat>
#include <omp.h>

namespace {

constexpr int64_t BLOCK = 256, SCALE_BYTES = 4;

// A message: the codes of `length` numbers, and the scales of their blocks.
inline int64_t message_bytes(int64_t length) { return length + length / BLOCK * SCALE_BYTES; }

inline int64_t clip(int64_t n) { return n < 0 ? 0 : n > BLOCK ? BLOCK : n; }

// Encode a block into codes and a scale. `error` gets what the codes lack of the numbers; it may be `numbers`.
// Magnitudes are compared by their bits, so that a NaN is the largest and becomes the scale. Adding 1.5 * 2^23 rounds to
// a whole number and leaves it in the low bits.
inline void encode_block(const float *numbers, int8_t *__restrict codes, int8_t *scale_bytes, float *error) {
    int32_t top = 0;
    for (int64_t i = 0; i < BLOCK; i++) {
        int32_t bits = int32_t(as_bits(numbers[i]) & 0x7fffffffu);
        top = bits > top ? bits : top;
    }
    float scale = as_float(uint32_t(top)) / 127.0f;
    scale = scale < FLT_MIN ? FLT_MIN : scale;  // a block of zeros needs a scale that is not zero
    for (int64_t i = 0; i < BLOCK; i++) {
        float shifted = numbers[i] / scale + 12582912.0f;
        codes[i] = int8_t(as_bits(shifted));
        error[i] = numbers[i] - (shifted - 12582912.0f) * scale;
    }
    std::memcpy(scale_bytes, &scale, SCALE_BYTES);
}

inline float read_scale(const int8_t *message, int64_t length, int64_t start) {
    float scale;
    std::memcpy(&scale, message + length + start / BLOCK * SCALE_BYTES, SCALE_BYTES);
    return scale;
}

// Encode the sums of `count` numbers and what is unsent of earlier ones as messages for `ranks` ranks, each of `length`
// numbers; the last ones are zeros. `unsent` gets what the messages lack.
template <class T>
void encode_blocks(const T *numbers, float *unsent, int8_t *messages, int64_t count, int64_t length, int64_t ranks,
                   int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t start = 0; start < ranks * length; start += BLOCK) {
        alignas(64) float sums[BLOCK];
        int64_t n = clip(count - start), at = start % length;
        int8_t *message = messages + start / length * message_bytes(length);
        for (int64_t i = 0; i < n; i++) sums[i] = load(numbers[start + i]) + unsent[start + i];
        for (int64_t i = n; i < BLOCK; i++) sums[i] = 0.0f;
        encode_block(sums, message + at, message + length + at / BLOCK * SCALE_BYTES, sums);
        std::memcpy(unsent + start, sums, size_t(n) * sizeof(float));
    }
}

// Encode the mean of the messages of `ranks` ranks. Rounding it loses as much of every rank's numbers, so `ranks` times
// the loss is added to `unsent`, which has `count` numbers.
void average_blocks(const int8_t *messages, float *unsent, int8_t *mean, int64_t count, int64_t length, int64_t ranks,
                    int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t start = 0; start < length; start += BLOCK) {
        alignas(64) float sums[BLOCK] = {};
        for (int64_t rank = 0; rank < ranks; rank++) {
            const int8_t *message = messages + rank * message_bytes(length), *codes = message + start;
            float scale = read_scale(message, length, start);
            for (int64_t i = 0; i < BLOCK; i++) sums[i] += float(codes[i]) * scale;
        }
        for (int64_t i = 0; i < BLOCK; i++) sums[i] /= float(ranks);
        encode_block(sums, mean + start, mean + length + start / BLOCK * SCALE_BYTES, sums);
        int64_t n = clip(count - start);
        for (int64_t i = 0; i < n; i++) unsent[start + i] += sums[i] * float(ranks);
    }
}

// Decode `count` numbers of messages of `length` numbers each.
template <class T>
void decode_blocks(const int8_t *messages, T *numbers, int64_t count, int64_t length, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t n = clip(count - start), at = start % length;
        const int8_t *message = messages + start / length * message_bytes(length), *__restrict codes = message + at;
        T *__restrict to = numbers + start;
        float scale = read_scale(message, length, at);
        for (int64_t i = 0; i < n; i++) store(to[i], float(codes[i]) * scale);
    }
}

} // namespace

extern "C" {
void *encode_blocks_fp32 = reinterpret_cast<void *>(&encode_blocks<float>);
void *encode_blocks_bf16 = reinterpret_cast<void *>(&encode_blocks<bf16>);
void *average_blocks_fp32 = reinterpret_cast<void *>(&average_blocks);
void *decode_blocks_fp32 = reinterpret_cast<void *>(&decode_blocks<float>);
void *decode_blocks_bf16 = reinterpret_cast<void *>(&decode_blocks<bf16>);
}
