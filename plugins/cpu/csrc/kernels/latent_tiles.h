// Latent attention of bfloat16 queries over a cache of bfloat16 by block products (see latent_products.h), for a piece
// of work as LatentPiece's: see latent.h.
//
// Up to 64 keys are worked on at a time, with 16 rows of queries in a group. Scores are keys times queries: keys are
// read as they lie in the cache, queries have pairs of columns side by side, which is made once. So a row of scores has
// one key and a lane for each row of queries, and no maximum and no total is a sum over lanes. Weights are rounded to
// bfloat16 and turned; a few columns of values at a time, those of two keys side by side, stay in the first cache for
// all rows of queries.
#pragma once

#include "latent_products.h"

namespace hardpoint::HARDPOINT_LEVEL::attention {

#if defined(HARDPOINT_BLOCK_PRODUCTS)

// See LatentPiece. `Latent` is that of latent.h, with queries of bfloat16.
template <typename Products, typename Latent>
class TiledLatentPiece {
  public:
    TiledLatentPiece(const Latent& call, std::int64_t request, std::int64_t first, std::int64_t queries)
        : a_(call),
          request_(request),
          token_(call.query_start[request] + first),
          position_(call.read_of(call.seq_lens[request] - call.num_queries(request) + first + 1) - 1),
          rows_(queries * call.heads),
          groups_(ceil_div(rows_, kGroupRows)),
          padded_(round_up(call.latent_size, kValueColumns)),
          rope_at_(round_up(call.latent_size, kPairedColumns)),
          width_(rope_at_ + round_up(call.rope_size, kPairedColumns)),
          scratch_(
              Scratch::bytes<std::uint32_t>(groups_ * kGroupRows * width_ / 2) +
              Scratch::bytes<bfloat16>((kBlockKeys + 1) * copy_stride()) +
              Scratch::bytes<std::uint32_t>(groups_ * kGroupRows * kBlockPairs) +
              Scratch::bytes<float>(groups_ * kGroupRows * sum_stride()) +
              4 * Scratch::bytes<float>(groups_ * kGroupRows)
          ) {
        const auto rows = groups_ * kGroupRows;
        queries_ = scratch_.take<std::uint32_t>(rows * width_ / 2);
        copies_ = scratch_.take<bfloat16>((kBlockKeys + 1) * copy_stride());
        weights_ = reinterpret_cast<Weights*>(scratch_.take<std::uint32_t>(groups_ * kGroupRows * kBlockPairs));
        sums_ = scratch_.take<float>(rows * sum_stride());
        most_ = scratch_.take<float>(rows);
        totals_ = scratch_.take<float>(rows);
        shrink_ = scratch_.take<float>(rows);
        newest_ = scratch_.take<std::int32_t>(rows);
        std::fill(sums_, sums_ + rows * sum_stride(), 0.0f);
        std::fill(most_, most_ + rows, -__builtin_inff());
        std::fill(totals_, totals_ + rows, 0.0f);
        const std::int64_t first_zeros = fills_tiles() ? kBlockKeys : 0;  // else what is behind parts of rows, too
        std::memset(
            copies_ + first_zeros * copy_stride(), 0, (kBlockKeys + 1 - first_zeros) * copy_stride() * sizeof(bfloat16)
        );
        for (std::int64_t row = 0; row < rows; ++row) {
            newest_[row] = static_cast<std::int32_t>(position_ + std::min(row, rows_ - 1) / a_.heads);
        }
        load_queries();
    }

