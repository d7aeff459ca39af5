// Attention of requests with one query: bound by reading the cache, which is read once for all query heads.
//
// A few positions with all their heads are read in order into the second cache first, then worked on head by head: what
// lies in order the processor fetches ahead at the memory's full speed. Without that the same work takes twice as long
// (measured on Zen 5), whatever the order of the work, and with prefetch instructions too.
#pragma once

#include "../constants.h"
#include "attention.h"
#include "attention_decode_bfloat16.h"

namespace hardpoint::HARDPOINT_LEVEL::attention {

constexpr int kDecodeKeys = 32;
constexpr int kDotKeys = kLanes == 16 ? 4 : 2, kDotQueries = 4;
constexpr int kValueVectors = kLanes == 16 ? 4 : 2;

// Elements of keys and values that a split has at least: some ten microseconds of reading.
constexpr std::int64_t kLeastSplit = 65536;

// The sums of several vectors, one behind the other.
#if defined(__AVX512F__)
inline void store_sums(float* to, const Floats (&v)[4]) {
    const auto a = bits_as<__m512>(v[0]), b = bits_as<__m512>(v[1]), c = bits_as<__m512>(v[2]),
               d = bits_as<__m512>(v[3]);
    const auto ab = bits_as<__m512d>(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const auto cd = bits_as<__m512d>(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    const auto quarters = bits_as<__m512>(_mm512_unpacklo_pd(ab, cd)) + bits_as<__m512>(_mm512_unpackhi_pd(ab, cd));
    const auto halves = _mm512_castps512_ps256(quarters) + _mm512_extractf32x8_ps(quarters, 1);
    _mm_storeu_ps(to, _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
}
#elif defined(__AVX2__)
inline void store_sums(float* to, const Floats (&v)[2]) {
    const auto both = _mm256_hadd_ps(bits_as<__m256>(v[0]), bits_as<__m256>(v[1]));
    const auto halves = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    const auto sums = _mm_hadd_ps(halves, halves);
    std::memcpy(to, &sums, 2 * sizeof(float));
}
#endif
template <int count>
inline void store_sums(float* to, const Floats (&v)[count]) {
    for (int i = 0; i < count; ++i) to[i] = sum(v[i]);
}

// A vector that several products read. Without this, compilers load it once for each of them, and loads are the bound.
inline Floats in_register(Floats v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#endif
    return v;
}

// scores[query][key] of `queries` rows of q, padded with zeros, and kDotKeys keys.
template <int queries, typename Row>
inline void dot(
    const Row* keys, std::int64_t at, const float* q, std::int64_t padded, std::int64_t size, float* scores
) {
    Floats sums[queries][kDotKeys];
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kDotKeys; ++j) sums[i][j] = Floats{};
    }
    const auto add = [&](std::int64_t d, auto read) {
        Floats k[kDotKeys];
#pragma GCC unroll 8
        for (int j = 0; j < kDotKeys; ++j) k[j] = read(keys[j] + at + d);
#pragma GCC unroll 8
        for (int i = 0; i < queries; ++i) {
            const Floats x = in_register(load(q + i * padded + d));
#pragma GCC unroll 8
            for (int j = 0; j < kDotKeys; ++j) sums[i][j] += x * k[j];
        }
    };
    std::int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) add(d, [](Row from) { return load(from); });
    if (d < size) add(d, [=](Row from) { return load_some(from, size - d); });
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i) store_sums(scores + i * kDecodeKeys, sums[i]);
}

// sums[query] = sums[query] * shrink[query] + the weighted values; here for `vectors` vectors of elements; the last
// elements of a head may be fewer than a vector: `some`.
template <int queries, int vectors, typename Row>
inline void add_vectors(
    const Row* values, std::int64_t at, std::int64_t count, const float* weights, const float* shrink,
    float* sums, std::int64_t padded, std::int64_t some = 0
) {
    Floats total[queries][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            total[i][v] = load(sums + i * padded + v * kLanes);
            total[i][v] *= shrink[i];
        }
    }
    for (std::int64_t j = 0; j < count; ++j) {
        Floats value[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            const Row from = values[j] + at + v * kLanes;
            value[v] = some ? load_some(from, some) : load(from);
        }
#pragma GCC unroll 8
        for (int i = 0; i < queries; ++i) {
            const Floats weight = in_register(broadcast(weights[i * kDecodeKeys + j]));
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) total[i][v] += weight * value[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) store(sums + i * padded + v * kLanes, total[i][v]);
    }
}

template <int queries, typename Row>
inline void add_values(
    const Row* values, std::int64_t at, std::int64_t count, const float* weights, const float* shrink,
    float* sums, std::int64_t padded, std::int64_t size
) {
    std::int64_t d = 0;
    for (; d + kValueVectors * kLanes <= size; d += kValueVectors * kLanes) {
        add_vectors<queries, kValueVectors>(values, at + d, count, weights, shrink, sums + d, padded);
    }
    for (; d + kLanes <= size; d += kLanes) {
        add_vectors<queries, 1>(values, at + d, count, weights, shrink, sums + d, padded);
    }
    if (d < size) add_vectors<queries, 1>(values, at + d, count, weights, shrink, sums + d, padded, size - d);
}

