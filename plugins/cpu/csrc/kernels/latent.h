// Latent attention over pages of latents and rotated keys. See hardpoint.reference.latent_attention for what is computed.
//
// All query heads read the same row of a position: its latent with its rotated key as the key, the latent as the value.
// A piece of work is some queries of one request, with all their heads, over a range of positions. It converts the rows
// of a few positions to float once, for all heads, and goes over them with some rows of queries at a time. Work per byte
// of the cache is high: with 16 heads, 15 multiplications for each byte of a bfloat16 row. Where the processor has
// products of bfloat16, by AMX or AVX-512 BF16, rows of bfloat16 are multiplied as they lie: see latent_tiles.h.
#pragma once

#include "../constants.h"
#include "attention_decode.h"
#include "latent_tiles.h"

namespace hardpoint::HARDPOINT_LEVEL::attention {

constexpr int kLatentRows = 64;  // rows of queries in a piece, about: they and their sums stay in the second cache
constexpr int kLatentQueries = kLanes == 8 ? 6 : 4;  // rows of queries that are worked on together
constexpr int kNearKeys = 8;     // keys that are worked on together: they stay in the first cache
static_assert(kDecodeKeys % kNearKeys == 0 && kNearKeys % kDotKeys == 0);

// q_latent and out [tokens, heads, latent_size], q_rope [tokens, heads, rope_size], of dtype `dtype` (see Code), are
// `*_token` and `*_head` elements apart. The cache's pages of latents [block, latent_size] and of rotated keys [block,
// rope_size] are `*_page` elements apart. Of 8-bit latents, `scales` are floats [block] in pages `scale_page` floats
// apart, and rotated keys are of `dtype`; other caches have elements of one kind. The rest is as in Attention.
//
// With `indices` [tokens, top_k], `index_stride` elements from token to token, a query reads the positions that its row
// lists. It then has places in its list where it else has positions: those up to its own, or top_k of them if that is
// less, are filled.
struct Latent {
    static constexpr char signature[] = "piipiipiiipipipipppiiiiiifpipii";
    const void* q_latent;
    std::int64_t q_latent_token, q_latent_head;
    const void* q_rope;
    std::int64_t q_rope_token, q_rope_head;
    void* out;
    std::int64_t out_token, out_head, dtype;
    const void* latents;
    std::int64_t latent_page;
    const void* rope_keys;
    std::int64_t rope_page;
    const float* scales;
    std::int64_t scale_page;
    const std::int32_t* query_start;
    const std::int32_t* seq_lens;
    const std::int32_t* block_table;
    std::int64_t table_stride, requests, heads, latent_size, rope_size, block;
    double scale;
    float* partial;  // [splits, heads, latent_size + 2]: a split's sums, largest scores and totals
    std::int64_t threads;
    const std::int32_t* indices;
    std::int64_t index_stride, top_k;

    std::int64_t num_queries(std::int64_t request) const { return query_start[request + 1] - query_start[request]; }
    std::int64_t queries_per_piece() const { return indices ? 1 : std::max<std::int64_t>(1, kLatentRows / heads); }

    // Of the positions before `end`, how many a query reads whose own is the last of them.
    std::int64_t read_of(std::int64_t end) const { return indices ? std::min(end, top_k) : end; }

    // Positions that the one query of a request reads; 0 for requests with more.
    std::int64_t num_read(std::int64_t request) const {
        return num_queries(request) == 1 ? read_of(seq_lens[request]) : 0;
    }

    // Positions in a split of such a request, by the lengths of all of them.
    std::int64_t split_size() const {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < requests; ++i) total += num_read(i);
        const auto least = std::max(
            ceil_div(total, kSplitsPerThread * threads), ceil_div(kLeastLatentSplit, latent_size + rope_size)
        );
        return round_up(std::max<std::int64_t>(1, least), kDecodeKeys);
    }

    // Pieces of a request: splits of its positions where it has one query, else blocks of its queries.
    std::int64_t num_pieces(std::int64_t request, std::int64_t split) const {
        const auto queries = num_queries(request);
        return queries == 1 ? ceil_div(num_read(request), split) : ceil_div(queries, queries_per_piece());
    }

    float* results(std::int64_t slot, std::int64_t head) const {
        return partial + (slot * heads + head) * (latent_size + 2);
    }

