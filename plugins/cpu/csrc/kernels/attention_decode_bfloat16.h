// Decode over a cache whose elements bfloat16 holds exactly, by the processor's bfloat16 dot products: a tile of keys,
// then of values, against four query heads of their KV head at once.
//
// While the keys of a tile are worked on its values are asked for, and then the next tile's keys: a request's pages lie
// anywhere, and at the end of each the processor's own guesses stop.
#pragma once

#include "attention.h"

#if defined(__AVX512BF16__)
namespace hardpoint::HARDPOINT_LEVEL::attention {

constexpr int kPairedKeys = 16;    // in a tile: its keys of 8 heads of 128 elements fill most of the first cache
constexpr int kPairedQueries = 4;  // one to each quarter of a vector

// Lines that lie one behind the other, of which some are yet to be asked for.
struct Run {
    const char *at = nullptr, *end = nullptr;

    // The last of them may stand behind the end.
    template <int lines>
    void fetch() {
        if (at >= end) return;
        for (int i = 0; i < lines; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T0);
        at += lines * 64;
    }
};

// The rows that will be read next, asked for a few lines at a time, in the order in which they lie, between other work:
// of the values while as many bytes of the keys are worked on, and the other way round.
class Ahead {
  public:
    // The first `count` of those rows, `bytes` each, come next; of what is left of the last ones nothing is asked for.
    template <typename Row, int most>
    void follow(const Row (&rows)[most], std::int64_t count, std::int64_t bytes) {
        static_assert(most <= kPairedKeys);
        runs_ = now_ = 0;
        run_[0] = {};
        for (std::int64_t i = 0; i < count; ++i) {
            const char* row = address(rows[i]);
            if (runs_ > 0 && run_[runs_ - 1].end == row) {
                run_[runs_ - 1].end += bytes;
            } else {
                run_[runs_++] = {row, row + bytes};
            }
        }
    }

    // What is asked for now. Loops work on a copy, which the compiler keeps in registers.
    Run& run() {
        while (now_ + 1 < runs_ && run_[now_].at >= run_[now_].end) ++now_;
        return run_[now_];
    }

  private:
    Run run_[kPairedKeys];
    int runs_ = 0, now_ = 0;
};

// 32 of a cache's 8-bit elements as bfloat16, which holds them exactly.
inline __m512i as_bfloat16(Floats first, Floats second) {
    return bits_as<__m512i>(_mm512_cvtne2ps_pbh(bits_as<__m512>(second), bits_as<__m512>(first)));
}
inline __m512i load_wide(const std::int8_t* from) {
    const auto convert = [](const std::int8_t* at) {
        return bits_as<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_raw<__m128i>(at))));
    };
    return as_bfloat16(convert(from), convert(from + kLanes));
}
inline __m512i load_wide(const float8_e5m2* from) {  // the upper half of a float16
    const auto halves = _mm512_slli_epi16(_mm512_cvtepu8_epi16(load_raw<__m256i>(from)), 8);
    return as_bfloat16(
        bits_as<Floats>(_mm512_cvtph_ps(_mm512_castsi512_si256(halves))),
        bits_as<Floats>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)))
    );
}
inline __m512i load_wide(const float8_e4m3fn* from) {
    const auto word = [](int bits) { return _mm512_set1_epi16(static_cast<short>(bits)); };
    const auto codes = _mm512_cvtepi8_epi16(load_raw<__m256i>(from)), rest = _mm512_and_si512(codes, word(0x7f));
    const auto shifted = _mm512_and_si512(_mm512_slli_epi16(codes, 4), word(0x87f0));
    auto bits = _mm512_add_epi16(shifted, word((127 - 7) << 7));
    // Subnormal numbers: multiples of 2^-9.
    const auto few = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const auto signs = _mm512_and_si512(codes, word(0x8000));
    const auto subnormal = _mm512_or_si512(_mm512_permutexvar_epi16(_mm512_and_si512(codes, word(7)), few), signs);
    bits = _mm512_mask_mov_epi16(bits, _mm512_cmplt_epu16_mask(rest, word(8)), subnormal);
    return _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(rest, word(0x7f)), word(0x7fc0));
}