    // Over the positions from begin to end, or places in a list, which is behind the newest query at most.
    void run(std::int64_t begin, std::int64_t end) {
        Products products;
        find_keys(begin, end);
        for (; begin < end; begin += kBlockKeys) {
            const auto count = std::min<std::int64_t>(kBlockKeys, end - begin);
            keys_ = next_;
            copy_keys(count);
            const bool is_last = begin + kBlockKeys >= end;
            if (!is_last) find_keys(begin + kBlockKeys, end);
            std::int64_t from = 0;  // the first group of rows that read any of the keys
            while (newest_[from * kGroupRows + kGroupRows - 1] < begin) ++from;
            for (auto group = from; group < groups_; ++group) {
                const std::uint32_t* queries = queries_ + group * kGroupRows * width_ / 2;
                products.score(keys_, count, queries, rope_at_, width_ - rope_at_, scores_);
                weigh(group, begin, count);
            }
            products.begin_values(is_last || !fills_tiles() ? nullptr : &next_, a_.latent_size, a_.rope_size);
            for (std::int64_t d = 0; d < padded_; d += kValueColumns) {
                products.take_values(keys_, d);
                for (auto group = from; group < groups_; ++group) {
                    float* sums = sums_ + group * kGroupRows * sum_stride() + d;
                    products.add(weights_ + group * kGroupRows, rows_ - group * kGroupRows, count, sums, sum_stride());
                }
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
    typedef std::uint32_t Weights[kBlockPairs];  // of a row of queries, in words of two keys

    // Elements from one copied row to the next: a latent and a rotated key, with zeros up to whole tiles behind each.
    std::int64_t copy_stride() const { return std::max(width_, padded_); }

    // Whether latents and rotated keys end where tiles do.
    bool fills_tiles() const { return a_.latent_size % kValueColumns == 0 && a_.rope_size % kPairedColumns == 0; }

    // Floats from one row of sums to the next: rows of a tile must not meet in the same lines of the cache.
    std::int64_t sum_stride() const { return padded_ + kGroupRows; }

    // Tiles of queries, of 32 columns each: words of two columns, and in each a row of queries in each lane.
    void load_queries() {
        bfloat16* rows = copies_;  // whose columns behind a part's end stay zeros
        const auto stride = copy_stride();
        for (std::int64_t group = 0; group < groups_; ++group) {
            for (std::int64_t i = 0; i < kGroupRows; ++i) {
                const auto row = std::min(group * kGroupRows + i, rows_ - 1);
                const auto token = token_ + row / a_.heads, head = row % a_.heads;
                const auto* latent = static_cast<const bfloat16*>(a_.q_latent) + token * a_.q_latent_token;
                const auto* rope = static_cast<const bfloat16*>(a_.q_rope) + token * a_.q_rope_token;
                std::copy_n(latent + head * a_.q_latent_head, a_.latent_size, rows + i * stride);
                std::copy_n(rope + head * a_.q_rope_head, a_.rope_size, rows + i * stride + rope_at_);
            }
            const auto* words = reinterpret_cast<const std::uint32_t*>(rows);
            for (std::int64_t at = 0; at < width_ / 2; at += kPairedColumns / 2) {
                turn_words(words + at, stride / 2, queries_ + (group * width_ / 2 + at) * kGroupRows, kGroupRows);
            }
        }
    }

    // The cache's rows from `begin` to `end`; behind them one of zeros.
    void find_keys(std::int64_t begin, std::int64_t end) {
        const auto count = std::min<std::int64_t>(kBlockKeys, end - begin);
        const auto find = [&](std::int64_t number, std::int64_t offset, std::int64_t i) {
            const std::int64_t page = a_.block_table[request_ * a_.table_stride + number];
            const auto* latents = static_cast<const bfloat16*>(a_.latents) + page * a_.latent_page;
            const auto* rope_keys = static_cast<const bfloat16*>(a_.rope_keys) + page * a_.rope_page;
            next_.latents[i] = latents + offset * a_.latent_size;
            next_.rope_keys[i] = rope_keys + offset * a_.rope_size;
        };
        if (a_.indices) {
            const std::int32_t* listed = a_.indices + token_ * a_.index_stride + begin;
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t position = std::max(listed[i], 0);
                find(position / a_.block, position % a_.block, i);
            }
        } else {
            std::int64_t number = begin / a_.block, offset = begin % a_.block;
            for (std::int64_t i = 0; i < count; ++number, offset = 0) {
                for (; offset < a_.block && i < count; ++offset, ++i) find(number, offset, i);
            }
        }
        const bfloat16* zeros = copies_ + kBlockKeys * copy_stride();
        std::fill(next_.latents + count, next_.latents + kBlockKeys, zeros);
        std::fill(next_.rope_keys + count, next_.rope_keys + kBlockKeys, zeros);
    }

    // Copy rows whose parts do not fill tiles, and groups of 16 that are not evenly apart where products ask for that.
    void copy_keys(std::int64_t count) {
        for (std::int64_t first = 0; first < count; first += kGroupRows) {
            const bfloat16 **latents = keys_.latents + first, **rope_keys = keys_.rope_keys + first;
            if (fills_tiles() && (!Products::kEvenRows || (are_even(latents) && are_even(rope_keys)))) continue;
            for (int i = 0; i < kGroupRows; ++i) {
                bfloat16* to = copies_ + (first + i) * copy_stride();
                std::copy_n(latents[i], a_.latent_size, to);
                std::copy_n(rope_keys[i], a_.rope_size, to + rope_at_);
                latents[i] = to;
                rope_keys[i] = to + rope_at_;
            }
        }
    }

    static bool are_even(const bfloat16* const* rows) {
        bool even = true;
        for (int i = 2; i < kGroupRows; ++i) even &= rows[i] - rows[i - 1] == rows[1] - rows[0];
        return even;
    }

    // Scores become weights, 0 for keys that a row of queries does not read, and join totals; sums shrink. Weights are
    // two tiles of 32 keys, with a row of queries in each row.
    void weigh(std::int64_t group, std::int64_t begin, std::int64_t count) {
        alignas(64) std::uint32_t pairs[kBlockPairs][kGroupRows];
        const Floats nothing = broadcast(-__builtin_inff());
        scale(group, begin, count);
        for (int v = 0; v < kGroupVectors; ++v) {
            const auto at = group * kGroupRows + v * kLanes;
            const auto score = [&](int key) { return load(scores_[key] + v * kLanes); };
            const Floats most = load(most_ + at);
            Floats tops[] = {most, most, most, most};  // several, as each has to wait for the one before it
            for (int key = 0; key < kBlockKeys; key += 4) {
                for (int i = 0; i < 4; ++i) {
                    const Floats x = score(key + i);
                    tops[i] = x > tops[i] ? x : tops[i];
                }
            }
            const Floats left = tops[0] > tops[1] ? tops[0] : tops[1], right = tops[2] > tops[3] ? tops[2] : tops[3];
            const Floats top = left > right ? left : right;
            const Floats origin = top == nothing ? Floats{} : top;  // see origin_of
            const Floats shrink = top == most ? broadcast(1.0f) : exponential(most - origin);
            Floats totals[2] = {load(totals_ + at) * shrink, Floats{}};
            for (int key = 0; key < kBlockKeys; key += 2) {
                const Floats even = weight_of(score(key) - origin), odd = weight_of(score(key + 1) - origin);
                totals[0] += even;
                totals[1] += odd;
                const Words both = bfloat16_pairs(even, odd);
                std::memcpy(pairs[key / 2] + v * kLanes, &both, sizeof(both));
            }
            store(shrink_ + at, shrink);
            store(totals_ + at, totals[0] + totals[1]);
            store(most_ + at, top);
        }
        for (int half = 0; half < 2; ++half) {
            constexpr int words = kBlockPairs / 2;
            turn_words(pairs[half * words], kGroupRows, weights_[group * kGroupRows] + half * words, kBlockPairs);
        }
        for (auto row = group * kGroupRows; row < (group + 1) * kGroupRows; ++row) {
            if (shrink_[row] == 1.0f) continue;
            float* sums = sums_ + row * sum_stride();
            for (std::int64_t d = 0; d < padded_; d += kLanes) store(sums + d, load(sums + d) * shrink_[row]);
        }
    }

    // Scale the scores; those of keys that a row of queries does not read become -inf, whatever they were.
    void scale(std::int64_t group, std::int64_t begin, std::int64_t count) {
        const Floats factor = broadcast(static_cast<float>(a_.scale)), nothing = broadcast(-__builtin_inff());
        for (int v = 0; v < kGroupVectors; ++v) {
            const Ints newest = load_raw<Ints>(newest_ + group * kGroupRows + v * kLanes);
            Ints read = newest + (1 - static_cast<std::int32_t>(begin));  // keys of each row
            read = read > static_cast<std::int32_t>(count) ? Ints{} + static_cast<std::int32_t>(count) : read;
            for (int key = 0; key < kBlockKeys; ++key) {
                float* scores = scores_[key] + v * kLanes;
                store(scores, read > key ? load(scores) * factor : nothing);
            }
        }
    }

    const Latent& a_;
    const std::int64_t request_, token_, position_;  // row in q and out, and position, of the first query
    const std::int64_t rows_, groups_;               // of queries, and of 16 of them
    const std::int64_t padded_, rope_at_, width_;    // columns of values; of a query the first of its rotated part; all
    Scratch scratch_;
    std::uint32_t* queries_;
    Weights* weights_;
    bfloat16* copies_;
    float *sums_, *most_, *totals_, *shrink_;
    std::int32_t* newest_;  // the last position that a row of queries reads
    BlockKeys keys_, next_;  // of the block at work, and of the one behind it
    alignas(64) float scores_[kBlockKeys][kGroupRows];
};

#endif

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
