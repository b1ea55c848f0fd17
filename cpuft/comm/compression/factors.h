// For powersgd: the products of gradients and factors of a few rows, each in one pass over the gradient's memory, which
// takes more time than the products themselves. `cpuft/comm/compression/powersgd.py` has the same in plain torch.
//
// A gradient is handled in blocks of rows and columns. `multiply` (products.h) makes the product of a block and factors
// in the cache, with AMX tiles where the CPU has them.

#pragma once

#include "../../train/fast/products.h"
#include "../../vectors.h"
#include <algorithm>
#include <cmath>
#include <omp.h>
#include <vector>

namespace {

// Rows and columns of a block, whose sums and numbers fit into the first-level cache. Rows and columns of gradients are
// padded with zeros to multiples of SIDE, so that they are whole tiles.
constexpr int64_t SIDE = 32, BLOCK_WIDTH = 128;
// The factors' few rows are padded to a multiple of this: a step of the tiles, and whole vectors.
constexpr int64_t FACTOR_STEP = 16;

// Gradients of T are multiplied with factors as numbers of this type: tiles and AVX512_BF16 multiply bf16; without them,
// floats are faster.
#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
template <class T> using Multiplied = T;
#else
template <class T> using Multiplied = float;
#endif

typedef std::vector<uint32_t> Words;

// The numbers x (rows, cols) as T, with zeros up to `height` rows of `width` numbers.
template <class T> Words pad_rows(const float *x, int64_t rows, int64_t cols, int64_t height, int64_t width) {
    Words filled(size_t(height * width / IN_WORD<T>));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j += W) {
            int64_t m = lanes_of(j, cols);
            put(reinterpret_cast<T *>(filled.data()) + i * width + j, get(x + i * cols + j, m), m);
        }
    return filled;
}

// The `height` rows of x as columns: the first ones of rows of `width` words, with zeros behind them.
inline Words transpose(const Words &x, int64_t height, int64_t width) {
    int64_t length = int64_t(x.size()) / height;
    Words turned(size_t(length * width));
    exchange(x.data(), length, turned.data(), width, height, length);
    return turned;
}

// Floats as words of a factor. With tiles, a word of the right factor holds bf16(x) and bf16(x - bf16(x)), and a word
// of the left factor holds a bf16 twice, so that the sum of their two products has twice as many digits of x as bf16.
template <class T> inline uvec as_left(vec x);
template <class T> inline uvec as_right(vec x);
template <> inline uvec as_left<float>(vec x) { return (uvec)x; }
template <> inline uvec as_right<float>(vec x) { return (uvec)x; }
template <> inline uvec as_left<bf16>(vec x) {
    uvec bits = (uvec)widen(narrow(x));
    return bits | bits >> 16;
}
template <> inline uvec as_right<bf16>(vec x) {
    vec high = widen(narrow(x));
    return (uvec)widen(narrow(x - high)) | (uvec)high >> 16;
}

template <uvec (*convert)(vec)> void convert_words(Words &x) {
    for (size_t i = 0; i < x.size(); i += W) {
        uvec y = convert(read<vec>(x.data() + i));
        std::memcpy(x.data() + i, &y, sizeof y);
    }
}

// Sums are made of 16 partial sums on all CPUs, so that they have the same bits: all ranks need the same rows.
constexpr int64_t PARTIAL_SUMS = 16;

inline float dot(const float *x, const float *y, int64_t n) {
    vec sums[PARTIAL_SUMS / W]{};
    for (int64_t j = 0; j < n; j += PARTIAL_SUMS)
        for (int64_t i = 0; i < PARTIAL_SUMS / W; i++)
            sums[i] = fused(read<vec>(x + j + i * W), read<vec>(y + j + i * W), sums[i]);
    float sum = 0.0f;
    for (int64_t i = 0; i < PARTIAL_SUMS; i++) sum += sums[i / W][i % W];
    return sum;
}

