// Attention of whole heads with AMX tiles, for examples of which a head fits into the second-level cache.
//
// Forward has scores with queries in rows: the probabilities are the left factor of the context. Backward has them with
// keys in rows: its sums over keys add whole vectors, and the probabilities and slopes are the left factors of the
// gradients of values and keys, which need no transposition. Exponentials are those of the scores as they are; only if
// a sum of them is very small or large, the query's highest score is subtracted first.

#pragma once

#include "heads.h"
#include <omp.h>

namespace {

#ifdef __AMX_BF16__

// The largest number of tokens of an example. Backward has two arrays of the square of this with 2 bytes each, which
// take half of the second-level cache.
constexpr int64_t MOST_TOKENS = 512;
// If a sum of exponentials is between these, none of its large summands has been rounded to zero or to infinity.
constexpr float LEAST_SUM = 1e-18f, MOST_SUM = 1e18f;
// The lowest bias of a key, to which lower ones, also -inf, are raised; and the bias where there is no key.
constexpr float MASKED = -1e30f, MISSING = -1e38f;
constexpr float LOG2_E = 1.44269504088896341f;

typedef uint64_t longs __attribute__((vector_size(64)));

inline bool fits_tiles(const Heads &g) {
    return HAS_TILES && g.size % COLS<bf16> == 0 && g.keys <= MOST_TOKENS && g.queries <= MOST_TOKENS && g.back < 0 &&
           g.ahead < 0 && !g.position_bias && (!g.bias || (g.bias_head == 0 && g.bias_query == 0));
}

// 2^x with a relative error of 8e-5, where bf16 rounds by up to 2e-3: a polynomial for the digits after the point.
inline vec exp2_of(vec x) {
    vec r = _mm512_reduce_ps(x, 1);
    vec p = r * 7.8024521e-2f + 2.2606719e-1f;
    p = p * r + 6.9583350e-1f;
    p = p * r + 9.9992520e-1f;
    return _mm512_scalef_ps(p, x);
}

// The bits of the probabilities that dropout keeps, for a block of queries: those of `Lanes`, one after the other.
class KeptBits {
    static constexpr int64_t IN_VECTOR = 32;
    const Heads &g;
    std::vector<uint32_t> bits;
    int64_t start = 0;

  public:
    explicit KeptBits(const Heads &heads)
        : g(heads), bits(size_t(TALL * heads.keys / IN_VECTOR + 4 + heads.keys / IN_VECTOR), ~0u) {}

    // For `count` queries of head h of example n from `first` on.
    void fill(int64_t n, int64_t h, int64_t first, int64_t count) {
        if (!g.threshold) return;
        constexpr uint64_t STEP_OF_WORDS = 0x9e3779b97f4a7c15ull;
        const longs numbers = {0, 1, 2, 3, 4, 5, 6, 7};
        const __m512i limit = _mm512_set1_epi16(int16_t(g.threshold));
        int64_t place = ((n * g.heads + h) * g.queries + first) * g.keys;
        start = place % 4;
        longs state = g.seed + (uint64_t(place / 4) + 1 + numbers) * STEP_OF_WORDS;
        for (int64_t i = 0; i * IN_VECTOR < start + count * g.keys; i++, state += 8 * STEP_OF_WORDS) {
            longs z = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
            bits[size_t(i)] = _mm512_cmpge_epu16_mask((__m512i)(z ^ (z >> 31)), limit);
        }
    }
    // Those of 32 keys from `key` on for the query number t of the block; bits of keys that do not exist are undefined.
    uint32_t of(int64_t t, int64_t key) const {
        int64_t bit = start + t * g.keys + key;
        uint64_t found;
        std::memcpy(&found, reinterpret_cast<const uint8_t *>(bits.data()) + bit / 8, sizeof found);
        return uint32_t(found >> bit % 8);
    }
};

// Copies all rows of a head, and fills up to `high` rows with zeros.
inline void collect_all(Rows<const bf16> from, int64_t count, int64_t high, int64_t size, bf16 *to) {
    for (int64_t t = 0; t < high; t++, to += size) {
        const bf16 *row = t < count ? from[t] : nullptr;
        for (int64_t j = 0; j < size; j += 2 * W)
            _mm512_store_si512(to + j, row ? _mm512_loadu_si512(row + j) : _mm512_setzero_si512());
    }
}

// The rows of the next example, which the second-level cache gets while this one is computed: whole rows from one end
// to the other, as the hardware reads ahead. Head by head, they would be a cache line each.
class NextRows {
    const uint8_t *from = nullptr;
    int64_t piece = 0;

