// Activations of vectors of floats, and their slopes. `T` is the type to which the caller rounds them.

#pragma once

#include "../../vectors.h"

namespace {

// An activation and its slope at the same place.
struct Activation {
    vec value, slope;
};

// GELU, v cdf(v), where cdf is that of the standard normal distribution, by Abramowitz and Stegun 7.1.26 (absolute
// error 1.5e-7). The cdf and the slope, cdf(v) + v pdf(v), need the same exponential.
template <class T> inline Activation gelu(vec v) {
    vec a = v < 0.0f ? -v : v;
    a = a > 30.0f ? all(30.0f) : a;
    vec bell = exp_of(v * v * -0.5f);
    vec t = inverse(a * (0.3275911f * 0.70710678118654752f) + 1.0f);
    vec tail = t * 1.061405429f - 1.453152027f;
    tail = tail * t + 1.421413741f;
    tail = tail * t - 0.284496736f;
    tail = tail * t + 0.254829592f;
    tail = tail * t * bell * 0.5f;
    vec cdf = v < 0.0f ? tail : 1.0f - tail;
    return {v * cdf, v * bell * 0.39894228040143268f + cdf};
}

#ifdef __AVX512BW__
// The cdf and GELU's slope as Taylor polynomials of degree 3 around the middles of 32 segments, for bf16: they need
// half as many instructions as the formula above. Their absolute errors are 1e-5 and 5e-5; bf16 rounds numbers near 1 by
// up to 4e-3. Row k has the factors of the k-th power; that of middle n * WIDTH is at n modulo 32, for n from -16 to 15.
struct GeluSegments {
    static constexpr float WIDTH = 0.28f, LEAST = -16.49f * WIDTH, MOST = 15.49f * WIDTH;
    alignas(64) float cdf[4][32], slope[4][32];

    GeluSegments() {
        for (int n = -16; n < 16; n++) {
            // exp of a double would need glibc 2.29, but the wheel promises 2.28; exp of a long double needs no new one.
            double x = n * double(WIDTH), pdf = double(std::exp(-0.5L * x * x)) * 0.39894228040143268;
            double middle = 0.5 * std::erfc(-x * 0.70710678118654752);
            double of_cdf[] = {middle, pdf, -x * pdf / 2, (x * x - 1) * pdf / 6};
            double of_slope[] = {middle + x * pdf, (2 - x * x) * pdf, (x * x - 4) * x * pdf / 2,
                                 (x * x * (7 - x * x) - 4) * pdf / 6};
            for (int k = 0; k < 4; k++) {
                cdf[k][n & 31] = float(of_cdf[k]);
                slope[k][n & 31] = float(of_slope[k]);
            }
        }
    }
};
const GeluSegments GELU_SEGMENTS;

inline vec cubic(const float (&factors)[4][32], ivec segment, vec t) {
    vec sum{};
#pragma GCC unroll 4
    for (int k = 3; k >= 0; k--)
        sum = sum * t + (vec)_mm512_permutex2var_ps(read<vec>(factors[k]), (__m512i)segment, read<vec>(factors[k] + W));
    return sum;
}

template <> inline Activation gelu<bf16>(vec v) {
    // A NaN stays one, because these instructions return their second operand then.
    vec x = _mm512_min_ps(all(GeluSegments::MOST), _mm512_max_ps(all(GeluSegments::LEAST), v));
    vec shifted = x * (1.0f / GeluSegments::WIDTH) + 12582912.0f;  // rounds as in exp_of
    vec t = x - (shifted - 12582912.0f) * GeluSegments::WIDTH;
    vec cdf = cubic(GELU_SEGMENTS.cdf, (ivec)shifted, t), slope = cubic(GELU_SEGMENTS.slope, (ivec)shifted, t);
    __mmask16 is_zero = _mm512_cmp_ps_mask(v, all(GeluSegments::LEAST), _CMP_LT_OQ);
    return {v * _mm512_mask_mov_ps(cdf, is_zero, vec{}), _mm512_mask_mov_ps(slope, is_zero, vec{})};
}
#endif

// `Gate` numbers the activations of gated units as the Python caller does.
enum Gate : int64_t { SILU, GELU, GELU_TANH };

inline vec sigmoid(vec x) { return inverse(exp_of(-x) + 1.0f); }

template <Gate gate, class T> inline Activation activate(vec x) {
    if constexpr (gate == GELU) return gelu<T>(x);
    // x * sigmoid(u), where u is x, or 2 sqrt(2 / pi) (x + 0.044715 x^3): 0.5 (1 + tanh(v)) is sigmoid(2 v). Beyond 30,
    // where the sigmoid is 0 or 1 as a float, the cube could overflow.
    vec u = x, du = all(1.0f);
    if constexpr (gate == GELU_TANH) {
        vec a = x > 30.0f ? all(30.0f) : (x < -30.0f ? all(-30.0f) : x);
        u = a * (a * a * 0.0713548162726f + 1.5957691216057f);
        du = a * a * 0.2140644488179f + 1.5957691216057f;
    }
    vec s = sigmoid(u);
    return {x * s, s + x * s * (1.0f - s) * du};
}

} // namespace