    void write(std::int64_t token, std::int64_t head, const float* sums, float factor) const {
        with_float(dtype, [&](auto type) {
            auto* to = static_cast<typename decltype(type)::type*>(out) + token * out_token + head * out_head;
            store_scaled_sums(to, sums, latent_size, factor);
        });
    }
};

// A row of the cache, of elements of the cache's kind, and its scale where that is of 8 bits.
struct LatentKey {
    const void *latent, *rope;
    const float* scale;
};

// Queries of one request from `first` on, in all heads, at work over keys that are floats. Rows of queries are heads of
// one query, one behind the other, then those of the next.
class LatentRows {
  public:
    LatentRows(const Latent& call, std::int64_t request, std::int64_t first, std::int64_t queries)
        : a_(call),
          request_(request),
          token_(call.query_start[request] + first),
          position_(call.read_of(call.seq_lens[request] - call.num_queries(request) + first + 1) - 1),
          rows_(queries * call.heads),
          padded_(round_up(call.latent_size, kLanes)),
          width_(padded_ + round_up(call.rope_size, kLanes)),
          scratch_(
              Scratch::bytes<float>(rows_ * width_) + Scratch::bytes<float>(kDecodeKeys * width_) +
              Scratch::bytes<float>(rows_ * padded_) + 3 * Scratch::bytes<float>(rows_) +
              Scratch::bytes<float>(rows_ * kDecodeKeys)
          ) {
        queries_ = scratch_.take<float>(rows_ * width_);
        keys_ = scratch_.take<float>(kDecodeKeys * width_);
        sums_ = scratch_.take<float>(rows_ * padded_);
        most_ = scratch_.take<float>(rows_);
        totals_ = scratch_.take<float>(rows_);
        shrink_ = scratch_.take<float>(rows_);
        weights_ = scratch_.take<float>(rows_ * kDecodeKeys);
        for (int i = 0; i < kDecodeKeys; ++i) key_rows_[i] = keys_ + i * width_;
        std::fill(sums_, sums_ + rows_ * padded_, 0.0f);
        std::fill(most_, most_ + rows_, -__builtin_inff());
        std::fill(totals_, totals_ + rows_, 0.0f);
        load_queries();
    }

    // visit(query's token, head, its sum of weighted latents, largest score, total).
    template <typename Visit>
    void finish(Visit visit) const {
        for (std::int64_t row = 0; row < rows_; ++row) {
            visit(token_ + row / a_.heads, row % a_.heads, sums_ + row * padded_, most_[row], totals_[row]);
        }
    }

  protected:
    // The keys at `keys_`, of `count` positions from `begin` on, join the sums. Between that the rows `next` are
    // prefetched, of `latent_bytes` and `rope_bytes`.
    void attend(
        std::int64_t begin, std::int64_t count, const LatentKey* next, std::int64_t num_next, std::int64_t latent_bytes,
        std::int64_t rope_bytes
    ) {
        score(begin, count);
        for (std::int64_t row = 0; row < rows_; ++row) weigh(row, visible(row, begin, count));
        std::int64_t key = 0;
        sum(begin, count, [&](std::int64_t columns) {  // so many are done
            for (; key * padded_ < columns * num_next; ++key) {
                prefetch(next[key].latent, latent_bytes);
                prefetch(next[key].rope, rope_bytes);
            }
        });
    }

    const Latent& a_;
    const std::int64_t request_, token_, position_;  // row in q and out, and position, of the first query
    const std::int64_t rows_, padded_, width_;       // of queries; floats of a latent, and of a whole row
    float* keys_;                                    // [kDecodeKeys, width_]

