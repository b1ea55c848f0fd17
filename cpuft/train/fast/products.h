// Products of small matrices that are in the cache. A call of a library for each would cost more than the product.
//
// Along the dimension that is summed over, sizes are counted in words of 32 bits: one float, or two adjacent bf16. In
// the left factor, the words of a row are contiguous; in the right factor, the words of all columns for the same index
// are.

#pragma once

#include "../../vectors.h"
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Floats and pairs of bf16 are read as words.
typedef uint32_t word __attribute__((may_alias));

// A float in factors whose product has the same bits on all CPUs.
struct Fused {
    float value;
};

template <class T> constexpr int64_t IN_WORD = 4 / int64_t(sizeof(T));
// Number of rows of sums, each of two vectors, that fit into registers.
#ifdef __aarch64__
constexpr int64_t HIGH = 8;
#else
constexpr int64_t HIGH = W / 2;
#endif
// Rows and columns of factors are padded with zeros to multiples of these; with AMX to two tiles in each direction.
#ifdef __AMX_BF16__
template <class T> constexpr int64_t ROWS = sizeof(T) == 2 ? 32 : HIGH;
template <class T> constexpr int64_t COLS = sizeof(T) == 2 ? 32 : W;
#else
template <class T> constexpr int64_t ROWS = HIGH;
template <class T> constexpr int64_t COLS = W > HIGH ? W : HIGH;
#endif
static_assert(COLS<float> % ROWS<float> == 0, "the columns of one product are the rows of another one");
inline int64_t filled_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// sums + left * right, where left is one word and right a vector of words.
template <class T> inline vec add_product(vec sums, uint32_t left, uvec right);
template <> inline vec add_product<float>(vec sums, uint32_t left, uvec right) {
    return sums + as_float(left) * (vec)right;
}
template <> inline vec add_product<Fused>(vec sums, uint32_t left, uvec right) {
    return fused(all(as_float(left)), (vec)right, sums);
}
template <> inline vec add_product<bf16>(vec sums, uint32_t left, uvec right) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(int(left)), (__m512bh)right);
#else
    sums += as_float(left << 16) * (vec)(right << 16);
    return sums + as_float(left & 0xffff0000u) * (vec)(right & 0xffff0000u);
#endif
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
inline vec first_halves(vec x, vec y) { return vcombine_f32(vget_low_f32(x), vget_low_f32(y)); }
inline vec second_halves(vec x, vec y) { return vcombine_f32(vget_high_f32(x), vget_high_f32(y)); }

// multiply_block for bf16 with BFMMLA, which makes twice as many products as BFDOT: of two words of two rows, and of two
// columns. A vector of sums has two columns of two rows. The number of words is even.
template <int64_t N>
inline void multiply_pairs(const word *a, int64_t a_stride, const word *b, int64_t b_stride, float *c,
                           int64_t c_stride, int64_t words, bool adds) {
    vec sums[HIGH / 2][2 * N]{};
#pragma GCC unroll 4
    for (int64_t r = 0; r < HIGH / 2; r++)
#pragma GCC unroll 2
        for (int64_t n = 0; n < N; n++)
            if (adds) {
                vec upper = read<vec>(c + 2 * r * c_stride + n * W), lower = read<vec>(c + (2 * r + 1) * c_stride + n * W);
                sums[r][2 * n] = first_halves(upper, lower);
                sums[r][2 * n + 1] = second_halves(upper, lower);
            }
    for (int64_t k = 0; k < words; k += 2) {
        bfloat16x8_t right[2 * N];
#pragma GCC unroll 2
        for (int64_t n = 0; n < N; n++) {
            uvec first = read<uvec>(b + k * b_stride + n * W), second = read<uvec>(b + (k + 1) * b_stride + n * W);
            right[2 * n] = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
            right[2 * n + 1] = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
        }
#pragma GCC unroll 4
        for (int64_t r = 0; r < HIGH / 2; r++) {
            const word *upper = a + 2 * r * a_stride + k, *lower = upper + a_stride;
            auto left = vreinterpretq_bf16_u32(vcombine_u32(vld1_u32(upper), vld1_u32(lower)));
#pragma GCC unroll 4
            for (int64_t n = 0; n < 2 * N; n++) sums[r][n] = vbfmmlaq_f32(sums[r][n], left, right[n]);
        }
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < HIGH / 2; r++)
#pragma GCC unroll 2
        for (int64_t n = 0; n < N; n++) {
            float *upper = c + 2 * r * c_stride + n * W;
            vst1q_f32(upper, first_halves(sums[r][2 * n], sums[r][2 * n + 1]));
            vst1q_f32(upper + c_stride, second_halves(sums[r][2 * n], sums[r][2 * n + 1]));
        }
}
#endif