template <typename Element>
inline void widen_row(const Element* from, std::int64_t n, bfloat16* to) {
    std::int64_t i = 0;
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(to + i, load_wide(from + i));
    if (i < n) {
        Element whole[32] = {};
        std::memcpy(whole, from + i, (n - i) * sizeof(Element));
        const auto wide = load_wide(whole);
        std::memcpy(to + i, &wide, (n - i) * sizeof(bfloat16));
    }
}

inline void widen_row(GroupRow from, std::int64_t n, bfloat16* to) {
    std::int64_t i = 0;
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(to + i, as_bfloat16(load(from + i), load(from + (i + kLanes))));
    if (i < n) store(to + i, load(from + i));  // sizes are multiples of a group
}

// The sums of each quarter of four vectors: quarter i of the result holds those of quarter i of each.
inline Floats quarter_sums(const __m512* v) {
    const auto ab = bits_as<__m512d>(_mm512_unpacklo_ps(v[0], v[1]) + _mm512_unpackhi_ps(v[0], v[1]));
    const auto cd = bits_as<__m512d>(_mm512_unpacklo_ps(v[2], v[3]) + _mm512_unpackhi_ps(v[2], v[3]));
    return bits_as<Floats>(_mm512_unpacklo_pd(ab, cd)) + bits_as<Floats>(_mm512_unpackhi_pd(ab, cd));
}

// The dot products of eight keys with the four queries at q [size / 8, 4, 8]: each quarter of a vector those of one
// query with four keys. With each eight elements `lines` are fetched ahead; so they are in add_pairs with each pair.
template <int lines>
inline void dot_with_eight(
    const bfloat16* const* keys, std::int64_t at, const bfloat16* q, std::int64_t size, Floats* to, Ahead& ahead
) {
    __m512 sums[8] = {};
    Run next = ahead.run();
    for (std::int64_t d = 0; d < size; d += 8) {
        const auto x = load_raw<__m512bh>(q + d * kPairedQueries);
        for (int j = 0; j < 8; ++j) {
            const auto key = _mm512_broadcast_i32x4(load_raw<__m128i>(keys[j] + at + d));
            sums[j] = _mm512_dpbf16_ps(sums[j], x, bits_as<__m512bh>(key));
        }
        next.fetch<lines>();
    }
    ahead.run() = next;
    to[0] = quarter_sums(sums);
    to[1] = quarter_sums(sums + 4);
}

inline Floats quarter_total(Floats v) {
    const auto once = v + bits_as<Floats>(_mm512_permute_ps(bits_as<__m512>(v), 0xb1));
    return once + bits_as<Floats>(_mm512_permute_ps(bits_as<__m512>(once), 0x4e));
}

inline Floats quarter_largest(Floats v) {  // of numbers that are no NaN
    const auto once = _mm512_max_ps(bits_as<__m512>(v), _mm512_permute_ps(bits_as<__m512>(v), 0xb1));
    return bits_as<Floats>(_mm512_max_ps(once, _mm512_permute_ps(once, 0x4e)));
}