  private:
    static void prefetch(const void* row, std::int64_t bytes) {
        for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at);
    }

    // How many of `count` keys from position `begin` on the query of a row reads.
    std::int64_t visible(std::int64_t row, std::int64_t begin, std::int64_t count) const {
        return std::clamp<std::int64_t>(position_ + row / a_.heads + 1 - begin, 0, count);
    }

    // part(how many rows of queries, the first of them), for those that read any of the keys.
    template <typename Part>
    void for_each_part(std::int64_t begin, Part part) const {
        for (std::int64_t row = 0; row < rows_; row += kLatentQueries) {
            const auto n = std::min<std::int64_t>(kLatentQueries, rows_ - row);
            if (visible(row + n - 1, begin, kDecodeKeys) == 0) continue;
            with_count<kLatentQueries>(n, [&](auto queries) { part(queries, row); });
        }
    }

    // Rows of [latent, zeros, rotated part, zeros], multiplied by the scale.
    void load_queries() {
        const auto factor = static_cast<float>(a_.scale);
        with_float(a_.dtype, [&](auto type) {
            using T = typename decltype(type)::type;
            for (std::int64_t row = 0; row < rows_; ++row) {
                const auto token = token_ + row / a_.heads, head = row % a_.heads;
                const auto* latent = static_cast<const T*>(a_.q_latent) + token * a_.q_latent_token;
                const auto* rope = static_cast<const T*>(a_.q_rope) + token * a_.q_rope_token;
                float* to = queries_ + row * width_;
                convert(latent + head * a_.q_latent_head, a_.latent_size, padded_, to);
                convert(rope + head * a_.q_rope_head, a_.rope_size, width_ - padded_, to + padded_);
                for (std::int64_t d = 0; d < width_; d += kLanes) store(to + d, load(to + d) * factor);
            }
        });
    }

    // Dot products of all rows of queries with the keys, at `weights_`.
    void score(std::int64_t begin, std::int64_t count) {
        for (std::int64_t near = 0; near < count; near += kNearKeys) {
            const auto end = std::min<std::int64_t>(near + kNearKeys, count);
            for_each_part(begin, [&](auto queries, std::int64_t row) {
                for (auto key = near; key < end; key += kDotKeys) {
                    dot<queries>(
                        key_rows_ + key, 0, queries_ + row * width_, width_, width_,
                        weights_ + row * kDecodeKeys + key
                    );
                }
            });
        }
    }

    // One row's dot products become weights, 0 for the keys behind the first `count`; what its sums shrink by goes to
    // `shrink_`.
    void weigh(std::int64_t row, std::int64_t count) {
        constexpr int vectors = kDecodeKeys / kLanes;
        const Ints lanes = lane_numbers();
        float* weights = weights_ + row * kDecodeKeys;
        Floats scores[vectors], top = broadcast(most_[row]);
        for (int v = 0; v < vectors; ++v) {
            const auto there = lanes + v * kLanes < static_cast<std::int32_t>(count);
            scores[v] = there ? load(weights + v * kLanes) : broadcast(-__builtin_inff());
            top = scores[v] > top ? scores[v] : top;
        }
        const float largest = lanes_largest(top), origin = origin_of(largest);
        Floats total = {};
        for (int v = 0; v < vectors; ++v) {
            const auto there = lanes + v * kLanes < static_cast<std::int32_t>(count);
            const Floats weight = there ? exponential(scores[v] - origin) : Floats{};
            store(weights + v * kLanes, weight);
            total += weight;
        }
        shrink_[row] = largest == most_[row] ? 1.0f : std::exp(most_[row] - largest);
        totals_[row] = totals_[row] * shrink_[row] + ::hardpoint::HARDPOINT_LEVEL::sum(total);
        most_[row] = largest;
    }

    // The weighted latents join the sums. A few columns for all rows of queries: those of the keys stay near.
    template <typename Done>
    void sum(std::int64_t begin, std::int64_t count, Done done) {
        const auto add = [&](auto vectors, std::int64_t d) {
            for_each_part(begin, [&](auto queries, std::int64_t row) {
                add_vectors<queries, vectors>(
                    key_rows_, d, visible(row + queries - 1, begin, count), weights_ + row * kDecodeKeys, shrink_ + row,
                    sums_ + row * padded_ + d, padded_
                );
            });
        };
        std::int64_t d = 0;
        for (; d + kValueVectors * kLanes <= padded_; d += kValueVectors * kLanes) {
            add(std::integral_constant<int, kValueVectors>{}, d);
            done(d);
        }
        for (; d < padded_; d += kLanes) add(std::integral_constant<int, 1>{}, d);
        done(padded_);
    }

    Scratch scratch_;
    float *queries_, *sums_, *most_, *totals_, *shrink_, *weights_;
    const float* key_rows_[kDecodeKeys];
};

// The same over a cache of these elements.
template <typename Element>
class LatentPiece : public LatentRows {
  public:
    using LatentRows::LatentRows;

    // Over the positions from begin to end, or places in a list, which is behind the newest query at most.
    void run(std::int64_t begin, std::int64_t end) {
        const std::int64_t latent_bytes = a_.latent_size * sizeof(Element);
        const std::int64_t rope_bytes = a_.rope_size * (kIsScaled<Element> ? float_size(a_.dtype) : sizeof(Element));
        find_keys(begin, end);
        for (; begin < end; begin += kDecodeKeys) {
            const auto count = std::min<std::int64_t>(kDecodeKeys, end - begin);
            load_keys(count);
            const auto num_next = find_keys(begin + count, end);  // 0 at the end
            attend(begin, count, found_, num_next, latent_bytes, rope_bytes);
        }
    }

