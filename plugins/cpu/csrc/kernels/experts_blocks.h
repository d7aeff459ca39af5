// Experts whose weights are blocks of GGUF files: the products of linear_blocks.h for rows sorted by expert. Part of the
// same family as those, so that what multiplies a part of a panel is compiled once for both.
#pragma once

#include "experts.h"
#include "linear_blocks.h"

namespace hardpoint::HARDPOINT_LEVEL {

// out [count, N]: sorted rows of x [., K] times their expert's weight, panels one expert after the other; x as
// RoundBlocks leaves it, of the same `group`.
template <typename T, int largest>
struct ExpertsLinearBlocks {
    static constexpr char signature[] = "ppppppppppppppiiiiiiiii";
    const std::int8_t* x_codes;
    const float *x_scales, *x_sums;
    const std::int32_t* x_starts;
    const T* x_numbers;
    const std::uint8_t* codes;
    const std::uint8_t* inner;
    const float16* outer;
    const std::uint8_t* inner_minima;
    const float16* outer_minima;
    ExpertsOut<T> out;
    Routed routed;
    std::int64_t n, k, group, outer_columns, zero, is_signed;

    std::int64_t chunks() const { return routed.chunks(n, kCodePanels<largest>); }
    void run(std::int64_t chunk) const {
        const BlockScales scales{inner, outer, inner_minima, outer_minima, k, group, outer_columns, zero, is_signed};
        const BlockInput<T> x{x_codes, x_scales, x_sums, x_starts, x_numbers, routed.places()};
        const std::int64_t panels = num_panels(n), size = panels * code_panel_size<largest>(k);
        routed.for_each_block<kCodeBlock<largest>>(chunk, n, kCodePanels<largest>, [&](std::int64_t expert, const Block& block) {
            const CodeWeight<largest> weight{codes + expert * size, scales.behind(expert, panels)};
            weight.multiply(block, x, out.of(expert, n));
        });
    }
};

template <typename T>
struct ExpertsLinearNibbleBlocks : ExpertsLinearBlocks<T, 15> {};
template <typename T>
struct ExpertsLinearSixBitBlocks : ExpertsLinearBlocks<T, 63> {};
template <typename T>
struct ExpertsLinearByteBlocks : ExpertsLinearBlocks<T, 255> {};

}  // namespace hardpoint::HARDPOINT_LEVEL