// e^x of x <= 0, to a few units in the last place; NaN for NaN.
inline Floats exponential_of_negative(Floats x) {
    const Floats low = broadcast(-150.0f);  // far below the least float
    const Floats power = (x < low ? low : x) * 1.44269504f;
    const auto whole = _mm512_roundscale_ps(bits_as<__m512>(power), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats r = power - bits_as<Floats>(whole);
    Floats p = broadcast(1.535336188e-4f);  // 2^r for |r| <= 1/2
    p = p * r + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    return bits_as<Floats>(_mm512_scalef_ps(bits_as<__m512>(p), whole));
}

// sums[query] = sums[query] * shrink[query] + the weighted values, for `vectors` times 32 elements, of which `mask`
// says which of the last 32 there are. Each 32 sums stand as unpacking leaves them: see in_order.
template <int queries, int vectors, int lines>
inline void add_pairs(
    const bfloat16* const* values, std::int64_t at, std::int64_t pairs, const std::uint32_t* weights,
    const float* shrink, float* sums, std::int64_t padded, __mmask32 mask, Ahead& ahead
) {
    __m512 total[queries][2 * vectors];
    for (int i = 0; i < queries; ++i) {
        const __m512 factor = _mm512_set1_ps(shrink[4 * i]);
        for (int v = 0; v < 2 * vectors; ++v) total[i][v] = _mm512_loadu_ps(sums + i * padded + v * 16) * factor;
    }
    Run next = ahead.run();
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
        __m512bh both[2 * vectors];
        for (int v = 0; v < vectors; ++v) {
            const auto kept = v + 1 < vectors ? ~__mmask32{} : mask;
            const auto one = _mm512_maskz_loadu_epi16(kept, values[2 * pair] + at + v * 32);
            const auto other = _mm512_maskz_loadu_epi16(kept, values[2 * pair + 1] + at + v * 32);
            both[2 * v] = bits_as<__m512bh>(_mm512_unpacklo_epi16(one, other));
            both[2 * v + 1] = bits_as<__m512bh>(_mm512_unpackhi_epi16(one, other));
        }
        const std::uint32_t* weight = weights + pair / 2 * 8 + pair % 2;
        for (int i = 0; i < queries; ++i) {
            const auto x = bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(weight[2 * i])));
            for (int v = 0; v < 2 * vectors; ++v) total[i][v] = _mm512_dpbf16_ps(total[i][v], x, both[v]);
        }
        next.fetch<lines>();
    }
    ahead.run() = next;
    for (int i = 0; i < queries; ++i) {
        for (int v = 0; v < 2 * vectors; ++v) _mm512_storeu_ps(sums + i * padded + v * 16, total[i][v]);
    }
}

// A row of sums as add_pairs leaves them to the order of the elements.
inline void in_order(float* sums, std::int64_t padded) {
    const auto low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const auto high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (std::int64_t d = 0; d < padded; d += 32) {
        const auto a = _mm512_loadu_ps(sums + d), b = _mm512_loadu_ps(sums + d + 16);
        _mm512_storeu_ps(sums + d, _mm512_permutex2var_ps(a, low, b));
        _mm512_storeu_ps(sums + d + 16, _mm512_permutex2var_ps(a, high, b));
    }
}

// One split of one request at work.
template <typename Element>
class PairedDecode {
  public:
    // Sizes of heads that it serves.
    static bool serves(std::int64_t size) { return size % 8 == 0; }

    PairedDecode(const Attention& attention, std::int64_t request)
        : a_(attention),
          request_(request),
          group_(a_.groups()),
          blocks_(ceil_div(group_, kPairedQueries)),
          padded_(round_up(a_.size, 32)),
          width_(a_.kv_heads * a_.size),
          all_(a_.kv_heads * blocks_ * kPairedQueries),
          scratch_(
              Scratch::bytes<bfloat16>(all_ * a_.size) + Scratch::bytes<float>(all_ * padded_) +
              3 * Scratch::bytes<float>(4 * all_) + Scratch::bytes<std::uint32_t>(all_ * kPairedKeys / 2) +
              Scratch::bytes<bfloat16>(width_) + Scratch::bytes<bfloat16>(kPairedKeys * a_.size)
          ) {
        queries_ = scratch_.template take<bfloat16>(all_ * a_.size);
        sums_ = scratch_.template take<float>(all_ * padded_);
        most_ = scratch_.template take<float>(4 * all_);
        totals_ = scratch_.template take<float>(4 * all_);
        shrink_ = scratch_.template take<float>(4 * all_);
        weights_ = scratch_.template take<std::uint32_t>(all_ * kPairedKeys / 2);
        zeros_ = scratch_.template take<bfloat16>(width_);
        widened_ = scratch_.template take<bfloat16>(kPairedKeys * a_.size);
        std::fill(sums_, sums_ + all_ * padded_, 0.0f);
        std::fill(most_, most_ + 4 * all_, -__builtin_inff());
        std::fill(totals_, totals_ + 4 * all_, 0.0f);
        std::fill(zeros_, zeros_ + width_, bfloat16{});
        load_queries();
    }

