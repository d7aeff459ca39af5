// Products of bfloat16 in blocks, for latent attention: float32 sums of 16 columns, by one of two instruction sets.
//
// Both multiply rows as they lie by words, each of which holds two elements of a column, one below the other. Where
// tiles are allowed (see tiles.h), four of them hold sums. Else, with AVX-512 BF16, 16 vectors hold sums, and each
// product is of a vector of words with one word of a row in all lanes.
#pragma once

#include "attention_decode.h"
#include "linear_tiles.h"

#if defined(HARDPOINT_TILES) || defined(__AVX512BF16__)
#define HARDPOINT_BLOCK_PRODUCTS
#endif

namespace hardpoint::HARDPOINT_LEVEL::attention {

#if defined(HARDPOINT_BLOCK_PRODUCTS)

constexpr int kBlockKeys = 64;                             // keys that are worked on together
constexpr int kGroupRows = 16;                             // rows of queries that are worked on together
constexpr int kValueColumns = 64;                          // columns of values that are worked on together
constexpr int kPairedColumns = 32;                         // columns in 16 words
constexpr int kGroupVectors = kGroupRows / kLanes;         // vectors of one number for each row of a group
constexpr int kBlockPairs = kBlockKeys / 2;                // and their pairs
constexpr int kLineElements = 32;                          // in a line of the processor's caches
static_assert(kGroupRows == tiles::kRows && kPairedColumns * sizeof(bfloat16) == tiles::kRowBytes);

// Rows of the cache: latents and rotated keys.
struct BlockKeys {
    const bfloat16 *latents[kBlockKeys], *rope_keys[kBlockKeys];
};

#if defined(HARDPOINT_TILES)

// kValueColumns words, each of an element of one row and of that below it.
inline void join_words(const bfloat16* upper, const bfloat16* lower, std::uint32_t* to) {
#if defined(__AVX512BW__)
    const Ints order = lane_numbers() * 0x10001 + (32 << 16);  // permutations count the lower row's elements from 32 on
    const auto first = bits_as<__m512i>(order), second = bits_as<__m512i>(order + 16 * 0x10001);
    for (int i = 0; i < kValueColumns; i += 32) {
        const auto a = _mm512_loadu_si512(upper + i), b = _mm512_loadu_si512(lower + i);
        _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(a, first, b));
        _mm512_storeu_si512(to + i + 16, _mm512_permutex2var_epi16(a, second, b));
    }
#else
    for (int i = 0; i < kValueColumns; i += kLanes) {
        const Words both = widen(load_raw<Halves>(upper + i)) | widen(load_raw<Halves>(lower + i)) << 16;
        std::memcpy(to + i, &both, sizeof(both));
    }
#endif
}

// By tiles, on this thread for as long as this lives.
class TileProducts {
  public:
    static constexpr bool kEvenRows = true;  // 16 rows, from a multiple of 16 on, have to lie evenly apart

    TileProducts() { shapes_.set(kRowsByTiles); }

    // scores[key][row of queries] of `count` keys; keys behind them, up to kBlockKeys, are read. Sizes are multiples of
    // kPairedColumns; `queries` are words [columns / 2][kGroupRows], of latents, then of rotated keys.
    __attribute__((noinline)) void score(
        const BlockKeys& keys, std::int64_t, const std::uint32_t* queries, std::int64_t latent_size,
        std::int64_t rope_size, float (*scores)[kGroupRows]
    ) const {
        tiles::zero<0>();
        tiles::zero<1>();
        tiles::zero<2>();
        tiles::zero<3>();
        add_scores(keys.latents, queries, latent_size);
        add_scores(keys.rope_keys, queries + latent_size / 2 * kGroupRows, rope_size);
        tiles::store<0>(scores[0], tiles::kRowBytes);
        tiles::store<1>(scores[tiles::kRows], tiles::kRowBytes);
        tiles::store<2>(scores[2 * tiles::kRows], tiles::kRowBytes);
        tiles::store<3>(scores[3 * tiles::kRows], tiles::kRowBytes);
    }

