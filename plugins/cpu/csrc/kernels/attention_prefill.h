// Attention of requests with several queries: tiles of queries and keys as small matrix products over packed panels,
// with the softmax taken while keys pass by (FlashAttention, arXiv:2205.14135). All query heads of a KV head are rows
// of one tile, one behind the other for each token.
#pragma once

#include "attention.h"

namespace hardpoint::HARDPOINT_LEVEL::attention {

constexpr int kTileKeys = 64;   // packed at a time: keys and values of 128 elements stay in the first cache
constexpr int kTileRows = 128;  // that share a packing, about
constexpr int kBlockRows = 6;   // with kBlockVectors, as many results as registers hold
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;
constexpr int kScoreVectors = kTileKeys / kLanes;

// How numbers stand in panels, and one step of a matrix product. A panel holds, for kLanes columns, `step` numbers of
// each column one behind the other, then the next `step`.
struct FloatPanels {
    using Number = float;
    static constexpr int step = 1;
    static Floats multiply_add(Floats sum, const float* row, Floats panel) { return sum + broadcast(*row) * panel; }
    static Floats pair(Floats first, Floats) { return first; }
};

#if defined(__AVX512BF16__)
struct Bfloat16Panels {
    using Number = bfloat16;
    static constexpr int step = 2;
    static Floats multiply_add(Floats sum, const bfloat16* row, Floats panel) {
        const auto both = _mm512_set1_epi32(load_raw<std::int32_t>(row));
        return bits_as<Floats>(
            _mm512_dpbf16_ps(bits_as<__m512>(sum), bits_as<__m512bh>(both), bits_as<__m512bh>(panel))
        );
    }
    static Floats pair(Floats first, Floats second) {  // numbers that bfloat16 holds exactly
        return bits_as<Floats>(bits_as<Words>(first) >> 16 | (bits_as<Words>(second) & 0xffff0000));
    }
};
#endif

// to [rows, vectors of columns] (+)= a [rows, n] @ panels [n, columns]. With `shrink` [rows], what is at `to` is
// multiplied by it and added to; else it is replaced.
template <typename Panels, int rows, int vectors>
inline void multiply(
    const typename Panels::Number* a, std::int64_t a_stride, const typename Panels::Number* panels,
    std::int64_t panel_stride, std::int64_t n, float* to, std::int64_t to_stride, const float* shrink
) {
    Floats sums[rows][vectors];
    for (int i = 0; i < rows; ++i) {
        for (int v = 0; v < vectors; ++v) {
            sums[i][v] = shrink ? load(to + i * to_stride + v * kLanes) * shrink[i] : Floats{};
        }
    }
    for (std::int64_t k = 0; k < n; k += Panels::step) {
        Floats panel[vectors];
        for (int v = 0; v < vectors; ++v) panel[v] = load_raw<Floats>(panels + v * panel_stride + k * kLanes);
        for (int i = 0; i < rows; ++i) {
            for (int v = 0; v < vectors; ++v) {
                sums[i][v] = Panels::multiply_add(sums[i][v], a + i * a_stride + k, panel[v]);
            }
        }
    }
    for (int i = 0; i < rows; ++i) {
        for (int v = 0; v < vectors; ++v) store(to + i * to_stride + v * kLanes, sums[i][v]);
    }
}

template <typename Panels>
inline void multiply_block(
    std::int64_t rows, std::int64_t vectors, const typename Panels::Number* a, std::int64_t a_stride,
    const typename Panels::Number* panels, std::int64_t panel_stride, std::int64_t n, float* to, std::int64_t to_stride,
    const float* shrink
) {
    with_count<kBlockRows>(rows, [&](auto count) {
        std::int64_t v = 0;
        while (v < vectors) {
            const auto now = std::min<std::int64_t>(kBlockVectors, vectors - v);
            with_count<kBlockVectors>(now, [&](auto wide) {
                multiply<Panels, count, wide>(
                    a, a_stride, panels + v * panel_stride, panel_stride, n, to + v * kLanes, to_stride, shrink
                );
            });
            v += now;
        }
    });
}

// to [n, kLanes] of 32 bits = the transpose of kLanes rows of n.
inline void transpose(const std::uint32_t* const* rows, std::int64_t n, std::uint32_t* to) {
    std::int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
        __m512i a[16], b[16];
        for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_si512(rows[r] + i);
        for (int r = 0; r < 16; r += 2) {
            b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
            b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
        }
        for (int r = 0; r < 16; r += 4) {
            a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
            a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
            a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
            a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
        }
        for (int r = 0; r < 4; ++r) {  // quarters of 128 bits are left to be transposed
            const auto ab_low = _mm512_shuffle_i32x4(a[r], a[r + 4], 0x44),
                       ab_high = _mm512_shuffle_i32x4(a[r], a[r + 4], 0xee);
            const auto cd_low = _mm512_shuffle_i32x4(a[r + 8], a[r + 12], 0x44);
            const auto cd_high = _mm512_shuffle_i32x4(a[r + 8], a[r + 12], 0xee);
            b[r] = _mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
            b[r + 4] = _mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
            b[r + 8] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
            b[r + 12] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
        }
        for (int r = 0; r < 16; ++r) _mm512_storeu_si512(to + (i + r) * 16, b[r]);
    }
#endif
    for (; i < n; ++i) {
        for (int r = 0; r < kLanes; ++r) to[i * kLanes + r] = rows[r][i];
    }
}

