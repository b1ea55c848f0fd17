// The rows of queries, keys and values of a head in the matrices of all tokens, and copies of these rows from and to
// working memory.

#pragma once

#include "products.h"
#include "../../vectors.h"
#include <algorithm>
#include <type_traits>
#include <vector>

namespace {

// Number of queries that are processed at a time.
constexpr int64_t TALL = 32;
// Least number of queries of a part of an example; a part's keys, and the sums of their gradients, stay in the cache.
constexpr int64_t PART = 256;

// The part of the tokens' rows that belongs to one head. Token t of an example is in row places[t], or absent if that
// is negative. If `places` is null, the tokens are in consecutive rows from `first` on.
template <class T> struct Rows {
    T *at;
    int64_t stride;
    const int64_t *places;
    int64_t first;
    T *operator[](int64_t t) const {
        int64_t row = places ? places[t] : first + t;
        return row < 0 ? nullptr : at + row * stride;
    }
};

// The positions of keys from `low` on and before `end`.
struct Range {
    int64_t low, end;
};

struct Heads {
    const float *bias, *position_bias;
    const int64_t *query_places, *key_places;
    int64_t batch, heads, key_heads, queries, keys, size;
    int64_t back, ahead;  // how many positions before and after its own a query looks at; negative: at all of them
    int64_t query_stride, key_stride, bias_batch, bias_head, bias_query;
    float factor;
    uint64_t seed;
    uint32_t threshold;
    float scale;

    template <class T> Rows<T> query_rows(T *x, int64_t stride, int64_t n, int64_t h) const {
        return {x + h * size, stride, query_places ? query_places + n * queries : nullptr, n * queries};
    }
    // The number of query heads that share one head of keys and values, whose number is h / group().
    int64_t group() const { return heads / key_heads; }
    // `shared` is the number of a head of keys and values.
    template <class T> Rows<T> key_rows(T *x, int64_t n, int64_t shared) const {
        return {x + shared * size, key_stride, key_places ? key_places + n * keys : nullptr, n * keys};
    }
    const float *bias_of(int64_t n, int64_t h, int64_t q) const {
        return bias ? bias + n * bias_batch + h * bias_head + q * bias_query : nullptr;
    }
    // The number of distances between the positions of an example, and the index of that between query q and key 0. From
    // there on, the distances between this query and all keys are consecutive.
    int64_t distances() const { return 2 * keys - 1; }
    int64_t distance_of(int64_t q) const { return keys - 1 - q; }
    const float *position_bias_of(int64_t h, int64_t q) const {
        return position_bias ? position_bias + h * distances() + distance_of(q) : nullptr;
    }
    // The keys that at least one of `count` queries from `first` on looks at, among `used` keys; empty if low >= end.
    Range seen_by(int64_t first, int64_t count, int64_t used) const {
        return {back < 0 ? 0 : std::max<int64_t>(first - back, 0),
                ahead < 0 ? used : std::min(first + count + ahead, used)};
    }
    bool has_window() const { return back >= 0 && ahead >= 0; }
    // The number of queries of a part. Adjacent parts have back + ahead keys in common, at most half of a part's.
    int64_t part() const { return has_window() ? filled_up(std::max(PART, 2 * (back + ahead)), TALL) : queries; }
    // The largest number of keys that `count` adjacent queries see, if the first key is rounded down to `step`.
    int64_t most_seen(int64_t count, int64_t step) const {
        return has_window() ? std::min(keys, count + back + ahead + step) : keys;
    }
    // The number of rows of all examples, of which the places are ascending, for `length` positions in each.
    int64_t rows(const int64_t *places, int64_t length) const {
        int64_t last = batch * length;
        while (places && last > 0 && places[last - 1] < 0) last--;
        return places && last > 0 ? places[last - 1] + 1 : last;
    }
    // The number of tokens of an example up to the last one that has a row.
    static int64_t count(const int64_t *places, int64_t n, int64_t length) {
        int64_t last = length;
        while (places && last > 0 && places[n * length + last - 1] < 0) last--;
        return last;
    }
};

// The heads of an encoder layer with these tensors, of which each query looks at all keys. Rows of queries, and of keys,
// are `stride` numbers apart; `rest` are the fields after that.
template <class Tensors, class... Rest>
Heads encoder_heads(const Tensors &t, const int64_t *query_places, int64_t batch, int64_t heads, int64_t queries,
                    int64_t keys, int64_t hidden, int64_t stride, Rest... rest) {
    return {t.score_bias, nullptr, query_places, t.places, batch, heads, heads, queries, keys, hidden / heads, -1, -1,
            stride, stride, rest...};
}

// A number of tokens, and the size of a head, padded for the products.
template <class T> int64_t length_of(int64_t tokens) { return filled_up(tokens, COLS<T>); }
template <class T> int64_t width_of(int64_t size) { return filled_up(size, std::max(COLS<T>, W * IN_WORD<T>)); }

// Working memory of one thread for several arrays, each aligned to cache lines. All is zero at first.
class Arrays {
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    // Arrays of 4 KB would have addresses that the CPU cannot tell apart when it looks for the store before a load.
    static constexpr int64_t STAGGER = 5 * 64;
    std::vector<Line> lines;

  public:
    // Calls assign(take), where take(array, count) makes the pointer `array` that to `count` elements.
    template <class Assign> void make(Assign &&assign) {
        for (int64_t pass = 0; pass < 2; pass++) {  // first adds up the sizes, then assigns the addresses
            uint8_t *from = lines.empty() ? nullptr : lines.data()->bytes;
            int64_t taken = 0;
            assign([&](auto *&array, int64_t count) {
                array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(from + taken);
                taken += (count * int64_t(sizeof *array) + 63) / 64 * 64 + STAGGER;
            });
            lines.resize(size_t(taken / 64));
        }
    }
};

template <class T> inline void copy(T *to, const T *from) { std::memcpy(to, from, W * sizeof(T)); }

template <class T> const word *words(const T *x) { return reinterpret_cast<const word *>(x); }

// Copies `count` rows from `first` on, then zeros up to `high` rows; each row is padded to `width`.
template <class T>
void collect(Rows<const T> from, int64_t first, int64_t count, int64_t high, int64_t size, int64_t width, T *to) {
    for (int64_t t = 0; t < high; t++, to += width) {
        const T *row = t < count ? from[first + t] : nullptr;
        int64_t found = row ? size : 0, j = 0;
        for (; j + W <= found; j += W) {
            copy(to + j, row + j);
            __builtin_prefetch(row + size + j);  // the same row of the next head
        }
        for (; j < width; j += W) put(to + j, j < found ? get(row + j, lanes_of(j, found)) : vec{}, W);
    }
}

// Rows of `from` are multiplied by `factors`, unless that is null.
template <class T>
void deliver(const float *from, int64_t width, Rows<T> to, int64_t first, int64_t count, int64_t size,
             const float *factors = nullptr) {
    for (int64_t t = 0; t < count; t++, from += width)
        if (T *row = to[first + t]) {
            float factor = factors ? factors[t] : 1.0f;
            for (int64_t j = 0; j < size; j += W)
                put(row + j, get(from + j, lanes_of(j, size)) * factor, lanes_of(j, size));
        }
}

} // namespace
