// Softmax attention with dropout on the probabilities, one head at a time, with both products. The kernel reads rows of
// queries, keys and values and writes rows of the context; scores never leave the cache. Backward recomputes them.
//
// Several query heads may share a head of keys and values. A query may be limited to a window of keys around its own
// position; then only the keys that a block of queries sees are multiplied, and an example is processed in parts, so
// that cost and memory grow with the window.

#pragma once

#include "whole_heads.h"
#include "heads.h"
#include "../../vectors.h"
#include <algorithm>
#include <cmath>
#include <omp.h>

namespace {

// The working memory of one thread: blocks that are aligned to cache lines and stay in the cache. All is zero at first,
// also the sums of gradients.
template <class T> struct Desk {
    int64_t length, most, width;  // the largest padded numbers of keys of a part and of a block; the padded head size
    Lanes lanes;
    Arrays arrays;
    T *rows, *queries, *grads, *dropped, *slopes;
    word *keys, *values, *paired, *turned, *pairs;
    float *scores, *wanted, *sums, *key_sums, *value_sums;
    Tiles<T> tiles;

    explicit Desk(const Heads &g)
        : length(length_of<T>(g.most_seen(g.part(), COLS<T>))), most(length_of<T>(g.most_seen(TALL, COLS<T>))),
          width(width_of<T>(g.size)), lanes(most) {
        int64_t tall = TALL * width, block = TALL * most, whole = length * width;
        arrays.make([&](auto take) {
            take(rows, whole), take(queries, tall), take(grads, tall), take(dropped, block), take(slopes, block);
            take(keys, whole), take(values, whole), take(paired, whole), take(turned, tall);
            take(pairs, std::max(tall, block)), take(scores, block), take(wanted, block), take(sums, tall);
            take(key_sums, whole), take(value_sums, whole);
        });
    }
};

// Replaces the scores s[begin] to s[end - 1] by their exponentials, and fills the vectors with zeros in which these
// are. Returns the factor that makes them the softmax. Either bias may be null.
inline float exponentials(float *s, const float *bias, const float *position_bias, int64_t begin, int64_t end,
                          float factor) {
    vec tops = all(-INFINITY), totals{};
    int64_t start = begin / W * W;
    for (int64_t j = start; j < end; j += W) {
        int64_t m = lanes_of(j, end);
        vec v = read<vec>(s + j) * factor;
        if (bias) v += get(bias + j, m);
        if (position_bias) v += get(position_bias + j, m);
        v = LANE < int32_t(m) ? v : all(-INFINITY);
        if (j < begin) v = LANE < int32_t(begin - j) ? all(-INFINITY) : v;
        put(s + j, v, W);
        tops = v > tops ? v : tops;
    }
    float top = most_of(tops);
    // exp_of returns at least exp(-87), which is 1e-38, but the probability of a masked key must be exactly 0.
    for (int64_t j = start; j < end; j += W) {
        vec v = read<vec>(s + j) - top;
        v = v < -87.0f ? vec{} : exp_of(v);
        put(s + j, v, W);
        totals += v;
    }
    return 1.0f / sum_of(totals);
}

// A block of queries, or a larger part of an example, and the keys that it sees.
struct Block {
    int64_t first, count, low, end;  // the queries, and the keys, of which the first is a multiple of COLS<T>
    int64_t high, length;            // the numbers of queries and of keys, padded for products
};

template <class T> Block block_of(const Heads &g, int64_t first, int64_t count, int64_t used) {
    Range seen = g.seen_by(first, count, used);
    int64_t low = std::min(seen.low, seen.end) / COLS<T> * COLS<T>;
    return {first, count, low, seen.end, filled_up(count, ROWS<T>), length_of<T>(seen.end - low)};
}

// Computes the probabilities of a block of queries in `scores`, and after dropout in `dropped`. Their rows begin with
// key b.low. Both are zero for keys that a query does not see, and padded with zeros. `keys` begins with that key, too.
template <class T>
void look(const Heads &g, Desk<T> &desk, int64_t n, int64_t h, const Block &b, const word *keys, int64_t stride,
          int64_t used) {
    int64_t length = b.length, low = b.low, width = width_of<T>(g.size);
    multiply<T>(words(desk.queries), width / IN_WORD<T>, keys, stride, desk.scores, length, b.high, length, width);
    for (int64_t t = 0; t < b.high; t++) {
        float *s = desk.scores + t * length;
        T *d = desk.dropped + t * length;
        int64_t q = b.first + t;
        Range mine = g.seen_by(q, 1, used);
        int64_t begin = mine.low - low, end = t < b.count && mine.low < mine.end ? mine.end - low : 0;
        const float *bias = g.bias_of(n, h, q), *position_bias = g.position_bias_of(h, q);
        if (bias) bias += low;
        if (position_bias) position_bias += low;
        float share = end ? exponentials(s, bias, position_bias, begin, end, g.factor) : 0.0f;
        int64_t place = ((n * g.heads + h) * g.queries + q) * g.keys + low;
        const uint16_t *bits = end && g.threshold ? desk.lanes.fill(g.seed, place, end) : nullptr;
        for (int64_t j = 0; j < length; j += W) {
            bool is_seen = j < end && j + W > begin;
            vec v = is_seen ? read<vec>(s + j) * share : vec{};
            put(s + j, v, W);
            put(d + j, bits && is_seen ? keep(v * g.scale, bits + j, g.threshold) : v, W);
        }
    }
}

// q, k and v point to the first row of the first head. Rows of the context have the stride heads * size.
template <class T>
void attend(const Heads &g, const T *q, const T *k, const T *v, T *context, int threads) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == 2)
        if (fits_whole_heads(g)) return attend_whole_heads(g, q, k, v, context, threads);
