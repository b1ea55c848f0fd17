// Both halves of an encoder layer whose norms come last, such as BERT's, with one function for forward and one for
// backward, so that no Python runs between the kernels:
//
//   attention half:     y = norm(x + dropout(attention(x P^T + packed bias) W^T + bias))
//   feed-forward half:  y = norm(x + dropout(gelu(x V^T + inner bias) W^T + bias))
//
// P has the weights of query, key and value. Matrices are (tokens, columns) or, for weights, (outputs, inputs). The
// functions work for bf16 where matrix_product does. `layers.py` runs the same pieces one by one.

#pragma once

#include "attention.h"
#include "norms.h"
#include "large_products.h"

namespace {

// The tensors of an attention half, in the order in which Python lists them. Those from dy on are used in backward
// only. dx may be null, if it is not wanted.
template <class T> struct AttentionHalf {
    const T *x, *packed_weight, *packed_bias, *weight, *bias;
    const float *norm_weight, *norm_bias;
    const float *score_bias;  // what is added to the scores; null: nothing
    const int64_t *places;    // the row of each position of the batch, -1 for padding; null: all positions have rows
    T *packed, *context, *sum, *y;
    float *mean, *rstd;
    const T *dy;
    T *dx, *dpacked_weight, *dpacked_bias, *dweight, *dbias;
    float *dnorm_weight, *dnorm_bias;
    T *dsum, *dproduct, *dcontext, *dpacked;
};

// The tensors of a feed-forward half, in the same way. `slope` is the derivative of the GELU, and `dbefore` the
// gradient of its input.
template <class T> struct FeedForwardHalf {
    const T *x, *inner_weight, *inner_bias, *weight, *bias;
    const float *norm_weight, *norm_bias;
    T *inner, *slope, *sum, *y;
    float *mean, *rstd;
    const T *dy;
    T *dx, *dinner_weight, *dinner_bias, *dweight, *dbias;
    float *dnorm_weight, *dnorm_bias;
    T *dsum, *dproduct, *dbefore;
};

// Products of `matrix_product`; `all_done` becomes false if one of them could not be computed.
template <class T> struct Products {
    int threads;
    bool all_done = true;

    void note(int64_t done) { all_done = all_done && done; }
    // y = x W^T + bias; bias may be null.
    void forward(const T *x, const T *weight, const T *bias, T *y, int64_t rows, int64_t cols, int64_t inner) {
        int64_t done;
        matrix_product<T>(x, weight, bias, nullptr, nullptr, nullptr, nullptr, y, &done, rows, cols, inner, 0, 1, 0,
                          threads);
        note(done);
    }
    // y = gelu(x W^T + bias), and its slope.
    void forward_gelu(const T *x, const T *weight, const T *bias, T *y, T *slope, int64_t rows, int64_t cols,
                      int64_t inner) {
        int64_t done;
        matrix_product<T>(x, weight, bias, nullptr, nullptr, nullptr, slope, y, &done, rows, cols, inner, 0, 1, 1,
                          threads);
        note(done);
    }
    // dx = dy W + addend, or dx = (dy W) * factor with its column sums; addend, factor and sums may be null.
    void backward(const T *dy, const T *weight, const T *addend, const T *factor, float *sums, T *dx, int64_t rows,
                  int64_t cols, int64_t inner) {
        int64_t done;
        matrix_product<T>(dy, weight, nullptr, factor, addend, sums, nullptr, dx, &done, rows, cols, inner, 0, 0, 0,
                          threads);
        note(done);
    }
    // dW = dy^T x for `tokens` rows.
    void weight(const T *dy, const T *x, T *dweight, int64_t rows, int64_t cols, int64_t tokens) {
        int64_t done;
        matrix_product<T>(dy, x, nullptr, nullptr, nullptr, nullptr, nullptr, dweight, &done, rows, cols, tokens, 1, 0,
                          0, threads);
        note(done);
    }
};

template <class T> void round_all(const std::vector<float> &from, T *to) {
    for (size_t i = 0; i < from.size(); i++) store(to[i], from[i]);
}

// *done is 1 if the half has been computed, see matrix_product. bias_batch, bias_head and bias_query are the
// strides of `score_bias`.
template <class T>
void attention_half_forward(const AttentionHalf<T> *half, int64_t *done, int64_t tokens, int64_t hidden, int64_t batch,
                            int64_t length, int64_t heads, int64_t bias_batch, int64_t bias_head, int64_t bias_query,
                            float factor, float eps, uint64_t score_seed, uint32_t score_threshold, float score_scale,
                            uint64_t seed, uint32_t threshold, float scale, int threads) {
    const AttentionHalf<T> &t = *half;
    const Heads g = encoder_heads(t, t.places, batch, heads, length, length, hidden, 3 * hidden, bias_batch, bias_head,
                                  bias_query, factor, score_seed, score_threshold, score_scale);
    Products<T> products{threads};
    products.forward(t.x, t.packed_weight, t.packed_bias, t.packed, tokens, 3 * hidden, hidden);
    attend<T>(g, t.packed, t.packed + hidden, t.packed + 2 * hidden, t.context, threads);
    products.forward(t.context, t.weight, nullptr, t.y, tokens, hidden, hidden);
    norm_forward<T>(t.y, t.bias, t.x, t.norm_weight, t.norm_bias, t.sum, t.y, t.mean, t.rstd, tokens, hidden, seed,
                    threshold, scale, eps, threads);
    *done = products.all_done;
}

template <class T>
void attention_half_backward(const AttentionHalf<T> *half, int64_t *done, int64_t tokens, int64_t hidden,
                             int64_t batch, int64_t length, int64_t heads, int64_t bias_batch, int64_t bias_head,
                             int64_t bias_query, float factor, float, uint64_t score_seed, uint32_t score_threshold,
                             float score_scale, uint64_t seed, uint32_t threshold, float scale, int threads) {
    const AttentionHalf<T> &t = *half;
    const Heads g = encoder_heads(t, t.places, batch, heads, length, length, hidden, 3 * hidden, bias_batch, bias_head,
                                  bias_query, factor, score_seed, score_threshold, score_scale);
    Products<T> products{threads};
    std::vector<float> dbias(static_cast<size_t>(hidden)), dpacked_bias(static_cast<size_t>(3 * hidden));
    T *dproduct = threshold ? t.dproduct : t.dsum;
    norm_backward<T>(t.dy, nullptr, t.sum, t.mean, t.rstd, t.norm_weight, dproduct, t.dsum, t.dnorm_weight,
                     t.dnorm_bias, dbias.data(), tokens, hidden, seed, threshold, scale, threads);
    products.weight(dproduct, t.context, t.dweight, hidden, hidden, tokens);
    products.backward(dproduct, t.weight, nullptr, nullptr, nullptr, t.dcontext, tokens, hidden, hidden);
    bool has_sums =
        attend_backward<T>(g, t.packed, t.packed + hidden, t.packed + 2 * hidden, t.dcontext, t.dpacked,
                           t.dpacked + hidden, t.dpacked + 2 * hidden, nullptr, dpacked_bias.data(), threads);
    products.weight(t.dpacked, t.x, t.dpacked_weight, 3 * hidden, hidden, tokens);
    if (!has_sums) column_sums<T>(t.dpacked, dpacked_bias.data(), tokens, 3 * hidden, threads);
    if (t.dx)
        products.backward(t.dpacked, t.packed_weight, t.dsum, nullptr, nullptr, t.dx, tokens, hidden, 3 * hidden);
    round_all(dbias, t.dbias);
    round_all(dpacked_bias, t.dpacked_bias);
    *done = products.all_done;
}

// `inner_size` is the number of columns after the first product.
template <class T>
void feed_forward_half_forward(const FeedForwardHalf<T> *half, int64_t *done, int64_t tokens, int64_t hidden,
                               int64_t inner_size, float eps, uint64_t seed, uint32_t threshold, float scale,
                               int threads) {
    const FeedForwardHalf<T> &t = *half;
    Products<T> products{threads};
    products.forward_gelu(t.x, t.inner_weight, t.inner_bias, t.inner, t.slope, tokens, inner_size, hidden);
    products.forward(t.inner, t.weight, nullptr, t.y, tokens, hidden, inner_size);
    norm_forward<T>(t.y, t.bias, t.x, t.norm_weight, t.norm_bias, t.sum, t.y, t.mean, t.rstd, tokens, hidden, seed,
                    threshold, scale, eps, threads);
    *done = products.all_done;
}

template <class T>
void feed_forward_half_backward(const FeedForwardHalf<T> *half, int64_t *done, int64_t tokens, int64_t hidden,
                                int64_t inner_size, float, uint64_t seed, uint32_t threshold, float scale,
                                int threads) {
    const FeedForwardHalf<T> &t = *half;
    Products<T> products{threads};
    std::vector<float> dbias(static_cast<size_t>(hidden)), dinner_bias(static_cast<size_t>(inner_size));
    T *dproduct = threshold ? t.dproduct : t.dsum;
    norm_backward<T>(t.dy, nullptr, t.sum, t.mean, t.rstd, t.norm_weight, dproduct, t.dsum, t.dnorm_weight,
                     t.dnorm_bias, dbias.data(), tokens, hidden, seed, threshold, scale, threads);
    products.weight(dproduct, t.inner, t.dweight, hidden, inner_size, tokens);
    products.backward(dproduct, t.weight, nullptr, t.slope, dinner_bias.data(), t.dbefore, tokens, inner_size, hidden);
    products.weight(t.dbefore, t.x, t.dinner_weight, inner_size, hidden, tokens);
    if (t.dx)
        products.backward(t.dbefore, t.inner_weight, t.dsum, nullptr, nullptr, t.dx, tokens, hidden, inner_size);
    round_all(dbias, t.dbias);
    round_all(dinner_bias, t.dinner_bias);
    *done = products.all_done;
}

} // namespace