    // Products of a block's values follow. `next`, if not null, are the keys of the next block, for prefetches: with
    // tiles these made a decode slower by a third.
    void begin_values(const BlockKeys*, std::int64_t, std::int64_t) {}

    // Products of its kValueColumns columns from `d` on follow.
    void take_values(const BlockKeys& keys, std::int64_t d) {
        for (int pair = 0; pair < kBlockPairs; ++pair) {
            join_words(keys.latents[2 * pair] + d, keys.latents[2 * pair + 1] + d, values_[pair]);
        }
    }

    // sums [kGroupRows][kValueColumns], rows `stride` floats apart, += the weighted values of `count` keys, for the
    // first `rows` rows at least; weights and values of keys behind them, up to a multiple of 32, are read. Weights are
    // words of two keys.
    void add(
        const std::uint32_t (*weights)[kBlockPairs], std::int64_t, std::int64_t count, float* sums, std::int64_t stride
    ) const {
        const std::int64_t bytes = stride * sizeof(float);
        tiles::load<0>(sums, bytes);
        tiles::load<1>(sums + tiles::kRows, bytes);
        tiles::load<2>(sums + 2 * tiles::kRows, bytes);
        tiles::load<3>(sums + 3 * tiles::kRows, bytes);
        add_half(weights[0], values_[0]);
        if (count > kBlockKeys / 2) add_half(weights[0] + kBlockPairs / 2, values_[kBlockPairs / 2]);
        tiles::store<0>(sums, bytes);
        tiles::store<1>(sums + tiles::kRows, bytes);
        tiles::store<2>(sums + 2 * tiles::kRows, bytes);
        tiles::store<3>(sums + 3 * tiles::kRows, bytes);
    }

  private:
    static void add_scores(const bfloat16* const* rows, const std::uint32_t* queries, std::int64_t size) {
        const auto stride = [&](int tile) {
            const bfloat16* const* of_tile = rows + tile * tiles::kRows;
            return (of_tile[1] - of_tile[0]) * static_cast<std::int64_t>(sizeof(bfloat16));
        };
        const std::int64_t strides[] = {stride(0), stride(1), stride(2), stride(3)};
        for (std::int64_t at = 0; at < size; at += kPairedColumns, queries += kPairedColumns / 2 * kGroupRows) {
            tiles::load<4>(queries, tiles::kRowBytes);
            tiles::load<5>(rows[0] + at, strides[0]);
            tiles::multiply_bfloat16<0, 5, 4>();
            tiles::load<6>(rows[tiles::kRows] + at, strides[1]);
            tiles::multiply_bfloat16<1, 6, 4>();
            tiles::load<7>(rows[2 * tiles::kRows] + at, strides[2]);
            tiles::multiply_bfloat16<2, 7, 4>();
            tiles::load<5>(rows[3 * tiles::kRows] + at, strides[3]);
            tiles::multiply_bfloat16<3, 5, 4>();
        }
    }

    static void add_half(const std::uint32_t* weights, const std::uint32_t* values) {
        constexpr std::int64_t stride = kValueColumns * sizeof(std::uint32_t);
        tiles::load<4>(weights, kBlockPairs * sizeof(std::uint32_t));
        tiles::load<5>(values, stride);
        tiles::multiply_bfloat16<0, 4, 5>();
        tiles::load<6>(values + tiles::kRows, stride);
        tiles::multiply_bfloat16<1, 4, 6>();
        tiles::load<7>(values + 2 * tiles::kRows, stride);
        tiles::multiply_bfloat16<2, 4, 7>();
        tiles::load<5>(values + 3 * tiles::kRows, stride);
        tiles::multiply_bfloat16<3, 4, 5>();
    }