  public:
    // `first` is the start of the first row, null for none; `width` is the number of numbers to that of the next row.
    NextRows(const bf16 *first, int64_t width, int64_t heads)
        : from(reinterpret_cast<const uint8_t *>(first)), piece(width * 2 / heads) {}
    // Asks for `count` pieces from number `first` on. A row has a piece for each head.
    template <bool WRITES> void ask(int64_t first, int64_t count) const {
        if (!from) return;
        for (int64_t j = first * piece; j < (first + count) * piece; j += 64)
            __builtin_prefetch(from + j, WRITES, 2);
    }
};

// The number of the first head after those that `schedule(static)` gives to this thread, of `count` heads.
inline int64_t end_of_share(int64_t count) {
    int64_t next = omp_get_thread_num() + 1, threads = omp_get_num_threads();
    return count / threads * next + std::min(next, count % threads);
}

// What is added to the scores of the keys of an example, as a power of two.
inline void take_bias(const Heads &g, int64_t n, int64_t used, int64_t length, float *to) {
    const float *bias = g.bias_of(n, 0, 0);
    for (int64_t j = 0; j < length; j += W) {
        int64_t m = std::max<int64_t>(0, lanes_of(j, used));
        vec b = bias && m ? get(bias + j, m) * LOG2_E : vec{};
        put(to + j, LANE < int32_t(m) ? (b < MASKED ? all(MASKED) : b) : all(MISSING), W);
    }
}

// Writes the exponentials of a query's scores, `length` numbers, in bf16, and zeros where dropout drops them. Returns
// the sum of all after rounding, so that one large probability is exact.
template <bool SUBTRACTS>
inline float write_exponentials(const float *s, const float *bias, const KeptBits &kept, int64_t t, int64_t length,
                                float factor, bf16 *to) {
    vec tops = all(MISSING), totals{};
    auto score = [&](int64_t j) { return read<vec>(s + j) * factor + read<vec>(bias + j); };
    if (SUBTRACTS)
        for (int64_t j = 0; j < length; j += W) tops = score(j) > tops ? score(j) : tops;
    vec top = SUBTRACTS ? all(most_of(tops)) : vec{};
    for (int64_t j = 0; j < length; j += 2 * W) {
        vec a = score(j), b = score(j + W);
        if (SUBTRACTS) a -= top, b -= top;
        __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)exp2_of(b), (__m512)exp2_of(a));
        totals = (vec)_mm512_dpbf16_ps((__m512)totals, (__m512bh)rounded, (__m512bh)_mm512_set1_epi32(0x3f803f80));
        _mm512_store_si512(to + j, _mm512_maskz_mov_epi16(kept.of(t, j), rounded));
    }
    return sum_of(totals);
}