// One chunk at work: some queries of one request, for one KV head.
template <typename Panels, typename Element>
struct PrefillTile {
    using Number = typename Panels::Number;

    const Attention& a;
    std::int64_t request, head;     // KV head
    std::int64_t tokens, position;  // queries, and the position of the first
    std::int64_t token;             // its row in q and out
    std::int64_t group, rows, padded, paired;
    Number *queries, *key_panels, *value_panels, *rounded, *staging;
    float *sums, *most, *totals, *scores, *shrink, *key_scales, *value_scales;
    Tile<Element, kTileKeys> tile;

    PrefillTile(
        const Attention& attention, std::int64_t request_number, std::int64_t kv_head, std::int64_t first_query,
        std::int64_t num_tokens
    )
        : a(attention), request(request_number), head(kv_head), tokens(num_tokens) {
        token = a.query_start[request] + first_query;
        position = a.seq_lens[request] - a.num_queries(request) + first_query;
        group = a.groups();
        rows = tokens * group;
        padded = round_up(a.size, kLanes);
        paired = round_up(a.size, 2);
    }

    std::int64_t position_of(std::int64_t row) const { return position + row / group; }

    void run() {
        Scratch scratch(
            Scratch::bytes<Number>(rows * paired) + Scratch::bytes<Number>(kTileKeys * paired) +
            Scratch::bytes<Number>(kTileKeys * padded) + Scratch::bytes<Number>(kBlockRows * kTileKeys) +
            Scratch::bytes<Number>(kLanes * (paired + kLanes)) + Scratch::bytes<float>(rows * padded) +
            2 * Scratch::bytes<float>(rows) + Scratch::bytes<float>(kBlockRows * kTileKeys) +
            Scratch::bytes<float>(kBlockRows) + 2 * Scratch::bytes<float>(kTileKeys)
        );
        queries = scratch.take<Number>(rows * paired);
        key_panels = scratch.take<Number>(kTileKeys * paired);
        value_panels = scratch.take<Number>(kTileKeys * padded);
        rounded = scratch.take<Number>(kBlockRows * kTileKeys);
        staging = scratch.take<Number>(kLanes * (paired + kLanes));
        sums = scratch.take<float>(rows * padded);
        most = scratch.take<float>(rows);
        totals = scratch.take<float>(rows);
        scores = scratch.take<float>(kBlockRows * kTileKeys);
        shrink = scratch.take<float>(kBlockRows);
        key_scales = scratch.take<float>(kTileKeys);
        value_scales = scratch.take<float>(kTileKeys);

        load_queries();
        std::fill(sums, sums + rows * padded, 0.0f);
        std::fill(most, most + rows, -__builtin_inff());
        std::fill(totals, totals + rows, 0.0f);
        const std::int64_t end = position + tokens;
        for (auto begin = a.first(position); begin < end; begin += kTileKeys) {
            tile.find(a, request, begin, std::min(begin + kTileKeys, end));
            tile.gather_scales(a, head, key_scales, value_scales);
            pack_keys();
            pack_values();
            for (std::int64_t row = 0; row < rows; row += kBlockRows) {
                attend(begin, row, std::min<std::int64_t>(kBlockRows, rows - row));
            }
        }
        for (std::int64_t row = 0; row < rows; ++row) {
            const auto query_head = head * group + row % group;
            const float factor = normalizer(a, query_head, most[row], totals[row]);
            a.with_output(token + row / group, query_head, [&](auto* to) {
                store_scaled_sums(to, sums + row * padded, a.size, factor);
            });
        }
    }

