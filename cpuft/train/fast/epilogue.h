// What happens to the sums of a matrix product before they are written: bias, activation, sums of columns, rounding to
// bf16. The blocks of sums come from large_products.h.

#pragma once

#include "activations.h"
#include <algorithm>

namespace {

#ifdef __AVX512BF16__

constexpr int64_t BLOCK_ROWS = 32, BLOCK_COLS = 32, BLOCK_SUMS = BLOCK_ROWS * BLOCK_COLS;

// 32 numbers of a row.
struct Pair {
    vec low, high;
};
inline Pair get_pair(const bf16 *p, __mmask32 mask) {
    auto widened = [](__m256i x) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); };
    return {widened(_mm256_maskz_loadu_epi16(__mmask16(mask), p)),
            widened(_mm256_maskz_loadu_epi16(__mmask16(mask >> 16), p + W))};
}
// If `past_caches`, all 32 numbers are written, which are a whole cache line.
inline void put_pair(bf16 *p, Pair x, __mmask32 mask, bool past_caches) {
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)x.high, (__m512)x.low);
    if (past_caches)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(p), rounded);
    else
        _mm512_mask_storeu_epi16(p, mask, rounded);
}

template <class T> T *moved(T *p, int64_t count) { return p ? p + count : p; }

// What happens to a product before it is rounded and written, in the order of these pointers, and how it is written. A
// null pointer stands for nothing.
struct Epilogue {
    const bf16 *bias;    // (cols,): it is added
    const bf16 *factor;  // (rows, cols): the product is multiplied by it
    const bf16 *addend;  // (rows, cols): it is added
    float *column_sums;  // (cols,): the sums of the columns are added to it
    bf16 *slope;         // (rows, cols): C becomes the GELU of the product, and this the GELU's slope
    bool has_gelu;       // the same without a slope
    bool past_caches;    // C and the slope do not stay in the caches, see `writes_past_caches`

    bool is_any() const { return bias || factor || addend || column_sums || slope || has_gelu; }
    // For the part of C that begins `number` numbers after its first one, in column `col`.
    Epilogue from(int64_t number, int64_t col) const {
        return {moved(bias, col),        moved(factor, number), moved(addend, number),
                moved(column_sums, col), moved(slope, number),  has_gelu,
                past_caches};
    }
    Pair apply(Pair x, int64_t number, __mmask32 mask) const {
        if (bias) {
            Pair b = get_pair(bias, mask);
            x = {x.low + b.low, x.high + b.high};
        }
        if (factor) {
            Pair f = get_pair(factor + number, mask);
            x = {x.low * f.low, x.high * f.high};
        }
        if (addend) {
            Pair a = get_pair(addend + number, mask);
            x = {x.low + a.low, x.high + a.high};
        }
        if (column_sums) {
            put(column_sums, read<vec>(column_sums) + x.low, W);
            put(column_sums + W, read<vec>(column_sums + W) + x.high, W);
        }
        if (!has_gelu) return x;
        Activation low = gelu<bf16>(x.low), high = gelu<bf16>(x.high);
        if (slope) put_pair(slope + number, {low.slope, high.slope}, mask, past_caches);
        return {low.value, high.value};
    }
};

// A block of sums that still has to be rounded and written to C.
struct Rounding {
    const float *sums = nullptr;
    bf16 *to = nullptr;
    Epilogue epilogue{};
    int64_t stride = 0, rows = 0, cols = 0, next = 0;

    Rounding() {}
    // For the block from `row` and `col` on of C, (rows, cols).
    Rounding(const float *sums, bf16 *c, const Epilogue &whole, int64_t row, int64_t col, int64_t rows, int64_t cols)
        : sums(sums), to(c + row * cols + col), epilogue(whole.from(row * cols + col, col)), stride(cols),
          rows(std::min(BLOCK_ROWS, rows - row)), cols(std::min(BLOCK_COLS, cols - col)) {}
    bool is_left() const { return next < rows; }
    // Asks for the memory of a row while its sums are still being made: without it, each row of 64 bytes is waited for.
    // GCC leaves out calls of a function that only prefetches, so it must not be a call.
    [[gnu::always_inline]] void prefetch(int64_t row) const {
        if (row >= rows) return;
        if (!epilogue.past_caches) {
            __builtin_prefetch(to + row * stride, 1);
            if (epilogue.slope) __builtin_prefetch(epilogue.slope + row * stride, 1);
        }
        if (epilogue.factor) __builtin_prefetch(epilogue.factor + row * stride);
        if (epilogue.addend) __builtin_prefetch(epilogue.addend + row * stride);
    }
    void write_row() {
        const float *from = sums + next * BLOCK_COLS;
        __mmask32 mask = cols >= 32 ? ~__mmask32(0) : (__mmask32(1) << cols) - 1;
        Pair result = epilogue.apply({read<vec>(from), read<vec>(from + W)}, next * stride, mask);
        put_pair(to + next * stride, result, mask, epilogue.past_caches);
        next++;
    }
    void finish() {
        while (is_left()) write_row();
    }
};

// Whether the rows of C and of the slope consist of whole cache lines. Then outputs and weights' gradients are written
// past the caches, which saves reading the lines first: much of what a layer writes in forward is read again only in
// backward. Inputs' gradients are read at once: when they were written so, too, backward of MiniLM was 4 % slower.
inline bool writes_past_caches(const bf16 *c, const bf16 *slope, int64_t cols) {
    auto starts_line = [](const bf16 *p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; };
    return cols % BLOCK_COLS == 0 && starts_line(c) && starts_line(slope);
}

#endif

} // namespace
