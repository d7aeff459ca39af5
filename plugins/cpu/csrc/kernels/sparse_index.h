// The indexer of sparse attention: writing index keys, scoring positions, choosing the best of a row. See the ops
// store_index_keys, index_scores and topk_positions.
#pragma once

#include <functional>

#include "../task.h"
#include "attention_decode.h"

namespace hardpoint::HARDPOINT_LEVEL::attention {

constexpr std::int64_t kScoredKeys = 256;  // positions in a chunk

// k [tokens, groups * size], `stride` elements from token to token, to the slots int32 [tokens] of a cache of elements
// `element` (see Code); `scales` is null where its elements have none.
template <typename T>
struct StoreIndexKeys {
    static constexpr char signature[] = "pipipiiiiiip";
    const T* k;
    std::int64_t stride;
    void* keys;
    std::int64_t key_page;
    float* scales;
    std::int64_t scale_page, tokens, groups, size, block, element;
    const std::int32_t* slots;

    std::int64_t chunks() const { return ceil_div(tokens, rows_per_chunk(groups * size)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(groups * size), tokens);
        with_element(element, [&](auto type) {
            using Element = typename decltype(type)::type;
            const CachePages<Element> to{static_cast<Element*>(keys), key_page, scales, scale_page, block, groups, size};
            for (auto token = mine.first; token < mine.last; ++token) {
                store_token(k + token * stride, size, to, slots[token]);
            }
        });
    }
};

// q [tokens, heads, groups * size] of dtype `dtype` (see Code), weights [tokens, heads], out [tokens, places]. A chunk is
// some positions of one token.
template <typename Element>
struct IndexScores {
    static constexpr char signature[] = "piiipipipipippiipiiiii";
    const void* q;
    std::int64_t q_token, q_head, dtype;
    const float* weights;
    std::int64_t weight_token;
    const Element* keys;
    std::int64_t key_page;
    const float* scales;
    std::int64_t scale_page;
    const std::int32_t* block_table;
    std::int64_t table_stride;
    const std::int32_t* query_start;
    const std::int64_t* positions;
    std::int64_t requests, tokens;
    float* out;
    std::int64_t places, heads, groups, size, block;

    std::int64_t chunks_of_token() const { return ceil_div(places, kScoredKeys); }
    std::int64_t chunks() const { return tokens * chunks_of_token(); }

    void run(std::int64_t chunk) const {
        const auto token = chunk / chunks_of_token(), first = chunk % chunks_of_token() * kScoredKeys;
        const auto last = std::min(places, first + kScoredKeys), read = std::clamp(positions[token] + 1, first, last);
        float* to = out + token * places;
        std::fill(to + read, to + last, -__builtin_inff());
        if (read == first) return;

        const auto padded = round_up(groups * size, kLanes);
        Scratch scratch(
            Scratch::bytes<float>(heads * padded) + Scratch::bytes<float>(kDecodeKeys * padded) +
            Scratch::bytes<float>(heads * kDecodeKeys)
        );
        auto* queries = scratch.take<float>(heads * padded);
        auto* rows = scratch.take<float>(kDecodeKeys * padded);
        auto* dots = scratch.take<float>(heads * kDecodeKeys);
        load_queries(token, padded, queries);
        const float* row_of[kDecodeKeys];
        for (int i = 0; i < kDecodeKeys; ++i) row_of[i] = rows + i * padded;
        const std::int32_t* table = block_table + request_of(token) * table_stride;
        for (auto begin = first; begin < read; begin += kDecodeKeys) {
            const auto count = std::min<std::int64_t>(kDecodeKeys, read - begin);
            for (std::int64_t i = 0; i < count; ++i) load_key(table, begin + i, padded, rows + i * padded);
            for (auto i = count; i % kDotKeys; ++i) std::copy_n(rows + (count - 1) * padded, padded, rows + i * padded);
            for (std::int64_t head = 0; head < heads; head += kDotQueries) {
                with_count<kDotQueries>(std::min<std::int64_t>(kDotQueries, heads - head), [&](auto n) {
                    for (std::int64_t i = 0; i < count; i += kDotKeys) {
                        dot<n>(row_of + i, 0, queries + head * padded, padded, padded, dots + head * kDecodeKeys + i);
                    }
                });
            }
            add_heads(dots, weights + token * weight_token, count, to + begin);
        }
    }

