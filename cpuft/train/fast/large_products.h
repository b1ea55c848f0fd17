// Products of large bf16 matrices, for linear layers: C (rows, cols) = A (rows, inner) B (inner, cols). They are made with
// AMX tiles, or with the vectors of AVX512_BF16 or of Arm's BFMMLA.
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
//
// With AVX512_BF16 and no AMX, 8 rows and 2 vectors of 16 columns are the 16 sums of a step. A register gets one word of
// A's row in all lanes, and is multiplied with the 16 words of either half of a panel's row. On Arm, `multiply_pairs`
// makes blocks of 8 rows and 8 columns.
//
// The gradient of a weight is a sum over tokens, A^T B with two factors that are stored token by token. There each
// thread makes a part of C alone, see `multiply_transposed`.

#pragma once

#include "epilogue.h"
#include "products.h"
#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <omp.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace {

#ifdef HAS_LARGE_PRODUCTS

// Numbers of a row that one instruction of AMX multiplies, and the words that they are.
constexpr int64_t STEP = 32, STEP_WORDS = STEP / 2;
#ifdef __AMX_BF16__
// Bytes of the panels that stay in the second-level cache, which has 2 MB.
constexpr int64_t CHUNK_BYTES = 1200000;
// Longer sums are made in parts of SPLIT_INNER numbers: 32 rows of so many fit into the first-level cache of 48 KB with
// the sums.
constexpr int64_t MOST_INNER = 1024;
// Where fewer than LEAST_CHUNK panels would stay in the second-level cache, all rows would be read for every few columns.
// Then parts of LONG_CHUNK panels stay, LONG_INNER numbers of the sums at a time.
constexpr int64_t LEAST_CHUNK = 8;
// The largest number of sums of a part of a weight's gradient. They take 1.8 MB; with parts of 0.8 or 1.2 MB, a step of
// MiniLM or BERT-base was not faster.
constexpr int64_t PART_SUMS = 450000;
#else
// The same for second-level caches of 1 MB. Vectors multiply so slowly that 8 rows of A and a panel may lie there, too.
// On a Zen 4, chunks of 0.3 to 0.8 MB and parts of 60,000 to 450,000 sums take as long.
constexpr int64_t CHUNK_BYTES = 600000, MOST_INNER = 4096, LEAST_CHUNK = 2, PART_SUMS = 200000;
#endif
constexpr int64_t SPLIT_INNER = 384, LONG_CHUNK = 16, LONG_INNER = 512;
// The largest number of blocks of rows whose sums wait beside the panels for the next numbers.
constexpr int64_t MOST_WAITING = 16;
// The largest number of threads that each pack the factors of their own parts of a weight's gradient: on two cores, this
// is faster (0.73 to 0.97 of the time), but the smaller the parts are, the more of them need the same numbers.
constexpr int64_t MOST_OWN_FACTORS = 8;

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
#ifdef __AVX512BF16__
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
#else
inline void zip_rows(const bf16 *x, int64_t stride, bool has_second, int64_t count, word *y) {
    if (has_second)
        pair_row(x, stride, y, std::min(count, BLOCK_COLS));
    else
        for (int64_t c = 0; c < count && c < BLOCK_COLS; c++) y[c] = x[c].bits;
    std::fill(y + std::min(count, BLOCK_COLS), y + BLOCK_COLS, word(0));
}
#endif

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

// 32 rows of A: word k of row r is words[r * row + k * step]. Tiles and BFMMLA need a step of 1.
struct LeftRows {
    const word *words;
    int64_t row, step;
};

// Words k to k + 15 of a strip: 32 rows of A from `begin` on, where A is stored transposed, (inner, rows), and these words
// are the words `first` to `first + 15` of A. Rows that are missing in A are zeros. `packed_rows` are the rows of a strip.
#if defined(__AMX_BF16__) || defined(__aarch64__)
inline void pack_left_step(const bf16 *a, int64_t inner, int64_t rows, int64_t begin, int64_t first, word *strip,
                           int64_t k, int64_t words) {
    alignas(64) word pairs[STEP_WORDS * BLOCK_ROWS];
    zip_step(a, inner, rows, begin, first, pairs);
    exchange(pairs, BLOCK_ROWS, strip + k, words, STEP_WORDS, BLOCK_ROWS);
}
inline LeftRows packed_rows(const word *strip, int64_t words) { return {strip, words, 1}; }
#else
inline void pack_left_step(const bf16 *a, int64_t inner, int64_t rows, int64_t begin, int64_t first, word *strip,
                           int64_t k, int64_t) {
    zip_step(a, inner, rows, begin, first, strip + k * BLOCK_ROWS);
}
inline LeftRows packed_rows(const word *strip, int64_t) { return {strip, 1, BLOCK_ROWS}; }
#endif