inline void attend_with_tiles(const Heads &g, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *context, int threads) {
    const int64_t size = g.size, high = filled_up(g.queries, TALL), wide = filled_up(g.keys, TALL), across = size / 2;
    const float factor = g.factor * LOG2_E;
#pragma omp parallel num_threads(threads)
    {
        bf16 *queries, *rows, *exponentials;
        word *keys, *values;
        float *bias, *scores, *sums, *shares;
        Arrays arrays;
        arrays.make([&](auto take) {
            take(queries, high * size), take(rows, wide * size), take(exponentials, TALL * wide);
            take(keys, wide * across), take(values, wide * across), take(bias, wide);
            take(scores, 2 * TALL * wide), take(sums, 2 * TALL * size), take(shares, 2 * TALL);
        });
        KeptBits kept(g);
        Tiles<bf16> tiles;
        const int64_t end = end_of_share(g.batch * g.heads);
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t n = 0; n < g.batch; n++)
            for (int64_t h = 0; h < g.heads; h++) {
                int64_t used = Heads::count(g.key_places, n, g.keys);
                int64_t asked = Heads::count(g.query_places, n, g.queries), length = filled_up(used, TALL);
                collect_all(g.key_rows(k, n, h / g.group()), used, length, size, rows);
                exchange(words(rows), across, keys, length, length, across);
                collect_all(g.key_rows(v, n, h / g.group()), used, length, size, rows);
                pair_rows(rows, values, length, size);
                collect_all(g.query_rows(q, g.query_stride, n, h), asked, filled_up(asked, TALL), size, queries);
                take_bias(g, n, used, length, bias);
                bool is_last = (n + 1) * g.heads >= end;
                NextRows next(is_last ? nullptr : g.key_rows(k, n + 1, 0)[0], g.key_stride, g.heads);
                NextRows next_written(is_last ? nullptr : g.query_rows(context, g.heads * size, n + 1, 0)[0],
                                      g.heads * size, g.heads);
                // The tiles multiply for the next block of queries while the exponentials of one are computed.
                auto odd = [](int64_t first) { return first / TALL % 2; };
                auto score = [&](int64_t first) {
                    multiply<bf16>(words(queries + first * size), across, keys, length,
                                   scores + odd(first) * TALL * wide, length, TALL, length, size);
                };
                auto finish = [&](int64_t first) {
                    deliver(sums + odd(first) * TALL * size, size, g.query_rows(context, g.heads * size, n, h), first,
                            std::min(TALL, asked - first), size, shares + odd(first) * TALL);
                };
                score(0);
                for (int64_t first = 0; first < asked; first += TALL) {
                    if (first + TALL < asked) score(first + TALL);
                    int64_t count = std::min(TALL, asked - first);
                    kept.fill(n, h, first, count);
                    for (int64_t t = 0; t < count; t++) {
                        next.ask<false>(h * asked + first + t, 1);
                        next_written.ask<true>(h * asked + first + t, 1);
                        const float *s = scores + odd(first) * TALL * wide + t * length;
                        bf16 *to = exponentials + t * length;
                        float total = write_exponentials<false>(s, bias, kept, t, length, factor, to);
                        if (!(total > LEAST_SUM && total < MOST_SUM))
                            total = write_exponentials<true>(s, bias, kept, t, length, factor, to);
                        shares[odd(first) * TALL + t] = used ? g.scale / total : 0.0f;
                    }
                    multiply<bf16>(words(exponentials), length / 2, values, size, sums + odd(first) * TALL * size, size,
                                   TALL, size, length);
                    if (first) finish(first - TALL);
                }
                if (asked) finish((asked - 1) / TALL * TALL);
            }
    }
}

// Adds the sums of the columns of `count` rows.
inline void add_rows(const float *rows, int64_t count, int64_t size, float *sums) {
    for (int64_t j = 0; j < size; j += W) {
        vec sum = read<vec>(sums + j);
        for (int64_t t = 0; t < count; t++) sum += read<vec>(rows + t * size + j);
        put(sums + j, sum, W);
    }
}

// The bits of 32 keys.
struct KeyBits {
    uint32_t of[32];
    constexpr KeyBits() : of() {
        for (int j = 0; j < 32; j++) of[j] = uint32_t(1) << j;
    }
};
constexpr KeyBits KEY_BITS;

// The scores of 16 queries with all keys, and the gradients of the probabilities after dropout, `wanted`: a vector for
// each key, TALL numbers after that of the key before. The functions are inlined, because calls would read the members
// again after each store.
struct Column {
    float *__restrict scores;
    const float *wanted, *bias;
    const uint32_t *bits;  // for each 32 keys, those of TALL queries: the bit of a key is set if dropout keeps it
    int64_t keys;