// Which part of which request a chunk is.
struct Split {
    std::int64_t request, begin, end, count, slot;  // positions; splits of the request; slot of its first in `partial`
};

struct Splits : Attention {
    // Positions in a split, by the lengths of all requests.
    std::int64_t split_size() const {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < requests; ++i) total += num_read(i);
        const auto least =
            std::max(ceil_div(total, kSplitsPerThread * threads), ceil_div(kLeastSplit, 2 * kv_heads * size));
        return round_up(std::max<std::int64_t>(1, least), kDecodeKeys);
    }
    // Positions that the one query of a request reads; 0 for requests with more.
    std::int64_t num_read(std::int64_t request) const {
        return num_queries(request) == 1 ? seq_lens[request] - first(seq_lens[request] - 1) : 0;
    }
    // A split's results in `partial`: for each head its sum of weighted values [size], largest score, and total.
    float* results(std::int64_t slot, std::int64_t head) const { return partial + (slot * heads + head) * (size + 2); }
};

template <typename Element>
struct Decode : Splits {
    std::int64_t chunks() const {
        const auto most = split_size();
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < requests; ++i) count += ceil_div(num_read(i), most);
        return count;
    }

    Split find(std::int64_t chunk) const {
        const auto most = split_size();
        std::int64_t slot = 0;
        for (std::int64_t i = 0;; ++i) {
            const auto read = num_read(i), count = ceil_div(read, most);
            if (chunk < slot + count) {
                const auto begin = seq_lens[i] - read + (chunk - slot) * most;
                return {i, begin, std::min<std::int64_t>(begin + most, seq_lens[i]), count, slot};
            }
            slot += count;
        }
    }

    void run(std::int64_t chunk) const {
#if defined(__AVX512BF16__)
        if constexpr (kIsBfloat16<Element>) {
            if (dtype == kBfloat16 && PairedDecode<Element>::serves(size)) return run_paired(chunk);
        }
#endif
        run_widened(chunk);
    }

    void run_widened(std::int64_t chunk) const {
        const Split split = find(chunk);
        const std::int64_t padded = round_up(size, kLanes), token = query_start[split.request];
        Scratch scratch(
            2 * Scratch::bytes<float>(heads * padded) + 3 * Scratch::bytes<float>(heads) +
            Scratch::bytes<float>(heads * kDecodeKeys)
        );
        auto* queries = scratch.take<float>(heads * padded);
        auto* sums = scratch.take<float>(heads * padded);
        auto* most = scratch.take<float>(heads);
        auto* totals = scratch.take<float>(heads);
        auto* shrink = scratch.take<float>(heads);
        auto* weights = scratch.take<float>(heads * kDecodeKeys);
        load_queries(token, queries, padded);
        std::fill(sums, sums + heads * padded, 0.0f);
        std::fill(most, most + heads, -__builtin_inff());
        std::fill(totals, totals + heads, 0.0f);

        Tile<Element, kDecodeKeys> tile;
        for (auto begin = split.begin; begin < split.end; begin += kDecodeKeys) {
            tile.find(*this, split.request, begin, std::min(begin + kDecodeKeys, split.end));
            read_in_order(tile);
            for (std::int64_t head = 0; head < kv_heads; ++head) {
                const std::int64_t at = head * size;
                for_each_part(head, [&](auto n, std::int64_t query) {
                    for (std::int64_t j = 0; j < tile.count; j += kDotKeys) {
                        dot<n>(
                            tile.keys + j, at, queries + query * padded, padded, size, weights + query * kDecodeKeys + j
                        );
                    }
                });
                weigh(tile, split, begin, head, weights, most, totals, shrink);
                for_each_part(head, [&](auto n, std::int64_t query) {
                    add_values<n>(
                        tile.values, at, tile.count, weights + query * kDecodeKeys, shrink + query,
                        sums + query * padded, padded, size
                    );
                });
            }
        }
        for (std::int64_t head = 0; head < heads; ++head) {
            finish(split, chunk, head, sums + head * padded, most[head], totals[head]);
        }
    }

#if defined(__AVX512BF16__)
    void run_paired(std::int64_t chunk) const {
        const Split split = find(chunk);
        PairedDecode<Element> decode(*this, split.request);
        decode.run(split.begin, split.end);
        decode.finish([&](std::int64_t head, const float* sum, float most, float total) {
            finish(split, chunk, head, sum, most, total);
        });
    }