// `count` words from word `first` on of A's rows from `begin` on: a copy of at most a block.
inline void copy_rows(const bf16 *a, int64_t inner, int64_t rows, int64_t begin, int64_t first, int64_t count,
                      word *y) {
    for (int64_t i = begin; i < std::min(rows, begin + BLOCK_ROWS); i++, y += count)
        std::memcpy(y, reinterpret_cast<const word *>(a + i * inner) + first, size_t(count) * sizeof(word));
}

// sums (32, 32) = a b, or += if `adds`, of 32 rows of A and a panel. Before these sums are written, which may be where
// those of the block `before` are, the latter are rounded and written to C. Memory is asked for what `after` will write.
#ifdef __AMX_BF16__
// At most a row is written behind each product of tiles, because the tile unit waits where several rows follow each other.
inline void multiply_with_panel(const LeftRows &left, const word *panel, float *sums, int64_t words, bool adds,
                                Rounding &before, const Rounding &after) {
    const word *a = left.words;
    const int64_t stride = left.row;
    constexpr int64_t LINE = 4 * BLOCK_COLS;
    int64_t row = 0, credit = 0;
    auto write_some = [&]() __attribute__((always_inline)) {
        credit += 16 * BLOCK_ROWS / 4;
        if (credit < words) return;
        credit -= words;
        after.prefetch(row++);
        if (before.is_left()) before.write_row();
    };
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
    for (int64_t k = 0; k < words; k += 16, a += 16) {
        _tile_stream_loadd(6, panel + k * BLOCK_COLS, LINE);
        _tile_stream_loadd(7, panel + k * BLOCK_COLS + 16, LINE);
        _tile_loadd(4, a, 4 * stride);
        _tile_loadd(5, a + 16 * stride, 4 * stride);
        _tile_dpbf16ps(0, 4, 6);
        write_some();
        _tile_dpbf16ps(1, 4, 7);
        write_some();
        _tile_dpbf16ps(2, 5, 6);
        write_some();
        _tile_dpbf16ps(3, 5, 7);
        write_some();
    }
    before.finish();
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + 16, LINE);
    _tile_stored(2, lower, LINE);
    _tile_stored(3, lower + 16, LINE);
}
#elif defined(__aarch64__)
inline void multiply_with_panel(const LeftRows &a, const word *panel, float *sums, int64_t words, bool adds,
                                Rounding &before, const Rounding &after) {
    before.finish();
    for (int64_t row = 0; row < BLOCK_ROWS; row++) after.prefetch(row);
    multiply_vectors<bf16>(a.words, a.row, panel, BLOCK_COLS, sums, BLOCK_COLS, BLOCK_ROWS, BLOCK_COLS, words, adds);
}
#else
inline void multiply_with_panel(const LeftRows &a, const word *panel, float *sums, int64_t words, bool adds,
                                Rounding &before, const Rounding &after) {
    before.finish();
    for (int64_t first = 0; first < BLOCK_ROWS; first += HIGH) {
        for (int64_t row = first; row < first + HIGH; row++) after.prefetch(row);
        vec block[HIGH][2]{};
        float *to = sums + first * BLOCK_COLS;
        if (adds)
#pragma GCC unroll 8
            for (int64_t r = 0; r < HIGH; r++)
#pragma GCC unroll 2
                for (int64_t n = 0; n < 2; n++) block[r][n] = read<vec>(to + r * BLOCK_COLS + n * W);
        const word *left = a.words + first * a.row;
        for (const word *right = panel; right < panel + words * BLOCK_COLS; right += BLOCK_COLS, left += a.step) {
            uvec low = read<uvec>(right), high = read<uvec>(right + W);
#pragma GCC unroll 8
            for (int64_t r = 0; r < HIGH; r++) {
                block[r][0] = add_product<bf16>(block[r][0], left[r * a.row], low);
                block[r][1] = add_product<bf16>(block[r][1], left[r * a.row], high);
            }
        }
#pragma GCC unroll 8
        for (int64_t r = 0; r < HIGH; r++)
#pragma GCC unroll 2
            for (int64_t n = 0; n < 2; n++) std::memcpy(to + r * BLOCK_COLS + n * W, &block[r][n], sizeof(vec));
    }
}
#endif

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns false if there is no memory for the packed factors.
bool multiply_with_tiles(const bf16 *a, const bf16 *b, const Epilogue &epilogue, bf16 *c, int64_t rows, int64_t cols,
                         int64_t inner, bool b_is_transposed, int threads) {
    int64_t words = inner / 2, blocks = ceil_div(rows, BLOCK_ROWS), panels = ceil_div(cols, BLOCK_COLS);
    int64_t chunk = std::clamp(CHUNK_BYTES / (4 * BLOCK_COLS * words), int64_t(1), panels);
    bool is_long = chunk < std::min(LEAST_CHUNK, panels);
    if (is_long) chunk = LONG_CHUNK;
    int64_t chunks = ceil_div(panels, chunk);
    chunk = ceil_div(panels, chunks);
    int64_t parts = std::clamp(ceil_div((is_long ? 8 : 16) * int64_t(threads), chunks), int64_t(1), blocks);
    int64_t split = is_long ? LONG_INNER / 2 : inner > MOST_INNER ? SPLIT_INNER / 2 : words;
    if (split < words) parts = std::max(parts, ceil_div(blocks, MOST_WAITING));
    // Sums of the blocks that wait for more steps, or of this block and the one before; and copied rows of A.
    int64_t waiting = split < words ? ceil_div(blocks, parts) * chunk : 2, most_sums = waiting * BLOCK_SUMS;
    int64_t of_thread = most_sums + BLOCK_ROWS * split, of_panels = panels * words * BLOCK_COLS;
    // Sums of columns by part, not by thread: which thread takes a task differs from run to run.
    int64_t of_columns = epilogue.column_sums ? panels * BLOCK_COLS : 0;
    static thread_local Scratch scratch;
    word *packed = scratch.get(of_panels + threads * of_thread + parts * of_columns);
    if (!packed) return false;
#pragma omp parallel num_threads(threads)
    {
        if (b_is_transposed) {
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; p++)
                pack_transposed_panel(b, inner, cols, p * BLOCK_COLS, packed + p * words * BLOCK_COLS);
        } else {
            // All columns of a few rows at a time: these rows are read from one end to the other.
#pragma omp for schedule(static)
            for (int64_t k = 0; k < words; k += STEP_WORDS)
                for (int64_t p = 0; p < panels; p++)
                    zip_step(b, inner, cols, p * BLOCK_COLS, k, packed + (p * words + k) * BLOCK_COLS);
        }
        word *own = packed + of_panels + omp_get_thread_num() * of_thread, *copied = own + most_sums;
        float *sums = reinterpret_cast<float *>(own);
        float *column_sums = reinterpret_cast<float *>(packed + of_panels + threads * of_thread);
        Epilogue own_epilogue = epilogue;
        Tiles<bf16> tiles;
        Rounding before;
        int64_t turn = 0;
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t task = 0; task < chunks * parts; task++) {
            int64_t first = task / parts * chunk, end = std::min(panels, first + chunk), part = task % parts;
            if (of_columns) {
                own_epilogue.column_sums = column_sums + part * of_columns;
                std::fill(own_epilogue.column_sums + first * BLOCK_COLS, own_epilogue.column_sums + end * BLOCK_COLS,
                          0.0f);
            }
            int64_t top = part * blocks / parts, bottom = (part + 1) * blocks / parts;
            for (int64_t k = 0; k < words; k += split)
                for (int64_t i = top; i < bottom; i++) {
                    int64_t count = std::min(split, words - k), begin = i * BLOCK_ROWS, row = words;
                    const word *left = reinterpret_cast<const word *>(a) + begin * row + k;
                    bool is_last = k + count == words;
                    // Nothing behind A is read; and rows that begin 4 KB or 8 KB apart would push each other out of the
                    // first-level cache.
                    if (is_long || begin + BLOCK_ROWS > rows) {
                        copy_rows(a, inner, rows, begin, k, count, copied);
                        left = copied, row = count;
                    }
                    for (int64_t p = first; p < end; p++) {
                        float *to = sums + (split < words ? (i - top) * chunk + p - first : turn++ & 1) * BLOCK_SUMS;
                        const word *panel = packed + (p * words + k) * BLOCK_COLS;
                        Rounding after;
                        if (is_last) after = {to, c, own_epilogue, begin, p * BLOCK_COLS, rows, cols};
                        multiply_with_panel({left, row, 1}, panel, to, count, k > 0, before, after);
                        if (is_last) before = after;
                    }
                }
        }
        before.finish();
        finish_writes();
        if (of_columns) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
            for (int64_t p = 0; p < panels; p++)
                for (int64_t part = 0; part < parts; part++)
                    for (int64_t j = p * BLOCK_COLS; j < std::min(cols, (p + 1) * BLOCK_COLS); j++)
                        epilogue.column_sums[j] += column_sums[part * of_columns + j];
        }
    }
    return true;
}