    vec kept(int64_t j, vec x) const {
        __m512i of_queries = _mm512_loadu_si512(bits + j / 32 * TALL);
        __m512i of_key = _mm512_set1_epi32(int(KEY_BITS.of[j % 32]));
        return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(of_queries, of_key), x);
    }
    vec score(int64_t j, float factor) const { return read<vec>(scores + j * TALL) * factor + bias[j]; }
    // Replaces the scores by their exponentials, or by those of what is left after each query's highest score has been
    // subtracted. Returns the sums of these, and `product`, of these times `wanted`.
    template <bool SUBTRACTS> [[gnu::always_inline]] vec write_exponentials(float factor, vec &product) const {
        vec tops = all(MISSING), total{}, weighted{};
        if (SUBTRACTS)
            for (int64_t j = 0; j < keys; j++) tops = score(j, factor) > tops ? score(j, factor) : tops;
        for (int64_t j = 0; j < keys; j++) {
            vec a = exp2_of(SUBTRACTS ? score(j, factor) - tops : score(j, factor));
            put(scores + j * TALL, a, W);
            total += a;
            weighted += a * kept(j, read<vec>(wanted + j * TALL));
        }
        product = weighted;
        return total;
    }
    // Writes the probabilities after dropout, and the gradients of the unscaled scores; rows are `stride` apart.
    [[gnu::always_inline]] void write_slopes(const Heads &g, vec total, vec product, bf16 *dropped, bf16 *slopes,
                                             int64_t stride) const {
        vec share = g.scale / total, rate = share * g.factor, mean = product / total * rate;
        for (int64_t j = 0; j < keys; j++) {
            vec a = read<vec>(scores + j * TALL);
            put(dropped + j * stride, kept(j, a * share), W);
            put(slopes + j * stride, a * (kept(j, read<vec>(wanted + j * TALL)) * rate - mean), W);
        }
    }
};

