// Products of matrices that are in the cache, small enough that a library's call for each would cost more than they do.
//
// They are counted in words of 32 bits along what is summed over: one float, or two bf16 that stand side by side. Of
// the left factor a row's words are consecutive, of the right one those that the same word of a row meets.

#pragma once

#include "vectors.h"
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Floats and pairs of bf16 are read as these.
typedef uint32_t word __attribute__((may_alias));

template <class T> constexpr int64_t IN_WORD = 4 / int64_t(sizeof(T));
// So many rows of sums, each of two vectors, fit into registers.
constexpr int64_t HIGH = W / 2;
// Rows and columns of factors are filled up with zeros to multiples of these: more with AMX, for two tiles each way.
#ifdef __AMX_BF16__
template <class T> constexpr int64_t ROWS = sizeof(T) == 2 ? 32 : HIGH;
template <class T> constexpr int64_t COLS = sizeof(T) == 2 ? 32 : W;
#else
template <class T> constexpr int64_t ROWS = HIGH;
template <class T> constexpr int64_t COLS = W;
#endif
inline int64_t filled_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// sums + left * right, of word pairs of T.
template <class T> inline vec add_product(vec sums, uint32_t left, uvec right);
template <> inline vec add_product<float>(vec sums, uint32_t left, uvec right) {
    return sums + as_float(left) * (vec)right;
}
template <> inline vec add_product<bf16>(vec sums, uint32_t left, uvec right) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(int(left)), (__m512bh)right);
#else
    sums += as_float(left << 16) * (vec)(right << 16);
    return sums + as_float(left & 0xffff0000u) * (vec)(right & 0xffff0000u);
#endif
}

// c (HIGH, N vectors) = a times b, or adds it.
template <class T, int64_t N>
inline void multiply_block(const word *a, int64_t a_stride, const word *b, int64_t b_stride, float *c,
                           int64_t c_stride, int64_t words, bool adds) {
    vec sums[HIGH][N]{};
#pragma GCC unroll 8
    for (int64_t r = 0; r < HIGH; r++)
#pragma GCC unroll 2
        for (int64_t n = 0; n < N; n++)
            if (adds) sums[r][n] = read<vec>(c + r * c_stride + n * W);
    for (int64_t k = 0; k < words; k++) {
        uvec right[N];
#pragma GCC unroll 2
        for (int64_t n = 0; n < N; n++) right[n] = read<uvec>(b + k * b_stride + n * W);
#pragma GCC unroll 8
        for (int64_t r = 0; r < HIGH; r++)
#pragma GCC unroll 2
            for (int64_t n = 0; n < N; n++) sums[r][n] = add_product<T>(sums[r][n], a[r * a_stride + k], right[n]);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < HIGH; r++)
#pragma GCC unroll 2
        for (int64_t n = 0; n < N; n++) std::memcpy(c + r * c_stride + n * W, &sums[r][n], sizeof(vec));
}

template <class T>
void multiply_vectors(const word *a, int64_t a_stride, const word *b, int64_t b_stride, float *c,
                      int64_t c_stride, int64_t rows, int64_t cols, int64_t words, bool adds) {
    for (int64_t j = 0; j < cols; j += 2 * W)
        for (int64_t i = 0; i < rows; i += HIGH) {
            const word *left = a + i * a_stride;
            float *to = c + i * c_stride + j;
            if (j + W < cols)
                multiply_block<T, 2>(left, a_stride, b + j, b_stride, to, c_stride, words, adds);
            else
                multiply_block<T, 1>(left, a_stride, b + j, b_stride, to, c_stride, words, adds);
        }
}

#ifdef __AMX_BF16__
// Whether Linux lets this process use tiles: it has to ask. Numbers of Documentation/arch/x86/xstate.rst.
const bool HAS_TILES = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// Palette 1; at byte 16 each of eight tiles' bytes a row, at 48 its rows. A constant: GCC 12 takes of what ldtilecfg
// reads the first eight bytes only for used.
alignas(64) const uint8_t SHAPES[64] = {1,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 64, 0, 64, 0, 64, 0,
                                        64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,
                                        0,  0, 0,  0, 16, 16, 16, 16, 16, 16, 16, 16};