    TileShapes shapes_;
    alignas(64) std::uint32_t values_[kBlockPairs][kValueColumns];  // words of two keys
};

#endif

#if defined(__AVX512BF16__)

// Rows that will be read next, prefetched line by line.
struct NextRows {
    const bfloat16* const* row = nullptr;
    std::int64_t at = 0, size = 0;  // the next element of that row, and how many a row has: whole lines

    void fetch() {
        _mm_prefetch(*row + at, _MM_HINT_T0);
        at += kLineElements;
        if (at < size) return;
        at = 0;
        ++row;
    }
};

// By dot products of two elements in each lane. Scores take 17 loads for 16 products, values 10 (Zen 5 has two of each
// in a cycle). While the values of a block are added, the next block's rows are prefetched in the order in which they
// lie: decodes from memory took 7.7 ms without, 7.0 with a prefetch of the same columns of each row, and 6.0 like this.
class VectorProducts {
  public:
    static constexpr bool kEvenRows = false;

    // As by tiles. Keys behind the first `count` are read up to a multiple of 16.
    void score(
        const BlockKeys& keys, std::int64_t count, const std::uint32_t* queries, std::int64_t latent_size,
        std::int64_t rope_size, float (*scores)[kGroupRows]
    ) const {
        for (std::int64_t first = 0; first < count; first += kKeys) {
            __m512 sums[kKeys] = {};
            add_scores(keys.latents + first, queries, latent_size, sums);
            add_scores(keys.rope_keys + first, queries + latent_size / 2 * kGroupRows, rope_size, sums);
            for (int i = 0; i < kKeys; ++i) _mm512_storeu_ps(scores[first + i], sums[i]);
        }
    }

    // As by tiles.
    void begin_values(const BlockKeys* next, std::int64_t latent_size, std::int64_t rope_size) {
        next_ = next;
        rope_size_ = rope_size;
        next_latents_ = {next ? next->latents : nullptr, 0, latent_size};
    }

    // As by tiles.
    void take_values(const BlockKeys& keys, std::int64_t d) {
        keys_ = &keys;
        d_ = d;
        prefetches_ = next_ != nullptr;
        if (!prefetches_) return;
        const auto last = kBlockKeys * (d + kValueColumns) / next_latents_.size;
        for (auto key = kBlockKeys * d / next_latents_.size; key < last; ++key) {
            for (std::int64_t at = 0; at < rope_size_; at += kLineElements) {
                _mm_prefetch(next_->rope_keys[key] + at, _MM_HINT_T0);
            }
        }
    }

    // As by tiles. Weights and values of keys behind the first `count` are read up to a multiple of 2.
    void add(
        const std::uint32_t (*weights)[kBlockPairs], std::int64_t rows, std::int64_t count, float* sums,
        std::int64_t stride
    ) {
        const auto pairs = ceil_div(count, 2);
        for (int row = 0; row < std::min<std::int64_t>(rows, kGroupRows); row += kRows) {
            for (int at = 0; at < kValueColumns; at += kColumns) {
                float* block = sums + row * stride + at;
                if (prefetches_) {
                    add_block<true>(weights + row, d_ + at, pairs, block, stride);
                } else {
                    add_block<false>(weights + row, d_ + at, pairs, block, stride);
                }
            }
        }
        prefetches_ = false;
    }

  private:
    static constexpr int kKeys = 16, kRows = 8, kColumns = 32;

    static void add_scores(
        const bfloat16* const* keys, const std::uint32_t* queries, std::int64_t size, __m512 (&sums)[kKeys]
    ) {
        constexpr int words = 2;  // of a key, one after the other: there are fewer registers than keys' addresses
        for (std::int64_t at = 0; at < size; at += 2 * words, queries += words * kGroupRows) {
            if (at % kLineElements == 0) {
                for (int i = 0; i < kKeys; ++i) _mm_prefetch(keys[i] + at + kLineElements, _MM_HINT_T0);
            }
            const auto x = load_raw<__m512bh>(queries), y = load_raw<__m512bh>(queries + kGroupRows);
            for (int i = 0; i < kKeys; ++i) {
                sums[i] = _mm512_dpbf16_ps(sums[i], in_all_lanes(keys[i] + at), x);
                sums[i] = _mm512_dpbf16_ps(sums[i], in_all_lanes(keys[i] + at + 2), y);
            }
        }
    }