    // Over the positions from begin to end.
    void run(std::int64_t begin, std::int64_t end) {
        const auto bytes = bytes_of<Element>(width_);
        find(tiles_[0], begin, end);
        for (int now = 0; begin < end; begin += kPairedKeys, now = 1 - now) {
            const auto &tile = tiles_[now], &next = tiles_[1 - now];
            ahead_.follow(tile.values, tile.count, bytes);
            for (std::int64_t head = 0; head < a_.kv_heads; ++head) score(tile, begin, head);
            find(tiles_[1 - now], begin + kPairedKeys, end);
            ahead_.follow(next.keys, next.count, bytes);
            for (std::int64_t head = 0; head < a_.kv_heads; ++head) sum(tile, head);
        }
    }

    // visit(query head, its sum of weighted values, largest score, total).
    template <typename Visit>
    void finish(Visit visit) {
        for (std::int64_t head = 0; head < a_.heads; ++head) {
            const auto row = head / group_ * blocks_ * kPairedQueries + head % group_;
            in_order(sums_ + row * padded_, padded_);
            visit(head, sums_ + row * padded_, most_[4 * row], totals_[4 * row]);
        }
    }

  private:
    using Rows = const bfloat16* [kPairedKeys];

    // Lines that eight elements of eight keys take.
    static constexpr int kLines = sizeof(Element);

    void find(Tile<Element, kPairedKeys>& tile, std::int64_t begin, std::int64_t end) const {
        tile.find(a_, request_, begin, std::clamp(end, begin, begin + kPairedKeys));
    }

    // To [KV head, block, size / 8, 4, 8].
    void load_queries() {
        const auto* from = static_cast<const bfloat16*>(a_.q) + a_.query_start[request_] * a_.q_stride;
        std::fill(queries_, queries_ + all_ * a_.size, bfloat16{});
        for (std::int64_t head = 0; head < a_.heads; ++head) {
            const auto i = head % group_, block = head / group_ * blocks_ + i / kPairedQueries;
            auto* to = queries_ + block * kPairedQueries * a_.size + i % kPairedQueries * 8;
            for (std::int64_t d = 0; d < a_.size; d += 8) {
                std::memcpy(to + d * kPairedQueries, from + head * a_.size + d, 8 * sizeof(bfloat16));
            }
        }
    }

    // One head's rows, of which `count` are wanted, as bfloat16, zeros behind them; returns where in a row it starts.
    std::int64_t rows_of_head(
        const Row<Element> (&from)[kPairedKeys], std::int64_t count, std::int64_t head, Rows& to
    ) {
        const std::int64_t at = head * a_.size;
        std::fill(to + count, to + kPairedKeys, zeros_);
        if constexpr (std::is_same_v<Element, bfloat16>) {
            std::copy(from, from + count, to);
            return at;
        } else {
            for (std::int64_t i = 0; i < count; ++i) {
                widen_row(from[i] + at, a_.size, widened_ + i * a_.size);
                to[i] = widened_ + i * a_.size;
            }
            return 0;
        }
    }

    // Weights of one KV head's keys in a tile.
    void score(const Tile<Element, kPairedKeys>& tile, std::int64_t begin, std::int64_t head) {
        float key_scales[kPairedKeys], value_scales[kPairedKeys];
        tile.gather_scales(a_, head, key_scales, value_scales);
        Rows keys;
        const auto at = rows_of_head(tile.keys, tile.count, head, keys);
        for (auto block = head * blocks_; block < (head + 1) * blocks_; ++block) {
            const bfloat16* queries = queries_ + block * kPairedQueries * a_.size;
            Floats scores[kPairedKeys / 4];
            for (std::int64_t key = 0; key < tile.count; key += 8) {
                dot_with_eight<kLines>(keys + key, at, queries, a_.size, scores + key / 4, ahead_);
            }
            weigh(block, begin, tile.count, scores, key_scales, value_scales);
        }
    }