// c (HIGH rows of N vectors) = a b, or c += a b if `adds`.
template <class T, int64_t N>
inline void multiply_block(const word *a, int64_t a_stride, const word *b, int64_t b_stride, float *c,
                           int64_t c_stride, int64_t words, bool adds) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    if constexpr (sizeof(T) == 2) return multiply_pairs<N>(a, a_stride, b, b_stride, c, c_stride, words, adds);
#endif
    vec sums[HIGH][N]{};
#pragma GCC unroll 8
    for (int64_t r = 0; r < HIGH; r++)
#pragma GCC unroll 2
        for (int64_t n = 0; n < N; n++)
            if (adds) sums[r][n] = read<vec>(c + r * c_stride + n * W);
    for (int64_t k = 0; k < words; k++) {
        uvec right[N];
#pragma GCC unroll 2
        for (int64_t n = 0; n < N; n++) {
            right[n] = read<uvec>(b + k * b_stride + n * W);
#if defined(__AVX2__) && !defined(__AVX512BW__)
            asm("" : "+x"(right[n]));  // GCC would read it again for each product, which takes longer than the products
#endif
        }
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
// Whether Linux lets this process use tiles, which it must request: ARCH_REQ_XCOMP_PERM for XTILEDATA, with the numbers
// in Documentation/arch/x86/xstate.rst.
const bool HAS_TILES = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// The configuration for ldtilecfg: palette 1; from byte 16 on, the bytes of a row of each of eight tiles (16 bits
// each); from byte 48 on, their numbers of rows. It is a constant because GCC 12 believes that ldtilecfg reads only 8
// bytes.
alignas(64) const uint8_t SHAPES[64] = {1,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 64, 0, 64, 0, 64, 0,
                                        64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,
                                        0,  0, 0,  0, 16, 16, 16, 16, 16, 16, 16, 16};

// Configures the tiles while it exists, and then restores the configuration of another library, such as oneDNN.
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

// `rows` and `cols` are multiples of 32, `words` of 16.
inline void multiply_tiles(const word *a, int64_t a_stride, const word *b, int64_t b_stride, float *c,
                           int64_t c_stride, int64_t rows, int64_t cols, int64_t words, bool adds) {
    asm volatile("" ::: "memory");  // GCC does not know that tile loads read memory: let it write a and b before them
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

// c (rows, cols) = a (rows, inner) b (inner, cols), or c += a b if `adds`. Strides are in words. The memory of a and c
// must extend to a multiple of ROWS<T> rows, that of b and c to a multiple of COLS<T> columns. `inner` is a multiple of
// 4 for bf16.
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

// y = x transposed, in words; rows and cols are multiples of W. A block of W rows is transposed by interleaving row i
// with row i + W / 2, log2(W) times.
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

// A row of words of a right factor whose rows are summed over: of two rows of x, `stride` apart, for bf16; floats as
// they are.
inline void pair_row(const float *x, int64_t, word *y, int64_t cols) { std::memcpy(y, x, size_t(cols) * sizeof(word)); }
inline void pair_row(const bf16 *__restrict x, int64_t stride, word *__restrict y, int64_t cols) {
    for (int64_t c = 0; c < cols; c++) y[c] = uint32_t(x[c].bits) | uint32_t(x[stride + c].bits) << 16;
}

// x as such a right factor: for bf16 in `room`; floats where they are.
inline const word *pair_rows(const float *x, word *, int64_t, int64_t) { return reinterpret_cast<const word *>(x); }
inline const word *pair_rows(const bf16 *x, word *room, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows / 2; r++) pair_row(x + 2 * r * cols, cols, room + r * cols, cols);
    return room;
}

} // namespace
