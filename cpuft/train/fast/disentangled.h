// DeBERTa's disentangled attention (He and others 2021, arXiv 2006.03654). To the score of a query and a key, it adds two
// products that depend on the distance between them: of the query with the position of the key, and of the key with
// the position of the query. Both arrays of positions have a row for each distance, so that no index is looked up here:
// next to each other, the products that a query has with the positions of consecutive keys are contiguous, too.
//
// A block of queries has rows of such products, each of which is shifted by one against that above it. Read with a
// stride that is one less than that of the rows, the block is aligned to the keys.

#pragma once

#include "attention.h"

namespace {

// Number of keys whose products with the positions of queries are computed at a time.
constexpr int64_t WIDE = 64;

template <class T> struct Disentangled {
    Heads heads;
    const T *position_keys, *position_queries;  // (distances, heads * size): by key - query, and by query - key

    // Products of positions have this many columns; the one of distance 0 is number origin() - 1. Blocks of queries and
    // keys then begin at columns that are multiples of W.
    int64_t origin() const { return filled_up(heads.keys, TALL); }
    int64_t columns() const { return 2 * origin(); }
    int64_t first_column() const { return origin() - heads.keys; }
    int64_t row_size() const { return heads.heads * heads.size; }
    // The first columns for a block of queries and all keys, and for a block of `high` keys and a block of queries.
    int64_t key_column(int64_t first) const { return origin() - TALL - first; }
    int64_t query_column(int64_t first, int64_t key, int64_t high) const { return origin() + first - key - high; }
};

// A number of tokens, padded for products whose rows or columns they are, or over which they add up.
template <class T> int64_t extent_of(int64_t tokens) { return width_of<T>(tokens); }

// The working memory of one thread.
template <class T> struct DisentangledDesk {
    int64_t width, across, columns;  // the padded size of a head, in numbers and in words, and columns of positions
    Lanes lanes;
    Arrays arrays;
    T *key_rows, *value_rows, *queries, *grads, *dropped, *slopes, *ahead_slopes, *behind_slopes;
    T *position_key_rows, *position_query_rows;
    word *keys, *values, *paired, *key_turned, *turned, *pairs;
    word *position_keys, *position_queries, *paired_position_keys, *paired_position_queries;
    float *scores, *wanted, *ahead, *behind, *aligned, *sums;
    float *key_sums, *key_row_sums, *value_sums, *position_key_sums, *position_query_sums, *rest;
    const word *position_key_pairs, *position_query_pairs;
    int64_t head = -1;  // whose positions are here
    Tiles<T> tiles;

    DisentangledDesk(const Disentangled<T> &g, bool backward)
        : width(width_of<T>(g.heads.size)), across(width / IN_WORD<T>), columns(g.columns()), lanes(g.heads.keys) {
        int64_t length = extent_of<T>(g.heads.keys), later = backward ? 1 : 0;
        int64_t tall = TALL * width, block = TALL * length, whole = length * width, ahead_block = TALL * (length + TALL);
        int64_t behind_block = WIDE * (WIDE + TALL), positions = columns * width;
        arrays.make([&](auto take) {
            take(key_rows, whole), take(value_rows, whole), take(queries, tall), take(dropped, block);
            take(position_key_rows, positions), take(position_query_rows, positions);
            take(keys, whole), take(values, whole);
            take(position_keys, positions / IN_WORD<T>), take(position_queries, positions / IN_WORD<T>);
            take(scores, block), take(ahead, ahead_block), take(behind, behind_block), take(aligned, block);
            take(sums, tall);
            take(grads, later * tall), take(slopes, later * block), take(wanted, later * block);
            take(ahead_slopes, later * ahead_block), take(behind_slopes, later * behind_block);
            take(paired, later * whole), take(key_turned, later * whole), take(turned, later * tall);
            take(pairs, later * std::max({tall, ahead_block, behind_block}));
            take(paired_position_keys, later * positions), take(paired_position_queries, later * positions);
            take(key_sums, later * whole), take(key_row_sums, later * whole), take(value_sums, later * whole);
            take(position_key_sums, later * positions), take(position_query_sums, later * positions);
            take(rest, later * std::max(positions, whole));
        });
    }
};

// Prepares the positions of head h for products.
template <class T> void take_positions(const Disentangled<T> &g, DisentangledDesk<T> &desk, int64_t h, bool backward) {
    if (desk.head == h) return;
    desk.head = h;
    int64_t distances = g.heads.distances(), width = desk.width;
    auto prepare = [&](const T *positions, T *rows, word *words_of_columns) {
        std::memset(static_cast<void *>(rows), 0, size_t(desk.columns * width) * sizeof(T));
        collect(Rows<const T>{positions + h * g.heads.size, g.row_size(), nullptr, 0}, 0, distances, distances,
                g.heads.size, width, rows + g.first_column() * width);
        exchange(words(rows), desk.across, words_of_columns, desk.columns, desk.columns, desk.across);
    };
    prepare(g.position_keys, desk.position_key_rows, desk.position_keys);
    prepare(g.position_queries, desk.position_query_rows, desk.position_queries);
    if (!backward) return;
    desk.position_key_pairs = pair_rows(desk.position_key_rows, desk.paired_position_keys, desk.columns, width);
    desk.position_query_pairs = pair_rows(desk.position_query_rows, desk.paired_position_queries, desk.columns, width);
}

// Computes the scores of a block of queries before they are multiplied by the factor.
template <class T>
void score(const Disentangled<T> &g, DisentangledDesk<T> &desk, int64_t first, int64_t count, int64_t length) {
    int64_t high = filled_up(count, ROWS<T>), stride = length + TALL;
    const word *queries = words(desk.queries);
    multiply<T>(queries, desk.across, desk.keys, length, desk.scores, length, high, length, desk.width);
    multiply<T>(queries, desk.across, desk.position_keys + g.key_column(first), desk.columns, desk.ahead, stride, high,
                stride, desk.width);
    for (int64_t key = 0; key < length; key += WIDE) {
        int64_t rows = std::min(WIDE, length - key), wide = rows + TALL;
        multiply<T>(words(desk.key_rows + key * desk.width), desk.across,
                    desk.position_queries + g.query_column(first, key, rows), desk.columns, desk.behind, wide, rows, wide,
                    desk.width);
        exchange(words(desk.behind) + rows - 1, wide - 1, reinterpret_cast<word *>(desk.aligned) + key, length, rows,
                 TALL);
    }
    for (int64_t t = 0; t < count; t++) {
        float *s = desk.scores + t * length;
        const float *ahead = desk.ahead + TALL - 1 + t * (stride - 1), *aligned = desk.aligned + t * length;
        for (int64_t j = 0; j < length; j += W)
            put(s + j, read<vec>(s + j) + read<vec>(ahead + j) + read<vec>(aligned + j), W);
    }
}

// Computes the probabilities of a block of queries in `scores`, and after dropout in `dropped`; both padded with zeros.
template <class T>
void weigh(const Disentangled<T> &g, DisentangledDesk<T> &desk, int64_t n, int64_t h, int64_t first, int64_t count,
           int64_t used, int64_t length) {
    const Heads &heads = g.heads;
    score(g, desk, first, count, length);
    for (int64_t t = 0, high = filled_up(count, ROWS<T>); t < high; t++) {
        float *s = desk.scores + t * length;
        T *d = desk.dropped + t * length;
        int64_t there = t < count ? used : 0;
        float share = there ? exponentials(s, heads.bias_of(n, h, first + t), nullptr, 0, used, heads.factor) : 0.0f;
        int64_t place = ((n * heads.heads + h) * heads.queries + first + t) * heads.keys;
        const uint16_t *bits = there && heads.threshold ? desk.lanes.fill(heads.seed, place, used) : nullptr;
        for (int64_t j = 0; j < length; j += W) {
            vec v = j < there ? read<vec>(s + j) * share : vec{};
            put(s + j, v, W);
            put(d + j, bits && j < there ? keep(v * heads.scale, bits + j, heads.threshold) : v, W);
        }
    }
}

// q, k and v point to the first row of the first head. Rows of the context have the stride heads * size.
template <class T>
void disentangled_forward(const T *q, const T *k, const T *v, const T *position_keys, const T *position_queries,
                          T *context, const float *bias, const int64_t *query_places, const int64_t *key_places,
                          int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t size,
                          int64_t query_stride, int64_t key_stride, int64_t bias_batch, int64_t bias_head,
                          int64_t bias_query, float factor, uint64_t seed, uint32_t threshold, float scale,
                          int threads) {
    Disentangled<T> g{{bias, nullptr, query_places, key_places, batch, heads, heads, queries, keys, size, -1, -1, query_stride,
                       key_stride, bias_batch, bias_head, bias_query, factor, seed, threshold, scale},
                      position_keys, position_queries};
#pragma omp parallel num_threads(threads)
    {
        DisentangledDesk<T> desk(g, false);
        int64_t width = desk.width, across = desk.across;
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t h = 0; h < heads; h++)
            for (int64_t n = 0; n < batch; n++) {
                take_positions(g, desk, h, false);
                int64_t used = Heads::count(key_places, n, keys), asked = Heads::count(query_places, n, queries);
                int64_t length = extent_of<T>(used);
                collect(g.heads.key_rows(k, n, h), 0, used, length, size, width, desk.key_rows);
                exchange(words(desk.key_rows), across, desk.keys, length, length, across);
                collect(g.heads.key_rows(v, n, h), 0, used, length, size, width, desk.value_rows);
                const word *values = pair_rows(desk.value_rows, desk.values, length, width);
                for (int64_t first = 0; first < asked; first += TALL) {
                    int64_t count = std::min(TALL, asked - first), high = filled_up(count, ROWS<T>);
                    collect(g.heads.query_rows(q, query_stride, n, h), first, count, TALL, size, width, desk.queries);
                    weigh(g, desk, n, h, first, count, used, length);
                    multiply<T>(words(desk.dropped), length / IN_WORD<T>, values, width, desk.sums, width, high, width,
                                length);
                    deliver(desk.sums, width, g.heads.query_rows(context, heads * size, n, h), first, count, size);
                }
            }
    }
}

