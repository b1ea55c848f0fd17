// Products of large bf16 matrices with AMX tiles, for linear layers: C (rows, cols) = A (rows, inner) B (inner, cols).
//
// A tile has 16 rows of 64 bytes. One instruction multiplies a tile of A (16 rows, 32 numbers) with a tile of B (32
// numbers, 16 columns), and adds the product to a tile of 16 x 16 floats. A is read as it lies in memory. In B, the
// words of a tile's row are the pairs of numbers 2 k and 2 k + 1 of 16 columns, so B is packed first:
//
//       B                                    panel of 32 columns, `inner / 2` rows of 128 bytes
//            0     1    ...   31                column 0        column 1         ...      column 31
//     0    b00   b01        b0,31          +----------------+----------------+--------+------------------+
//     1    b10   b11        b1,31          |  b00  |  b10   |  b01  |  b11   |        | b0,31  |  b1,31  |   row 0
//     2    b20   b21        b2,31    ->    |  b20  |  b30   |  b21  |  b31   |        | b2,31  |  b3,31  |   row 1
//     3    b30   b31        b3,31          +----------------+----------------+--------+------------------+
//    ...                                    <------- tile of columns 0 to 15 -------> <- columns 16 to 31 ->
//
// A block of C is 32 rows of 32 columns: four tiles of sums, for which two tiles of A and two of B are read per step.
//
//                 B: panel p            The block's rows of A stay in the first-level cache while all panels of a
//               +----+----+             chunk pass; the panels are read with the hint that they are not needed there
//               | t6 | t7 |             again, or they would push out A. A chunk of panels fits into the second-level
//               +----+----+             cache. The sums of a block are rounded to bf16 during the steps of the next
//      +----+   +----+----+             one, which the tile unit multiplies at the same time.
//   A  | t4 |   | t0 | t1 |
//      +----+   +----+----+
//      | t5 |   | t2 | t3 |   C
//      +----+   +----+----+

#pragma once

#include "activations.h"
#include "products.h"
#include <algorithm>
#include <cstdlib>
#include <omp.h>

namespace {

#ifdef __AMX_BF16__

constexpr int64_t BLOCK_ROWS = 32, BLOCK_COLS = 32, STEP = 32;
// Bytes of the panels that stay in the second-level cache, which has 2 MB on the CPUs with AMX.
constexpr int64_t CHUNK_BYTES = 1200000;
// Longer sums are made in parts of SPLIT_INNER numbers: 32 rows of so many fit into the first-level cache of 48 KB with
// the sums. MOST_PACKED_INNER is the limit if A has been packed, because it was stored transposed.
constexpr int64_t MOST_INNER = 1024, MOST_PACKED_INNER = 512, SPLIT_INNER = 384;
constexpr int64_t BLOCK_SUMS = BLOCK_ROWS * BLOCK_COLS;

// Memory for packed factors and sums, which stays for the next call and grows.
class Scratch {
    word *memory = nullptr;
    size_t bytes = 0;

