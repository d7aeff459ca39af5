// Drawing tokens, and their log-probabilities.
#pragma once

#include "../task.h"
#include "argmax.h"
#include "chunking.h"
#include "logit_row.h"

namespace hardpoint::HARDPOINT_LEVEL {

inline Scratch& scratch_of_thread() {
    static thread_local Scratch scratch;
    return scratch;
}

// Rows of a chunk that are looked at several times, exponentials included.
inline std::int64_t sampled_per_chunk(std::int64_t n) { return rows_per_chunk(4 * n); }

// logits [rows, n] with `stride` elements from row to row, settings [rows]; see the op sample_tokens.
template <typename T>
struct SampleTokens {
    static constexpr char signature[] = "pppppppiii";
    const T* logits;
    const float* temperature;
    const std::int32_t* top_k;
    const float *top_p, *min_p, *uniform;
    std::int64_t* tokens;
    std::int64_t rows, n, stride;

    std::int64_t chunks() const { return ceil_div(rows, sampled_per_chunk(n)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, sampled_per_chunk(n), rows);
        for (auto row = mine.first; row < mine.last; ++row) tokens[row] = sample(row);
    }

    std::int64_t sample(std::int64_t row) const {
        const T* x = logits + row * stride;
        if (temperature[row] == 0.0f) return argmax_row(x, n);
        const LogitRow<T> scaled(x, n, temperature[row], scratch_of_thread());
        if (!std::isfinite(scaled.highest())) return argmax_row(x, n);
        float least = scaled.highest() + std::log(min_p[row]);
        if (top_k[row] > 0 && top_k[row] < n) {
            const auto& top = scaled.top(top_k[row]);
            if (static_cast<std::int64_t>(top.size()) == top_k[row]) least = std::max(least, top.back().value);
        }
        if (top_p[row] < 1.0f) least = std::max(least, scaled.nucleus(least, top_p[row]));
        return scaled.draw(least, uniform[row]);
    }
};

// logits [rows, n], tokens [rows] -> ids, logprobs and ranks [rows, 1 + top_n]; see the op token_logprobs. Equally
// likely tokens come in the order of the vocabulary.
template <typename T>
struct TokenLogprobs {
    static constexpr char signature[] = "pppppiiii";
    const T* logits;
    const std::int64_t* tokens;
    std::int64_t* ids;
    float* logprobs;
    std::int64_t* ranks;
    std::int64_t rows, n, stride, top_n;

    std::int64_t chunks() const { return ceil_div(rows, sampled_per_chunk(n)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, sampled_per_chunk(n), rows);
        for (auto row = mine.first; row < mine.last; ++row) rank(row);
    }

    void rank(std::int64_t row) const {
        const T* x = logits + row * stride;
        const std::int64_t start = row * (1 + top_n);
        const LogitRow<T> all(x, n, 1.0f, scratch_of_thread());
        const bool has_nan = std::isnan(to_float(x[argmax_row(x, n)]));  // the first of them, where there is one
        const float log_mass = has_nan ? std::nanf("") : std::log(all.mass(-__builtin_inff()));
        const auto put = [&](std::int64_t place, std::int64_t token, float value, std::int64_t likelier) {
            ids[start + place] = token;
            logprobs[start + place] = value - all.highest() - log_mass;
            ranks[start + place] = 1 + likelier;
        };
        const float own = to_float(x[tokens[row]]);
        put(0, tokens[row], own, all.count_above(own));
        if (top_n == 0) return;
        const auto& top = all.top(top_n);
        std::int64_t likelier = 0;
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(top.size()); ++i) {
            if (top[i].value != top[likelier].value) likelier = i;
            put(1 + i, top[i].token, top[i].value, likelier);
        }
        // A row with fewer numbers than that holds NaN.
        for (auto i = static_cast<std::int64_t>(top.size()); i < top_n; ++i) put(1 + i, 0, __builtin_nanf(""), i);
    }
};

// The first word of Philox4x32-10, its top 24 bits; see the op philox_uniform.
struct PhiloxUniform {
    static constexpr char signature[] = "pppi";
    const std::uint64_t *seeds, *positions;
    float* out;
    std::int64_t count;

    std::int64_t chunks() const { return ceil_div(count, kElementsPerChunk); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, kElementsPerChunk, count);
        for (auto i = mine.first; i < mine.last; ++i) {
            out[i] = static_cast<float>(first_word(seeds[i], positions[i]) >> 8) * 0x1p-24f;
        }
    }

    static std::uint32_t first_word(std::uint64_t seed, std::uint64_t position) {
        std::uint32_t c0 = position, c1 = position >> 32, c2 = 0, c3 = 0, k0 = seed, k1 = seed >> 32;
        for (int round = 0; round < 10; ++round) {
            const std::uint64_t a = std::uint64_t{0xD2511F53} * c0, b = std::uint64_t{0xCD9E8D57} * c2;
            c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
            c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
            c1 = b;
            c3 = a;
            k0 += 0x9E3779B9;
            k1 += 0xBB67AE85;
        }
        return c0;
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