// Computes the gradient of the scores before the factor, in `slopes` and in `wanted`, from that of the probabilities
// after dropout in `wanted`, as slope() of attention.h does. Both are zero for what is no query.
template <class T> void find_slopes(const Heads &g, DisentangledDesk<T> &desk, int64_t high, int64_t length) {
    for (int64_t t = 0; t < high; t++) {
        const float *p = desk.scores + t * length;
        const T *d = desk.dropped + t * length;
        float *w = desk.wanted + t * length;
        T *s = desk.slopes + t * length;
        vec totals{};
        for (int64_t j = 0; j < length; j += W) totals += get(d + j, W) * read<vec>(w + j);
        float total = sum_of(totals);
        for (int64_t j = 0; j < length; j += W) {
            vec kept = get(d + j, W) != 0.0f ? read<vec>(w + j) * g.scale : vec{};
            vec grad = read<vec>(p + j) * (kept - total) * g.factor;
            put(s + j, grad, W);
            put(w + j, grad, W);
        }
    }
    std::fill(desk.wanted + high * length, desk.wanted + TALL * length, 0.0f);
}

// Adds the gradients that pass through the products with positions: of the queries to `sums`, of the keys to
// `key_row_sums`, and of the positions. `turned` holds the queries of this block, transposed.
template <class T>
void add_position_grads(const Disentangled<T> &g, DisentangledDesk<T> &desk, int64_t first, int64_t high,
                        int64_t length) {
    constexpr int64_t tall = TALL / IN_WORD<T>;
    int64_t width = desk.width, stride = length + TALL, column = g.key_column(first);
    std::memset(static_cast<void *>(desk.ahead_slopes), 0, size_t(TALL * stride) * sizeof(T));
    for (int64_t t = 0; t < high; t++)
        std::memcpy(static_cast<void *>(desk.ahead_slopes + TALL - 1 + t * (stride - 1)),
                    static_cast<const void *>(desk.slopes + t * length), size_t(length) * sizeof(T));
    multiply<T>(words(desk.ahead_slopes), stride / IN_WORD<T>, desk.position_key_pairs + column / IN_WORD<T> * width,
                width, desk.sums, width, high, width, stride, true);
    multiply<T>(desk.turned, tall, pair_rows(desk.ahead_slopes, desk.pairs, high, stride), stride,
                desk.position_key_sums + column, desk.columns, width, stride, high, true);
    for (int64_t key = 0; key < length; key += WIDE) {
        int64_t rows = std::min(WIDE, length - key), wide = rows + TALL;
        column = g.query_column(first, key, rows);
        exchange(words(desk.wanted) + key, length, reinterpret_cast<word *>(desk.behind), TALL, TALL, rows);
        std::memset(static_cast<void *>(desk.behind_slopes), 0, size_t(rows * wide) * sizeof(T));
        for (int64_t j = 0; j < rows; j++)
            for (int64_t t = 0; t < TALL; t += W)
                put(desk.behind_slopes + rows - 1 + j * (wide - 1) + t, read<vec>(desk.behind + j * TALL + t), W);
        multiply<T>(words(desk.behind_slopes), wide / IN_WORD<T>,
                    desk.position_query_pairs + column / IN_WORD<T> * width, width, desk.key_row_sums + key * width, width,
                    rows, width, wide, true);
        multiply<T>(desk.key_turned + key / IN_WORD<T>, length / IN_WORD<T>,
                    pair_rows(desk.behind_slopes, desk.pairs, rows, wide), wide, desk.position_query_sums + column,
                    desk.columns, width, wide, rows, true);
    }
}

