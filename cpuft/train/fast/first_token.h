// The attention half of an encoder layer for the first token of each example alone, see encoder_layer.h: that of the
// last layer of a model of which nothing else is used.
//
// Keys and values are not computed. The score of a query q with the key W x + b of token x is (q W) x + q b, and the
// context of probabilities p is V (sum of p x) + (sum of p) c, where V and c are weight and bias of the values. So the
// weights multiply a few rows for each example instead of all tokens. q b is the same for all keys of a query, so the
// keys' bias changes no probability, and has no gradient.
//
// Sizes of heads are multiples of 32, so that tiles can multiply them. "Few rows" are one for each example, filled up
// to a multiple of 32.

#pragma once

#include "attention.h"
#include "norms.h"

namespace {

// The tensors, in the order in which Python lists them. Those from dy on are used in backward only.
template <class T> struct FirstTokens {
    const T *x;                            // (tokens, hidden)
    const T *packed_weight, *packed_bias;  // (3 hidden, hidden) and (3 hidden,): of queries, keys and values
    const T *weight, *bias;                // of the linear layer after attention
    const float *norm_weight, *norm_bias;
    const float *score_bias;  // what is added to the scores; null: nothing
    const int64_t *places;    // the row of each position of the batch, -1 for padding; null: all positions have rows
    T *first, *query, *context;   // (few rows, hidden): the first tokens, their queries and contexts
    T *folded, *mixed;            // (few rows * heads + 32, hidden): q W, and the sums of p x
    float *probabilities, *mass;  // (batch, heads, length) before dropout, and (batch, heads): the sums of p
    T *sum, *y;                   // (batch, hidden): before and after the norm
    float *mean, *rstd;
    const T *dy;
    T *dx, *dpacked_weight, *dpacked_bias, *dweight, *dbias;
    float *dnorm_weight, *dnorm_bias;
    T *dsum, *dproduct, *dcontext, *dquery;  // as first
    T *dfolded, *dmixed;                     // as folded
    float *dmass;                            // as mass
};

// The working memory of one thread, and products of a head.
template <class T> struct FirstTokenDesk {
    int64_t hidden, size, few, high, twice, length;  // filled up to 32: few rows, heads, twice the heads, and tokens
    Lanes lanes;
    Arrays arrays;
    T *rows, *left, *both;  // `both`: slopes of scores, and below them probabilities
    word *right, *pairs, *turned;
    float *scores, *sums;
    Tiles<T> tiles;

    FirstTokenDesk(const Heads &g, int64_t width)
        : hidden(width), size(g.size), few(filled_up(g.batch, 32)), high(filled_up(g.heads, 32)),
          twice(filled_up(2 * g.heads, 32)), length(filled_up(g.keys, 32)), lanes(length) {
        int64_t most = std::max({few, twice, length, size});
        arrays.make([&](auto take) {
            take(rows, most * hidden), take(left, few * size), take(both, twice * length);
            take(right, most * hidden), take(pairs, std::max(few * size, twice * length));
            take(turned, std::max(few * size, twice * length)), take(scores, high * length);
            take(sums, std::max({few, high, size, int64_t(32)}) * hidden);
        });
    }
    // sums (few, hidden) = x W for the weight of a head, (size, hidden); rows of x are `stride` numbers apart.
    void multiply_by(const T *x, int64_t stride, const T *weight) {
        const word *factor = pair_rows(weight, right, size, hidden);
        multiply<T>(words(x), stride / IN_WORD<T>, factor, hidden, sums, hidden, few, hidden, size);
    }
    // sums (few, size) = x W^T, for `size` rows of a weight.
    void project(const T *x, int64_t stride, const T *weight) {
        int64_t across = hidden / IN_WORD<T>;
        exchange(words(weight), across, right, size, size, across);
        multiply<T>(words(x), stride / IN_WORD<T>, right, size, sums, size, few, size, hidden);
    }
    // The gradient of a head's weight, dy^T x for `count` rows, rounded to `to`, (size, hidden).
    void weight_gradient(const T *dy, int64_t dy_stride, const T *x, int64_t x_stride, int64_t count, T *to) {
        int64_t tall = few / IN_WORD<T>;
        collect(Rows<const T>{dy, dy_stride, nullptr, 0}, 0, count, few, size, size, left);
        exchange(pair_rows(left, pairs, few, size), size, turned, tall, tall, size);
        collect(Rows<const T>{x, x_stride, nullptr, 0}, 0, count, few, hidden, hidden, rows);
        multiply<T>(turned, tall, pair_rows(rows, right, few, hidden), hidden, sums, hidden, size, hidden, few);
        deliver(sums, hidden, Rows<T>{to, hidden, nullptr, 0}, 0, size, hidden);
    }
    // The numbers from `column` to `column + 32` of dy W, for a weight (hidden, hidden): sums (few, 32).
    void multiply_back(const T *dy, const T *weight, int64_t column) {
        for (int64_t k = 0; k < hidden; k += IN_WORD<T>)
            pair_row(weight + k * hidden + column, hidden, right + k / IN_WORD<T> * 32, 32);
        multiply<T>(words(dy), hidden / IN_WORD<T>, right, 32, sums, 32, few, 32, hidden);
    }
    // The tokens of an example, transposed, as the right factor of scores.
    void turn_rows(int64_t tokens) {
        int64_t across = hidden / IN_WORD<T>;
        exchange(words(rows), across, right, tokens, tokens, across);
    }
    // sums (heads, hidden) = p x, for p in rows of `tokens` numbers.
    void mix_rows(const T *p, int64_t tokens) {
        const word *factor = pair_rows(rows, right, tokens, hidden);
        multiply<T>(words(p), tokens / IN_WORD<T>, factor, hidden, sums, hidden, high, hidden, tokens);
    }
};

template <class T>
void first_token_half_forward(const FirstTokens<T> *tensors, int64_t hidden, int64_t batch, int64_t length,
                              int64_t heads, int64_t bias_batch, int64_t bias_head, int64_t bias_query, float factor,
                              float eps, uint64_t score_seed, uint32_t score_threshold, float score_scale,
                              uint64_t seed, uint32_t threshold, float scale, int threads) {
    const FirstTokens<T> &t = *tensors;
    const Heads g = encoder_heads(t, nullptr, batch, heads, 1, length, hidden, hidden, bias_batch, bias_head,
                                  bias_query, factor, score_seed, score_threshold, score_scale);
    const int64_t size = g.size, all_heads = heads * hidden;
#pragma omp parallel num_threads(threads)
    {
        FirstTokenDesk<T> desk(g, hidden);
        float *sums = desk.sums;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < desk.few; n++)
            for (int64_t j = 0; j < hidden; j += W) {
                const T *row = n < batch ? g.key_rows(t.x, n, 0)[0] : nullptr;
                put(t.first + n * hidden + j, row ? get(row + j, W) : vec{}, W);
            }
#pragma omp for schedule(static)
        for (int64_t h = 0; h < heads; h++) {
            const T *weight = t.packed_weight + h * size * hidden;
            desk.project(t.first, hidden, weight);
            for (int64_t n = 0; n < desk.few; n++)
                for (int64_t j = 0; j < size; j += W) {
                    vec q = read<vec>(sums + n * size + j) + get(t.packed_bias + h * size + j, W);
                    put(t.query + n * hidden + h * size + j, n < batch ? q : vec{}, W);
                }
            desk.multiply_by(t.query + h * size, hidden, weight + hidden * hidden);
            deliver(sums, hidden, Rows<T>{t.folded + h * hidden, all_heads, nullptr, 0}, 0, desk.few, hidden);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < batch; n++) {
            int64_t used = Heads::count(g.key_places, n, length), tokens = filled_up(used, 32);
            collect(g.key_rows(t.x, n, 0), 0, used, tokens, hidden, hidden, desk.rows);
            desk.turn_rows(tokens);
            multiply<T>(words(t.folded + n * all_heads), hidden / IN_WORD<T>, desk.right, tokens, desk.scores, tokens,
                        desk.high, tokens, hidden);
            std::fill_n(desk.both, desk.high * tokens, T{});
            for (int64_t h = 0; h < heads; h++) {
                float *s = desk.scores + h * tokens;
                T *d = desk.both + h * tokens;
                float share = exponentials(s, g.bias_of(n, h, 0), nullptr, 0, used, factor);
                const int64_t place = (n * heads + h) * length;
                const uint16_t *bits = score_threshold ? desk.lanes.fill(score_seed, place, used) : nullptr;
                float *p = t.probabilities + place;
                vec total{};
                for (int64_t j = 0; j < used; j += W) {
                    int64_t m = lanes_of(j, used);
                    vec v = read<vec>(s + j) * share;
                    put(p + j, v, m);
                    put(d + j, bits ? keep(v * score_scale, bits + j, score_threshold) : v, m);
                    total += get(d + j, m);
                }
                t.mass[n * heads + h] = sum_of(total);
            }
            desk.mix_rows(desk.both, tokens);
            deliver(sums, hidden, Rows<T>{t.mixed + n * all_heads, hidden, nullptr, 0}, 0, heads, hidden);
        }
#pragma omp for schedule(static)
        for (int64_t h = 0; h < heads; h++) {
            desk.project(t.mixed + h * hidden, all_heads, t.packed_weight + (2 * hidden + h * size) * hidden);
            for (int64_t n = 0; n < batch; n++)
                for (int64_t j = 0; j < size; j += W) {
                    vec shift = get(t.packed_bias + 2 * hidden + h * size + j, W) * t.mass[n * heads + h];
                    put(t.context + n * hidden + h * size + j, read<vec>(sums + n * size + j) + shift, W);
                }
        }
#pragma omp for schedule(static) nowait
        for (int64_t h = 0; h < heads; h++) {
            desk.project(t.context, hidden, t.weight + h * size * hidden);
            deliver(sums, size, Rows<T>{t.y + h * size, hidden, nullptr, 0}, 0, batch, size);
        }
    }
    norm_forward<T>(t.y, t.bias, t.first, t.norm_weight, t.norm_bias, t.sum, t.y, t.mean, t.rstd, batch, hidden, seed,
                    threshold, scale, eps, threads);
}

