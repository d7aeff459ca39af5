// Products with a weight of e2m1 in groups of columns with scales of one byte S: MXFP4 (32 columns, e8m0), and NVFP4 (16
// columns, e4m3, with a float32 for each row beside them). w = value * scale * outer. Activations stay as they are.
#pragma once

#include "../task.h"
#include "byte_scales.h"
#include "nibbles.h"

namespace hardpoint::HARDPOINT_LEVEL {

// See LinearInt4. `outer` is float32 [panels, 16], or null.
template <typename T, typename S>
struct LinearFloat4 {
    static constexpr char signature[] = "ppppppiiiiii";
    const T* x;
    const std::uint8_t* steps;
    const S* scales;
    const float* outer;
    const T* bias;
    T* out;
    std::int64_t m, n, k, group, x_stride, alike;

    std::int64_t chunks() const { return Cut(m, n, kNibblePanels).chunks(); }
    void run(std::int64_t chunk) const {
        const NibbleWeight<Nibbles<S, E2M1Codes>> weight{{steps, scales, nullptr, outer, k, group}, alike != 0};
        for_each_block<kNibbleBlock<T>>(Cut(m, n, kNibblePanels), chunk, [&](const Block& block) {
            weight.template multiply<T>(block, {x, x_stride, {}}, Output::of(out, bias, n));
        });
    }
};

// The same for experts: see ExpertsLinear.
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
        multiply_experts(chunk, routed, x, x_stride, n, alike != 0, of_expert, out);
    }
};

// See UnpackInt4.
template <typename T, typename S>
struct UnpackFloat4 {
    static constexpr char signature[] = "pppppiii";
    const std::uint8_t* steps;
    const S* scales;
    const float* outer;
    const std::int64_t* ids;
    T* out;
    std::int64_t count, k, group;

    std::int64_t chunks() const { return ceil_div(count, rows_per_chunk(k)); }
    void run(std::int64_t chunk) const {
        unpack_rows(Nibbles<S, E2M1Codes>{steps, scales, nullptr, outer, k, group}, ids, out, count, chunk);
    }
};

template <typename T>
using LinearMxfp4 = LinearFloat4<T, e8m0>;
template <typename T>
using LinearNvfp4 = LinearFloat4<T, e4m3>;
template <typename T>
using ExpertsLinearMxfp4 = ExpertsLinearFloat4<T, e8m0>;
template <typename T>
using ExpertsLinearNvfp4 = ExpertsLinearFloat4<T, e4m3>;
template <typename T>
using UnpackMxfp4 = UnpackFloat4<T, e8m0>;
template <typename T>
using UnpackNvfp4 = UnpackFloat4<T, e4m3>;

}  // namespace hardpoint::HARDPOINT_LEVEL
