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
// The cdf for positive numbers, without its 0.5, as Taylor polynomials of degree 3 around the middles of 32 segments, for
// bf16: they need half as many instructions as the formula above. The slope takes the polynomial's derivative for the
// pdf. The absolute errors of cdf and slope are 3e-6 and 5e-5; bf16 rounds numbers near 1 by up to 4e-3. Row k has the
// factors of the k-th power. In the last segment, the cdf is 1.
struct GeluSegments {
    static constexpr float WIDTH = 0.15f, MOST = 31.49f * WIDTH;
    alignas(64) float factors[4][32]{};

    GeluSegments() {
        for (int n = 0; n < 31; n++) {
            // exp of a double would need glibc 2.29, but the wheel promises 2.28; exp of a long double needs no new one.
            double x = n * double(WIDTH), pdf = double(std::exp(-0.5L * x * x)) * 0.39894228040143268;
            double powers[] = {0.5 * std::erf(x * 0.70710678118654752), pdf, -x * pdf / 2, (x * x - 1) * pdf / 6};
            for (int k = 0; k < 4; k++) factors[k][n] = float(powers[k]);
        }
        factors[0][31] = 0.5f;
    }
};
const GeluSegments GELU_SEGMENTS;

template <> inline Activation gelu<bf16>(vec v) {
    vec a = (vec)((ivec)v & 0x7fffffff);
    vec x = _mm512_min_ps(all(GeluSegments::MOST), a);  // a NaN stays one: this instruction returns its second operand
    vec shifted = x * (1.0f / GeluSegments::WIDTH) + 12582912.0f;  // rounds as in exp_of
    vec t = x - (shifted - 12582912.0f) * GeluSegments::WIDTH;
    auto factor = [&](int k) {
        const float *row = GELU_SEGMENTS.factors[k];
        return (vec)_mm512_permutex2var_ps(read<vec>(row), (__m512i)shifted, read<vec>(row + W));
    };
    vec third = factor(3), second = third * t + factor(2), first = second * t + factor(1);
    vec cdf = first * t + factor(0), pdf = (third * t + second) * t + first;
    vec slope = x * pdf + cdf;
    return {a * cdf + v * 0.5f, (vec)((ivec)slope ^ ((ivec)v & INT32_MIN)) + 0.5f};
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
