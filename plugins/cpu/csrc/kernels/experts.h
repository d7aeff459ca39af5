// The feed-forwards of a mixture of experts: rows sorted by expert, then products with each expert's own weight.
//
// Axes: T tokens, K experts of a token, E experts. Row p of the sorted order is place order[p] of ids [T, K], counted
// through; rows of one expert are neighbours.
#pragma once

#include "../task.h"
#include "linear_float4.h"
#include "linear_int4.h"
#include "linear_int8.h"

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

    std::int64_t row(std::int64_t p) const { return top_k ? order[p] / top_k : p; }
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

    auto finish(std::int64_t expert, std::int64_t n) const {
        return [to = out, from = bias ? bias + expert * n : nullptr, n](std::int64_t p, const Sums& sums, std::int64_t c) {
            store_results<T>(to + p * n + c, sums, from ? from + c : nullptr, n - c);
        };
    }
};

// out [count, N]: sorted rows of x [., K] times their expert's weight, panels one expert after the other. See
// multiply_block for `alike`.
template <typename T>
struct ExpertsLinear {
    static constexpr char signature[] = "ppppppiiiiiii";
    const T* x;
    const T* w;
    ExpertsOut<T> out;
    Routed routed;
    std::int64_t n, k, x_stride, alike;

    std::int64_t chunks() const { return routed.chunks(n, kTilePanels); }
    void run(std::int64_t chunk) const {
        const auto row = [&](std::int64_t p) { return x + routed.row(p) * x_stride; };
        const std::int64_t size = num_panels(n) * panel_size<T>(k);
        routed.for_each_block(chunk, n, kTilePanels, [&](std::int64_t expert, const Block& block) {
            PlainWeight<T>{w + expert * size, n, k, alike != 0}.multiply(block, row, out.finish(expert, n));
        });
    }
};

// The same with int8 weights and rounded activations.
template <typename T>
struct ExpertsLinearInt8 {
    static constexpr char signature[] = "pppppppppiiiii";
    const std::int8_t* codes;
    const float* x_scales;
    const std::int8_t* w;
    const float* w_scales;
    const std::int32_t* row_sums;
    ExpertsOut<T> out;
    Routed routed;
    std::int64_t n, k;

    std::int64_t chunks() const { return routed.chunks(n, kBytePanels); }
    void run(std::int64_t chunk) const {
        const std::int64_t padded = num_panels(n) * kPanelRows;
        const auto row = [&](std::int64_t p) { return codes + routed.row(p) * k; };
        const auto scale = [&](std::int64_t p) { return x_scales[routed.row(p)]; };
        const std::int64_t size = num_panels(n) * byte_panel_size(k);
        routed.for_each_block(chunk, n, kBytePanels, [&](std::int64_t expert, const Block& block) {
            ByteWeight{w + expert * size, w_scales + expert * padded, row_sums + expert * padded, n, k}.multiply(
                block, row, scale, out.finish(expert, n)
            );
        });
    }
};

// One chunk of the same with 4-bit weights, activations as they are. `of_expert(e)` is the weight of expert e.
template <typename T, typename W, typename OfExpert>
inline void multiply_nibbles(
    std::int64_t chunk, const Routed& routed, const T* x, std::int64_t x_stride, std::int64_t n, bool alike,
    const OfExpert& of_expert, const ExpertsOut<T>& out
) {
    const auto row = [&](std::int64_t p) { return x + routed.row(p) * x_stride; };
    routed.for_each_block<kNibbleBlock<T>>(chunk, n, kNibblePanels, [&](std::int64_t expert, const Block& block) {
        NibbleWeight<T, W>{of_expert(expert), n, alike}.multiply(block, row, out.finish(expert, n));
    });
}

template <typename T, typename S>
struct ExpertsLinearInt4 {
    static constexpr char signature[] = "ppppppppiiiiiiii";
    const T* x;
    const std::uint8_t* steps;
    const S* scales;
    const std::uint8_t* zeros;
    ExpertsOut<T> out;
    Routed routed;
    std::int64_t n, k, group, x_stride, alike;

    std::int64_t chunks() const { return routed.chunks(n, kNibblePanels); }
    void run(std::int64_t chunk) const {
        using W = Nibbles<S, Int4Codes>;
        const std::int64_t size = num_panels(n) * nibble_panel_size(k), groups = num_panels(n) * (k / group) * kPanelRows;
        const auto of_expert = [&](std::int64_t e) {
            return W{steps + e * size, scales + e * groups, zeros ? zeros + e * groups : nullptr, nullptr, k, group};
        };
        multiply_nibbles<T, W>(chunk, routed, x, x_stride, n, alike != 0, of_expert, out);
    }
};

template <typename T, typename S>
struct ExpertsLinearFloat4 {
    static constexpr char signature[] = "ppppppppiiiiiiii";
    const T* x;
    const std::uint8_t* steps;
    const S* scales;
    const float* outer;
    ExpertsOut<T> out;
    Routed routed;
    std::int64_t n, k, group, x_stride, alike;

    std::int64_t chunks() const { return routed.chunks(n, kNibblePanels); }
    void run(std::int64_t chunk) const {
        using W = Nibbles<S, E2M1Codes>;
        const std::int64_t padded = num_panels(n) * kPanelRows, size = num_panels(n) * nibble_panel_size(k);
        const auto of_expert = [&](std::int64_t e) {
            const float* outers = outer ? outer + e * padded : nullptr;
            return W{steps + e * size, scales + e * padded * (k / group), nullptr, outers, k, group};
        };
        multiply_nibbles<T, W>(chunk, routed, x, x_stride, n, alike != 0, of_expert, out);
    }
};

template <typename T>
using ExpertsLinearMxfp4 = ExpertsLinearFloat4<T, e8m0>;
template <typename T>
using ExpertsLinearNvfp4 = ExpertsLinearFloat4<T, e4m3>;

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