// Subtracts the projection of x on `count` orthonormal rows, and returns the length that is left of x. The second pass
// makes x orthogonal within rounding (Giraud, Langou, Rozloznik, 2005).
inline float project(float *x, const float *rows, int64_t count, int64_t n) {
    std::vector<float> parts(size_t(count), 0.0f);
    for (int64_t pass = 0; pass < 2; pass++) {
        for (int64_t k = 0; k < count; k++) parts[size_t(k)] = dot(x, rows + k * n, n);
        for (int64_t j = 0; j < n; j += W) {
            vec y = read<vec>(x + j);
            for (int64_t k = 0; k < count; k++) y = fused(all(-parts[size_t(k)]), read<vec>(rows + k * n + j), y);
            std::memcpy(x + j, &y, sizeof y);
        }
    }
    return std::sqrt(dot(x, x, n));
}

// y: orthonormal rows that span the rows of x, both (rank, cols), rounded to T, by classical Gram-Schmidt. A row that
// depends on the i rows before it is replaced by the first unit vector whose square length after `project` is at least
// half the mean of all unit vectors, 1 - i / cols. All CPUs give the same bits.
template <class T> void orthonormalise(const float *x, float *y, int64_t rank, int64_t cols, int) {
    int64_t n = filled_up(cols, PARTIAL_SUMS);
    std::vector<float> rows(size_t(rank * n));
    for (int64_t i = 0; i < rank; i++) {
        float *row = rows.data() + i * n;
        std::memcpy(row, x + i * cols, size_t(cols) * sizeof(float));
        float before = std::sqrt(dot(row, row, n)), length = project(row, rows.data(), i, n);
        bool depends = std::isfinite(before) && length <= before * 1e-6f;  // NaNs stay NaNs
        for (int64_t unit = 0; depends && unit < cols; unit++) {
            std::memset(row, 0, size_t(n) * sizeof(float));
            row[unit] = 1.0f;
            length = project(row, rows.data(), i, n);
            depends = length * length < 0.5f * float(cols - i) / float(cols);
        }
        for (int64_t j = 0; j < n; j++) row[j] /= length;
        for (int64_t j = 0; j < cols; j++) {
            T rounded;
            store(rounded, row[j]);
            y[i * cols + j] = load(rounded);
        }
    }
}

// Prefetches a row of a block.
template <class T> inline void prefetch_row(const T *row, int64_t count) {
    for (int64_t j = 0; j < count; j += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + j);
}

// unsent (rows, cols) += gradient - left^T right, for the factors left (rank, rows) and right (rank, cols) of the last
// update; null: there was none. Then p (rank, rows) = q unsent^T, for q (rank, cols). Both `left` and `q` are rounded
// to T.
template <class T>
void add_gradient(const T *gradient, T *unsent, const float *left, const float *right, const float *q, float *p,
                  int64_t rows, int64_t cols, int64_t rank, int threads) {
    typedef Multiplied<T> M;
    constexpr int64_t N = IN_WORD<M>;
    int64_t padded_rows = filled_up(rows, SIDE), padded_cols = filled_up(cols, SIDE);
    int64_t padded_rank = filled_up(rank, FACTOR_STEP);
    int64_t width = filled_up(padded_rank, COLS<M>);
    Words factor = transpose(pad_rows<M>(q, rank, cols, padded_rank, padded_cols), padded_rank, width);
    Words sent_left, sent_right;
    if (left) {
        sent_left = transpose(pad_rows<float>(left, rank, rows, padded_rank, padded_rows), padded_rank, padded_rank);
        sent_right = pad_rows<float>(right, rank, cols, padded_rank, padded_cols);
        convert_words<as_left<M>>(sent_left);
        convert_words<as_right<M>>(sent_right);
    }
#pragma omp parallel num_threads(threads)
    {
        Tiles<M> tiles;
        alignas(64) float sums[SIDE * BLOCK_WIDTH]{};
        alignas(64) M block[SIDE * BLOCK_WIDTH];  // the last rows may be missing, and their products are not used
        std::vector<float> projected(size_t(SIDE * width));
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < rows; begin += SIDE) {
            int64_t count = std::min(SIDE, rows - begin), next = begin + SIDE;
            for (int64_t first = 0; first < cols; first += BLOCK_WIDTH) {
                int64_t n = std::min(BLOCK_WIDTH, cols - first), filled = filled_up(n, SIDE);
                if (left)
                    multiply<M>(sent_left.data() + begin * padded_rank, padded_rank, sent_right.data() + first,
                                padded_cols, sums, BLOCK_WIDTH, SIDE, filled, N == 1 ? rank : padded_rank * N);
                for (int64_t i = 0; i < count; i++) {
                    const T *g = gradient + (begin + i) * cols + first;
                    T *u = unsent + (begin + i) * cols + first;
                    if (next + i < rows) prefetch_row(g + SIDE * cols, n), prefetch_row(u + SIDE * cols, n);
                    for (int64_t j = 0; j < filled; j += W) {
                        int64_t m = std::clamp<int64_t>(n - j, 0, W), at = i * BLOCK_WIDTH + j;
                        vec x = get(u + j, m) + get(g + j, m) - read<vec>(sums + at);
                        put(u + j, x, m);
                        put(block + at, x, W);
                    }
                }
                multiply<M>(reinterpret_cast<const word *>(block), BLOCK_WIDTH / N, factor.data() + first / N * width,
                            width, projected.data(), width, SIDE, width, filled, first > 0);
            }
            for (int64_t k = 0; k < rank; k++)
                for (int64_t i = 0; i < count; i++) p[k * rows + begin + i] = projected[size_t(i * width + k)];
        }
    }
}