    void load_queries() {
        with_float(a.dtype, [&](auto type) {
            using T = typename decltype(type)::type;
            for (std::int64_t row = 0; row < rows; ++row) {
                const auto* from = static_cast<const T*>(a.q) + (token + row / group) * a.q_stride;
                from += (head * group + row % group) * a.size;
                if constexpr (Panels::step == 1 || std::is_same_v<T, Number>) {
                    convert(from, a.size, paired, queries + row * paired);
                }
            }
        });
    }

    void pack_keys() {
        constexpr std::int64_t per_word = 4 / sizeof(Number);
        const std::int64_t words = ceil_div(a.size, per_word), at = head * a.size, stride = paired + kLanes;
        const bool whole_words = a.size % per_word == 0;
        for (std::int64_t first = 0; first < tile.count; first += kLanes) {
            const std::uint32_t* from[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                // Behind the last key, `tile` repeats it; such scores are hidden later.
                const auto key = tile.keys[first + i] + at;
                if constexpr (std::is_same_v<Element, Number>) {
                    if (whole_words) {
                        from[i] = reinterpret_cast<const std::uint32_t*>(key);
                        continue;
                    }
                }
                convert(key, a.size, paired, staging + i * stride);
                from[i] = reinterpret_cast<const std::uint32_t*>(staging + i * stride);
            }
            transpose(from, words, reinterpret_cast<std::uint32_t*>(key_panels + first * paired));
        }
    }

    void pack_values() {
        const std::int64_t at = head * a.size;
        for (std::int64_t j = 0; j < tile.count; j += Panels::step) {
            const auto one = tile.values[j] + at;
            const bool alone = Panels::step == 2 && j + 1 == tile.count;
            const auto other = Panels::step == 2 ? tile.values[j + 1 < tile.count ? j + 1 : j] + at : one;
            const auto put = [&](std::int64_t d, Floats first, Floats second) {
                const Floats both = Panels::pair(first, alone ? Floats{} : second);
                std::memcpy(static_cast<void*>(value_panels + d * kTileKeys + j * kLanes), &both, sizeof(both));
            };
            std::int64_t d = 0;
            for (; d + kLanes <= a.size; d += kLanes) put(d, load(one + d), load(other + d));
            if (d < a.size) put(d, load_some(one + d, a.size - d), load_some(other + d, a.size - d));
        }
    }

    // A few rows of queries against the packed keys, which begin at a position.
    void attend(std::int64_t begin, std::int64_t row, std::int64_t count) {
        const std::int64_t newest = position_of(row + count - 1), oldest = a.first(position_of(row));
        if (newest < begin || oldest >= begin + tile.count) return;
        const auto visible = std::min(tile.count, newest + 1 - begin);
        multiply_block<Panels>(
            count, ceil_div(visible, kLanes), queries + row * paired, paired, key_panels, kLanes * paired,
            round_up(a.size, Panels::step), scores, kTileKeys, nullptr
        );
        for (std::int64_t i = 0; i < count; ++i) weigh(begin, row + i, i, visible);
        multiply_block<Panels>(
            count, padded / kLanes, rounded, kTileKeys, value_panels, kTileKeys * kLanes,
            round_up(visible, Panels::step), sums + row * padded, padded, shrink
        );
    }

