// A weight [N, K] in panels of 16 rows, and what multiplying by it has in common whatever its numbers are.
//
// A panel holds 16 rows, K-major, `kGroup` neighbouring columns of a row side by side (2 of bfloat16, 4 of int8): what
// the dot-product instructions of AVX-512, AVX-VNNI and AMX take, 64 bytes for one group of columns. GEMV, GEMM and the
// look-up of single rows read this one layout. The last panel is padded with zeros.
//
// Axes: M rows of x, N rows of the weight, K columns of both.
#pragma once

#include <algorithm>
#include <utility>

#include "../constants.h"
#include "../task.h"
#include "chunking.h"
#include "tiles.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

constexpr int kVectors = kPanelRows / kLanes;  // a panel's 16 results in registers

// 16 accumulators, one for each row of a panel.
struct Sums {
    Floats v[kVectors];
};

inline std::int64_t num_panels(std::int64_t n) { return ceil_div(n, kPanelRows); }

// How large a tile of results is kept in registers: rows of x times panels, and at most so many results for all.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTilePanels = 4, kTileResults = 24;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTilePanels = 4, kTileResults = 6;
#else
constexpr int kTileRows = 2, kTilePanels = 1, kTileResults = 2;
#endif

// Rows of x that a kernel takes together where there are many.
inline std::int64_t rows_together() {
#if defined(HARDPOINT_TILES)
    if (tiles_allowed) return 2 * tiles::kRows;
#endif
    return kTileRows;
}

// Columns that are multiplied before the next rows of x are taken: a block of panels then stays in the second-level
// cache. Half as many, with their results carried in between, was 5 % slower on a Zen 5. Where registers are half as
// long, so that a tile has one panel of floats, that panel stays in the first-level cache.
template <typename T>
constexpr std::int64_t kBlockColumns = kLanes < 16 && std::is_same_v<T, float> ? 256 : 1024;

// How far ahead panels are fetched, in bytes. The processor's own prefetching stops at each page, and with a few rows
// of x there is too little else to do: without this, 8 rows were 10 % slower on a Zen 5. Where one panel is read after
// the other, and not several side by side, what lies far ahead is still what comes next: there 8 KiB were a third
// faster than 2 KiB (int4, one row, one thread), as fast as a plain read; 16 KiB were slower.
constexpr std::int64_t kFetchAhead = 2048, kFetchAheadInOrder = 8192;

// Inlined early, since GCC takes a function that does nothing but this for one without effect.
template <std::int64_t ahead = kFetchAhead>
[[gnu::always_inline]] inline void fetch(const void* address) {
    __builtin_prefetch(static_cast<const char*>(address) + ahead);
}

// How x [M, K] times a weight of N rows is cut: blocks of rows of x times blocks of panels.
struct Cut {
    std::int64_t m, n, rows_per_block, panels_per_block, row_blocks, panel_blocks;

    Cut(std::int64_t m, std::int64_t n, std::int64_t panels_per_block = kTilePanels)
        : m(m),
          n(n),
          rows_per_block(even_share(m)),
          panels_per_block(panels_per_block),
          row_blocks(ceil_div(m, rows_per_block)),
          panel_blocks(ceil_div(num_panels(n), panels_per_block)) {}
    std::int64_t chunks() const { return row_blocks * panel_blocks; }

  private:
    // At most kBlockRows, the same for all blocks, as kernels take them together.
    static std::int64_t even_share(std::int64_t m) {
        const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(m, kBlockRows)), together = rows_together();
        return std::max<std::int64_t>(1, ceil_div(ceil_div(m, blocks), together)) * together;
    }
};

// Some rows of x and some panels: a chunk's part of the work, or what of it fits a tile's width.
struct Block {
    std::int64_t first_row, rows, first_panel, panels;
};

// Call f(block) for all blocks of one chunk, each at most `most` panels wide.
template <std::int64_t most = kTilePanels, typename F>
inline void for_each_block(const Cut& cut, std::int64_t chunk, F&& f) {
    const std::int64_t row = chunk / cut.panel_blocks * cut.rows_per_block;
    const std::int64_t rows = std::min(cut.rows_per_block, cut.m - row);
    const std::int64_t first = chunk % cut.panel_blocks * cut.panels_per_block;
    const std::int64_t end = std::min(first + cut.panels_per_block, num_panels(cut.n));
    for (std::int64_t panel = first; panel < end; panel += most) {
        f(Block{row, rows, panel, std::min(most, end - panel)});
    }
}

// Call f(std::integral_constant<int, i>) for 0 <= i < count. Where an array is indexed by nothing but such constants,
// GCC keeps its elements in registers; of one that loops index, it copies them to the stack and back around the loops.
template <int count, typename F>
[[gnu::always_inline]] inline void unrolled(F&& f) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, i>{}), ...);
    }(std::make_integer_sequence<int, count>{});
}

