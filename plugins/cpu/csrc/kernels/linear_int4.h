// Products with a weight of 4-bit integers in groups of columns, each with a scale and, where it has them, zero points:
// w = (code - zero) * scale. Activations stay as they are. Signed elements are stored with 8 added; without zero points,
// 8 is the zero.
#pragma once

#include "../task.h"
#include "nibbles.h"

namespace hardpoint::HARDPOINT_LEVEL {

// out [M, N] = x [M, K] @ w.T + bias. K is a multiple of `group`, and `group` of 8. With `alike` the elements always
// become numbers first: then a row's bits do not depend on how many rows there are.
template <typename T, typename S>
struct LinearInt4 {
    static constexpr char signature[] = "ppppppiiiiii";
    const T* x;
    const std::uint8_t* steps;
    const S* scales;
    const std::uint8_t* zeros;
    const T* bias;
    T* out;
    std::int64_t m, n, k, group, x_stride, alike;

    std::int64_t chunks() const { return Cut(m, n, kNibblePanels).chunks(); }
    void run(std::int64_t chunk) const {
        const NibbleWeight<Nibbles<S, Int4Codes>> weight{{steps, scales, zeros, nullptr, k, group}, alike != 0};
        for_each_block<kNibbleBlock<T>>(Cut(m, n, kNibblePanels), chunk, [&](const Block& block) {
            weight.template multiply<T>(block, {x, x_stride, {}}, Output::of(out, bias, n));
        });
    }
};

// The same for experts: see ExpertsLinear.
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
        multiply_experts(chunk, routed, x, x_stride, n, alike != 0, of_expert, out);
    }
};

// Weight [N, K / 2], two nibbles a byte, low first -> steps; `flip` is 8 for signed elements, else 0.
struct PackInt4 {
    static constexpr char signature[] = "ppiiii";
    const std::uint8_t* weight;
    std::uint8_t* packed;
    std::int64_t n, k, stride, flip;

    std::int64_t chunks() const { return num_panels(n); }
    void run(std::int64_t panel) const {
        for (int row = 0; row < kPanelRows; ++row) {
            const std::int64_t r = panel * kPanelRows + row;
            std::uint8_t* to = packed + panel * nibble_panel_size(k) + 4 * row;
            for (std::int64_t c = 0; c < k; c += kNibbleColumns, to += 4 * kPanelRows) {
                // Byte i holds the columns c + 2 * i and the next: the low nibbles make one word, the high ones the
                // other.
                std::uint32_t bytes = 0x11111111u * kNibbleZero;
                if (r < n) bytes = load_raw<std::uint32_t>(weight + r * stride + c / 2) ^ 0x11111111u * flip;
                std::uint32_t words = 0;
                for (int i = 0; i < kNibbleColumns / 2; ++i) {
                    words |= (bytes >> (8 * i) & 0xf) << (4 * i);
                    words |= (bytes >> (8 * i + 4) & 0xf) << (16 + 4 * i);
                }
                std::memcpy(to, &words, sizeof(words));
            }
        }
    }
};

// out [count, K]: rows `ids` (int64; all in order where it is null) as numbers.
template <typename T, typename S>
struct UnpackInt4 {
    static constexpr char signature[] = "pppppiii";
    const std::uint8_t* steps;
    const S* scales;
    const std::uint8_t* zeros;
    const std::int64_t* ids;
    T* out;
    std::int64_t count, k, group;

    std::int64_t chunks() const { return ceil_div(count, rows_per_chunk(k)); }
    void run(std::int64_t chunk) const {
        unpack_rows(Nibbles<S, Int4Codes>{steps, scales, zeros, nullptr, k, group}, ids, out, count, chunk);
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
