// Changes of logits before a token is drawn.
#pragma once

#include "../task.h"
#include "chunking.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

// logits, forbidden [rows, n] with `*_stride` elements from row to row -> out [rows, n]: negative infinity where
// forbidden.
template <typename T>
struct MaskTokens {
    static constexpr char signature[] = "pppiiii";
    const T* logits;
    const std::uint8_t* forbidden;
    T* out;
    std::int64_t rows, n, stride, forbidden_stride;

    std::int64_t chunks() const { return ceil_div(rows, rows_per_chunk(n)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(n), rows);
        const T never = round_to<T>(-__builtin_inff());
        for (auto row = mine.first; row < mine.last; ++row) {
            const T* x = logits + row * stride;
            const std::uint8_t* mask = forbidden + row * forbidden_stride;
            for (std::int64_t i = 0; i < n; ++i) out[row * n + i] = mask[i] ? never : x[i];
        }
    }
};

// logits [rows, n], in_prompt and counts [rows, n], penalties [rows] -> out [rows, n]; see the op apply_penalties.
template <typename T>
struct ApplyPenalties {
    static constexpr char signature[] = "pppppppiiiii";
    const T* logits;
    const std::uint8_t* in_prompt;
    const std::int32_t* counts;
    const float *repetition, *presence, *frequency;
    float* out;
    std::int64_t rows, n, stride, prompt_stride, counts_stride;

    std::int64_t chunks() const { return ceil_div(rows, rows_per_chunk(n)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(n), rows);
        for (auto row = mine.first; row < mine.last; ++row) {
            const T* x = logits + row * stride;
            const std::uint8_t* prompt = in_prompt + row * prompt_stride;
            const std::int32_t* drawn = counts + row * counts_stride;
            const float repeated = repetition[row], present = presence[row], frequent = frequency[row];
            for (std::int64_t i = 0; i < n; ++i) {
                const auto count = static_cast<float>(drawn[i]);
                const float value = to_float(x[i]), factor = prompt[i] || drawn[i] > 0 ? repeated : 1.0f;
                const float penalised = value > 0 ? value / factor : value * factor;
                out[row * n + i] = penalised - (frequent * count + (drawn[i] > 0 ? present : 0.0f));
            }
        }
    }
};

// logits [rows, n], tokens and values [rows, count] -> out [rows, n]; see the op apply_logit_bias.
template <typename T>
struct ApplyLogitBias {
    static constexpr char signature[] = "ppppiiiiii";
    const T* logits;
    const std::int64_t* tokens;
    const float* values;
    float* out;
    std::int64_t rows, n, stride, count, tokens_stride, values_stride;

    std::int64_t chunks() const { return ceil_div(rows, rows_per_chunk(n)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(n), rows);
        for (auto row = mine.first; row < mine.last; ++row) {
            const T* x = logits + row * stride;
            float* y = out + row * n;
            for (std::int64_t i = 0; i < n; ++i) y[i] = to_float(x[i]);
            for (std::int64_t i = 0; i < count; ++i)
                y[tokens[row * tokens_stride + i]] += values[row * values_stride + i];
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
