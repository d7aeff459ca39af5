// Layers with a state: a short convolution, linear recurrences, their gates and their norm. See the ops causal_conv,
// linear_recurrence_step, linear_recurrence_chunks, recurrence_gates and gated_rms_norm.
#pragma once

#include "../task.h"
#include "activation.h"
#include "attention.h"

namespace hardpoint::HARDPOINT_LEVEL::recurrence {

using attention::convert;
using attention::round_up;
using attention::Scratch;

// Floats [n] to elements.
template <typename T>
inline void round_row(T* to, const float* from, std::int64_t n) {
    attention::store_scaled_sums(to, from, n, 1.0f);
}

// x [tokens, channels], `x_stride` elements from token to token; weight [channels, width], bias [channels] or null, out
// [tokens, channels]. States [width - 1, channels] are in pages `state_page` elements apart. A chunk is some channels of
// all tokens: none reads an input that another writes over.
template <typename T>
struct CausalConv {
    static constexpr char signature[] = "pipppipppiiiiip";
    const T* x;
    std::int64_t x_stride;
    const T* weight;
    const T* bias;
    T* states;
    std::int64_t state_page;
    const std::int64_t* pages;
    const std::int32_t* query_start;
    const std::int32_t* seq_lens;
    std::int64_t tokens, requests, channels, width;
    Activation activation;
    T* out;

    std::int64_t block() const { return tokens < 16 ? 1024 : 256; }
    std::int64_t chunks() const { return ceil_div(channels, block()); }