  public:
    ~Scratch() { std::free(memory); }
    // Returns null if there is not so much memory.
    word *get(int64_t words) {
        size_t wanted = (size_t(words) * sizeof(word) + 4095) / 4096 * 4096;
        if (wanted > bytes) {
            std::free(memory);
            memory = static_cast<word *>(std::aligned_alloc(4096, wanted));
            bytes = memory ? wanted : 0;
        }
        return memory;
    }
};

// The words of the rows x and x + stride (zeros if there is no second row): pairs of their first `count` numbers (at
// most 32; zeros follow).
inline void zip_rows(const bf16 *x, int64_t stride, bool has_second, int64_t count, word *y) {
    const __mmask32 mask = count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
    __m512i first = _mm512_maskz_loadu_epi16(mask, x);
    __m512i second = has_second ? _mm512_maskz_loadu_epi16(mask, x + stride) : _mm512_setzero_si512();
    __m512i low = _mm512_unpacklo_epi16(first, second), high = _mm512_unpackhi_epi16(first, second);
    const __m512i front = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i back = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    _mm512_store_si512(y, _mm512_permutex2var_epi64(low, front, high));
    _mm512_store_si512(y + 16, _mm512_permutex2var_epi64(low, back, high));
}

// The words `first` to `first + 16` of a right factor (inner, cols) for 32 columns from `begin` on: 16 rows of a panel.
inline void zip_step(const bf16 *b, int64_t inner, int64_t cols, int64_t begin, int64_t first, word *y) {
    int64_t count = std::min(BLOCK_COLS, cols - begin);
    for (int64_t row = 2 * first; row < 2 * first + STEP; row += 2, y += BLOCK_COLS)
        if (row < inner)
            zip_rows(b + row * cols + begin, cols, row + 1 < inner, count, y);
        else
            std::memset(y, 0, 4 * BLOCK_COLS);
}

// A whole panel of B that is stored transposed, (cols, inner); `inner` is a multiple of 32.
inline void pack_transposed_panel(const bf16 *b, int64_t inner, int64_t cols, int64_t begin, word *panel) {
    int64_t words = inner / 2;
    for (int64_t first = 0; first < BLOCK_COLS; first += W) {
        int64_t count = std::min(W, cols - begin - first);
        const bf16 *rows = b + (begin + first) * inner;
        if (count == W) {
            exchange(reinterpret_cast<const word *>(rows), words, panel + first, BLOCK_COLS, W, words);
            continue;
        }
        for (int64_t k = 0; k < words; k++)
            for (int64_t c = 0; c < W; c++)
                panel[k * BLOCK_COLS + first + c] =
                    c < count ? reinterpret_cast<const word *>(rows + c * inner)[k] : 0;
    }
}

// A step of 32 rows of A from `begin` on, 16 words of each, from A that is stored transposed, (inner, rows). Rows of y
// are `stride` words apart; those that are missing in A are zeros.
inline void transpose_step(const bf16 *a, int64_t inner, int64_t rows, int64_t begin, int64_t first, word *y,
                           int64_t stride) {
    alignas(64) word pairs[W * BLOCK_ROWS];
    zip_step(a, inner, rows, begin, first, pairs);
    exchange(pairs, BLOCK_ROWS, y, stride, W, BLOCK_ROWS);
}

// `count` words from word `first` on of A's rows from `begin` on: a copy of the last rows, so that nothing behind them
// is read.
inline void pack_last_rows(const bf16 *a, int64_t inner, int64_t rows, int64_t begin, int64_t first, int64_t count,
                           word *y) {
    for (int64_t i = begin; i < rows; i++, y += count)
        std::memcpy(y, reinterpret_cast<const word *>(a + i * inner) + first, size_t(count) * sizeof(word));
}

// 32 numbers of a row.
struct Pair {
    vec low, high;
};
inline Pair get_pair(const bf16 *p, __mmask32 mask) {
    __m512i both = _mm512_maskz_loadu_epi16(mask, p);
    return {widen(read<half>(&both)), widen(read<half>(reinterpret_cast<const uint16_t *>(&both) + W))};
}
inline void put_pair(bf16 *p, Pair x, __mmask32 mask) {
    _mm512_mask_storeu_epi16(p, mask, (__m512i)_mm512_cvtne2ps_pbh((__m512)x.high, (__m512)x.low));
}

template <class T> T *moved(T *p, int64_t count) { return p ? p + count : p; }

// What happens to a product before it is rounded and written, in the order of these pointers. A null pointer stands for
// nothing.
struct Epilogue {
    const bf16 *bias;    // (cols,): it is added
    const bf16 *factor;  // (rows, cols): the product is multiplied by it
    const bf16 *addend;  // (rows, cols): it is added
    float *column_sums;  // (cols,): the sums of the columns are added to it
    bf16 *slope;         // (rows, cols): C becomes the GELU of the product, and this the GELU's slope
    bool has_gelu;       // the same without a slope

    // For the part of C that begins `number` numbers after its first one, in column `col`.
    Epilogue from(int64_t number, int64_t col) const {
        return {moved(bias, col),        moved(factor, number), moved(addend, number),
                moved(column_sums, col), moved(slope, number),  has_gelu};
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
        if (slope) put_pair(slope + number, {low.slope, high.slope}, mask);
        return {low.value, high.value};
    }
};

// A block of sums that still has to be rounded and written to C.
struct Rounding {
    const float *sums = nullptr;
    bf16 *to = nullptr;
    Epilogue epilogue{};
    int64_t stride = 0, rows = 0, cols = 0, next = 0;