    // kRows rows, kColumns columns from `d` on.
    template <bool prefetches>
    void add_block(
        const std::uint32_t (*weights)[kBlockPairs], std::int64_t d, std::int64_t pairs, float* sums,
        std::int64_t stride
    ) {
        const Ints order = lane_numbers() * 0x10001 + (32 << 16);  // the odd key's elements count from 32 on
        const auto low = bits_as<__m512i>(order), high = bits_as<__m512i>(order + 16 * 0x10001);
        NextRows next = next_latents_;
        __m512 total[kRows][2];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            total[i][0] = _mm512_loadu_ps(sums + i * stride);
            total[i][1] = _mm512_loadu_ps(sums + i * stride + kLanes);
        }
        for (std::int64_t pair = 0; pair < pairs; ++pair) {
            if constexpr (prefetches) next.fetch();
            const auto even = _mm512_loadu_si512(keys_->latents[2 * pair] + d);
            const auto odd = _mm512_loadu_si512(keys_->latents[2 * pair + 1] + d);
            const auto first = bits_as<__m512bh>(_mm512_permutex2var_epi16(even, low, odd));
            const auto second = bits_as<__m512bh>(_mm512_permutex2var_epi16(even, high, odd));
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                const auto weight = in_all_lanes(weights[i] + pair);
                total[i][0] = _mm512_dpbf16_ps(total[i][0], weight, first);
                total[i][1] = _mm512_dpbf16_ps(total[i][1], weight, second);
            }
        }
        next_latents_ = next;
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            _mm512_storeu_ps(sums + i * stride, total[i][0]);
            _mm512_storeu_ps(sums + i * stride + kLanes, total[i][1]);
        }
    }

    static __m512bh in_all_lanes(const void* word) {
        return bits_as<__m512bh>(_mm512_set1_epi32(load_raw<std::int32_t>(word)));
    }

    const BlockKeys *keys_ = nullptr, *next_ = nullptr;
    std::int64_t d_ = 0, rope_size_ = 0;
    bool prefetches_ = false;  // whether the next products do: the first of each columns
    NextRows next_latents_;
};

#endif

// The rows of 16 words each become columns; they lie `from_stride` and `to_stride` words apart.
inline void turn_words(const std::uint32_t* from, std::int64_t from_stride, std::uint32_t* to, std::int64_t to_stride) {
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
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
#else
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) to[j * to_stride + i] = from[i * from_stride + j];
    }
#endif
}

// The nearest bfloat16 of `even` in the lower half of each word, those of `odd` in the upper.
inline Words bfloat16_pairs(Floats even, Floats odd) {
#if defined(__AVX512BF16__)
    const Ints lanes = lane_numbers() * 0x10001 + (16 << 16);
    const auto halves = bits_as<__m512i>(_mm512_cvtne2ps_pbh(bits_as<__m512>(odd), bits_as<__m512>(even)));
    return bits_as<Words>(_mm512_permutexvar_epi16(bits_as<__m512i>(lanes), halves));
#else
    const auto rounded = [](Floats v) {
        const auto bits = bits_as<Words>(v);
        const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
        return v != v ? quiet : nearest;
    };
    return rounded(even) | rounded(odd) << 16;
#endif
}

// e^x of x <= 0.
inline Floats weight_of(Floats x) {
#if defined(__AVX512BF16__)
    return exponential_of_negative(x);
#else
    return exponential(x);
#endif
}

#endif

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