    // The weighted values of one KV head in a tile join its sums.
    void sum(const Tile<Element, kPairedKeys>& tile, std::int64_t head) {
        Rows values;
        const auto at = rows_of_head(tile.values, tile.count, head, values);
        const auto pairs = ceil_div(tile.count, 2);
        const auto last = a_.size % 32 ? (__mmask32{1} << a_.size % 32) - 1 : ~__mmask32{};
        for (std::int64_t i = 0; i < blocks_; ++i) {
            const auto block = head * blocks_ + i;
            const auto* weights = weights_ + block * 2 * kPairedKeys;
            const auto* shrink = shrink_ + block * kLanes;
            const auto queries = std::min<std::int64_t>(kPairedQueries, group_ - i * kPairedQueries);
            with_count<kPairedQueries>(queries, [&](auto n) {
                float* sums = sums_ + block * kPairedQueries * padded_;
                std::int64_t d = 0;
                for (; d + 32 < padded_; d += 64) {
                    add_pairs<n, 2, 2 * kLines>(
                        values, at + d, pairs, weights, shrink, sums + d, padded_,
                        d + 64 == padded_ ? last : ~__mmask32{}, ahead_
                    );
                }
                if (d < padded_) {
                    add_pairs<n, 1, kLines>(values, at + d, pairs, weights, shrink, sums + d, padded_, last, ahead_);
                }
            });
        }
    }

    // Dot products become weights, in pairs as add_pairs reads them, and what the sums of query i shrink by, at 4 i.
    void weigh(
        std::int64_t block, std::int64_t begin, std::int64_t count, Floats* scores, const float* key_scales,
        const float* value_scales
    ) {
        const auto vectors = 2 * ceil_div(count, 8);
        float *most = most_ + block * kLanes, *totals = totals_ + block * kLanes;
        const Ints lanes = lane_numbers() & 3;
        Floats slopes = {};
        if (a_.slopes) {
            const auto first = block % blocks_ * kPairedQueries;  // in its group; behind the group's last none is used
            for (int i = 0; i < kLanes; ++i) {
                slopes[i] = a_.slopes[block / blocks_ * group_ + std::min(group_ - 1, first + i / 4)];
            }
        }
        const auto scale = static_cast<float>(a_.scale), soft_cap = static_cast<float>(a_.soft_cap);
        const auto newest = a_.seq_lens[request_] - 1;
        const Floats before = load(most);
        Floats top = before;
        for (std::int64_t v = 0; v < vectors; ++v) {
            Floats score = scores[v];
            if constexpr (kIsScaled<Element>) score *= load_four(key_scales + 4 * v);
            score *= scale;
            if (soft_cap != 0.0f) score = soft_cap * hyperbolic_tangent(score / soft_cap);
            if (a_.slopes) {
                const auto distance = static_cast<std::int32_t>(newest - begin - 4 * v) - lanes;
                score -= slopes * __builtin_convertvector(distance, Floats);
            }
            if (4 * v + 4 > count) {
                score = lanes < static_cast<std::int32_t>(count - 4 * v) ? score : broadcast(-__builtin_inff());
            }
            scores[v] = score;
            top = score > top ? score : top;
        }
        top = quarter_largest(top);
        const Floats origin = top == -__builtin_inff() ? Floats{} : top;  // see origin_of
        Floats total = {};
        for (std::int64_t v = 0; v < vectors; v += 2) {
            Floats weight[2];
            for (int i = 0; i < 2; ++i) {
                const std::int64_t key = 4 * (v + i);
                const auto there = lanes < static_cast<std::int32_t>(count - key);
                weight[i] = exponential_of_negative(scores[v + i] - origin);
                if (key + 4 > count) weight[i] = there ? weight[i] : Floats{};
                total += weight[i];
                if constexpr (kIsScaled<Element>) {
                    weight[i] *= load_four(value_scales + key);
                    if (key + 4 > count) weight[i] = there ? weight[i] : Floats{};
                }
            }
            const auto both = _mm512_cvtne2ps_pbh(bits_as<__m512>(weight[1]), bits_as<__m512>(weight[0]));
            std::memcpy(weights_ + block * 2 * kPairedKeys + 8 * v, &both, sizeof(both));
        }
        const Floats factor = top == before ? broadcast(1.0f) : exponential_of_negative(before - top);
        store(shrink_ + block * kLanes, factor);
        store(totals, load(totals) * factor + quarter_total(total));
        store(most, top);
    }

    const Attention& a_;
    const std::int64_t request_, group_, blocks_, padded_, width_, all_;  // all_: rows of queries, some of them padding
    Scratch scratch_;
    bfloat16 *queries_, *zeros_, *widened_;
    float *sums_, *most_, *totals_, *shrink_;
    std::uint32_t* weights_;
    Tile<Element, kPairedKeys> tiles_[2];
    Ahead ahead_;
};

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
#endif