// The gradients of the keys and values of one example and head; those of its queries are delivered block by block.
template <class T>
void find_example_grads(const Disentangled<T> &g, DisentangledDesk<T> &desk, const T *q, const T *k, const T *v,
                        const T *grad, T *dq, T *dk, T *dv, int64_t n, int64_t h) {
    constexpr int64_t tall = TALL / IN_WORD<T>;
    const Heads &heads = g.heads;
    int64_t width = desk.width, across = desk.across, size = heads.size;
    int64_t used = Heads::count(heads.key_places, n, heads.keys);
    int64_t asked = Heads::count(heads.query_places, n, heads.queries), length = extent_of<T>(used);
    collect(heads.key_rows(v, n, h), 0, used, length, size, width, desk.value_rows);
    exchange(words(desk.value_rows), across, desk.values, length, length, across);
    collect(heads.key_rows(k, n, h), 0, used, length, size, width, desk.key_rows);
    exchange(words(desk.key_rows), across, desk.keys, length, length, across);
    const word *paired = pair_rows(desk.key_rows, desk.paired, length, width);
    exchange(paired, width, desk.key_turned, length / IN_WORD<T>, length / IN_WORD<T>, width);
    std::fill_n(desk.key_sums, width * length, 0.0f);
    std::fill_n(desk.key_row_sums, width * length, 0.0f);
    std::fill_n(desk.value_sums, width * length, 0.0f);
    for (int64_t first = 0; first < asked; first += TALL) {
        int64_t count = std::min(TALL, asked - first), high = filled_up(count, ROWS<T>);
        collect(heads.query_rows(q, heads.query_stride, n, h), first, count, TALL, size, width, desk.queries);
        collect(heads.query_rows(grad, g.row_size(), n, h), first, count, TALL, size, width, desk.grads);
        weigh(g, desk, n, h, first, count, used, length);
        multiply<T>(words(desk.grads), across, desk.values, length, desk.wanted, length, high, length, width);
        find_slopes(heads, desk, high, length);
        exchange(pair_rows(desk.grads, desk.pairs, TALL, width), width, desk.turned, tall, tall, width);
        multiply<T>(desk.turned, tall, pair_rows(desk.dropped, desk.pairs, high, length), length, desk.value_sums, length,
                    width, length, high, true);
        exchange(pair_rows(desk.queries, desk.pairs, TALL, width), width, desk.turned, tall, tall, width);
        multiply<T>(desk.turned, tall, pair_rows(desk.slopes, desk.pairs, high, length), length, desk.key_sums, length,
                    width, length, high, true);
        multiply<T>(words(desk.slopes), length / IN_WORD<T>, paired, width, desk.sums, width, high, width, length);
        add_position_grads(g, desk, first, high, length);
        deliver(desk.sums, width, heads.query_rows(dq, heads.query_stride, n, h), first, count, size);
    }
    exchange(words(desk.key_sums), length, reinterpret_cast<word *>(desk.rest), width, width, length);
    for (int64_t i = 0; i < length * width; i += W)
        put(desk.rest + i, read<vec>(desk.rest + i) + read<vec>(desk.key_row_sums + i), W);
    deliver(desk.rest, width, heads.key_rows(dk, n, h), 0, used, size);
    exchange(words(desk.value_sums), length, reinterpret_cast<word *>(desk.rest), width, width, length);
    deliver(desk.rest, width, heads.key_rows(dv, n, h), 0, used, size);
}