// q (rank, cols) = p unsent, for p (rank, rows), which is rounded to T. Memory is read from one end to the other.
template <class T>
void multiply_factor(const float *p, const T *unsent, float *q, int64_t rows, int64_t cols, int64_t rank,
                     int threads) {
    typedef Multiplied<T> M;
    constexpr int64_t N = IN_WORD<M>;
    int64_t height = filled_up(rank, ROWS<M>), padded_rows = filled_up(rows, SIDE), width = filled_up(cols, SIDE);
    Words factor = pad_rows<M>(p, rank, rows, height, padded_rows);
    std::vector<float> sums(size_t(height * width));
#pragma omp parallel num_threads(threads)
    {
        Tiles<M> tiles;
        alignas(64) word block[SIDE / N * BLOCK_WIDTH]{};
        for (int64_t begin = 0; begin < rows; begin += SIDE) {
#pragma omp for schedule(static) nowait  // a thread has the same columns each time
            for (int64_t first = 0; first < cols; first += BLOCK_WIDTH) {
                int64_t n = std::min(BLOCK_WIDTH, cols - first);
                for (int64_t i = 0; i < SIDE; i += N) {
                    word *to = block + i / N * BLOCK_WIDTH;
                    const T *from = unsent + (begin + i) * cols + first;
                    if (begin + i + N > rows) {
                        std::memset(to, 0, size_t(n) * sizeof(word));
                        for (int64_t j = 0; N == 2 && begin + i < rows && j < n; j++) std::memcpy(to + j, from + j, 2);
                        continue;
                    }
                    for (int64_t r = 0; r < N; r++)
                        if (begin + i + r + SIDE < rows) prefetch_row(from + (r + SIDE) * cols, n);
                    if constexpr (N == 2) {
                        pair_row(from, cols, to, n);
                    } else {
                        for (int64_t j = 0; j < n; j += W)
                            put(reinterpret_cast<float *>(to) + j, get(from + j, lanes_of(j, n)), lanes_of(j, n));
                    }
                }
                multiply<M>(factor.data() + begin / N, padded_rows / N, block, BLOCK_WIDTH, sums.data() + first, width,
                            height, filled_up(n, SIDE), SIDE, begin > 0);
            }
        }
    }
    for (int64_t k = 0; k < rank; k++)
        std::memcpy(q + k * cols, sums.data() + k * width, size_t(cols) * sizeof(float));
}