#endif
    int64_t width = width_of<T>(g.size), across = width / IN_WORD<T>;
#pragma omp parallel num_threads(threads)
    {
        Desk<T> desk(g);
        const word *values = nullptr;
        int64_t there = -1;  // which keys and values are on the desk: often, a thread takes the heads of a group in a row
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t n = 0; n < g.batch; n++)
            for (int64_t h = 0; h < g.heads; h++) {
                int64_t used = Heads::count(g.key_places, n, g.keys);
                int64_t asked = Heads::count(g.query_places, n, g.queries);
                int64_t shared = h / g.group();
                for (int64_t from = 0; from < asked; from += g.part()) {
                    Block p = block_of<T>(g, from, std::min(g.part(), asked - from), used);
                    int64_t these = (n * g.key_heads + shared) * g.queries + from;
                    if (there != these) {
                        collect(g.key_rows(k, n, shared), p.low, p.end - p.low, p.length, g.size, width, desk.rows);
                        exchange(words(desk.rows), across, desk.keys, p.length, p.length, across);
                        collect(g.key_rows(v, n, shared), p.low, p.end - p.low, p.length, g.size, width, desk.rows);
                        values = pair_rows(desk.rows, desk.values, p.length, width);
                        there = these;
                    }
                    for (int64_t first = from; first < from + p.count; first += TALL) {
                        Block b = block_of<T>(g, first, std::min(TALL, from + p.count - first), used);
                        int64_t at = b.low - p.low;
                        collect(g.query_rows(q, g.query_stride, n, h), first, b.count, TALL, g.size, width,
                                desk.queries);
                        look(g, desk, n, h, b, desk.keys + at, p.length, used);
                        multiply<T>(words(desk.dropped), b.length / IN_WORD<T>, values + at / IN_WORD<T> * width,
                                    width, desk.sums, width, b.high, width, b.length);
                        deliver(desk.sums, width, g.query_rows(context, g.heads * g.size, n, h), first, b.count,
                                g.size);
                    }
                }
            }
    }
}

