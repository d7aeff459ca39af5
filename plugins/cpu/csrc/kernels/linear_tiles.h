// Products of many rows of x with panels (see panels.h) by tiles (see tiles.h): 16 groups of a panel's columns are a
// tile as they lie. Two tiles of rows of x times two panels are summed up at a time, in four tiles.
#pragma once

#include <algorithm>

#include "panels.h"
#include "scratch.h"
#include "tiles.h"

namespace hardpoint::HARDPOINT_LEVEL {

// Whether tiles can multiply elements of this type.
#if defined(HARDPOINT_TILES)
template <typename T>
constexpr bool kTiled = std::is_same_v<T, bfloat16> || std::is_same_v<T, std::int8_t>;
#else
template <typename T>
constexpr bool kTiled = false;
#endif

// Whether tiles multiply a block, where they can: rows that one tile of vector registers holds are bound by memory either
// way. Rounding differs between the two, so that with `alike` they multiply all blocks.
inline bool by_tiles(const Block& block, bool alike = false) {
    return tiles_allowed && (alike || block.rows > kTileRows);
}

// results[i][p] = row i of the block times its panel p, or with `add` that is added, over some columns. `row(i)` is
// where row i of x starts; `w` is the first panel, others follow `panel_stride` elements apart. Results have 64 bytes.
template <typename T, typename Row, typename Results>
void multiply_by_tiles(
    const Block& block, const Row& row, std::int64_t first_column, std::int64_t columns, const T* w,
    std::int64_t panel_stride, bool add, Results (*results)[kTilePanels]
);

#if defined(HARDPOINT_TILES)

// Tiles 0 to 3 hold sums, of row tile r and panel p in 2 * r + p; 4 and 5 hold rows of x, 6 and 7 panels.
constexpr int kRowsByTiles = 2 * tiles::kRows, kPanelsByTiles = 2;
static_assert(kPanelRows * 4 == tiles::kRowBytes);

// Rows of x that lie `stride` bytes apart.
struct EvenRows {
    const std::uint8_t* first;
    std::int64_t stride;
};

// The tiles' shapes on this thread, for as long as this lives. Then they are given up: the thread is torch's, whose own
// kernels bring their shapes, and a thread with tiles in use costs the system more to switch.
class TileShapes {
  public:
    TileShapes() = default;
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;
    ~TileShapes() {
        if (rows_) tiles::release();
    }

    // For so many rows of x, at most kRowsByTiles. What is in the tiles may be lost.
    void set(std::int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        tiles::Shapes shapes;
        const auto shape = [&](int tile, std::int64_t count) {
            shapes.rows[tile] = static_cast<std::uint8_t>(count);
            shapes.row_bytes[tile] = tiles::kRowBytes;
        };
        for (int r = 0; r * tiles::kRows < rows; ++r) {
            const std::int64_t some = std::min<std::int64_t>(tiles::kRows, rows - r * tiles::kRows);
            for (int tile : {2 * r, 2 * r + 1, 4 + r}) shape(tile, some);
        }
        for (int tile : {6, 7}) shape(tile, tiles::kRows);
        tiles::configure(shapes);
    }

  private:
    std::int64_t rows_ = 0;
};

template <typename T, int sums, int x, int w>
inline void multiply_tile() {
    if constexpr (std::is_same_v<T, bfloat16>) tiles::multiply_bfloat16<sums, x, w>();
    if constexpr (std::is_same_v<T, std::int8_t>) tiles::multiply_int8<sums, x, w>();
}

// Add the products of one tile of each: 64 bytes of each row of x.
template <typename T, int row_tiles, int panels>
inline void add_products(EvenRows x, const std::uint8_t* w, std::int64_t panel_stride) {
    tiles::load<4>(x.first, x.stride);
    tiles::load<6>(w, tiles::kRowBytes);
    multiply_tile<T, 0, 4, 6>();
    if constexpr (row_tiles == 2) {
        tiles::load<5>(x.first + tiles::kRows * x.stride, x.stride);
        multiply_tile<T, 2, 5, 6>();
    }
    if constexpr (panels == 2) {
        tiles::load<7>(w + panel_stride, tiles::kRowBytes);
        multiply_tile<T, 1, 4, 7>();
        if constexpr (row_tiles == 2) multiply_tile<T, 3, 5, 7>();
    }
}

// Call f(row tile, panel) with constants for each tile of sums.
template <int row_tiles, int panels, typename F>
inline void for_each_sum(F&& f) {
    f(std::integral_constant<int, 0>{}, std::integral_constant<int, 0>{});
    if constexpr (panels == 2) f(std::integral_constant<int, 0>{}, std::integral_constant<int, 1>{});
    if constexpr (row_tiles == 2) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 0>{});
    if constexpr (row_tiles == 2 && panels == 2) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{});
}

