// The feed-forwards of a mixture of experts: rows sorted by expert, then products with each expert's own weight, which
// stand beside those of one weight: linear.h, linear_int8.h and so on.
//
// Axes: T tokens, K experts of a token, E experts. Row p of the sorted order is place order[p] of ids [T, K], counted
// through; rows of one expert are neighbours.
#pragma once

#include "../task.h"
#include "panels.h"

namespace hardpoint::HARDPOINT_LEVEL {

// At most so many of them are needed for `count` rows.
inline std::int64_t most_expert_rows(std::int64_t count, std::int64_t experts) {
    return std::min(count, experts) + count / kBlockRows;
}

// ids int32 [T * K], -1 where an expert is not here -> order int32 [T * K], places int32 [T * K] (where a place went in
// the order; -1: nowhere), and pieces [most_expert_rows]; those that are not needed have no rows. `starts` is scratch
// memory, int64 [E + 1].
struct SortByExpert {
    static constexpr char signature[] = "pppppii";
    const std::int32_t* ids;
    std::int32_t* order;
    std::int32_t* places;
    ExpertRows* pieces;
    std::int64_t* starts;
    std::int64_t count, experts;

    std::int64_t chunks() const { return 1; }
    void run(std::int64_t) const {
        std::fill(starts, starts + experts + 1, 0);
        for (std::int64_t i = 0; i < count; ++i) {
            if (ids[i] >= 0) ++starts[ids[i] + 1];
        }
        std::int64_t piece = 0;
        for (std::int64_t e = 0; e < experts; ++e) {
            const std::int64_t rows = starts[e + 1];
            starts[e + 1] += starts[e];
            for (std::int64_t first = 0; first < rows; first += kBlockRows) {
                pieces[piece++] = {e, starts[e] + first, std::min<std::int64_t>(kBlockRows, rows - first)};
            }
        }
        for (; piece < most_expert_rows(count, experts); ++piece) pieces[piece] = {0, 0, 0};
        for (std::int64_t i = 0; i < count; ++i) {
            if (ids[i] < 0) {
                places[i] = -1;
                continue;
            }
            const std::int64_t place = starts[ids[i]]++;
            places[i] = static_cast<std::int32_t>(place);
            order[place] = static_cast<std::int32_t>(i);
        }
    }
};

// Which rows of x the sorted rows are: with `top_k`, the tokens' own; with 0, x is sorted as well.
struct Routed {
    const std::int32_t* order;
    const ExpertRows* pieces;
    std::int64_t count, experts, top_k;

    Places places() const { return {order, top_k}; }
    std::int64_t chunks(std::int64_t n, std::int64_t panels) const {
        return most_expert_rows(count, experts) * ceil_div(num_panels(n), panels);
    }

    // Call f(expert, block) for the blocks of one chunk, each at most `most` panels wide.
    template <std::int64_t most = kTilePanels, typename F>
    void for_each_block(std::int64_t chunk, std::int64_t n, std::int64_t panels, const F& f) const {
        const std::int64_t wide = ceil_div(num_panels(n), panels);
        const ExpertRows& piece = pieces[chunk / wide];
        if (!piece.rows) return;
        const std::int64_t end = std::min((chunk % wide + 1) * panels, num_panels(n));
        for (std::int64_t panel = chunk % wide * panels; panel < end; panel += most) {
            f(piece.expert, Block{piece.first, piece.rows, panel, std::min(most, end - panel)});
        }
    }
};

// Writes the results of sorted rows to out [count, N], each with the bias of its expert: [E, N], or null.
template <typename T>
struct ExpertsOut {
    const T* bias;
    T* out;

    Output of(std::int64_t expert, std::int64_t n, const float* scales = nullptr) const {
        return Output::of(out, bias ? bias + expert * n : nullptr, n, scales);
    }
};

// out [T, H]: the sum of the sorted rows y of a token's places, each times its weight, float32 [T, K].
template <typename T>
struct SumOfExperts {
    static constexpr char signature[] = "ppppiii";
    const T* y;
    const std::int32_t* places;
    const float* weights;
    T* out;
    std::int64_t tokens, top_k, n;

    std::int64_t chunks() const { return ceil_div(tokens, rows_per_chunk(n * top_k)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(n * top_k), tokens);
        for (auto token = mine.first; token < mine.last; ++token) {
            for (std::int64_t i = 0; i < n; i += kLanes) {
                const std::int64_t count = std::min<std::int64_t>(kLanes, n - i);
                Floats total = {};
                for (std::int64_t place = token * top_k; place < (token + 1) * top_k; ++place) {
                    if (places[place] < 0) continue;
                    const T* from = y + places[place] * n + i;
                    T some[kLanes] = {};
                    if (count < kLanes) from = static_cast<const T*>(std::memcpy(some, from, count * sizeof(T)));
                    total += load(from) * weights[place];
                }
                T rounded[kLanes];
                store(rounded, total);
                std::memcpy(out + token * n + i, rounded, count * sizeof(T));
            }
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