// gradient (rows, cols) = p^T q, for p (rank, rows) and q (rank, cols). All CPUs add the products in the same order and
// round alike, because ranks need the same bits.
template <class T>
void write_product(const float *p, const float *q, T *gradient, int64_t rows, int64_t cols, int64_t rank,
                   int threads) {
    int64_t padded_rows = filled_up(rows, SIDE), padded_cols = filled_up(cols, SIDE);
    int64_t padded_rank = filled_up(rank, FACTOR_STEP);
    Words left = transpose(pad_rows<float>(p, rank, rows, padded_rank, padded_rows), padded_rank, padded_rank);
    Words right = pad_rows<float>(q, rank, cols, padded_rank, padded_cols);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[SIDE * BLOCK_WIDTH];
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < rows; begin += SIDE) {
            for (int64_t first = 0; first < cols; first += BLOCK_WIDTH) {
                int64_t n = std::min(BLOCK_WIDTH, cols - first);
                multiply<Fused>(left.data() + begin * padded_rank, padded_rank, right.data() + first, padded_cols, sums,
                                BLOCK_WIDTH, SIDE, filled_up(n, SIDE), rank);
                for (int64_t i = 0; i < std::min(SIDE, rows - begin); i++) {
                    T *row = gradient + (begin + i) * cols + first;
                    const float *x = sums + i * BLOCK_WIDTH;
                    int64_t j = 0;
                    for (; j + W <= n; j += W) {
                        if constexpr (sizeof(T) == 2) {
                            half y = narrow(read<vec>(x + j));
                            std::memcpy(row + j, &y, sizeof y);
                        } else {
                            std::memcpy(row + j, x + j, sizeof(vec));
                        }
                    }
                    for (; j < n; j++) store(row[j], x[j]);
                }
            }
        }
    }
}

// Where a gradient's numbers begin in tensors in which those of all gradients lie one after another: in the gradients
// themselves, (rows, cols) each, and in their factors, (rank, rows) and (rank, cols) each.
struct Place {
    int64_t whole, left, right;
};

inline std::vector<Place> find_places(const int64_t *rows, const int64_t *cols, const int64_t *rank, int64_t count) {
    std::vector<Place> places(size_t(count) + 1);
    for (size_t k = 0; k < size_t(count); k++)
        places[k + 1] = {places[k].whole + rows[k] * cols[k], places[k].left + rank[k] * rows[k],
                         places[k].right + rank[k] * cols[k]};
    return places;
}

// For each of `count` gradients, number k from gradients[starts[k]] on: makes the rows of q (rank, cols) orthonormal,
// and calls `add_gradient` with them. All other tensors have those of one gradient after another.
template <class T>
void make_first_factors(const T *gradients, const int64_t *starts, T *unsent, const float *left, const float *right,
                        const float *q, float *p, const int64_t *rows, const int64_t *cols, const int64_t *rank,
                        int64_t count, int threads) {
    std::vector<Place> places = find_places(rows, cols, rank, count);
    std::vector<float> bases(size_t(places.back().right));
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t k = 0; k < count; k++) {
        int64_t at = places[size_t(k)].right;
        orthonormalise<T>(q + at, bases.data() + at, rank[k], cols[k], 1);
    }
    for (int64_t k = 0; k < count; k++) {
        Place at = places[size_t(k)];
        add_gradient(gradients + starts[k], unsent + at.whole, left ? left + at.left : nullptr,
                     left ? right + at.right : nullptr, bases.data() + at.right, p + at.left, rows[k], cols[k],
                     rank[k], threads);
    }
}

// For each of `count` gradients: basis (rank, rows) gets orthonormal rows that span those of p, and then q (rank, cols)
// becomes basis unsent.
template <class T>
void make_second_factors(const float *p, float *basis, const T *unsent, float *q, const int64_t *rows,
                         const int64_t *cols, const int64_t *rank, int64_t count, int threads) {
    std::vector<Place> places = find_places(rows, cols, rank, count);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t k = 0; k < count; k++) {
        int64_t at = places[size_t(k)].left;
        orthonormalise<T>(p + at, basis + at, rank[k], rows[k], 1);
    }
    for (int64_t k = 0; k < count; k++) {
        Place at = places[size_t(k)];
        multiply_factor(basis + at.left, unsent + at.whole, q + at.right, rows[k], cols[k], rank[k], threads);
    }
}

// `write_product` for each of `count` gradients, number k from gradients[starts[k]] on.
template <class T>
void write_products(const float *p, const float *q, T *gradients, const int64_t *starts, const int64_t *rows,
                    const int64_t *cols, const int64_t *rank, int64_t count, int threads) {
    std::vector<Place> places = find_places(rows, cols, rank, count);
    for (int64_t k = 0; k < count; k++) {
        Place at = places[size_t(k)];
        write_product(p + at.left, q + at.right, gradients + starts[k], rows[k], cols[k], rank[k], threads);
    }
}

} // namespace