// `rows` rows of x, of which `bytes` bytes are multiplied, and one or two panels. Results of a row lie side by side.
template <typename T, int row_tiles, int panels, typename Results>
void multiply_tiles(
    EvenRows x, std::int64_t rows, std::int64_t bytes, const std::uint8_t* w, std::int64_t panel_stride, bool add,
    Results* results
) {
    constexpr std::int64_t result_stride = kTilePanels * sizeof(Results);
    const auto of_tile = [&](int r, int p) { return results + r * tiles::kRows * kTilePanels + p; };
    for_each_sum<row_tiles, panels>([&](auto r, auto p) {
        if (add) {
            tiles::load<2 * r + p>(of_tile(r, p), result_stride);
        } else {
            tiles::zero<2 * r + p>();
        }
    });
    std::int64_t at = 0;
    for (; at + tiles::kRowBytes <= bytes; at += tiles::kRowBytes) {
        add_products<T, row_tiles, panels>({x.first + at, x.stride}, w + at * kPanelRows, panel_stride);
    }
    if (at < bytes) {  // with zeros behind, as neither x nor the last panel goes on
        alignas(64) std::uint8_t last_x[kRowsByTiles][tiles::kRowBytes] = {};
        alignas(64) std::uint8_t last_w[kPanelsByTiles][tiles::kRows][tiles::kRowBytes] = {};
        for (std::int64_t i = 0; i < rows; ++i) std::memcpy(last_x[i], x.first + i * x.stride + at, bytes - at);
        for (int p = 0; p < panels; ++p) {
            const std::int64_t groups = ceil_div(bytes - at, 4);
            std::memcpy(last_w[p], w + p * panel_stride + at * kPanelRows, groups * tiles::kRowBytes);
        }
        add_products<T, row_tiles, panels>({last_x[0], tiles::kRowBytes}, last_w[0][0], sizeof(last_w[0]));
    }
    for_each_sum<row_tiles, panels>([&](auto r, auto p) { tiles::store<2 * r + p>(of_tile(r, p), result_stride); });
}

// Memory apart from that of panels that were made.
template <typename T>
struct RowCopy {
    T element;
};

// Columns of a block's rows. Where these are not evenly apart, as some of an expert's are not, they are copied.
template <typename T, typename Row>
inline EvenRows even_rows(const Block& block, const Row& row, std::int64_t first_column, std::int64_t columns) {
    const auto at = [&](std::int64_t i) {
        return reinterpret_cast<const std::uint8_t*>(row(block.first_row + i) + first_column);
    };
    EvenRows rows{at(0), block.rows > 1 ? at(1) - at(0) : 0};
    std::int64_t even = 1;
    while (even < block.rows && at(even) == rows.first + even * rows.stride) ++even;
    if (even == block.rows) return rows;
    RowCopy<T>* copy = scratch<RowCopy<T>>(block.rows * columns);
    for (std::int64_t i = 0; i < block.rows; ++i) std::memcpy(copy + i * columns, at(i), columns * sizeof(T));
    return {reinterpret_cast<const std::uint8_t*>(copy), columns * static_cast<std::int64_t>(sizeof(T))};
}

template <typename T, typename Row, typename Results>
void multiply_by_tiles(
    const Block& block, const Row& row, std::int64_t first_column, std::int64_t columns, const T* w,
    std::int64_t panel_stride, bool add, Results (*results)[kTilePanels]
) {
    static_assert(sizeof(Results) == tiles::kRowBytes);
    constexpr std::int64_t size = sizeof(T);
    const EvenRows x = even_rows<T>(block, row, first_column, columns);
    const auto* panel = reinterpret_cast<const std::uint8_t*>(w);
    TileShapes shapes;
    for (std::int64_t first = 0; first < block.rows; first += kRowsByTiles) {
        const std::int64_t rows = std::min<std::int64_t>(kRowsByTiles, block.rows - first);
        shapes.set(rows);
        for (std::int64_t p = 0; p < block.panels; p += kPanelsByTiles) {
            with_constant<2>(ceil_div(rows, tiles::kRows), [&](auto row_tiles) {
                with_constant<kPanelsByTiles>(block.panels - p, [&](auto panels) {
                    multiply_tiles<T, row_tiles, panels>(
                        {x.first + first * x.stride, x.stride}, rows, columns * size, panel + p * panel_stride * size,
                        panel_stride * size, add, &results[first][p]
                    );
                });
            });
        }
    }
}

#endif

}  // namespace hardpoint::HARDPOINT_LEVEL