    void run(std::int64_t chunk) const {
        const Rows mine(chunk, block(), channels);
        const auto first = mine.first, n = mine.last - mine.first, padded = round_up(n, kLanes);
        Scratch scratch((2 * width + 2) * Scratch::bytes<float>(padded));
        float* taps = scratch.take<float>(width * padded);
        float* inputs = scratch.take<float>(width * padded);  // of the last `width` tokens, in turn
        float* start = scratch.take<float>(padded);
        float* sums = scratch.take<float>(padded);
        std::fill_n(start, padded, 0.0f);
        if (bias) convert(bias + first, n, padded, start);
        for (std::int64_t tap = 0; tap < width; ++tap) {
            for (std::int64_t i = 0; i < padded; ++i) {
                taps[tap * padded + i] = i < n ? to_float(weight[(first + i) * width + tap]) : 0.0f;
            }
        }
        for (std::int64_t request = 0; request < requests; ++request) {
            const std::int64_t token = query_start[request], count = query_start[request + 1] - token;
            if (count == 0) continue;
            T* state = states + pages[request] * state_page + first;
            for (std::int64_t i = 0; i < width - 1; ++i) {
                if (seq_lens[request] == count) {
                    std::fill_n(inputs + i * padded, padded, 0.0f);
                } else {
                    convert(state + i * channels, n, padded, inputs + i * padded);
                }
            }
            for (std::int64_t i = 0; i < count; ++i) {
                convert(x + (token + i) * x_stride + first, n, padded, inputs + (i + width - 1) % width * padded);
                for (std::int64_t j = 0; j < padded; j += kLanes) {
                    Floats sum = load(start + j);
                    for (std::int64_t tap = 0, row = i % width; tap < width; ++tap, row = row + 1 < width ? row + 1 : 0) {
                        sum += load(taps + tap * padded + j) * load(inputs + row * padded + j);
                    }
                    store(sums + j, sum);
                }
                activate_row(sums, sums, padded, activation);
                round_row(out + (token + i) * channels + first, sums, n);
            }
            for (std::int64_t i = 0; i < width - 1; ++i) {
                round_row(state + i * channels, inputs + (count + i) % width * padded, n);
            }
        }
    }
};

// Some tokens of one head, as rows of numbers: keys, queries and decays [count, padded], the latter [count] where a head
// has one; betas [count], values and results [count, rows].
struct Tokens {
    std::int64_t count, padded, rows;
    bool delta_rule, channel_decay;
    float *q, *k, *decay, *beta, *values, *results;
};

// Rows [kRows, vectors] of a state through all tokens. They stay in registers, if `kVectors` says how many they are.
template <int kVectors, int kRows, bool kChannelDecay>
void advance(const Tokens& t, float* state, std::int64_t stride, std::int64_t row) {
    const std::int64_t vectors = kVectors ? kVectors : t.padded / kLanes;
    Floats kept[kRows][kVectors ? kVectors : 1];
    const auto at = [&](int r, std::int64_t i) { return state + r * stride + i * kLanes; };
    const auto get = [&](int r, std::int64_t i) {
        if constexpr (kVectors > 0) return kept[r][i];
        return load(at(r, i));
    };
    const auto set = [&](int r, std::int64_t i, Floats x) {
        if constexpr (kVectors > 0) {
            kept[r][i] = x;
        } else {
            store(at(r, i), x);
        }
    };
    if constexpr (kVectors > 0) {
        for (int r = 0; r < kRows; ++r) {
            for (int i = 0; i < kVectors; ++i) kept[r][i] = load(at(r, i));
        }
    }
    for (std::int64_t token = 0; token < t.count; ++token) {
        const float* k = t.k + token * t.padded;
        const float* q = t.q + token * t.padded;
        const float* decays = t.decay + token * t.padded;
        const Floats decay = broadcast(kChannelDecay ? 0.0f : t.decay[token]);
        Floats dots[kRows][2] = {}, sums[kRows][2] = {};
        for (std::int64_t i = 0; i < vectors; ++i) {
            const Floats by = kChannelDecay ? load(decays + i * kLanes) : decay, key = load(k + i * kLanes);
            for (int r = 0; r < kRows; ++r) {
                const Floats s = get(r, i) * by;
                set(r, i, s);
                dots[r][i % 2] += s * key;
            }
        }
        Floats u[kRows];
        for (int r = 0; r < kRows; ++r) {
            const float known = t.delta_rule ? sum(dots[r][0] + dots[r][1]) : 0.0f;
            u[r] = broadcast(t.beta[token] * (t.values[token * t.rows + row + r] - known));
        }
        for (std::int64_t i = 0; i < vectors; ++i) {
            const Floats key = load(k + i * kLanes), query = load(q + i * kLanes);
            for (int r = 0; r < kRows; ++r) {
                const Floats s = get(r, i) + u[r] * key;
                set(r, i, s);
                sums[r][i % 2] += s * query;
            }
        }
        for (int r = 0; r < kRows; ++r) t.results[token * t.rows + row + r] = sum(sums[r][0] + sums[r][1]);
    }
    if constexpr (kVectors > 0) {
        for (int r = 0; r < kRows; ++r) {
            for (int i = 0; i < kVectors; ++i) store(at(r, i), kept[r][i]);
        }
    }
}

template <int kVectors, int kRows, bool kChannelDecay>
void advance_rows(const Tokens& t, float* state, std::int64_t stride) {
    std::int64_t row = 0;
    for (; row + kRows <= t.rows; row += kRows) {
        advance<kVectors, kRows, kChannelDecay>(t, state + row * stride, stride, row);
    }
    for (; row < t.rows; ++row) advance<kVectors, 1, kChannelDecay>(t, state + row * stride, stride, row);
}

template <int kVectors, int kRows>
void advance_all(const Tokens& t, float* state, std::int64_t stride) {
    if (t.channel_decay) return advance_rows<kVectors, kRows, true>(t, state, stride);
    advance_rows<kVectors, kRows, false>(t, state, stride);
}

constexpr std::int64_t kTokens = 32;  // in Tokens
constexpr std::int64_t kStateRows = 48;  // in a chunk of prompts

// q, k [tokens, key_heads, key_size], v [tokens, heads, value_size], with strides from token to token and from head to
// head; decay [tokens, heads] or [tokens, heads, key_size], beta [tokens, heads], out [tokens, heads, value_size].
// States [heads, value_size, key_size] are in pages `state_page` floats apart. Without query_start each request has one
// token. A chunk is `rows` rows of a state.
template <typename T>
struct LinearRecurrence {
    static constexpr char signature[] = "piipiipiippppipppiiiiiiiif";
    const T* q;
    std::int64_t q_token, q_head;
    const T* k;
    std::int64_t k_token, k_head;
    const T* v;
    std::int64_t v_token, v_head;
    const float* decay;
    const float* beta;
    T* out;
    float* states;
    std::int64_t state_page;
    const std::int64_t* pages;
    const std::int32_t* query_start;
    const std::int32_t* seq_lens;
    std::int64_t requests, heads, key_heads, key_size, value_size, delta_rule, normalize, channel_decay;
    double scale;

