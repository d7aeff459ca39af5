// Latent attention of bfloat16 queries over a cache of bfloat16 by tiles (see tiles.h), for a piece of work as
// LatentPiece's: see latent.h.
//
// Up to 64 keys are worked on at a time, with 16 rows of queries in a tile. Scores are keys times queries: a tile of keys
// has their rows as they lie in the cache, one of queries has pairs of columns side by side, which is made once. So a row
// of scores has one key and a lane for each row of queries, and no maximum and no total is a sum over lanes. Weights are
// rounded to bfloat16 and turned; a few columns of values at a time, those of two keys side by side, stay in the first
// cache for all rows of queries. Nothing asks the memory ahead: prefetches, and loads of the next keys on the way, made
// this slower by a third.
#pragma once

#include "attention_decode.h"
#include "linear_tiles.h"

namespace hardpoint::HARDPOINT_LEVEL::attention {

#if defined(HARDPOINT_TILES)

constexpr int kTileKeys = 64;                        // keys that are worked on together
constexpr int kTileWords = tiles::kRowBytes / 4;     // pairs of bfloat16 in a row of a tile
constexpr int kTileColumns = 2 * kTileWords;         // columns of a tile of bfloat16
constexpr int kTilesAtOnce = 4;                      // tiles of sums
constexpr int kLaneVectors = tiles::kRows / kLanes;  // vectors of a number for each row of queries of a tile
static_assert(kTileKeys == kTilesAtOnce * tiles::kRows && kTileWords == tiles::kRows);

// The rows of 16 words each become columns; they lie `from_stride` and 16 words apart.
inline void turn_words(const std::uint32_t* from, std::int64_t from_stride, std::uint32_t* to) {
#if defined(__AVX512F__)
    __m512i rows[16], pairs[16];
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
        _mm512_storeu_si512(to + i * 16, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(to + (i + 4) * 16, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(to + (i + 8) * 16, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(to + (i + 12) * 16, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
#else
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) to[j * 16 + i] = from[i * from_stride + j];
    }
#endif
}

// The nearest bfloat16 in the lower half of each word.
inline Words bfloat16_words(Floats v) {
    const auto bits = bits_as<Words>(v);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    return v != v ? quiet : rounded;
}

// See LatentPiece. `Latent` is that of latent.h.
template <typename Latent>
class TiledLatentPiece {
  public:
    static bool serves(const Latent& call) { return call.dtype == kBfloat16; }

    TiledLatentPiece(const Latent& call, std::int64_t request, std::int64_t first, std::int64_t queries)
        : a_(call),
          request_(request),
          token_(call.query_start[request] + first),
          position_(call.read_of(call.seq_lens[request] - call.num_queries(request) + first + 1) - 1),
          rows_(queries * call.heads),
          groups_(ceil_div(rows_, tiles::kRows)),
          padded_(round_up(call.latent_size, kValueColumns)),
          rope_at_(round_up(call.latent_size, kTileColumns)),
          width_(rope_at_ + round_up(call.rope_size, kTileColumns)),
          scratch_(
              Scratch::bytes<std::uint32_t>(groups_ * tiles::kRows * width_ / 2) +
              Scratch::bytes<bfloat16>((kTileKeys + 1) * copy_stride()) +
              Scratch::bytes<std::uint32_t>(groups_ * kWeightWords) +
              Scratch::bytes<float>(groups_ * tiles::kRows * sum_stride()) +
              4 * Scratch::bytes<float>(groups_ * tiles::kRows)
          ) {
        const auto rows = groups_ * tiles::kRows;
        queries_ = scratch_.take<std::uint32_t>(rows * width_ / 2);
        copies_ = scratch_.take<bfloat16>((kTileKeys + 1) * copy_stride());
        weights_ = scratch_.take<std::uint32_t>(groups_ * kWeightWords);
        sums_ = scratch_.take<float>(rows * sum_stride());
        most_ = scratch_.take<float>(rows);
        totals_ = scratch_.take<float>(rows);
        shrink_ = scratch_.take<float>(rows);
        newest_ = scratch_.take<std::int32_t>(rows);
        std::fill(sums_, sums_ + rows * sum_stride(), 0.0f);
        std::fill(most_, most_ + rows, -__builtin_inff());
        std::fill(totals_, totals_ + rows, 0.0f);
        const std::int64_t first_zeros = fills_tiles() ? kTileKeys : 0;  // else what is behind parts of rows, too
        std::memset(
            copies_ + first_zeros * copy_stride(), 0, (kTileKeys + 1 - first_zeros) * copy_stride() * sizeof(bfloat16)
        );
        for (std::int64_t row = 0; row < rows; ++row) {
            newest_[row] = static_cast<std::int32_t>(position_ + std::min(row, rows_ - 1) / a_.heads);
        }
        load_queries();
    }

    // Over the positions from begin to end, or places in a list, which is behind the newest query at most.
    void run(std::int64_t begin, std::int64_t end) {
        TileShapes shapes;
        shapes.set(kRowsByTiles);
        for (; begin < end; begin += kTileKeys) {
            const auto count = std::min<std::int64_t>(kTileKeys, end - begin);
            find_keys(begin, count);
            copy_keys(count);
            std::int64_t from = 0;  // the first group of rows that read any of the keys
            while (newest_[from * tiles::kRows + tiles::kRows - 1] < begin) ++from;
            for (auto group = from; group < groups_; ++group) {
                score(group);
                weigh(group, begin, count);
            }
            for (std::int64_t d = 0; d < padded_; d += kValueColumns) {
                join_values(d);
                for (auto group = from; group < groups_; ++group) add(group, d, count);
            }
        }
    }

    // visit(query's token, head, its sum of weighted latents, largest score, total).
    template <typename Visit>
    void finish(Visit visit) const {
        for (std::int64_t row = 0; row < rows_; ++row) {
            visit(token_ + row / a_.heads, row % a_.heads, sums_ + row * sum_stride(), most_[row], totals_[row]);
        }
    }

  private:
    // A row of the cache.
    struct Key {
        const bfloat16 *latent, *rope;
    };

    static constexpr std::int64_t kValueColumns = kTilesAtOnce * tiles::kRows;
    static constexpr std::int64_t kWeightWords = kTileKeys / 2 * tiles::kRows;

    // Elements from one copied row to the next: a latent and a rotated key, with zeros up to whole tiles behind each.
    std::int64_t copy_stride() const { return std::max(width_, padded_); }

    // Whether latents and rotated keys end where tiles do.
    bool fills_tiles() const { return a_.latent_size % kValueColumns == 0 && a_.rope_size % kTileColumns == 0; }

    // Floats from one row of sums to the next: rows of a tile must not meet in the same lines of the cache.
    std::int64_t sum_stride() const { return padded_ + tiles::kRows; }

    // Tiles of queries, of 32 columns each: words of two columns, and in each a row of queries in each lane.
    void load_queries() {
        bfloat16* rows = copies_;  // whose columns behind a part's end stay zeros
        const auto stride = copy_stride();
        for (std::int64_t group = 0; group < groups_; ++group) {
            for (std::int64_t i = 0; i < tiles::kRows; ++i) {
                const auto row = std::min(group * tiles::kRows + i, rows_ - 1);
                const auto token = token_ + row / a_.heads, head = row % a_.heads;
                const auto* latent = static_cast<const bfloat16*>(a_.q_latent) + token * a_.q_latent_token;
                const auto* rope = static_cast<const bfloat16*>(a_.q_rope) + token * a_.q_rope_token;
                std::copy_n(latent + head * a_.q_latent_head, a_.latent_size, rows + i * stride);
                std::copy_n(rope + head * a_.q_rope_head, a_.rope_size, rows + i * stride + rope_at_);
            }
            const auto* words = reinterpret_cast<const std::uint32_t*>(rows);
            for (std::int64_t at = 0; at < width_ / 2; at += kTileWords) {
                turn_words(words + at, stride / 2, queries_ + (group * width_ / 2 + at) * tiles::kRows);
            }
        }
    }

    // The cache's rows at `count` positions from `begin` on; behind them one of zeros.
    void find_keys(std::int64_t begin, std::int64_t count) {
        const auto at = [&](std::int64_t number, std::int64_t offset) -> Key {
            const std::int64_t page = a_.block_table[request_ * a_.table_stride + number];
            const auto* latents = static_cast<const bfloat16*>(a_.latents) + page * a_.latent_page;
            const auto* rope_keys = static_cast<const bfloat16*>(a_.rope_keys) + page * a_.rope_page;
            return {latents + offset * a_.latent_size, rope_keys + offset * a_.rope_size};
        };
        if (a_.indices) {
            const std::int32_t* listed = a_.indices + token_ * a_.index_stride + begin;
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t position = std::max(listed[i], 0);
                keys_[i] = at(position / a_.block, position % a_.block);
            }
        } else {
            std::int64_t number = begin / a_.block, offset = begin % a_.block;
            for (std::int64_t i = 0; i < count; ++number, offset = 0) {
                for (; offset < a_.block && i < count; ++offset, ++i) keys_[i] = at(number, offset);
            }
        }
        const bfloat16* zeros = copies_ + kTileKeys * copy_stride();
        std::fill(keys_ + count, keys_ + kTileKeys, Key{zeros, zeros});
    }

    // Copy the rows of tiles of keys that are not evenly apart, or whose parts do not fill tiles.
    void copy_keys(std::int64_t count) {
        for (std::int64_t first = 0; first < count; first += tiles::kRows) {
            Key* keys = keys_ + first;
            bool even = fills_tiles();
            for (int i = 2; i < tiles::kRows; ++i) {
                even &= keys[i].latent - keys[i - 1].latent == keys[1].latent - keys[0].latent;
                even &= keys[i].rope - keys[i - 1].rope == keys[1].rope - keys[0].rope;
            }
            if (even) continue;
            for (int i = 0; i < tiles::kRows; ++i) {
                bfloat16* to = copies_ + (first + i) * copy_stride();
                std::copy_n(keys[i].latent, a_.latent_size, to);
                std::copy_n(keys[i].rope, a_.rope_size, to + rope_at_);
                keys[i] = {to, to + rope_at_};
            }
        }
    }

    // scores_[key][row of queries of the group], of all keys: rows are zeros where there are none.
    void score(std::int64_t group) {
        const std::uint32_t* queries = queries_ + group * tiles::kRows * width_ / 2;
        tiles::zero<0>();
        tiles::zero<1>();
        tiles::zero<2>();
        tiles::zero<3>();
        const auto add = [&](const bfloat16* Key::* part, std::int64_t size) {
            const bfloat16* keys[kTilesAtOnce];
            std::int64_t strides[kTilesAtOnce];
            for (int i = 0; i < kTilesAtOnce; ++i) {
                const Key* tile = keys_ + i * tiles::kRows;
                keys[i] = tile[0].*part;
                strides[i] = (tile[1].*part - tile[0].*part) * static_cast<std::int64_t>(sizeof(bfloat16));
            }
            for (std::int64_t at = 0; at < size; at += kTileColumns, queries += tiles::kRows * kTileWords) {
                tiles::load<4>(queries, tiles::kRowBytes);
                tiles::load<5>(keys[0] + at, strides[0]);
                tiles::multiply_bfloat16<0, 5, 4>();
                tiles::load<6>(keys[1] + at, strides[1]);
                tiles::multiply_bfloat16<1, 6, 4>();
                tiles::load<7>(keys[2] + at, strides[2]);
                tiles::multiply_bfloat16<2, 7, 4>();
                tiles::load<5>(keys[3] + at, strides[3]);
                tiles::multiply_bfloat16<3, 5, 4>();
            }
        };
        add(&Key::latent, a_.latent_size);
        add(&Key::rope, a_.rope_size);
        tiles::store<0>(scores_[0], tiles::kRowBytes);
        tiles::store<1>(scores_[tiles::kRows], tiles::kRowBytes);
        tiles::store<2>(scores_[2 * tiles::kRows], tiles::kRowBytes);
        tiles::store<3>(scores_[3 * tiles::kRows], tiles::kRowBytes);
    }

    // Scores become weights, 0 for keys that a row of queries does not read, and join totals; sums shrink. Weights are
    // tiles of 32 keys, with a row of queries in each row.
    void weigh(std::int64_t group, std::int64_t begin, std::int64_t count) {
        alignas(64) std::uint32_t pairs[kTileKeys / 2][tiles::kRows];
        const Floats factor = broadcast(static_cast<float>(a_.scale)), nothing = broadcast(-__builtin_inff());
        for (int v = 0; v < kLaneVectors; ++v) {
            const auto at = group * tiles::kRows + v * kLanes;
            Ints read = load_raw<Ints>(newest_ + at) + (1 - static_cast<std::int32_t>(begin));  // keys of each row
            read = read > static_cast<std::int32_t>(count) ? Ints{} + static_cast<std::int32_t>(count) : read;
            const auto score = [&](int key) {
                const Floats scaled = load(scores_[key] + v * kLanes) * factor;
                return read > key ? scaled : nothing;
            };
            const Floats most = load(most_ + at);
            Floats top = most;
            for (int key = 0; key < kTileKeys; ++key) {
                const Floats x = score(key);
                top = x > top ? x : top;
            }
            const Floats origin = top == nothing ? Floats{} : top;  // see origin_of
            const Floats shrink = top == most ? broadcast(1.0f) : exponential(most - origin);
            Floats total = load(totals_ + at) * shrink;
            for (int key = 0; key < kTileKeys; key += 2) {
                const Floats even = exponential(score(key) - origin), odd = exponential(score(key + 1) - origin);
                total += even + odd;
                const Words both = bfloat16_words(even) | bfloat16_words(odd) << 16;
                std::memcpy(pairs[key / 2] + v * kLanes, &both, sizeof(both));
            }
            store(shrink_ + at, shrink);
            store(totals_ + at, total);
            store(most_ + at, top);
        }
        for (int half = 0; half < 2; ++half) {
            turn_words(pairs[half * kTileWords], tiles::kRows, weights(group) + half * kWeightWords / 2);
        }
        for (auto row = group * tiles::kRows; row < (group + 1) * tiles::kRows; ++row) {
            if (shrink_[row] == 1.0f) continue;
            float* sums = sums_ + row * sum_stride();
            for (std::int64_t d = 0; d < padded_; d += kLanes) store(sums + d, load(sums + d) * shrink_[row]);
        }
    }

    std::uint32_t* weights(std::int64_t group) const { return weights_ + group * kWeightWords; }

    // values_: some columns from `d` on, in each word those of two keys.
    void join_values(std::int64_t d) {
        for (int pair = 0; pair < kTileKeys / 2; ++pair) {
            const bfloat16 *even = keys_[2 * pair].latent + d, *odd = keys_[2 * pair + 1].latent + d;
            for (int i = 0; i < kValueColumns; i += kLanes) {
                const Words both = widen(load_raw<Halves>(even + i)) | widen(load_raw<Halves>(odd + i)) << 16;
                std::memcpy(values_[pair] + i, &both, sizeof(both));
            }
        }
    }

    // The weighted values, those columns, join the sums of a group.
    void add(std::int64_t group, std::int64_t d, std::int64_t count) {
        float* sums = sums_ + group * tiles::kRows * sum_stride() + d;
        const std::int64_t stride = sum_stride() * sizeof(float);
        tiles::load<0>(sums, stride);
        tiles::load<1>(sums + tiles::kRows, stride);
        tiles::load<2>(sums + 2 * tiles::kRows, stride);
        tiles::load<3>(sums + 3 * tiles::kRows, stride);
        add_half(group, 0);
        if (count > kTileColumns) add_half(group, 1);
        tiles::store<0>(sums, stride);
        tiles::store<1>(sums + tiles::kRows, stride);
        tiles::store<2>(sums + 2 * tiles::kRows, stride);
        tiles::store<3>(sums + 3 * tiles::kRows, stride);
    }

    void add_half(std::int64_t group, int half) {
        const std::uint32_t* values = values_[half * kTileWords];
        tiles::load<4>(weights(group) + half * kWeightWords / 2, tiles::kRowBytes);
        tiles::load<5>(values, sizeof(values_[0]));
        tiles::multiply_bfloat16<0, 4, 5>();
        tiles::load<6>(values + tiles::kRows, sizeof(values_[0]));
        tiles::multiply_bfloat16<1, 4, 6>();
        tiles::load<7>(values + 2 * tiles::kRows, sizeof(values_[0]));
        tiles::multiply_bfloat16<2, 4, 7>();
        tiles::load<5>(values + 3 * tiles::kRows, sizeof(values_[0]));
        tiles::multiply_bfloat16<3, 4, 5>();
    }

    const Latent& a_;
    const std::int64_t request_, token_, position_;  // row in q and out, and position, of the first query
    const std::int64_t rows_, groups_;               // of queries, and of 16 of them
    const std::int64_t padded_, rope_at_, width_;    // columns of values; of a query the first of its rotated part; all
    Scratch scratch_;
    std::uint32_t *queries_, *weights_;
    bfloat16* copies_;
    float *sums_, *most_, *totals_, *shrink_;
    std::int32_t* newest_;  // the last position that a row of queries reads
    Key keys_[kTileKeys];
    alignas(64) float scores_[kTileKeys][tiles::kRows];
    alignas(64) std::uint32_t values_[kTileKeys / 2][kValueColumns];
};

#endif

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