    bool is_left() const { return next < rows; }
    // Asks for the memory of a row while its sums are still being made: without it, each row of 64 bytes is waited for.
    void prefetch(int64_t row) const {
        if (row >= rows) return;
        __builtin_prefetch(to + row * stride, 1);
        if (epilogue.slope) __builtin_prefetch(epilogue.slope + row * stride, 1);
        if (epilogue.factor) __builtin_prefetch(epilogue.factor + row * stride);
        if (epilogue.addend) __builtin_prefetch(epilogue.addend + row * stride);
    }
    void write_row() {
        const float *from = sums + next * BLOCK_COLS;
        __mmask32 mask = cols >= 32 ? ~__mmask32(0) : (__mmask32(1) << cols) - 1;
        put_pair(to + next * stride, epilogue.apply({read<vec>(from), read<vec>(from + W)}, next * stride, mask), mask);
        next++;
    }
    void finish() {
        while (is_left()) write_row();
    }
};

// sums (32, 32) = a b, or += if `adds`, of 32 rows of A and a panel. `row` is the distance of two rows of A in words.
// Meanwhile, the sums of the block `before` are rounded and written, and memory is asked for those of this block, which
// `after` writes.
inline void multiply_with_panel(const word *a, int64_t row, const word *panel, float *sums, int64_t words, bool adds,
                                Rounding &before, const Rounding &after) {
    constexpr int64_t LINE = 4 * BLOCK_COLS;
    float *lower = sums + 16 * BLOCK_COLS;
    if (adds) {
        _tile_loadd(0, sums, LINE);
        _tile_loadd(1, sums + 16, LINE);
        _tile_loadd(2, lower, LINE);
        _tile_loadd(3, lower + 16, LINE);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t each = (BLOCK_ROWS + words / 16 - 1) / (words / 16);
    for (int64_t k = 0; k < words; k += 16, a += 16) {
        _tile_stream_loadd(6, panel + k * BLOCK_COLS, LINE);
        _tile_stream_loadd(7, panel + k * BLOCK_COLS + 16, LINE);
        _tile_loadd(4, a, 4 * row);
        _tile_loadd(5, a + 16 * row, 4 * row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (int64_t i = 0; i < each; i++) after.prefetch(k / 16 * each + i);
        for (int64_t i = 0; i < each && before.is_left(); i++) before.write_row();
    }
    before.finish();
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + 16, LINE);
    _tile_stored(2, lower, LINE);
    _tile_stored(3, lower + 16, LINE);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns false if there is no memory for the packed factors.
bool multiply_with_tiles(const bf16 *a, const bf16 *b, const Epilogue &epilogue, bf16 *c, int64_t rows, int64_t cols,
                         int64_t inner, bool a_is_transposed, bool b_is_transposed, int threads) {
    int64_t words = filled_up(inner, STEP) / 2;
    // Rows that lie a multiple of a page apart would compete for the same lines of a cache.
    int64_t stride = words + (words % 256 == 0 ? 16 : 0);
    int64_t blocks = ceil_div(rows, BLOCK_ROWS), panels = ceil_div(cols, BLOCK_COLS);
    int64_t chunk = std::clamp(CHUNK_BYTES / (4 * BLOCK_COLS * words), int64_t(1), panels);
    int64_t chunks = ceil_div(panels, chunk);
    chunk = ceil_div(panels, chunks);
    int64_t parts = std::clamp(ceil_div(4 * int64_t(threads), chunks), int64_t(1), blocks);
    int64_t split = 2 * words > (a_is_transposed ? MOST_PACKED_INNER : MOST_INNER) ? SPLIT_INNER / 2 : words;
    // Sums of the blocks that wait for more steps, or of this block and the one before; the last rows of A; and sums of
    // columns.
    int64_t most_sums = std::max<int64_t>(chunk, 2) * BLOCK_SUMS;
    int64_t of_columns = epilogue.column_sums ? panels * BLOCK_COLS : 0;
    int64_t of_thread = most_sums + BLOCK_ROWS * split + of_columns;
    int64_t of_panels = panels * words * BLOCK_COLS, of_rows = a_is_transposed ? blocks * BLOCK_ROWS * stride : 0;
    static thread_local Scratch scratch;
    word *packed = scratch.get(of_panels + of_rows + threads * of_thread), *rows_packed = packed + of_panels;
    if (!packed) return false;
#pragma omp parallel num_threads(threads)
    {
        if (b_is_transposed) {
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; p++)
                pack_transposed_panel(b, inner, cols, p * BLOCK_COLS, packed + p * words * BLOCK_COLS);
        }
        // All columns of a few rows at a time: these rows are read from one end to the other.
        if (a_is_transposed || !b_is_transposed) {
#pragma omp for schedule(static)
            for (int64_t k = 0; k < words; k += W) {
                for (int64_t p = 0; !b_is_transposed && p < panels; p++)
                    zip_step(b, inner, cols, p * BLOCK_COLS, k, packed + (p * words + k) * BLOCK_COLS);
                for (int64_t i = 0; a_is_transposed && i < blocks; i++)
                    transpose_step(a, inner, rows, i * BLOCK_ROWS, k, rows_packed + i * BLOCK_ROWS * stride + k,
                                   stride);
            }
        }
        word *own = rows_packed + of_rows + omp_get_thread_num() * of_thread, *last_rows = own + most_sums;
        float *sums = reinterpret_cast<float *>(own);
        Epilogue own_epilogue = epilogue;
        if (of_columns) {
            own_epilogue.column_sums = sums + most_sums + BLOCK_ROWS * split;
            std::memset(own_epilogue.column_sums, 0, size_t(of_columns) * sizeof(float));
        }
        Tiles<bf16> tiles;
        Rounding before;
        int64_t turn = 0;
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t task = 0; task < chunks * parts; task++) {
            int64_t first = task / parts * chunk, end = std::min(panels, first + chunk), part = task % parts;
            for (int64_t i = part * blocks / parts; i < (part + 1) * blocks / parts; i++) {
                for (int64_t k = 0; k < words; k += split) {
                    int64_t count = std::min(split, words - k), begin = i * BLOCK_ROWS, row = inner / 2;
                    const word *left = reinterpret_cast<const word *>(a) + begin * row + k;
                    if (a_is_transposed) {
                        left = rows_packed + begin * stride + k;
                        row = stride;
                    } else if (begin + BLOCK_ROWS > rows) {
                        pack_last_rows(a, inner, rows, begin, k, count, last_rows);
                        left = last_rows, row = count;
                    }
                    for (int64_t p = first; p < end; p++) {
                        float *to = sums + (split < words ? p - first : turn++ & 1) * BLOCK_SUMS;
                        const word *panel = packed + (p * words + k) * BLOCK_COLS;
                        Rounding after;
                        if (k + count == words) {
                            int64_t col = p * BLOCK_COLS, number = begin * cols + col;
                            after = Rounding{to,   c + number, own_epilogue.from(number, col),
                                             cols, std::min(BLOCK_ROWS, rows - begin), std::min(BLOCK_COLS, cols - col),
                                             0};
                        }
                        multiply_with_panel(left, row, panel, to, count, k > 0, before, after);
                        if (k + count == words) before = after;
                    }
                }
            }
        }
        before.finish();
        if (of_columns) {
#pragma omp critical
            for (int64_t j = 0; j < cols; j++) epilogue.column_sums[j] += own_epilogue.column_sums[j];
        }
    }
    return true;
}
#endif

// c (rows, cols) = a (rows, inner) b (inner, cols), after what `Epilogue` does to it. A factor that is transposed is
// stored as (inner, rows), or (cols, inner). *done is 1 if c has been computed: this CPU has tiles, and they can
// multiply these sizes.
template <class T>
void matrix_product(const T *a, const T *b, const T *bias, const T *factor, const T *addend, float *column_sums,
                    T *slope, T *c, int64_t *done, int64_t rows, int64_t cols, int64_t inner, int64_t a_is_transposed,
                    int64_t b_is_transposed, int64_t has_gelu, int threads) {
    *done = 0;
#ifdef __AMX_BF16__
    // Rows that are read as they lie in memory have to end with a whole tile.
    bool fits = inner % STEP == 0 || (a_is_transposed && !b_is_transposed);
    if constexpr (sizeof(T) == 2)
        if (HAS_TILES && fits && rows && cols && inner)
            *done = multiply_with_tiles(a, b, {bias, factor, addend, column_sums, slope, has_gelu != 0}, c, rows, cols,
                                        inner, a_is_transposed, b_is_transposed, threads);
#endif
}

} // namespace