// Into how many parts the rows and the columns of a weight's gradient are divided.
struct Parts {
    int64_t of_rows, of_cols;
};
// The division that probably takes least time. For each token, a thread reads the numbers of A and of B that belong to
// the columns of its part; one of them is estimated to take as long as 200 multiplications. Divisions are remembered: a
// model has few sizes, and one of BERT-large has 4,096 divisions to try, for which all other threads would wait.
inline Parts choose_parts(int64_t rows, int64_t cols, int64_t threads) {
    static thread_local std::map<std::array<int64_t, 3>, Parts> known;
    Parts &best = known[{rows, cols, threads}];
    if (best.of_rows) return best;
    double least = INFINITY;
    for (int64_t m = 1; m <= ceil_div(rows, BLOCK_ROWS); m++)
        for (int64_t n = 1; n <= ceil_div(cols, BLOCK_COLS); n++) {
            double high = double(filled_up(ceil_div(rows, m), BLOCK_ROWS));
            double wide = double(filled_up(ceil_div(cols, n), BLOCK_COLS));
            double cost = double(ceil_div(m * n, threads)) * (high * wide + 200.0 * (high + wide));
            bool fits = high * wide <= double(PART_SUMS);
            if (fits && cost < least) best = {m, n}, least = cost;
        }
    return best;
}