inline void attend_backward_with_tiles(const Heads &g, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad,
                                       bf16 *dq, bf16 *dk, bf16 *dv, float *column_sums, int threads) {
    const int64_t size = g.size, high = filled_up(g.queries, TALL), wide = filled_up(g.keys, TALL), across = size / 2;
    const float factor = g.factor * LOG2_E;
    ThreadSums lines(threads, column_sums ? 3 * g.heads * size : 0);
#pragma omp parallel num_threads(threads)
    {
        // `_columns` and `_pairs` are right factors. Some arrays share their memory, so that most of it stays in the
        // first-level cache.
        bf16 *rows, *keys, *values, *dropped, *slopes;
        word *query_columns, *grad_columns, *query_pairs, *grad_pairs, *key_pairs;
        float *bias, *scores, *wanted;
        uint32_t *bits;
        Arrays arrays;
        arrays.make([&](auto take) {
            take(rows, std::max(high, wide) * std::max(size, TALL)), take(keys, wide * size), take(values, wide * size);
            take(dropped, wide * high), take(slopes, wide * high), take(query_columns, across * high);
            take(grad_columns, across * high), take(query_pairs, high * across), take(grad_pairs, high * across);
            take(key_pairs, wide * across), take(bias, wide), take(bits, wide);
            take(scores, wide * TALL), take(wanted, std::max(wide, TALL) * std::max(size, TALL));
        });
        word *mixed = reinterpret_cast<word *>(rows), *slope_rows = reinterpret_cast<word *>(scores);
        float *sums = wanted;
        KeptBits kept(g);
        float *mine = column_sums ? lines.of(omp_get_thread_num()) : nullptr;
        Tiles<bf16> tiles;
        const int64_t end = end_of_share(g.batch * g.heads);
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t n = 0; n < g.batch; n++)
            for (int64_t h = 0; h < g.heads; h++) {
                int64_t used = Heads::count(g.key_places, n, g.keys);
                int64_t asked = Heads::count(g.query_places, n, g.queries);
                int64_t length = filled_up(used, TALL), tall = filled_up(asked, TALL);
                auto prepare = [&](const bf16 *x, int64_t stride, word *columns, word *pairs) {
                    collect_all(g.query_rows(x, stride, n, h), asked, tall, size, rows);
                    exchange(words(rows), across, columns, tall, tall, across);
                    pair_rows(rows, pairs, tall, size);
                };
                prepare(q, g.query_stride, query_columns, query_pairs);
                prepare(grad, g.heads * size, grad_columns, grad_pairs);
                collect_all(g.key_rows(v, n, h), used, length, size, values);
                collect_all(g.key_rows(k, n, h), used, length, size, keys);
                pair_rows(keys, key_pairs, length, size);
                take_bias(g, n, used, length, bias);
                bool is_last = (n + 1) * g.heads >= end;
                NextRows next(is_last ? nullptr : g.key_rows(k, n + 1, 0)[0], g.key_stride, g.heads);
                NextRows next_grads(is_last ? nullptr : g.query_rows(grad, g.heads * size, n + 1, 0)[0], g.heads * size,
                                    g.heads);
                NextRows next_written(is_last ? nullptr : g.key_rows(dk, n + 1, 0)[0], g.key_stride, g.heads);
                for (int64_t first = 0; first < asked; first += TALL) {
                    int64_t count = std::min(TALL, asked - first);
                    multiply<bf16>(words(keys), across, query_columns + first, tall, scores, TALL, length, TALL, size);
                    multiply<bf16>(words(values), across, grad_columns + first, tall, wanted, TALL, length, TALL, size);
                    kept.fill(n, h, first, count);
                    for (int64_t key = 0; key < length; key += 32)
                        for (int64_t t = 0; t < count; t++) bits[key + t] = kept.of(t, key);
                    next.ask<false>(h * asked + first, count);
                    next_grads.ask<false>(h * asked + first, count);
                    next_written.ask<true>(h * asked + first, count);
                    for (int64_t half = 0; half < TALL; half += W) {
                        Column column{scores + half, wanted + half, bias, bits + half, used};
                        vec product, total = column.write_exponentials<false>(factor, product);
                        if (most_of(total > LEAST_SUM && total < MOST_SUM ? vec{} : all(1.0f))) {
                            multiply<bf16>(words(keys), across, query_columns + first, tall, scores, TALL, length,
                                           TALL, size);
                            total = column.write_exponentials<true>(factor, product);
                        }
                        column.write_slopes(g, total, product, dropped + first + half, slopes + first + half, tall);
                    }
                    // What another example left there may be infinite, and would be multiplied by zeros.
                    for (int64_t j = used; j < length; j++)
                        std::memset(slopes + j * tall + first, 0, TALL * sizeof(bf16));
                    for (int64_t j = 0; j < length; j += 2)
                        pair_row(slopes + j * tall + first, tall, mixed + j / 2 * TALL, TALL);
                    exchange(mixed, TALL, slope_rows, length / 2, length / 2, TALL);
                    multiply<bf16>(slope_rows, length / 2, key_pairs, size, sums, size, TALL, size, length);
                    if (mine) add_rows(sums, count, size, mine + h * size);
                    deliver(sums, size, g.query_rows(dq, g.query_stride, n, h), first, count, size);
                }
                auto finish = [&](const bf16 *left, const word *right, bf16 *to, int64_t column) {
                    multiply<bf16>(words(left), tall / 2, right, size, sums, size, length, size, tall);
                    if (mine) add_rows(sums, used, size, mine + (column * g.heads + h) * size);
                    deliver(sums, size, g.key_rows(to, n, h), 0, used, size);
                };
                finish(slopes, query_pairs, dk, 1);
                finish(dropped, grad_pairs, dv, 2);
            }
    }
    lines.add_to(column_sums, 0, size_t(3 * g.heads * size));
}
#endif

} // namespace
