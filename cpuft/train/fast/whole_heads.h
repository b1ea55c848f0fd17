// Attention of whole heads in bf16, for examples of which a head fits into the second-level cache: with AMX tiles, or with
// the vector instructions of AVX512_BF16.
//
// Forward has scores with queries in rows: the probabilities are the left factor of the context. Backward has them with
// keys in rows: its sums over keys add whole vectors, and the probabilities and slopes are the left factors of the
// gradients of values and keys, which need no transposition. Exponentials are those of the scores as they are; only if
// a sum of them is very small or large, the query's highest score is subtracted first.

#pragma once

#include "heads.h"
#include <omp.h>

namespace {

#ifdef __AVX512BF16__

// The largest number of tokens of an example. Backward has two arrays of the square of this with 2 bytes each, which
// take half of the second-level cache with AMX, which is 2 MB, and a quarter of other CPUs' 1 MB.
#ifdef __AMX_BF16__
constexpr int64_t MOST_TOKENS = 512;
#else
constexpr int64_t MOST_TOKENS = 256;
#endif
// The largest size of a head: working memory for 16 rows is on the stack.
constexpr int64_t MOST_SIZE = 512;
// If a sum of exponentials is between these, none of its large summands has been rounded to zero or to infinity.
constexpr float LEAST_SUM = 1e-18f, MOST_SUM = 1e18f;
// The lowest bias of a key, to which lower ones, also -inf, are raised; and the bias where there is no key.
constexpr float MASKED = -1e30f, MISSING = -1e38f;
constexpr float LOG2_E = 1.44269504088896341f;

typedef uint64_t longs __attribute__((vector_size(64)));

inline bool fits_whole_heads(const Heads &g) {
    return g.size % (2 * W) == 0 && g.size <= MOST_SIZE && g.keys <= MOST_TOKENS && g.queries <= MOST_TOKENS &&
           g.back < 0 && g.ahead < 0 && !g.position_bias && (!g.bias || (g.bias_head == 0 && g.bias_query == 0));
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

// A left factor of a product; the stride is in words.
struct Left {
    const word *at;
    int64_t stride;
};

// The rows of one head of an example as factors of products. They are read where they lie, unless some of them are
// missing between others, or there is nothing behind the last one that could be read in place of padding.
class Factors {
    Rows<const bf16> from;
    int64_t count, size;
    const bf16 *first;  // the first row if all lie one after the other, else null
    int64_t behind;     // the number of rows in memory after the first one

    // Copies the rows from `begin` to `end`, and zeros in place of those that are missing.
    void copy_rows(int64_t begin, int64_t end, bf16 *to) const {
        for (int64_t t = begin; t < end; t++, to += size) {
            const bf16 *row = t < count ? from[t] : nullptr;
            for (int64_t j = 0; j < size; j += 2 * W)
                _mm512_storeu_si512(to + j, row ? _mm512_loadu_si512(row + j) : _mm512_setzero_si512());
        }
    }

  public:
    // There are `in_memory` rows of all examples.
    Factors(Rows<const bf16> rows, int64_t count, int64_t size, int64_t in_memory)
        : from(rows), count(count), size(size), first(count ? rows[0] : nullptr), behind(0) {
        if (!first) return;
        behind = in_memory - (first - rows.at) / rows.stride;
        if (rows[count - 1] != first + (count - 1) * rows.stride) first = nullptr;
    }
    // A left factor. Rows behind the last one are undefined up to row `high`. `room` is memory for so many.
    Left as_left(int64_t high, bf16 *room) const {
        if (first && high <= behind) return {words(first), from.stride / 2};
        copy_rows(0, high, room);
        return {words(room), size / 2};
    }
    // A right factor that is stored transposed: columns of `high` words, of which the last are zeros.
    void turn(int64_t high, word *to) const {
        alignas(64) bf16 room[W * MOST_SIZE];
        for (int64_t t = 0; t < high; t += W) {
            bool is_whole = first && t + W <= count;
            if (!is_whole) copy_rows(t, t + W, room);
            const word *rows = words(is_whole ? first + t * from.stride : room);
            exchange(rows, (is_whole ? from.stride : size) / 2, to + t, high, W, size / 2);
        }
    }
    // A right factor of which the rows are summed over, `high` rows with zeros for those that are missing.
    void pair(int64_t high, word *to) const {
        alignas(64) bf16 room[2 * MOST_SIZE];
        for (int64_t t = 0; t < high; t += 2, to += size) {
            bool is_whole = first && t + 2 <= count;
            if (!is_whole) copy_rows(t, t + 2, room);
            pair_row(is_whole ? first + t * from.stride : room, is_whole ? from.stride : size, to, size);
        }
    }
};

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

// The heads of all examples that this thread computes: those from number `begin` to `end`, where n * heads + h is the
// number of head h of example n. All threads have about as much work, also if examples are sorted by their lengths.
struct Share {
    int64_t begin, end;
};
inline Share share_of(const Heads &g) {
    // The work of a head: some of it for each token, the rest for each pair of tokens.
    auto work = [&](int64_t n) {
        int64_t used = Heads::count(g.key_places, n, g.keys);
        return Heads::count(g.query_places, n, g.queries) * (filled_up(used, TALL) + TALL) + 1;
    };
    int64_t total = 0, done = 0, number = 0, thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t n = 0; n < g.batch; n++) total += g.heads * work(n);
    Share share{0, g.batch * g.heads};
    for (int64_t n = 0; n < g.batch; n++) {
        int64_t of_head = work(n);
        for (int64_t h = 0; h < g.heads; h++, number++, done += of_head) {
            if (thread * total > done * threads) share.begin = number + 1;
            if ((thread + 1) * total > done * threads) share.end = number + 1;
        }
    }
    return share;
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

// Writes `count` rows of sums to the rows of a head from `first` on, times `factors` unless that is null, and adds those
// without the factors to `column_sums`, unless that is null.
inline void write_sums(const float *sums, Rows<bf16> to, int64_t first, int64_t count, int64_t size,
                       const float *factors, float *column_sums) {
    for (int64_t j = 0; j < size; j += 2 * W) {
        vec low{}, high{};
        for (int64_t t = 0; t < count; t++) {
            bf16 *row = to[first + t];
            if (!row) continue;
            vec a = read<vec>(sums + t * size + j), b = read<vec>(sums + t * size + j + W);
            low += a, high += b;
            if (factors) a *= factors[t], b *= factors[t];
            _mm512_storeu_si512(row + j, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
        }
        if (!column_sums) continue;
        put(column_sums + j, read<vec>(column_sums + j) + low, W);
        put(column_sums + j + W, read<vec>(column_sums + j + W) + high, W);
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

inline void attend_whole_heads(const Heads &g, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *context, int threads) {
    const int64_t size = g.size, high = filled_up(g.queries, TALL), wide = filled_up(g.keys, TALL), across = size / 2;
    const int64_t query_rows = g.rows(g.query_places, g.queries), key_rows = g.rows(g.key_places, g.keys);
    const float factor = g.factor * LOG2_E;
#pragma omp parallel num_threads(threads)
    {
        bf16 *rows, *exponentials;
        word *keys, *values;
        float *bias, *scores, *sums, *shares;
        Arrays arrays;
        arrays.make([&](auto take) {
            take(rows, high * size), take(exponentials, 2 * TALL * wide);
            take(keys, wide * across), take(values, wide * across), take(bias, wide);
            take(scores, 2 * TALL * wide), take(sums, 2 * TALL * size), take(shares, 2 * TALL);
        });
        KeptBits kept(g);
        Tiles<bf16> tiles;
        const Share share = share_of(g);
        for (int64_t number = share.begin; number < share.end; number++) {
            int64_t n = number / g.heads, h = number % g.heads;
            int64_t used = Heads::count(g.key_places, n, g.keys);
            int64_t asked = Heads::count(g.query_places, n, g.queries), length = filled_up(used, TALL);
            Factors(g.key_rows(k, n, h / g.group()), used, size, key_rows).turn(length, keys);
            Factors(g.key_rows(v, n, h / g.group()), used, size, key_rows).pair(length, values);
            Factors query_factors(g.query_rows(q, g.query_stride, n, h), asked, size, query_rows);
            Left queries = query_factors.as_left(filled_up(asked, TALL), rows);
            take_bias(g, n, used, length, bias);
            bool is_last = (n + 1) * g.heads >= share.end;
            NextRows next(is_last ? nullptr : g.key_rows(k, n + 1, 0)[0], g.key_stride, g.heads);
            NextRows next_written(is_last ? nullptr : g.query_rows(context, g.heads * size, n + 1, 0)[0],
                                  g.heads * size, g.heads);
            // The tiles multiply the scores of the next block of queries, and the probabilities of the one before,
            // while the exponentials of one are computed: tiles wait for what has just been stored.
            auto odd = [](int64_t first) { return first / TALL % 2; };
            auto score = [&](int64_t first) {
                multiply<bf16>(queries.at + first * queries.stride, queries.stride, keys, length,
                               scores + odd(first) * TALL * wide, length, TALL, length, size);
            };
            auto look = [&](int64_t first) {
                int64_t count = std::min(TALL, asked - first);
                kept.fill(n, h, first, count);
                for (int64_t t = 0; t < count; t++) {
                    next.ask<false>(h * asked + first + t, 1);
                    next_written.ask<true>(h * asked + first + t, 1);
                    const float *s = scores + odd(first) * TALL * wide + t * length;
                    bf16 *to = exponentials + odd(first) * TALL * wide + t * length;
                    float total = write_exponentials<false>(s, bias, kept, t, length, factor, to);
                    if (!(total > LEAST_SUM && total < MOST_SUM))
                        total = write_exponentials<true>(s, bias, kept, t, length, factor, to);
                    shares[odd(first) * TALL + t] = used ? g.scale / total : 0.0f;
                }
            };
            auto mix = [&](int64_t first) {
                multiply<bf16>(words(exponentials + odd(first) * TALL * wide), length / 2, values, size,
                               sums + odd(first) * TALL * size, size, TALL, size, length);
            };
            auto finish = [&](int64_t first) {
                write_sums(sums + odd(first) * TALL * size, g.query_rows(context, g.heads * size, n, h), first,
                           std::min(TALL, asked - first), size, shares + odd(first) * TALL, nullptr);
            };
            score(0);
            for (int64_t first = 0; first < asked + 2 * TALL; first += TALL) {
                if (first + TALL < asked) score(first + TALL);
                if (first >= 2 * TALL) finish(first - 2 * TALL);
                if (first < asked) look(first);
                if (first >= TALL && first - TALL < asked) mix(first - TALL);
            }
        }
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

// Numbers of TALL queries.
struct Queries {
    vec low, high;
};

// The scores of a block of queries with all keys, and the gradients of the probabilities after dropout, `wanted`: TALL
// numbers for each key. The functions are inlined, because calls would read the members again after each store.
struct Columns {
    float *__restrict scores;
    const float *wanted, *bias;
    const uint32_t *bits;  // for each 32 keys, those of TALL queries: the bit of a key is set if dropout keeps it
    int64_t keys;

    static Queries get(const float *p) { return {read<vec>(p), read<vec>(p + W)}; }
    Queries kept(int64_t j, Queries x) const {
        const uint32_t *of_queries = bits + j / 32 * TALL;
        __m512i of_key = _mm512_set1_epi32(int(KEY_BITS.of[j % 32]));
        __mmask16 low = _mm512_test_epi32_mask(_mm512_loadu_si512(of_queries), of_key);
        __mmask16 high = _mm512_test_epi32_mask(_mm512_loadu_si512(of_queries + W), of_key);
        return {_mm512_maskz_mov_ps(low, x.low), _mm512_maskz_mov_ps(high, x.high)};
    }
    Queries score(int64_t j, float factor) const {
        Queries s = get(scores + j * TALL);
        return {s.low * factor + bias[j], s.high * factor + bias[j]};
    }
    // Replaces the scores by their exponentials, or by those of what is left after each query's highest score has been
    // subtracted. Returns the sums of these, and `product`, of these times `wanted`.
    template <bool SUBTRACTS> [[gnu::always_inline]] Queries write_exponentials(float factor, Queries &product) const {
        Queries tops{all(MISSING), all(MISSING)}, total{}, weighted{};
        if (SUBTRACTS)
            for (int64_t j = 0; j < keys; j++) {
                Queries s = score(j, factor);
                tops = {s.low > tops.low ? s.low : tops.low, s.high > tops.high ? s.high : tops.high};
            }
        for (int64_t j = 0; j < keys; j++) {
            Queries s = score(j, factor), w = kept(j, get(wanted + j * TALL));
            if (SUBTRACTS) s = {s.low - tops.low, s.high - tops.high};
            s = {exp2_of(s.low), exp2_of(s.high)};
            put(scores + j * TALL, s.low, W);
            put(scores + j * TALL + W, s.high, W);
            total = {total.low + s.low, total.high + s.high};
            weighted = {weighted.low + s.low * w.low, weighted.high + s.high * w.high};
        }
        product = weighted;
        return total;
    }
    // Writes the probabilities after dropout, and the gradients of the unscaled scores; rows are `stride` apart.
    [[gnu::always_inline]] void write_slopes(const Heads &g, Queries total, Queries product, bf16 *dropped,
                                             bf16 *slopes, int64_t stride) const {
        Queries share{g.scale / total.low, g.scale / total.high}, rate{share.low * g.factor, share.high * g.factor};
        Queries mean{product.low / total.low * rate.low, product.high / total.high * rate.high};
        auto write = [](bf16 *to, vec low, vec high) {
            _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
        };
        for (int64_t j = 0; j < keys; j++) {
            Queries a = get(scores + j * TALL), w = kept(j, get(wanted + j * TALL));
            Queries p = kept(j, {a.low * share.low, a.high * share.high});
            write(dropped + j * stride, p.low, p.high);
            write(slopes + j * stride, a.low * (w.low * rate.low - mean.low), a.high * (w.high * rate.high - mean.high));
        }
    }
};

inline void attend_backward_whole_heads(const Heads &g, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad,
                                       bf16 *dq, bf16 *dk, bf16 *dv, float *column_sums, int threads) {
    const int64_t size = g.size, high = filled_up(g.queries, TALL), wide = filled_up(g.keys, TALL), across = size / 2;
    const int64_t query_rows = g.rows(g.query_places, g.queries), key_rows = g.rows(g.key_places, g.keys);
    const float factor = g.factor * LOG2_E;
    ThreadSums lines(threads, column_sums ? 3 * g.heads * size : 0);
#pragma omp parallel num_threads(threads)
    {
        // `_columns` and `_pairs` are right factors. Some arrays share their memory, so that most of it stays in the
        // first-level cache.
        bf16 *key_room, *value_room, *dropped, *slopes;
        word *mixed, *query_columns, *grad_columns, *query_pairs, *grad_pairs, *key_pairs;
        float *bias, *scores, *wanted;
        uint32_t *bits;
        Arrays arrays;
        arrays.make([&](auto take) {
            take(mixed, wide / 2 * TALL), take(key_room, wide * size), take(value_room, wide * size);
            take(dropped, wide * high), take(slopes, wide * high), take(query_columns, across * high);
            take(grad_columns, across * high), take(query_pairs, high * across), take(grad_pairs, high * across);
            take(key_pairs, wide * across), take(bias, wide), take(bits, wide);
            take(scores, wide * TALL), take(wanted, std::max(wide, TALL) * std::max(size, TALL));
        });
        word *slope_rows = reinterpret_cast<word *>(scores);
        float *sums = wanted;
        KeptBits kept(g);
        float *mine = column_sums ? lines.of(omp_get_thread_num()) : nullptr;
        Tiles<bf16> tiles;
        const Share share = share_of(g);
        for (int64_t number = share.begin; number < share.end; number++) {
            int64_t n = number / g.heads, h = number % g.heads;
            int64_t used = Heads::count(g.key_places, n, g.keys);
            int64_t asked = Heads::count(g.query_places, n, g.queries);
            int64_t length = filled_up(used, TALL), tall = filled_up(asked, TALL);
            auto prepare = [&](const bf16 *x, int64_t stride, word *columns, word *pairs) {
                Factors factors(g.query_rows(x, stride, n, h), asked, size, query_rows);
                factors.turn(tall, columns);
                factors.pair(tall, pairs);
            };
            prepare(q, g.query_stride, query_columns, query_pairs);
            prepare(grad, g.heads * size, grad_columns, grad_pairs);
            Factors key_factors(g.key_rows(k, n, h), used, size, key_rows);
            Left keys = key_factors.as_left(length, key_room);
            Left values = Factors(g.key_rows(v, n, h), used, size, key_rows).as_left(length, value_room);
            key_factors.pair(length, key_pairs);
            take_bias(g, n, used, length, bias);
            bool is_last = (n + 1) * g.heads >= share.end;
            NextRows next(is_last ? nullptr : g.key_rows(k, n + 1, 0)[0], g.key_stride, g.heads);
            NextRows next_grads(is_last ? nullptr : g.query_rows(grad, g.heads * size, n + 1, 0)[0], g.heads * size,
                                g.heads);
            NextRows next_written(is_last ? nullptr : g.key_rows(dk, n + 1, 0)[0], g.key_stride, g.heads);
            for (int64_t first = 0; first < asked; first += TALL) {
                int64_t count = std::min(TALL, asked - first);
                auto score = [&] {
                    multiply<bf16>(keys.at, keys.stride, query_columns + first, tall, scores, TALL, length, TALL,
                                   size);
                };
                score();
                multiply<bf16>(values.at, values.stride, grad_columns + first, tall, wanted, TALL, length, TALL,
                               size);
                kept.fill(n, h, first, count);
                for (int64_t key = 0; key < length; key += 32)
                    for (int64_t t = 0; t < count; t++) bits[key + t] = kept.of(t, key);
                next.ask<false>(h * asked + first, count);
                next_grads.ask<false>(h * asked + first, count);
                next_written.ask<true>(h * asked + first, count);
                Columns columns{scores, wanted, bias, bits, used};
                Queries product, total = columns.write_exponentials<false>(factor, product);
                auto is_far = [](vec x) { return x > LEAST_SUM && x < MOST_SUM ? vec{} : all(1.0f); };
                if (most_of(is_far(total.low) + is_far(total.high))) {
                    score();
                    total = columns.write_exponentials<true>(factor, product);
                }
                columns.write_slopes(g, total, product, dropped + first, slopes + first, tall);
                // What another example left there may be infinite, and would be multiplied by zeros.
                for (int64_t j = used; j < length; j++)
                    std::memset(slopes + j * tall + first, 0, TALL * sizeof(bf16));
                for (int64_t j = 0; j < length; j += 2)
                    pair_row(slopes + j * tall + first, tall, mixed + j / 2 * TALL, TALL);
                exchange(mixed, TALL, slope_rows, length / 2, length / 2, TALL);
                multiply<bf16>(slope_rows, length / 2, key_pairs, size, sums, size, TALL, size, length);
                write_sums(sums, g.query_rows(dq, g.query_stride, n, h), first, count, size, nullptr,
                           mine ? mine + h * size : nullptr);
            }
            auto finish = [&](const bf16 *left, const word *right, bf16 *to, int64_t column) {
                multiply<bf16>(words(left), tall / 2, right, size, sums, size, length, size, tall);
                write_sums(sums, g.key_rows(to, n, h), 0, used, size, nullptr,
                           mine ? mine + (column * g.heads + h) * size : nullptr);
            };
            finish(slopes, query_pairs, dk, 1);
            finish(dropped, grad_pairs, dv, 2);
        }
    }
    lines.add_to(column_sums, 0, size_t(3 * g.heads * size));
}
#endif

} // namespace