    std::int64_t rows() const { return query_start ? std::min(kStateRows, value_size) : value_size; }
    std::int64_t blocks() const { return ceil_div(value_size, rows()); }
    std::int64_t chunks() const { return requests * heads * blocks(); }

    void run(std::int64_t chunk) const {
        const auto request = chunk / (heads * blocks()), head = chunk / blocks() % heads;
        const Rows mine(chunk % blocks(), rows(), value_size);
        const std::int64_t first = query_start ? query_start[request] : request;
        const std::int64_t count = query_start ? query_start[request + 1] - first : 1;
        if (count == 0) return;
        const auto own = mine.last - mine.first, padded = round_up(key_size, kLanes), most = std::min(count, kTokens);
        float* state = states + pages[request] * state_page + (head * value_size + mine.first) * key_size;
        if (seq_lens[request] == count) std::fill_n(state, own * key_size, 0.0f);

        const bool in_place = padded == key_size;
        Scratch scratch(
            3 * Scratch::bytes<float>(most * padded) + Scratch::bytes<float>(most) +
            2 * Scratch::bytes<float>(round_up(most * own, kLanes)) + Scratch::bytes<float>(in_place ? 0 : own * padded)
        );
        Tokens t{most, padded, own, delta_rule != 0, channel_decay != 0, {}, {}, {}, {}, {}, {}};
        t.q = scratch.take<float>(most * padded);
        t.k = scratch.take<float>(most * padded);
        t.decay = scratch.take<float>(most * padded);
        t.beta = scratch.take<float>(most);
        t.values = scratch.take<float>(round_up(most * own, kLanes));
        t.results = scratch.take<float>(round_up(most * own, kLanes));
        float* rows_of_state = state;
        if (!in_place) {
            rows_of_state = scratch.take<float>(own * padded);
            for (std::int64_t row = 0; row < own; ++row) {
                convert(state + row * key_size, key_size, padded, rows_of_state + row * padded);
            }
        }
        for (std::int64_t begin = 0; begin < count; begin += kTokens) {
            t.count = std::min(kTokens, count - begin);
            for (std::int64_t i = 0; i < t.count; ++i) prepare(t, i, first + begin + i, head, mine.first);
            advance_by_size(t, rows_of_state);
            for (std::int64_t i = 0; i < t.count; ++i) {
                T* to = out + ((first + begin + i) * heads + head) * value_size + mine.first;
                round_row(to, t.results + i * own, own);
            }
        }
        if (!in_place) {
            for (std::int64_t row = 0; row < own; ++row) {
                std::memcpy(state + row * key_size, rows_of_state + row * padded, key_size * sizeof(float));
            }
        }
    }

  private:
    void prepare(const Tokens& t, std::int64_t i, std::int64_t token, std::int64_t head, std::int64_t row) const {
        const auto key_head = head / (heads / key_heads);
        float* own_q = t.q + i * t.padded;
        float* own_k = t.k + i * t.padded;
        convert(q + token * q_token + key_head * q_head, key_size, t.padded, own_q);
        convert(k + token * k_token + key_head * k_head, key_size, t.padded, own_k);
        scale_row(own_q, t.padded, static_cast<float>(scale) * norm_of(own_q, t.padded));
        scale_row(own_k, t.padded, norm_of(own_k, t.padded));
        convert(v + token * v_token + head * v_head + row, t.rows, t.rows, t.values + i * t.rows);
        t.beta[i] = beta[token * heads + head];
        if (t.channel_decay) {
            float* own = t.decay + i * t.padded;
            convert(decay + (token * heads + head) * key_size, key_size, t.padded, own);
            for (std::int64_t j = 0; j < t.padded; j += kLanes) store(own + j, exponential(load(own + j)));
        } else {
            t.decay[i] = std::exp(decay[token * heads + head]);
        }
    }