template <class T>
void first_token_half_backward(const FirstTokens<T> *tensors, int64_t hidden, int64_t batch, int64_t length,
                               int64_t heads, int64_t bias_batch, int64_t bias_head, int64_t bias_query, float factor,
                               float, uint64_t score_seed, uint32_t score_threshold, float score_scale,
                               uint64_t seed, uint32_t threshold, float scale, int threads) {
    const FirstTokens<T> &t = *tensors;
    const Heads g = encoder_heads(t, nullptr, batch, heads, 1, length, hidden, hidden, bias_batch, bias_head,
                                  bias_query, factor, score_seed, score_threshold, score_scale);
    const int64_t size = g.size, all_heads = heads * hidden, square = hidden * hidden;
    std::vector<float> dbias(static_cast<size_t>(hidden));
    T *dproduct = threshold ? t.dproduct : t.dsum;
    norm_backward<T>(t.dy, nullptr, t.sum, t.mean, t.rstd, t.norm_weight, dproduct, t.dsum, t.dnorm_weight,
                     t.dnorm_bias, dbias.data(), batch, hidden, seed, threshold, scale, threads);
    for (int64_t j = 0; j < hidden; j++) store(t.dbias[j], dbias[size_t(j)]);
#pragma omp parallel num_threads(threads)
    {
        FirstTokenDesk<T> desk(g, hidden);
        float *sums = desk.sums;
        // The bias of a head: the sum of the rows of its outputs' gradient, times `factors` unless that is null.
        auto sum_rows = [&](const T *dy, const float *factors, T *to) {
            for (int64_t j = 0; j < size; j += W) {
                vec sum{};
                for (int64_t n = 0; n < batch; n++)
                    sum += get(dy + n * hidden + j, W) * (factors ? factors[n * heads] : 1.0f);
                put(to + j, sum, W);
            }
        };
#pragma omp for schedule(static)
        for (int64_t column = 0; column < hidden; column += 32) {
            desk.multiply_back(dproduct, t.weight, column);
            deliver(sums, 32, Rows<T>{t.dcontext + column, hidden, nullptr, 0}, 0, batch, 32);
        }
#pragma omp for schedule(static)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t column = h * size;
            desk.weight_gradient(dproduct + column, hidden, t.context, hidden, batch, t.dweight + column * hidden);
            const T *grad = t.dcontext + column, *value_weight = t.packed_weight + 2 * square + column * hidden;
            collect(Rows<const T>{grad, hidden, nullptr, 0}, 0, batch, desk.few, size, size, desk.left);
            desk.multiply_by(desk.left, size, value_weight);
            deliver(sums, hidden, Rows<T>{t.dmixed + h * hidden, all_heads, nullptr, 0}, 0, desk.few, hidden);
            desk.weight_gradient(grad, hidden, t.mixed + h * hidden, all_heads, batch,
                                 t.dpacked_weight + 2 * square + column * hidden);
            sum_rows(grad, t.mass + h, t.dpacked_bias + 2 * hidden + column);
            for (int64_t n = 0; n < batch; n++) {
                vec sum{};
                for (int64_t j = 0; j < size; j += W)
                    sum += get(grad + n * hidden + j, W) * get(t.packed_bias + 2 * hidden + column + j, W);
                t.dmass[n * heads + h] = sum_of(sum);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < batch; n++) {
            int64_t used = Heads::count(g.key_places, n, length), tokens = filled_up(used, 32);
            collect(g.key_rows(t.x, n, 0), 0, used, tokens, hidden, hidden, desk.rows);
            desk.turn_rows(tokens);
            multiply<T>(words(t.dmixed + n * all_heads), hidden / IN_WORD<T>, desk.right, tokens, desk.scores, tokens,
                        desk.high, tokens, hidden);
            T *slopes = desk.both, *dropped = slopes + heads * tokens;
            std::fill_n(desk.both, desk.twice * tokens, T{});
            for (int64_t h = 0; h < heads; h++) {
                float *wanted = desk.scores + h * tokens;
                const float mass = t.dmass[n * heads + h];
                const int64_t place = (n * heads + h) * length;
                const uint16_t *bits = score_threshold ? desk.lanes.fill(score_seed, place, used) : nullptr;
                const float *p = t.probabilities + place;
                auto kept = [&](vec x, int64_t j) {
                    return bits ? keep(x * score_scale, bits + j, score_threshold) : x;
                };
                vec total{};
                for (int64_t j = 0; j < used; j += W)
                    total += get(p + j, lanes_of(j, used)) * kept(read<vec>(wanted + j) + mass, j);
                float mean = sum_of(total);
                for (int64_t j = 0; j < used; j += W) {
                    int64_t m = lanes_of(j, used);
                    vec v = get(p + j, m), slope = v * (kept(read<vec>(wanted + j) + mass, j) - mean) * factor;
                    put(slopes + h * tokens + j, slope, m);
                    put(dropped + h * tokens + j, kept(v, j), m);
                }
            }
            desk.mix_rows(slopes, tokens);
            deliver(sums, hidden, Rows<T>{t.dfolded + n * all_heads, hidden, nullptr, 0}, 0, heads, hidden);
            // dx = slopes^T (q W) + dropped^T dmixed, as one product.
            const int64_t tall = desk.twice / IN_WORD<T>;
            Rows<const T> folded{t.folded + n * all_heads, hidden, nullptr, 0};
            Rows<const T> mixed{t.dmixed + n * all_heads, hidden, nullptr, 0};
            collect(folded, 0, heads, heads, hidden, hidden, desk.rows);
            collect(mixed, 0, heads, desk.twice - heads, hidden, hidden, desk.rows + all_heads);
            const word *factors = pair_rows(desk.rows, desk.right, desk.twice, hidden);
            exchange(pair_rows(slopes, desk.pairs, desk.twice, tokens), tokens, desk.turned, tall, tall, tokens);
            for (int64_t from = 0; from < used; from += 32) {
                multiply<T>(desk.turned + from * tall, tall, factors, hidden, sums, hidden, 32, hidden, desk.twice);
                deliver(sums, hidden, g.key_rows(t.dx, n, 0), from, std::min<int64_t>(32, used - from), hidden);
            }
        }
#pragma omp for schedule(static)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t column = h * size;
            desk.project(t.dfolded + h * hidden, all_heads, t.packed_weight + square + column * hidden);
            for (int64_t n = 0; n < desk.few; n++)
                for (int64_t j = 0; j < size; j += W)
                    put(t.dquery + n * hidden + column + j, n < batch ? read<vec>(sums + n * size + j) : vec{}, W);
            desk.weight_gradient(t.query + column, hidden, t.dfolded + h * hidden, all_heads, batch,
                                 t.dpacked_weight + square + column * hidden);
            desk.weight_gradient(t.dquery + column, hidden, t.first, hidden, batch, t.dpacked_weight + column * hidden);
            sum_rows(t.dquery + column, nullptr, t.dpacked_bias + column);
            for (int64_t j = 0; j < size; j += W) put(t.dpacked_bias + hidden + column + j, vec{}, W);
        }
        // What the first tokens get as queries and by the residual connection.
#pragma omp for schedule(static) nowait
        for (int64_t column = 0; column < hidden; column += 32) {
            desk.multiply_back(t.dquery, t.packed_weight, column);
            for (int64_t n = 0; n < batch; n++)
                for (int64_t j = 0; j < 32; j += W) {
                    T *to = g.key_rows(t.dx, n, 0)[0] + column + j;
                    vec residual = get(t.dsum + n * hidden + column + j, W);
                    put(to, get(to, W) + read<vec>(sums + n * 32 + j) + residual, W);
                }
        }
    }
}

} // namespace