  private:
    // Find the cache's rows at up to kDecodeKeys positions from `begin` to `end`; how many these are.
    std::int64_t find_keys(std::int64_t begin, std::int64_t end) {
        const auto count = std::min<std::int64_t>(kDecodeKeys, end - begin);
        if (a_.indices) {
            const std::int32_t* listed = a_.indices + token_ * a_.index_stride + begin;
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t position = std::max(listed[i], 0);
                found_[i] = find_key(position / a_.block, position % a_.block);
            }
        } else {
            std::int64_t number = begin / a_.block, offset = begin % a_.block;
            for (std::int64_t i = 0; i < count; ++number, offset = 0) {
                for (; offset < a_.block && i < count; ++offset, ++i) found_[i] = find_key(number, offset);
            }
        }
        return count;
    }

    // A row of the cache, of the request's block `number`.
    LatentKey find_key(std::int64_t number, std::int64_t offset) const {
        const std::int64_t page = a_.block_table[request_ * a_.table_stride + number];
        const auto* latents = static_cast<const Element*>(a_.latents) + page * a_.latent_page;
        LatentKey found{latents + offset * a_.latent_size, nullptr, nullptr};
        if constexpr (kIsScaled<Element>) found.scale = a_.scales + page * a_.scale_page + offset;
        with_rope([&](auto type) {
            const auto* rope = static_cast<const typename decltype(type)::type*>(a_.rope_keys) + page * a_.rope_page;
            found.rope = rope + offset * a_.rope_size;
        });
        return found;
    }

    // Rows that were found, as floats; behind them the last one again, for loops over several.
    void load_keys(std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) load_key(found_[i], keys_ + i * width_);
        for (auto i = count; i % kDotKeys; ++i) std::copy_n(keys_ + (count - 1) * width_, width_, keys_ + i * width_);
    }

    void load_key(const LatentKey& key, float* to) const {
        convert(static_cast<const Element*>(key.latent), a_.latent_size, padded_, to);
        if constexpr (kIsScaled<Element>) {
            const Floats scale = broadcast(*key.scale);
            for (std::int64_t d = 0; d < padded_; d += kLanes) store(to + d, load(to + d) * scale);
        }
        with_rope([&](auto type) {
            const auto* rope = static_cast<const typename decltype(type)::type*>(key.rope);
            convert(rope, a_.rope_size, width_ - padded_, to + padded_);
        });
    }

    // visit(Type of rotated keys' elements).
    template <typename Visit>
    void with_rope(Visit visit) const {
        if constexpr (kIsScaled<Element>) {
            with_float(a_.dtype, visit);
        } else {
            visit(Type<Element>{});
        }
    }

    LatentKey found_[kDecodeKeys];
};

