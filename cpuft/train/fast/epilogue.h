// What happens to the sums of a matrix product before they are written: bias, activation, sums of columns, rounding to
// bf16. The blocks of sums come from large_products.h.

#pragma once

#include "activations.h"
#include <algorithm>

namespace {

// CPUs with instructions that multiply bf16: of others, torch's library makes the products.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_LARGE_PRODUCTS

constexpr int64_t BLOCK_ROWS = 32, BLOCK_COLS = 32, BLOCK_SUMS = BLOCK_ROWS * BLOCK_COLS;

// 32 numbers of a row.
constexpr int64_t PARTS = BLOCK_COLS / W;
struct Line {
    vec parts[PARTS];
};
// Calls f(0) to f(PARTS - 1).
template <class Function> [[gnu::always_inline]] inline void for_parts(const Function &f) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < PARTS; i++) f(i);
}
#ifdef __AVX512BF16__
inline __mmask32 first_of_line(int64_t n) { return n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1; }
// The first n numbers at p, and zeros.
inline Line get_line(const bf16 *p, int64_t n) {
    __mmask32 mask = first_of_line(n);
    auto widened = [](__m256i x) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); };
    return {widened(_mm256_maskz_loadu_epi16(__mmask16(mask), p)),
            widened(_mm256_maskz_loadu_epi16(__mmask16(mask >> 16), p + W))};
}
// If `past_caches`, all 32 numbers are written, which are a whole cache line.
inline void put_line(bf16 *p, const Line &x, int64_t n, bool past_caches) {
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)x.parts[1], (__m512)x.parts[0]);
    if (past_caches)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(p), rounded);
    else
        _mm512_mask_storeu_epi16(p, first_of_line(n), rounded);
}
#else
inline Line get_line(const bf16 *p, int64_t n) {
    Line x{};
    for (int64_t i = 0; i * W < n; i++) x.parts[i] = get(p + i * W, n - i * W);
    return x;
}
inline void put_line(bf16 *p, const Line &x, int64_t n, bool) {
    for (int64_t i = 0; i * W < n; i++) put(p + i * W, x.parts[i], n - i * W);
}
#endif

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
    // `number` is that of the line's first number, `count` how many of its 32 numbers C has.
    [[gnu::always_inline]] void apply(Line &x, int64_t number, int64_t count) const {
        if (bias) {
            Line b = get_line(bias, count);
            for_parts([&](int64_t i) { x.parts[i] += b.parts[i]; });
        }
        if (factor) {
            Line f = get_line(factor + number, count);
            for_parts([&](int64_t i) { x.parts[i] *= f.parts[i]; });
        }
        if (addend) {
            Line a = get_line(addend + number, count);
            for_parts([&](int64_t i) { x.parts[i] += a.parts[i]; });
        }
        if (column_sums)
            for_parts([&](int64_t i) {
                put(column_sums + i * W, read<vec>(column_sums + i * W) + x.parts[i], W);
            });
        if (!has_gelu) return;
        Line slopes;
        for_parts([&](int64_t i) {
            Activation found = gelu<bf16>(x.parts[i]);
            x.parts[i] = found.value, slopes.parts[i] = found.slope;
        });
        if (slope) put_line(slope + number, slopes, count, past_caches);
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
        Line x;
        for_parts([&](int64_t i) { x.parts[i] = read<vec>(from + i * W); });
        epilogue.apply(x, next * stride, cols);
        put_line(to + next * stride, x, cols, epilogue.past_caches);
        next++;
    }
    void finish() {
        while (is_left()) write_row();
    }
};

// Whether the rows of C and of the slope consist of whole cache lines. Then outputs and weights' gradients are written
// past the caches, which saves reading the lines first: much of what a layer writes in forward is read again only in
// backward. Inputs' gradients are read at once: when they were written so, too, backward of MiniLM was 4 % slower.
#ifdef __AVX512BF16__
inline bool writes_past_caches(const bf16 *c, const bf16 *slope, int64_t cols) {
    auto starts_line = [](const bf16 *p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; };
    return cols % BLOCK_COLS == 0 && starts_line(c) && starts_line(slope);
}
// What was written past the caches is visible to the other threads from here on.
inline void finish_writes() { _mm_sfence(); }
#else
inline bool writes_past_caches(const bf16 *, const bf16 *, int64_t) { return false; }
inline void finish_writes() {}
#endif

#endif

} // namespace