// Computes the gradient of the unscaled scores, in `slopes`, from that of the probabilities after dropout, in `wanted`.
// sum(probs * dprobs) = sum(dropped * ddropped), and where `dropped` is zero, the probability was dropped or is zero.
// Adds that of the scores to `position_grad`, the gradient of each distance's bias, unless it is null.
template <class T>
void slope(const Heads &g, Desk<T> &desk, const Block &b, float *position_grad) {
    int64_t length = b.length, used = b.end - b.low;
    for (int64_t t = 0; t < b.high; t++) {
        const float *p = desk.scores + t * length, *w = desk.wanted + t * length;
        const T *d = desk.dropped + t * length;
        T *s = desk.slopes + t * length;
        float *sums = position_grad && t < b.count ? position_grad + g.distance_of(b.first + t) + b.low : nullptr;
        vec totals{};
        for (int64_t j = 0; j < length; j += W) totals += get(d + j, W) * read<vec>(w + j);
        float total = sum_of(totals);
        for (int64_t j = 0; j < length; j += W) {
            vec kept = get(d + j, W) != 0.0f ? read<vec>(w + j) * g.scale : vec{};
            vec grad = read<vec>(p + j) * (kept - total);
            put(s + j, grad * g.factor, W);
            if (sums && j < used) put(sums + j, get(sums + j, lanes_of(j, used)) + grad, lanes_of(j, used));
        }
    }
}

// sums (width, length) += left^T (width, high) right (high, length). A row of `sums` has `stride` numbers.
template <class T>
void add_block(Desk<T> &desk, const T *left, const T *right, float *sums, int64_t stride, int64_t width,
               int64_t length, int64_t high) {
    constexpr int64_t tall = TALL / IN_WORD<T>;
    exchange(pair_rows(left, desk.pairs, TALL, width), width, desk.turned, tall, tall, width);
    const word *pairs = pair_rows(right, desk.pairs, high, length);
    multiply<T>(desk.turned, tall, pairs, length, sums, stride, width, length, high, true);
}

// Writes the gradients of `count` keys or values from `first` on, whose sums are the first columns of (width, stride).
// Then the columns after these take their place, and zeros follow: in the end, all sums are zero again.
template <class T>
void finish(Desk<T> &desk, float *sums, int64_t stride, Rows<T> to, int64_t first, int64_t count, int64_t size) {
    int64_t columns = filled_up(count, COLS<T>);
    exchange(words(sums), stride, desk.paired, desk.width, desk.width, columns);
    deliver(reinterpret_cast<const float *>(desk.paired), desk.width, to, first, count, size);
    if (columns == stride) return (void)std::fill_n(sums, desk.width * stride, 0.0f);  // at once: rows may be short
    for (float *row = sums; row < sums + desk.width * stride; row += stride) {
        std::copy(row + columns, row + stride, row);
        std::fill(row + stride - columns, row + stride, 0.0f);
    }
}

// dq, dk and dv have the layout of q, k and v; `grad`, the gradient of the context, has that of the context. The gradient
// of the position bias is added to `position_grad`, (batch, heads, distances), unless that is null. Returns whether the
// sums of the columns of dq, dk and dv, of all heads one after the other, have been added to `sums`; it may be null.
template <class T>
bool attend_backward(const Heads &g, const T *q, const T *k, const T *v, const T *grad, T *dq, T *dk, T *dv,
                     float *position_grad, float *sums, int threads) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == 2)
        if (fits_whole_heads(g) && g.group() == 1) {
            attend_backward_whole_heads(g, q, k, v, grad, dq, dk, dv, sums, threads);
            return true;
        }
#endif
    int64_t width = width_of<T>(g.size), across = width / IN_WORD<T>;