// dq, dk and dv have the layout of q, k and v; `grad`, the gradient of the context, has that of the context. Those of the
// positions are written to `position_key_grads` and `position_query_grads`, (groups, distances, heads * size): their sums
// over the examples of each group. The sum over groups does not depend on the number of threads.
template <class T>
void disentangled_backward(const T *q, const T *k, const T *v, const T *position_keys, const T *position_queries,
                           const T *grad, T *dq, T *dk, T *dv, float *position_key_grads, float *position_query_grads,
                           const float *bias, const int64_t *query_places, const int64_t *key_places, int64_t groups,
                           int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t size,
                           int64_t query_stride, int64_t key_stride, int64_t bias_batch, int64_t bias_head,
                           int64_t bias_query, float factor, uint64_t seed, uint32_t threshold, float scale,
                           int threads) {
    Disentangled<T> g{{bias, nullptr, query_places, key_places, batch, heads, heads, queries, keys, size, -1, -1, query_stride,
                       key_stride, bias_batch, bias_head, bias_query, factor, seed, threshold, scale},
                      position_keys, position_queries};
#pragma omp parallel num_threads(threads)
    {
        DisentangledDesk<T> desk(g, true);
        int64_t width = desk.width, columns = desk.columns, distances = g.heads.distances();
        auto deliver_positions = [&](const float *sums, float *grads, int64_t group, int64_t h) {
            exchange(words(sums), columns, reinterpret_cast<word *>(desk.rest), width, width, columns);
            Rows<float> to{grads + group * distances * g.row_size() + h * size, g.row_size(), nullptr, 0};
            deliver(desk.rest + g.first_column() * width, width, to, 0, distances, size);
        };
#pragma omp for collapse(2) schedule(dynamic) nowait
        for (int64_t h = 0; h < heads; h++)
            for (int64_t group = 0; group < groups; group++) {
                take_positions(g, desk, h, true);
                std::fill_n(desk.position_key_sums, width * columns, 0.0f);
                std::fill_n(desk.position_query_sums, width * columns, 0.0f);
                for (int64_t n = group * batch / groups; n < (group + 1) * batch / groups; n++)
                    find_example_grads(g, desk, q, k, v, grad, dq, dk, dv, n, h);
                deliver_positions(desk.position_key_sums, position_key_grads, group, h);
                deliver_positions(desk.position_query_sums, position_query_grads, group, h);
            }
    }
}

} // namespace