#endif

    // A split's results for one head go to the output, if it is the request's only one, or else to `partial`.
    void finish(
        const Split& split, std::int64_t chunk, std::int64_t head, const float* sum, float most, float total
    ) const {
        if (split.count == 1) {
            const float factor = normalizer(*this, head, most, total);
            with_output(query_start[split.request], head, [&](auto* to) { store_scaled_sums(to, sum, size, factor); });
        } else {
            float* to = results(chunk, head);
            std::memcpy(to, sum, size * sizeof(float));
            to[size] = most;
            to[size + 1] = total;
        }
    }

    void load_queries(std::int64_t token, float* to, std::int64_t padded) const {
        with_float(dtype, [&](auto type) {
            const auto* from = static_cast<const typename decltype(type)::type*>(q) + token * q_stride;
            for (std::int64_t head = 0; head < heads; ++head)
                convert(from + head * size, size, padded, to + head * padded);
        });
    }

    // The query heads of one KV head, up to kDotQueries at a time: part(how many, the first).
    template <typename Part>
    void for_each_part(std::int64_t head, Part part) const {
        for (std::int64_t i = 0; i < groups(); i += kDotQueries) {
            with_count<kDotQueries>(std::min<std::int64_t>(kDotQueries, groups() - i), [&](auto n) {
                part(n, head * groups() + i);
            });
        }
    }

    void read_in_order(const Tile<Element, kDecodeKeys>& tile) const {
        const std::int64_t bytes = bytes_of<Element>(kv_heads * size);
        for (const auto& rows : {tile.keys, tile.values}) {
            for (std::int64_t j = 0; j < tile.count; ++j) {
                const auto* row = static_cast<const volatile char*>(address(rows[j]));
                for (std::int64_t line = 0; line < bytes; line += 64) static_cast<void>(row[line]);
            }
        }
    }

    // The dot products of one KV head's queries become weights, in place; what its sums shrink by goes to `shrink`.
    void weigh(
        const Tile<Element, kDecodeKeys>& tile, const Split& split, std::int64_t begin, std::int64_t head,
        float* weights, float* most, float* totals, float* shrink
    ) const {
        constexpr int vectors = kDecodeKeys / kLanes;
        const Ints lanes = lane_numbers();
        float key_scales[kDecodeKeys], value_scales[kDecodeKeys];
        tile.gather_scales(*this, head, key_scales, value_scales);
        const auto newest = seq_lens[split.request] - 1;
        for (std::int64_t i = 0; i < groups(); ++i) {
            const auto query = head * groups() + i;
            const ScoreRule rule(*this, query);
            Floats scores[vectors], top = broadcast(most[query]);
            for (int v = 0; v < vectors; ++v) {
                Floats dots = load(weights + query * kDecodeKeys + v * kLanes);
                if constexpr (kIsScaled<Element>) dots = dots * load(key_scales + v * kLanes);
                const Floats score = rule.apply(dots, lanes, newest - begin - v * kLanes);
                scores[v] =
                    lanes + v * kLanes < static_cast<std::int32_t>(tile.count) ? score : broadcast(-__builtin_inff());
                top = scores[v] > top ? scores[v] : top;
            }
            const float largest = lanes_largest(top), origin = origin_of(largest);
            Floats total = {};
            for (int v = 0; v < vectors; ++v) {
                const Floats weight = exponential(scores[v] - origin);
                total += lanes + v * kLanes < static_cast<std::int32_t>(tile.count) ? weight : Floats{};
                scores[v] = weight;
                if constexpr (kIsScaled<Element>) scores[v] = weight * load(value_scales + v * kLanes);
                store(weights + query * kDecodeKeys + v * kLanes, scores[v]);
            }
            shrink[query] = largest == most[query] ? 1.0f : std::exp(most[query] - largest);
            totals[query] = totals[query] * shrink[query] + sum(total);
            most[query] = largest;
        }
    }
};

// The splits of requests that have several, by their largest scores and totals; a chunk is one KV head of one request.
struct MergeSplits : Splits {
    std::int64_t chunks() const {
        const auto size_of_split = split_size();
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < requests; ++i) count += num_read(i) > size_of_split;
        return count * kv_heads;
    }

    void run(std::int64_t chunk) const {
        const auto size_of_split = split_size();
        std::int64_t request = 0, slot = 0;
        for (auto before = chunk / kv_heads;; ++request) {
            const auto read = num_read(request);
            if (read > size_of_split && before-- == 0) break;
            slot += ceil_div(read, size_of_split);
        }
        const auto count = ceil_div(num_read(request), size_of_split), padded = round_up(size, kLanes);
        Scratch scratch(Scratch::bytes<float>(padded));
        auto* sums = scratch.take<float>(padded);
        for (auto head = chunk % kv_heads * groups(); head < (chunk % kv_heads + 1) * groups(); ++head) {
            float most = -__builtin_inff(), total = 0;
            for (std::int64_t i = 0; i < count; ++i) most = std::max(most, results(slot + i, head)[size]);
            std::fill(sums, sums + padded, 0.0f);
            for (std::int64_t i = 0; i < count; ++i) {
                const float* part = results(slot + i, head);
                const float factor = part[size] == most ? 1.0f : std::exp(part[size] - most);
                total += part[size + 1] * factor;
                for (std::int64_t d = 0; d < size; ++d) sums[d] += part[d] * factor;
            }
            const float factor = normalizer(*this, head, most, total);
            with_output(query_start[request], head, [&](auto* to) { store_scaled_sums(to, sums, size, factor); });
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