  private:
    // The last request that starts at or before the token.
    std::int64_t request_of(std::int64_t token) const {
        const auto* end = query_start + requests;
        return std::min(std::upper_bound(query_start, end, static_cast<std::int32_t>(token)), end) - query_start - 1;
    }

    void load_queries(std::int64_t token, std::int64_t padded, float* to) const {
        with_float(dtype, [&](auto type) {
            const auto* from = static_cast<const typename decltype(type)::type*>(q) + token * q_token;
            for (std::int64_t head = 0; head < heads; ++head) {
                convert(from + head * q_head, groups * size, padded, to + head * padded);
            }
        });
    }

    void load_key(const std::int32_t* table, std::int64_t position, std::int64_t padded, float* to) const {
        const std::int64_t page = table[position / block], offset = position % block;
        convert(keys + page * key_page + offset * groups * size, groups * size, padded, to);
        if constexpr (kIsScaled<Element>) {
            const float* scale = scales + page * scale_page + offset * groups;
            for (std::int64_t i = 0; i < groups * size; ++i) to[i] *= scale[i / size];
        }
    }

    // Of each key, the weighted sum of its dot products that are not below zero. A NaN stays one.
    void add_heads(const float* dots, const float* weight, std::int64_t count, float* to) const {
        for (std::int64_t i = 0; i < count; i += kLanes) {
            Floats total = {};
            for (std::int64_t head = 0; head < heads; ++head) {
                const Floats x = load(dots + head * kDecodeKeys + i);
                total += (x < Floats{} ? Floats{} : x) * weight[head];
            }
            if (i + kLanes <= count) {
                store(to + i, total);
            } else {
                store_some(to + i, total, count - i);
            }
        }
    }
};

// scores [rows, .], `stride` elements from row to row, positions [rows] -> out [rows, top_k]. A chunk is a row.
struct TopkPositions {
    static constexpr char signature[] = "pippiii";
    const float* scores;
    std::int64_t stride;
    const std::int64_t* positions;
    std::int32_t* out;
    std::int64_t rows, places, top_k;

    std::int64_t chunks() const { return rows; }
    void run(std::int64_t row) const {
        const float* x = scores + row * stride;
        std::int32_t* to = out + row * top_k;
        const auto count = std::min(positions[row] + 1, places);
        if (count <= top_k) {
            for (std::int64_t i = 0; i < top_k; ++i) to[i] = i < count ? static_cast<std::int32_t>(i) : -1;
            return;
        }
        Scratch scratch(Scratch::bytes<std::uint32_t>(count));
        auto* same = scratch.take<std::uint32_t>(count);
        // The highest bits first: most scores are out of the question by them.
        std::int32_t counts[kBins] = {};
        for (std::int64_t i = 0; i < count; ++i) ++counts[key(x[i]) >> kShift];
        std::int64_t left = top_k, bin = kBins - 1;
        for (; counts[bin] < left; --bin) left -= counts[bin];
        std::int64_t among = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            if (key(x[i]) >> kShift == static_cast<std::uint32_t>(bin)) same[among++] = key(x[i]);
        }
        std::nth_element(same, same + left - 1, same + among, std::greater<>());
        const auto lowest = same[left - 1];
        // Of those equal to the lowest that is chosen, as many as the higher ones leave room for.
        for (std::int64_t i = 0; i < among; ++i) left -= same[i] > lowest;
        for (std::int64_t i = 0, written = 0; written < top_k; ++i) {
            const auto one = key(x[i]);
            if (one > lowest || (one == lowest && left-- > 0)) to[written++] = static_cast<std::int32_t>(i);
        }
    }

  private:
    static constexpr int kShift = 21;
    static constexpr std::int64_t kBins = 1 << (32 - kShift);

    // Of the order of numbers: 0 and -0 are equal, NaN is above all.
    static std::uint32_t key(float x) {
        if (x != x) return 0xffffffffu;
        const auto bits = bits_as<std::uint32_t>(x + 0.0f);
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