    float norm_of(const float* x, std::int64_t padded) const {
        if (!normalize) return 1.0f;
        Floats squares = {};
        for (std::int64_t i = 0; i < padded; i += kLanes) squares += load(x + i) * load(x + i);
        return 1.0f / std::sqrt(sum(squares) + 1e-6f);
    }

    static void scale_row(float* x, std::int64_t padded, float by) {
        for (std::int64_t i = 0; i < padded; i += kLanes) store(x + i, load(x + i) * by);
    }

    static void advance_by_size(const Tokens& t, float* state) {
        switch (t.padded / kLanes) {
            case 1: return advance_all<1, 4>(t, state, t.padded);
            case 2: return advance_all<2, 4>(t, state, t.padded);
            case 4: return advance_all<4, 4>(t, state, t.padded);
            case 8: return advance_all<8, 3>(t, state, t.padded);
            default: return advance_all<0, 2>(t, state, t.padded);
        }
    }
};

// a [tokens, heads, channels], b [tokens, heads] or null, with strides from token to token; rate [heads], bias [heads,
// channels]; decay like a, beta [tokens, heads]. One channel where a head has one decay.
template <typename T>
struct RecurrenceGates {
    static constexpr char signature[] = "pipippppiiif";
    const T* a;
    std::int64_t a_token;
    const T* b;
    std::int64_t b_token;
    const float* rate;
    const float* bias;
    float* decay;
    float* beta;
    std::int64_t tokens, heads, channels;
    double low;

    std::int64_t rows() const { return std::max<std::int64_t>(1, rows_per_chunk(heads * channels) / 16); }
    std::int64_t chunks() const { return ceil_div(tokens, rows()); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows(), tokens);
        for (auto token = mine.first; token < mine.last; ++token) {
            for (std::int64_t head = 0; head < heads; ++head) {
                const float speed = -std::exp(rate[head]);
                float step = 0;
                for (std::int64_t i = 0; i < channels; ++i) {
                    const auto place = head * channels + i;
                    const float x = to_float(a[token * a_token + place]) + bias[place];
                    step = std::max(x > 20.0f ? x : std::log1p(std::exp(x)), static_cast<float>(low));
                    decay[token * heads * channels + place] = speed * step;
                }
                beta[token * heads + head] = b ? 1.0f / (1.0f + std::exp(-to_float(b[token * b_token + head]))) : step;
            }
        }
    }
};

// x, out [tokens, groups, size], gate alike with `gate_token` elements from token to token; weight [groups, size], or
// [1, size] where `one_weight`.
template <typename T>
struct GatedRmsNorm {
    static constexpr char signature[] = "ppippiiiiiif";
    const T* x;
    const T* gate;
    std::int64_t gate_token;
    const T* weight;
    T* out;
    std::int64_t tokens, groups, size, one_weight;
    Activation activation;
    std::int64_t gate_first;
    double eps;

    std::int64_t chunks() const { return ceil_div(tokens * groups, rows_per_chunk(size)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(size), tokens * groups);
        const auto padded = round_up(size, kLanes);
        Scratch scratch(3 * Scratch::bytes<float>(padded));
        auto* y = scratch.take<float>(padded);
        auto* factor = scratch.take<float>(padded);
        auto* own_weight = scratch.take<float>(padded);
        for (auto row = mine.first; row < mine.last; ++row) {
            const auto token = row / groups, group = row % groups;
            convert(x + row * size, size, padded, y);
            convert(gate + token * gate_token + group * size, size, padded, factor);
            convert(weight + (one_weight ? 0 : group * size), size, padded, own_weight);
            activate_row(factor, factor, padded, activation);
            Floats squares = {};
            for (std::int64_t i = 0; i < padded; i += kLanes) {
                if (gate_first) store(y + i, load(y + i) * load(factor + i));
                squares += load(y + i) * load(y + i);
            }
            const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + static_cast<float>(eps));
            for (std::int64_t i = 0; i < padded; i += kLanes) {
                const Floats normed = load(y + i) * scale * load(own_weight + i);
                store(y + i, gate_first ? normed : normed * load(factor + i));
            }
            round_row(out + row * size, y, size);
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL::recurrence