template <typename Element>
struct LatentAttention : Latent {
    std::int64_t chunks() const {
        const auto split = split_size();
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < requests; ++i) count += num_pieces(i, split);
        return count;
    }

    void run(std::int64_t chunk) const {
        const auto split = split_size();
        std::int64_t request = 0, slot = 0, number = chunk;
        for (;; ++request) {
            const auto pieces = num_pieces(request, split);
            if (number < pieces) break;
            number -= pieces;
            if (num_queries(request) == 1) slot += pieces;
        }
        if (num_queries(request) == 1) return run_split(request, number, num_pieces(request, split), split, slot);
        // The newest queries first: they read the most keys, and small chunks at the end let threads finish together.
        const auto first = (num_pieces(request, split) - 1 - number) * queries_per_piece();
        const auto queries = std::min(queries_per_piece(), num_queries(request) - first);
        with_piece(request, first, queries, [&](auto& piece) {
            piece.run(0, read_of(seq_lens[request] - num_queries(request) + first + queries));
            write_result(piece);
        });
    }

    // A split of a request's positions. `slot` is that of its first split in `partial`.
    void run_split(
        std::int64_t request, std::int64_t number, std::int64_t splits, std::int64_t split, std::int64_t slot
    ) const {
        with_piece(request, 0, 1, [&](auto& piece) {
            piece.run(number * split, std::min<std::int64_t>((number + 1) * split, num_read(request)));
            if (splits == 1) return write_result(piece);
            piece.finish([&](std::int64_t, std::int64_t head, const float* sums, float most, float total) {
                float* to = results(slot + number, head);
                std::memcpy(to, sums, latent_size * sizeof(float));
                to[latent_size] = most;
                to[latent_size + 1] = total;
            });
        });
    }

    template <typename Run>
    void with_piece(std::int64_t request, std::int64_t first, std::int64_t queries, Run run) const {
#if defined(HARDPOINT_BLOCK_PRODUCTS)
        if constexpr (std::is_same_v<Element, bfloat16>) {
            const auto run_by = [&](auto products) {
                TiledLatentPiece<typename decltype(products)::type, Latent> piece(*this, request, first, queries);
                run(piece);
            };
#if defined(HARDPOINT_TILES)
            if (dtype == kBfloat16 && tiles_allowed) return run_by(Type<TileProducts>{});
#endif
#if defined(__AVX512BF16__)
            if (dtype == kBfloat16) return run_by(Type<VectorProducts>{});
#endif
        }
#endif
        LatentPiece<Element> piece(*this, request, first, queries);
        run(piece);
    }

    template <typename Piece>
    void write_result(const Piece& piece) const {
        piece.finish([&](std::int64_t token, std::int64_t head, const float* sums, float, float total) {
            write(token, head, sums, 1.0f / total);
        });
    }
};

// The splits of requests that have several, by their largest scores and totals; a chunk is one head of one request.
struct MergeLatentSplits : Latent {
    std::int64_t chunks() const {
        const auto split = split_size();
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < requests; ++i) count += num_read(i) > split;
        return count * heads;
    }

    void run(std::int64_t chunk) const {
        const auto split = split_size(), head = chunk % heads;
        std::int64_t request = 0, slot = 0;
        for (auto before = chunk / heads;; ++request) {
            if (num_read(request) > split && before-- == 0) break;
            slot += ceil_div(num_read(request), split);
        }
        const auto count = ceil_div(num_read(request), split);
        Scratch scratch(Scratch::bytes<float>(latent_size));
        auto* sums = scratch.take<float>(latent_size);
        std::fill(sums, sums + latent_size, 0.0f);
        float most = -__builtin_inff(), total = 0;
        for (std::int64_t i = 0; i < count; ++i) most = std::max(most, results(slot + i, head)[latent_size]);
        for (std::int64_t i = 0; i < count; ++i) {
            const float* part = results(slot + i, head);
            const float factor = part[latent_size] == most ? 1.0f : std::exp(part[latent_size] - most);
            total += part[latent_size + 1] * factor;
            for (std::int64_t d = 0; d < latent_size; ++d) sums[d] += part[d] * factor;
        }
        write(query_start[request], head, sums, 1.0f / total);
    }
};

// latent [tokens, latent_size] and rope_key [tokens, rope_size], `*_stride` elements from token to token, to the slots
// int32 [tokens] of a cache of elements `element` (see Code), rotated keys of T beside elements of 8 bits.
template <typename T>
struct LatentStore {
    static constexpr char signature[] = "pipipipipiiiiiip";
    const T* latent;
    std::int64_t latent_stride;
    const T* rope_key;
    std::int64_t rope_stride;
    void* latents;
    std::int64_t latent_page;
    void* rope_keys;
    std::int64_t rope_page;
    float* scales;
    std::int64_t scale_page;
    std::int64_t tokens, latent_size, rope_size, block_size, element;
    const std::int32_t* slots;

    std::int64_t chunks() const { return ceil_div(tokens, rows_per_chunk(latent_size + rope_size)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(latent_size + rope_size), tokens);
        with_element(element, [&](auto type) {
            using Element = typename decltype(type)::type;
            using Rope = std::conditional_t<kIsScaled<Element>, T, Element>;
            const CachePages<Element> to{
                static_cast<Element*>(latents), latent_page, scales, scale_page, block_size, 1, latent_size
            };
            const CachePages<Rope> to_rope{
                static_cast<Rope*>(rope_keys), rope_page, nullptr, 0, block_size, 1, rope_size
            };
            for (auto token = mine.first; token < mine.last; ++token) {
                store_token(latent + token * latent_stride, latent_size, to, slots[token]);
                store_token(rope_key + token * rope_stride, rope_size, to_rope, slots[token]);
            }
        });
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