    // One row's dot products, at `scores` + i rows, become weights at `rounded` + i rows; see also Decode::weigh.
    void weigh(std::int64_t begin, std::int64_t row, std::int64_t i, std::int64_t visible) {
        const auto at = position_of(row);
        const auto low = static_cast<std::int32_t>(std::clamp<std::int64_t>(a.first(at) - begin, 0, kTileKeys));
        const auto high = static_cast<std::int32_t>(std::min(tile.count, at + 1 - begin));
        const std::int64_t vectors = ceil_div(visible, kLanes);
        Number* weights = rounded + i * kTileKeys;
        if (high <= low) {
            std::memset(static_cast<void*>(weights), 0, vectors * kLanes * sizeof(Number));
            shrink[i] = 1.0f;
            return;
        }
        const ScoreRule rule(a, head * group + row % group);
        const Ints lanes = lane_numbers();
        Floats kept[kScoreVectors], top = broadcast(most[row]);
        for (std::int64_t v = 0; v < vectors; ++v) {
            Floats dots = load(scores + i * kTileKeys + v * kLanes);
            if constexpr (kIsScaled<Element>) dots = dots * load(key_scales + v * kLanes);
            const Ints key = lanes + static_cast<std::int32_t>(v * kLanes);
            const Floats score = rule.apply(dots, lanes, at - begin - v * kLanes);
            kept[v] = (key >= low) & (key < high) ? score : broadcast(-__builtin_inff());
            top = kept[v] > top ? kept[v] : top;
        }
        const float largest = lanes_largest(top), origin = origin_of(largest);
        Floats total = {};
        for (std::int64_t v = 0; v < vectors; ++v) {
            const Ints key = lanes + static_cast<std::int32_t>(v * kLanes);
            Floats weight = exponential(kept[v] - origin);
            weight = (key >= low) & (key < high) ? weight : Floats{};
            total += weight;
            if constexpr (kIsScaled<Element>) {
                weight = weight * load(value_scales + v * kLanes);
                weight = (key >= low) & (key < high) ? weight : Floats{};
            }
            store(weights + v * kLanes, weight);
        }
        shrink[i] = largest == most[row] ? 1.0f : std::exp(most[row] - largest);
        totals[row] = totals[row] * shrink[i] + sum(total);
        most[row] = largest;
    }
};

template <typename Element>
struct Prefill : Attention {
    std::int64_t tokens_per_chunk() const { return std::max<std::int64_t>(1, kTileRows / groups()); }

    std::int64_t blocks(std::int64_t request) const {
        const auto queries = num_queries(request);
        return queries > 1 ? ceil_div(queries, tokens_per_chunk()) : 0;
    }

    std::int64_t chunks() const {
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < requests; ++i) count += blocks(i);
        return count * kv_heads;
    }

    void run(std::int64_t chunk) const {
        std::int64_t request = 0, block = chunk / kv_heads;
        for (; block >= blocks(request); ++request) block -= blocks(request);
        // The newest queries first: they read the most keys, and small chunks at the end let threads finish together.
        const auto first_query = (blocks(request) - 1 - block) * tokens_per_chunk();
        const auto tokens = std::min(tokens_per_chunk(), num_queries(request) - first_query);
#if defined(__AVX512BF16__)
        if constexpr (kIsBfloat16<Element>) {
            if (dtype == kBfloat16) {
                return PrefillTile<Bfloat16Panels, Element>(*this, request, chunk % kv_heads, first_query, tokens)
                    .run();
            }
        }
#endif
        PrefillTile<FloatPanels, Element>(*this, request, chunk % kv_heads, first_query, tokens).run();
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