// C (rows, cols) = A^T B for A (inner, rows) and B (inner, cols): the gradient of a weight, a sum over all tokens. Each
// thread makes parts of C. It packs the numbers of a few hundred tokens at a time, and adds their products to the sums
// of its part, which mostly stay in the second-level cache. Many threads pack all numbers together first. Returns false
// if there is no memory for sums and packed numbers.
bool multiply_transposed(const bf16 *a, const bf16 *b, bf16 *c, int64_t rows, int64_t cols, int64_t inner,
                         int threads) {
    Epilogue epilogue{};
    epilogue.past_caches = writes_past_caches(c, nullptr, cols);
    Parts parts = choose_parts(rows, cols, threads);
    int64_t high = filled_up(ceil_div(rows, parts.of_rows), BLOCK_ROWS), blocks = high / BLOCK_ROWS;
    int64_t wide = filled_up(ceil_div(cols, parts.of_cols), BLOCK_COLS), panels = wide / BLOCK_COLS;
    int64_t tokens = filled_up(ceil_div(inner, ceil_div(inner, SPLIT_INNER)), STEP), words = tokens / 2;
    // Packed numbers are strips of 32 rows of A or 32 columns of B for so many tokens: those of A come first.
    bool is_shared = threads > MOST_OWN_FACTORS;
    int64_t strip = BLOCK_ROWS * words, all_blocks = ceil_div(rows, BLOCK_ROWS), all_panels = ceil_div(cols, BLOCK_COLS);
    int64_t of_tokens = (all_blocks + all_panels) * strip, shared = is_shared ? ceil_div(inner, tokens) * of_tokens : 0;
    int64_t of_thread = high * wide + (is_shared ? 0 : (blocks + panels) * strip);
    static thread_local Scratch scratch;
    word *memory = scratch.get(shared + threads * of_thread);
    if (!memory) return false;
#pragma omp parallel num_threads(threads)
    {
        auto turn = [&](int64_t block, int64_t token, int64_t k, word *to) {
            pack_left_step(a, inner, rows, block * BLOCK_ROWS, token / 2 + k, to, k, words);
        };
        auto zip = [&](int64_t panel, int64_t token, int64_t k, word *to) {
            zip_step(b, inner, cols, panel * BLOCK_COLS, token / 2 + k, to + k * BLOCK_COLS);
        };
        if (is_shared) {
#pragma omp for collapse(2) schedule(static)
            for (int64_t step = 0; step < ceil_div(inner, STEP); step++)
                for (int64_t number = 0; number < all_blocks + all_panels; number++) {
                    int64_t token = step * STEP / tokens * tokens, k = (step * STEP - token) / 2;
                    word *to = memory + token / tokens * of_tokens + number * strip;
                    number < all_blocks ? turn(number, token, k, to) : zip(number - all_blocks, token, k, to);
                }
        }
        word *own = memory + shared + omp_get_thread_num() * of_thread, *packed = own + high * wide;
        float *sums = reinterpret_cast<float *>(own);
        Tiles<bf16> tiles;
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t part = 0; part < parts.of_rows * parts.of_cols; part++) {
            int64_t top = part / parts.of_cols * high, left = part % parts.of_cols * wide;
            int64_t last_block = std::min(blocks, ceil_div(rows - top, BLOCK_ROWS));
            int64_t last_panel = std::min(panels, ceil_div(cols - left, BLOCK_COLS));
            Rounding before;
            for (int64_t token = 0; token < inner; token += tokens) {
                int64_t count = std::min(words, filled_up(inner - token, STEP) / 2);
                word *left_strips = packed, *right_strips = packed + blocks * strip;
                if (is_shared) {
                    left_strips = memory + token / tokens * of_tokens + top / BLOCK_ROWS * strip;
                    right_strips = memory + token / tokens * of_tokens + (all_blocks + left / BLOCK_COLS) * strip;
                } else {
                    for (int64_t k = 0; k < count; k += STEP_WORDS) {
                        for (int64_t p = 0; p < last_panel; p++)
                            zip(left / BLOCK_COLS + p, token, k, right_strips + p * strip);
                        for (int64_t i = 0; i < last_block; i++)
                            turn(top / BLOCK_ROWS + i, token, k, left_strips + i * strip);
                    }
                }
                for (int64_t i = 0; i < last_block; i++)
                    for (int64_t p = 0; p < last_panel; p++) {
                        float *to = sums + (i * panels + p) * BLOCK_SUMS;
                        Rounding after;
                        if (token + tokens >= inner)
                            after = {to, c, epilogue, top + i * BLOCK_ROWS, left + p * BLOCK_COLS, rows, cols};
                        multiply_with_panel(packed_rows(left_strips + i * strip, words), right_strips + p * strip, to,
                                            count, token > 0, before, after);
                        before = after;
                    }
            }
            before.finish();
        }
        finish_writes();
    }
    return true;
}