// The tiles' shapes while this lives; then they are as another library left them.
template <class T> struct Tiles {
    Tiles() {}
};
template <> struct Tiles<bf16> {
    alignas(64) uint8_t before[64];
    Tiles() {
        if (!HAS_TILES) return;
        _tile_storeconfig(before);
        _tile_loadconfig(SHAPES);
    }
    ~Tiles() {
        if (HAS_TILES) _tile_loadconfig(before);
    }
};

// Rows are multiples of 32 as well, words of 16.
inline void multiply_tiles(const word *a, int64_t a_stride, const word *b, int64_t b_stride, float *c,
                           int64_t c_stride, int64_t rows, int64_t cols, int64_t words, bool adds) {
    for (int64_t j = 0; j < cols; j += 32)
        for (int64_t i = 0; i < rows; i += 32) {
            float *upper = c + i * c_stride + j, *lower = upper + 16 * c_stride;
            if (adds) {
                _tile_loadd(0, upper, 4 * c_stride);
                _tile_loadd(1, upper + 16, 4 * c_stride);
                _tile_loadd(2, lower, 4 * c_stride);
                _tile_loadd(3, lower + 16, 4 * c_stride);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t k = 0; k < words; k += 16) {
                _tile_loadd(4, a + i * a_stride + k, 4 * a_stride);
                _tile_loadd(5, a + (i + 16) * a_stride + k, 4 * a_stride);
                _tile_loadd(6, b + k * b_stride + j, 4 * b_stride);
                _tile_loadd(7, b + k * b_stride + j + 16, 4 * b_stride);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, upper, 4 * c_stride);
            _tile_stored(1, upper + 16, 4 * c_stride);
            _tile_stored(2, lower, 4 * c_stride);
            _tile_stored(3, lower + 16, 4 * c_stride);
        }
}
#else
template <class T> struct Tiles {
    Tiles() {}
};
#endif

// c (rows, cols) = a (rows, inner) times b, or adds it: `inner` numbers are summed over. Strides are in words. What is
// there of a and c goes on to a multiple of ROWS<T>, of b and c to one of COLS<T>.
template <class T>
void multiply(const word *a, int64_t a_stride, const word *b, int64_t b_stride, float *c, int64_t c_stride,
              int64_t rows, int64_t cols, int64_t inner, bool adds = false) {
    int64_t words = inner / IN_WORD<T>;
#ifdef __AMX_BF16__
    if constexpr (sizeof(T) == 2)
        if (HAS_TILES) return multiply_tiles(a, a_stride, b, b_stride, c, c_stride, rows, cols, words, adds);
#endif
    multiply_vectors<T>(a, a_stride, b, b_stride, c, c_stride, rows, cols, words, adds);
}

// The words of x (rows, cols), both multiples of W, with rows and columns exchanged. As often as W has halves, row i is
// zipped with the one half of W below it: then each is a column.
inline void exchange(const word *x, int64_t x_stride, word *y, int64_t y_stride, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r += W)
        for (int64_t c = 0; c < cols; c += W) {
            ivec lines[W], zipped[W];
#pragma GCC unroll 16
            for (int64_t i = 0; i < W; i++) lines[i] = read<ivec>(x + (r + i) * x_stride + c);
#pragma GCC unroll 4
            for (int64_t n = W; n > 1; n /= 2) {
#pragma GCC unroll 8
                for (int64_t i = 0; i < W / 2; i++) {
                    zipped[2 * i] = zip_first(lines[i], lines[i + W / 2]);
                    zipped[2 * i + 1] = zip_second(lines[i], lines[i + W / 2]);
                }
#pragma GCC unroll 16
                for (int64_t i = 0; i < W; i++) lines[i] = zipped[i];
            }
#pragma GCC unroll 16
            for (int64_t i = 0; i < W; i++) std::memcpy(y + (c + i) * y_stride + r, &lines[i], sizeof(ivec));
        }
}

// Rows of T as words down the columns: a right factor, if rows are what is summed over. Floats are that as they are.
inline const word *pair_rows(const float *x, word *, int64_t, int64_t) { return reinterpret_cast<const word *>(x); }
inline const word *pair_rows(const bf16 *__restrict x, word *__restrict room, int64_t rows, int64_t cols) {
    word *y = room;
    for (int64_t r = 0; r < rows / 2; r++, x += 2 * cols, y += cols)
        for (int64_t c = 0; c < cols; c++) y[c] = uint32_t(x[c].bits) | uint32_t(x[cols + c].bits) << 16;
    return room;
}

} // namespace
