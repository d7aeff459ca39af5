// A weight as GGUF stores it, in panels: whole-numbered elements and the scales of their groups. See linear_blocks.h.
//
// Codes of a panel (see panels.h) come in words of four bytes for each row, 64 bytes for all 16: four columns as bytes,
// or eight as nibbles, of which byte b has column b low and column 4 + b high. Codes of six bits come 16 columns at a
// time: two words of nibbles, then one whose byte b has the upper two bits of columns b, 4 + b, 8 + b and 12 + b.
#pragma once

#include "linear_int8.h"

namespace hardpoint::HARDPOINT_LEVEL {

constexpr int kBlockGroup = 32;  // columns of activations that share a scale
constexpr int kWordBytes = 4;

// Panels in a chunk: as many bytes as of int8 where codes are nibbles.
template <int largest>
constexpr std::int64_t kCodePanels = largest == 15 ? 4 * kTilePanels : kBytePanels;

// Rows of x that are multiplied together.
#if defined(__AVX2__)
constexpr int kCodeRows = 8;
#else
constexpr int kCodeRows = 4;
#endif

// Vectors of a panel's rows that are multiplied at once: few rows of x leave registers for all of them, and then the
// panel is read once, in order, as the memory gives it.
template <int rows>
constexpr int kPartsTogether = rows * kVectors <= 8 ? kVectors : 1;

// Of x, in a block; more are multiplied by tiles, where there are any.
constexpr int kMostCodeRows = 16;

// Columns that a step of a panel has, and its words for each row. `largest` is that of the codes: 15, 63 or 255.
template <int largest>
constexpr int kStepColumns = largest == 15 ? 8 : largest == 63 ? 16 : 4;
template <int largest>
constexpr int kStepWords = largest == 63 ? 3 : 1;
constexpr int kWordStride = kWordBytes * kPanelRows;  // from a word of a step to the next, of the same row
template <int largest>
inline std::int64_t code_panel_size(std::int64_t k) {
    return k / kStepColumns<largest> * kStepWords<largest> * kWordStride;
}

// One operand of weights: see the top. Scales and minima [panels, columns / block, 16]; the inner ones are null where
// there is one level, whose block is `group` then, and minima where there are none.
struct BlockScales {
    const std::uint8_t* inner;
    const float16* outer;
    const std::uint8_t* inner_minima;
    const float16* outer_minima;
    std::int64_t k, group, outer_columns, zero, is_signed;

    // Those of one panel, whose groups are counted from 0: nothing is divided for each of them. A block is what an outer
    // scale is for, which is one group where there is one level.
    struct OfPanel {
        const std::uint8_t* inner;
        const float16* outer;
        const std::uint8_t* inner_minima;
        const float16* outer_minima;
        bool is_signed;
        float zero;

        // The scales of kLanes rows.
        struct Level {
            Floats outer, outer_minimum;
        };
        Level block(std::int64_t b, int j) const {
            const std::int64_t at = b * kPanelRows + j * kLanes;
            return {load(outer + at), outer_minima ? load(outer_minima + at) : Floats{}};
        }
        Floats scale(const Level& block, std::int64_t g, int j) const { return within(block.outer, inner, is_signed, g, j); }
        // The factor of a sum of activations, where `taken_off` is off the codes already.
        Floats offset(const Level& block, std::int64_t g, int j, Floats scale, std::int64_t taken_off = 0) const {
            const Floats of_zero = scale * (static_cast<float>(taken_off) - zero);
            return outer_minima ? of_zero + within(block.outer_minimum, inner_minima, false, g, j) : of_zero;
        }

      private:
        static Floats within(Floats outer, const std::uint8_t* in, bool with_sign, std::int64_t g, int j) {
            if (!in) return outer;
            const std::uint8_t* from = in + g * kPanelRows + j * kLanes;
            if (with_sign) return outer * load(reinterpret_cast<const std::int8_t*>(from));
            return outer * __builtin_convertvector(bits_as<Ints>(widen(load_raw<Bytes>(from))), Floats);
        }
    };
    OfPanel panel(std::int64_t p) const {
        const std::int64_t narrow = p * (k / group) * kPanelRows, wide = p * (k / outer_columns) * kPanelRows;
        return {
            inner ? inner + narrow : nullptr,
            outer + wide,
            inner_minima ? inner_minima + narrow : nullptr,
            outer_minima ? outer_minima + wide : nullptr,
            is_signed != 0,
            static_cast<float>(zero),
        };
    }
    std::int64_t groups_in_block() const { return outer_columns / group; }

    // Those of the weight `count` weights of `panels` panels behind this one.
    BlockScales behind(std::int64_t count, std::int64_t panels) const {
        const std::int64_t narrow = count * panels * (k / group) * kPanelRows;
        const std::int64_t wide = count * panels * (k / outer_columns) * kPanelRows;
        BlockScales found = *this;
        found.inner = inner ? inner + narrow : nullptr;
        found.outer = outer + wide;
        found.inner_minima = inner_minima ? inner_minima + narrow : nullptr;
        found.outer_minima = outer_minima ? outer_minima + wide : nullptr;
        return found;
    }
};

// Rounded activations: codes [M, K], scales [M, K / 32], and sums times scale over each group of the weight's columns.
// `starts`, where products are sums of 16 bits: see pair_products.h.
// For tiles there are the numbers that these mean as well, [M, K]; else null. A block's row i is theirs `places(i)`.
template <typename T>
struct BlockInput {
    const std::int8_t* codes;
    const float* scales;
    const float* sums;
    const std::int32_t* starts;
    const T* numbers;
    Places places;
};

// Some rows of activations: where each begins.
template <int rows>
struct CodeRows {
    const std::int8_t* codes[rows];
    const float* scales[rows];
    const float* sums[rows];
};

// Four columns of a step, 4 * i and on, as bytes.
template <int largest, int i>
[[gnu::always_inline]] inline Words word_of_step(const std::uint8_t* step) {
    if constexpr (largest == 255) return load_raw<Words>(step);
    const auto nibbles = load_raw<Words>(step + i / 2 * kWordStride);
    Words codes = (i % 2 == 0 ? nibbles : nibbles >> 4) & 0x0f0f0f0fu;
    if constexpr (largest == 63) {  // to bits 4 and 5
        constexpr int left = i < 2 ? 4 - 2 * i : 0, right = i < 2 ? 0 : 2 * i - 4;
        codes |= load_raw<Words>(step + 2 * kWordStride) << left >> right & 0x30303030u;
    }
    return codes;
}

// Call f(std::integral_constant<int, i>, codes) for all of a step's.
template <int largest, typename F>
[[gnu::always_inline]] inline void for_each_word(const std::uint8_t* step, F&& f) {
    unrolled<kStepColumns<largest> / kWordBytes>([&](auto i) __attribute__((always_inline)) {
        f(i, word_of_step<largest, i>(step));
    });
}

}  // namespace hardpoint::HARDPOINT_LEVEL