// Call f(std::integral_constant<int, n>) for a number 1 <= n <= most that is known when it runs.
template <int most, typename F>
inline void with_constant(std::int64_t n, F&& f) {
    if constexpr (most > 1) {
        if (n < most) return with_constant<most - 1>(n, std::forward<F>(f));
    }
    f(std::integral_constant<int, most>{});
}

// Call tile(rows, panels, first row, first panel) for all of a block, rows as evenly as can be. The next panels are taken
// when all rows have met the last ones, which stay in the nearest cache.
template <int most_rows = kTileRows, typename Tile>
inline void for_each_tile(std::int64_t rows, std::int64_t panels, Tile&& tile) {
    const std::int64_t tiles = ceil_div(rows, most_rows);
    // The widest tile, of the fewest rows, says how many panels are taken at a time.
    const std::int64_t wide = std::max<std::int64_t>(1, kTileResults / std::max<std::int64_t>(1, ceil_div(rows, tiles)));
    const std::int64_t together = std::min<std::int64_t>(kTilePanels, wide);
    for (std::int64_t panel = 0; panel < panels; panel += together) {
        for (std::int64_t i = 0; i < tiles; ++i) {
            const std::int64_t first = rows * i / tiles, count = rows * (i + 1) / tiles - first;
            tile(count, std::min(together, panels - panel), first, panel);
        }
    }
}

// Call f(rows, panels) with the numbers of a tile of for_each_tile as constants.
template <int most_rows = kTileRows, typename F>
inline void with_tile(std::int64_t rows, std::int64_t panels, F&& f) {
    with_constant<most_rows>(rows, [&](auto r) {
        constexpr int most = std::clamp(kTileResults / r, 1, kTilePanels);
        with_constant<most>(panels, [&](auto p) { f(r, p); });
    });
}

// Which row of x a block's row i is: itself, or with `top_k` that of the token at place i of an order (see experts.h).
struct Places {
    const std::int32_t* order = nullptr;
    std::int64_t top_k = 0;

    std::int64_t operator()(std::int64_t i) const { return top_k ? order[i] / top_k : i; }
};

// Rows of x for a block, `stride` elements from one to the next.
template <typename T>
struct InputRows {
    const T* x;
    std::int64_t stride;
    Places places;

    const T* operator()(std::int64_t i) const { return x + places(i) * stride; }
};

// out [M, N], to which a kernel's results go, times `scales` [panels, 16] or null, plus the bias [N] or null. The elements
// of out and bias are known to `write_tile` alone, so that products are compiled once for all of them.
struct Output {
    void (*write_tile)(
        const Output& to, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t panels,
        const Sums* sums, std::int64_t stride
    );
    void* out;
    const void* bias;
    std::int64_t n;
    const float* scales = nullptr;

    template <typename T>
    static Output of(T* out, const T* bias, std::int64_t n, const float* scales = nullptr) {
        return {&write_elements<T>, out, bias, n, scales};
    }

    // Results of `rows` rows from `row` on by `panels` panels from `column` on; sums lie `stride` apart from row to row.
    void write(
        std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t panels, const Sums* sums,
        std::int64_t stride
    ) const {
        write_tile(*this, row, rows, column, panels, sums, stride);
    }

  private:
    template <typename T>
    static void write_elements(
        const Output& to, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t panels,
        const Sums* sums, std::int64_t stride
    ) {
        T* out = static_cast<T*>(to.out) + row * to.n + column;
        const T* bias = to.bias ? static_cast<const T*>(to.bias) + column : nullptr;
        const float* scales = to.scales ? to.scales + column : nullptr;
        for (std::int64_t r = 0; r < rows; ++r, out += to.n, sums += stride) {
            for (std::int64_t p = 0; p < panels; ++p) {
                const std::int64_t first = p * kPanelRows, columns = to.n - column - first;
                // Vector by vector: GCC copies a whole Sums by parts, which are slow to read as vectors again.
                const auto results = [&](int j) __attribute__((always_inline)) {
                    const Floats v = sums[p].v[j];
                    return scales ? v * load(scales + first + j * kLanes) : v;
                };
                if (columns >= kPanelRows) {
                    for (int j = 0; j < kVectors; ++j) {
                        const Floats v = results(j);
                        store(out + first + j * kLanes, bias ? v + load(bias + first + j * kLanes) : v);
                    }
                    continue;
                }
                float all[kPanelRows];  // those of padding included
                for (int j = 0; j < kVectors; ++j) store(all + j * kLanes, results(j));
                for (int i = 0; i < columns; ++i) {
                    out[first + i] = round_to<T>(all[i] + (bias ? to_float(bias[first + i]) : 0.0f));
                }
            }
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