#ifdef __AMX_BF16__
const bool CAN_MULTIPLY = HAS_TILES;
#elif defined(__aarch64__)
const bool CAN_MULTIPLY = true;  // whether torch is faster is measured when it is used first
#else
// Not on AMD's CPUs from family 26 on (Zen 5), whose vectors multiply twice as fast: oneDNN reaches 91 % of that rate there,
// and these products were not measured. CPUID has the family in bits 8 to 11 and 20 to 27.
const bool CAN_MULTIPLY = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    bool is_amd = __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx;
    return !is_amd || !__get_cpuid(1, &a, &b, &c, &d) || (a >> 8 & 15) + (a >> 20 & 255) < 26;
}();
#endif
#endif

// c (rows, cols) = a (rows, inner) b (inner, cols), after what `Epilogue` does to it. A factor that is transposed is
// stored as (inner, rows), or (cols, inner). *done is 1 if c has been computed: this CPU can, and
// the sizes fit.
template <class T>
void matrix_product(const T *a, const T *b, const T *bias, const T *factor, const T *addend, float *column_sums,
                    T *slope, T *c, int64_t *done, int64_t rows, int64_t cols, int64_t inner, int64_t a_is_transposed,
                    int64_t b_is_transposed, int64_t has_gelu, int threads) {
    *done = 0;
#ifdef HAS_LARGE_PRODUCTS
    if constexpr (sizeof(T) == 2) {
        if (!CAN_MULTIPLY || !rows || !cols || !inner) return;
        bool past_caches = b_is_transposed && writes_past_caches(c, slope, cols);
        Epilogue epilogue{bias, factor, addend, column_sums, slope, has_gelu != 0, past_caches};
        if (a_is_transposed && !b_is_transposed && !epilogue.is_any())
            *done = multiply_transposed(a, b, c, rows, cols, inner, threads);
        else if (!a_is_transposed && inner % STEP == 0)  // its rows are read as they lie, and have to end with a tile
            *done = multiply_with_tiles(a, b, epilogue, c, rows, cols, inner, b_is_transposed, threads);
    }
#endif
}

} // namespace
