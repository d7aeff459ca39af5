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
        const auto row = [&](std::int64_t i) { return x + i * x_stride; };
        const auto finish = [&](std::int64_t i, const Sums& sums, std::int64_t column) {
            store_results(out + i * n + column, sums, bias ? bias + column : nullptr, n - column);
        };
        const Nibbles<S, E2M1Codes> w{steps, scales, nullptr, outer, k, group};
        for_each_block<kNibbleBlock<T>>(Cut(m, n, kNibblePanels), chunk, [&](const Block& block) {
            NibbleWeight<T, Nibbles<S, E2M1Codes>>{w, n, alike != 0}.multiply(block, row, finish);
        });
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
using UnpackMxfp4 = UnpackFloat4<T, e8m0>;
template <typename T>
using UnpackNvfp4 = UnpackFloat4<T, e4m3>;

}  // namespace hardpoint::HARDPOINT_LEVEL