#pragma omp parallel num_threads(threads)
    {
        Desk<T> desk(g);
        // One thread adds up the gradients of a head of keys and values, over all query heads that share it.
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t n = 0; n < g.batch; n++)
            for (int64_t shared = 0; shared < g.key_heads; shared++) {
                int64_t used = Heads::count(g.key_places, n, g.keys);
                int64_t asked = Heads::count(g.query_places, n, g.queries);
                // The sums of a part are in the first columns; those that the next part shares with it are moved there.
                int64_t stride = std::min(desk.length, length_of<T>(used)), low = 0;
                Rows<T> dkeys = g.key_rows(dk, n, shared), dvalues = g.key_rows(dv, n, shared);
                for (int64_t from = 0; from < asked; from += g.part()) {
                    Block p = block_of<T>(g, from, std::min(g.part(), asked - from), used);
                    if (p.low > low) {
                        finish(desk, desk.key_sums, stride, dkeys, low, p.low - low, g.size);
                        finish(desk, desk.value_sums, stride, dvalues, low, p.low - low, g.size);
                        low = p.low;
                    }
                    collect(g.key_rows(v, n, shared), low, p.end - low, p.length, g.size, width, desk.rows);
                    exchange(words(desk.rows), across, desk.values, p.length, p.length, across);
                    collect(g.key_rows(k, n, shared), low, p.end - low, p.length, g.size, width, desk.rows);
                    exchange(words(desk.rows), across, desk.keys, p.length, p.length, across);
                    const word *paired = pair_rows(desk.rows, desk.paired, p.length, width);
                    for (int64_t h = shared * g.group(); h < (shared + 1) * g.group(); h++)
                        for (int64_t first = from; first < from + p.count; first += TALL) {
                            Block b = block_of<T>(g, first, std::min(TALL, from + p.count - first), used);
                            int64_t at = b.low - low;
                            collect(g.query_rows(q, g.query_stride, n, h), first, b.count, TALL, g.size, width,
                                    desk.queries);
                            collect(g.query_rows(grad, g.heads * g.size, n, h), first, b.count, TALL, g.size, width,
                                    desk.grads);
                            look(g, desk, n, h, b, desk.keys + at, p.length, used);
                            multiply<T>(words(desk.grads), across, desk.values + at, p.length, desk.wanted, b.length,
                                        b.high, b.length, width);
                            slope(g, desk, b,
                                  position_grad ? position_grad + (n * g.heads + h) * g.distances() : nullptr);
                            add_block(desk, desk.grads, desk.dropped, desk.value_sums + at, stride, width, b.length,
                                      b.high);
                            add_block(desk, desk.queries, desk.slopes, desk.key_sums + at, stride, width, b.length,
                                      b.high);
                            multiply<T>(words(desk.slopes), b.length / IN_WORD<T>, paired + at / IN_WORD<T> * width,
                                        width, desk.sums, width, b.high, width, b.length);
                            deliver(desk.sums, width, g.query_rows(dq, g.query_stride, n, h), first, b.count, g.size);
                        }
                }
                // Without a window these are all keys; with one, those after the last part's have no gradient.
                for (; low < used; low += stride) {
                    finish(desk, desk.key_sums, stride, dkeys, low, std::min(stride, used - low), g.size);
                    finish(desk, desk.value_sums, stride, dvalues, low, std::min(stride, used - low), g.size);
                }
            }
    }
    return false;
}

template <class T>
void attention_forward(const T *q, const T *k, const T *v, T *context, const float *bias, const float *position_bias,
                       const int64_t *query_places, const int64_t *key_places, int64_t batch, int64_t heads,
                       int64_t key_heads, int64_t queries, int64_t keys, int64_t size, int64_t back, int64_t ahead,
                       int64_t query_stride, int64_t key_stride, int64_t bias_batch, int64_t bias_head,
                       int64_t bias_query, float factor, uint64_t seed, uint32_t threshold, float scale,
                       int threads) {
    Heads g{bias, position_bias, query_places, key_places, batch, heads, key_heads, queries, keys, size, back, ahead,
            query_stride, key_stride, bias_batch, bias_head, bias_query, factor, seed, threshold, scale};
    attend(g, q, k, v, context, threads);
}

template <class T>
void attention_backward(const T *q, const T *k, const T *v, const T *grad, T *dq, T *dk, T *dv, float *position_grad,
                        const float *bias, const float *position_bias, const int64_t *query_places,
                        const int64_t *key_places, int64_t batch, int64_t heads, int64_t key_heads, int64_t queries,
                        int64_t keys, int64_t size, int64_t back, int64_t ahead, int64_t query_stride,
                        int64_t key_stride, int64_t bias_batch, int64_t bias_head, int64_t bias_query, float factor,
                        uint64_t seed, uint32_t threshold, float scale, int threads) {
    Heads g{bias, position_bias, query_places, key_places, batch, heads, key_heads, queries, keys, size, back, ahead,
            query_stride, key_stride, bias_batch, bias_head, bias_query, factor, seed, threshold, scale};
    attend_backward<T>(g, q, k, v, grad, dq, dk, dv, position_grad, nullptr, threads);
}

} // namespace
