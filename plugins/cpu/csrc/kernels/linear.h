// Products with a weight of plain numbers: float32, float16, bfloat16.
#pragma once

#include "../task.h"
#include "experts.h"
#include "linear_tiles.h"

namespace hardpoint::HARDPOINT_LEVEL {

// How many columns of a row stand side by side in a panel.
template <typename T>
constexpr int kGroup = std::is_same_v<T, bfloat16> ? 2 : 1;

// Elements of one panel of K columns.
template <typename T>
inline std::int64_t panel_size(std::int64_t k) {
    return ceil_div(k, kGroup<T>) * kGroup<T> * kPanelRows;
}

// The elements of x as vector registers multiply them: bfloat16 where there is an instruction for its products.
#if defined(__AVX512BF16__)
template <typename T>
using Factor = std::conditional_t<std::is_same_v<T, bfloat16>, bfloat16, float>;
#else
template <typename T>
using Factor = float;
#endif

// The elements of panels that are made of others, for x of T.
template <typename T>
using Made = std::conditional_t<kTiled<T>, T, Factor<T>>;

#if defined(__AVX512BF16__)
// sums [rows, panels] = x[r] times panel p, over `columns` columns; with `add` that is added to them. `stride` is from a
// row of sums to the next, `panel_stride` counts elements.
template <int rows, int panels>
[[gnu::noinline]] void multiply(
    Sums* sums, std::int64_t stride, bool add, const bfloat16* const* x, const bfloat16* w, std::int64_t panel_stride,
    std::int64_t columns
) {
    __m512 acc[rows][panels];
    for (int r = 0; r < rows; ++r) {
        for (int p = 0; p < panels; ++p) acc[r][p] = add ? bits_as<__m512>(sums[r * stride + p]) : _mm512_setzero_ps();
    }
    for (std::int64_t g = 0; g < ceil_div(columns, 2); ++g) {
        __m512bh column[panels];
        for (int p = 0; p < panels; ++p) {
            const bfloat16* from = w + p * panel_stride + g * 2 * kPanelRows;
            fetch(from);
            column[p] = load_raw<__m512bh>(from);
        }
        for (int r = 0; r < rows; ++r) {
            const auto pair = bits_as<__m512bh>(_mm512_set1_epi32(load_raw<int>(x[r] + 2 * g)));
            for (int p = 0; p < panels; ++p) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], pair, column[p]);
        }
    }
    for (int r = 0; r < rows; ++r) {
        for (int p = 0; p < panels; ++p) sums[r * stride + p] = bits_as<Sums>(acc[r][p]);
    }
}
#endif

// The numbers of one column of a group, of a panel's part.
template <int column>
[[gnu::always_inline]] inline Floats numbers_of(const bfloat16* pairs) {
    const auto both = load_raw<Words>(pairs);
    return bits_as<Floats>(column == 0 ? both << 16 : both & 0xffff0000u);
}
template <int column, typename T>
[[gnu::always_inline]] inline Floats numbers_of(const T* numbers) {
    return load(numbers);
}

// Rows of x for which elements of panels become floats in registers; for more, in memory first.
constexpr int kNarrowRows = kLanes == 8 ? 8 : kTileRows;

// The same of floats. Elements of panels become floats in registers.
template <int rows, int panels, typename T>
[[gnu::noinline]] void multiply(
    Sums* sums, std::int64_t stride, bool add, const float* const* x, const T* w, std::int64_t panel_stride,
    std::int64_t columns
) {
    Floats acc[rows][panels][kVectors];
    unrolled<rows * panels * kVectors>([&](auto i) __attribute__((always_inline)) {
        constexpr int r = i / (panels * kVectors), p = i / kVectors % panels, j = i % kVectors;
        acc[r][p][j] = add ? sums[r * stride + p].v[j] : Floats{};
    });
    // Each number of x is spread just before its products: all at once, they would push sums out of registers.
    for (std::int64_t c = 0; c < columns; c += kGroup<T>) {
        const T* from = w + c * kPanelRows;
        if constexpr (rows <= kNarrowRows) unrolled<panels>([&](auto p) { fetch(from + p * panel_stride); });
        unrolled<kGroup<T>>([&](auto column) __attribute__((always_inline)) {
            Floats numbers[panels * kVectors];
            unrolled<panels * kVectors>([&](auto i) __attribute__((always_inline)) {
                const T* part = from + i / kVectors * panel_stride + i % kVectors * kLanes * kGroup<T>;
                numbers[i] = numbers_of<column>(part);
            });
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                const float factor = x[r][c + column];
                unrolled<panels * kVectors>([&](auto i) __attribute__((always_inline)) {
                    acc[r][i / kVectors][i % kVectors] += numbers[i] * factor;
                });
            });
        });
    }
    unrolled<rows * panels * kVectors>([&](auto i) __attribute__((always_inline)) {
        constexpr int r = i / (panels * kVectors), p = i / kVectors % panels, j = i % kVectors;
        sums[r * stride + p].v[j] = acc[r][p][j];
    });
}

// Panels in the cache or in memory: where the first of a block stands, and how far apart they are.
template <typename T>
struct Panels {
    const T* first;
    std::int64_t stride;
};

// What gives a block's panels from a column on: they lie in memory or are made. Called through a pointer, so that products
// are compiled once for all that make panels of the same elements.
template <typename T>
struct PanelSource {
    const void* of;
    Panels<T> (*give)(const void* of, std::int64_t first, std::int64_t columns);

    // From a function of (first column, columns), which must outlive this.
    template <typename F>
    explicit PanelSource(const F& f)
        : of(&f), give([](const void* of, std::int64_t first, std::int64_t columns) {
              return (*static_cast<const F*>(of))(first, columns);
          }) {}
    Panels<T> operator()(std::int64_t first, std::int64_t columns) const { return give(of, first, columns); }
};

// multiply_block by tiles.
template <typename T>
void multiply_block_by_tiles(
    const Block& block, std::int64_t k, std::int64_t step, const PanelSource<T>& panels, const InputRows<T>& row,
    const Output& out
) {
    alignas(64) Sums results[kBlockRows][kTilePanels];
    std::int64_t first = 0;
    do {
        const std::int64_t columns = std::min(step, k - first);
        const Panels<T> w = panels(first, columns);
        multiply_by_tiles(block, row, first, columns, w.first, w.stride, first > 0, results);
        first += step;
    } while (first < k);
    out.write(block.first_row, block.rows, block.first_panel * kPanelRows, block.panels, results[0], kTilePanels);
}

// Memory of copies: apart from that of panels that were made, and that of rows from that of panels.
struct FloatRow {
    float element;
};
struct FloatPanel {
    float element;
};

// Columns of a block's rows as they are multiplied: where they lie, or as floats in memory of this thread.
template <typename T>
struct FactorRows {
    const Block& block;
    const InputRows<T>& row;
    std::int64_t first;
    FloatRow* copy = nullptr;
    std::int64_t stride = 0;

    FactorRows(const Block& block, const InputRows<T>& row, std::int64_t first, std::int64_t columns)
        : block(block), row(row), first(first), stride(ceil_div(columns, kLanes) * kLanes) {
        if constexpr (!kAsTheyLie) {
            copy = scratch<FloatRow>(block.rows * stride);
            for (std::int64_t i = 0; i < block.rows; ++i) {
                const T* from = row(block.first_row + i) + first;
                float* to = &copy[i * stride].element;
                std::int64_t c = 0;
                for (; c + kLanes <= columns; c += kLanes) store(to + c, load(from + c));
                for (; c < columns; ++c) to[c] = to_float(from[c]);
            }
        }
    }
    const Factor<T>* at(std::int64_t i) const {
        if constexpr (kAsTheyLie) {
            return row(block.first_row + i) + first;
        } else {
            return &copy[i * stride].element;
        }
    }

  private:
    static constexpr bool kAsTheyLie = std::is_same_v<T, Factor<T>>;
};

// Columns of a block's panels as floats in memory of this thread.
template <typename T>
inline Panels<float> float_panels(Panels<T> w, std::int64_t panels, std::int64_t columns) {
    const std::int64_t stride = ceil_div(columns, kGroup<T>) * kGroup<T> * kPanelRows;
    float* made = &scratch<FloatPanel>(panels * stride)->element;
    for (std::int64_t p = 0; p < panels; ++p) {
        const T* from = w.first + p * w.stride;
        float* to = made + p * stride;
        for (std::int64_t c = 0; c < columns; c += kGroup<T>) {
            fetch(from + c * kPanelRows);
            unrolled<kVectors * kGroup<T>>([&](auto i) __attribute__((always_inline)) {
                constexpr int column = i / kVectors, j = i % kVectors;
                const T* part = from + c * kPanelRows + j * kLanes * kGroup<T>;
                store(to + (c + column) * kPanelRows + j * kLanes, numbers_of<column>(part));
            });
        }
    }
    return {made, stride};
}

// One block of x [M, K] @ w.T, x of T. `panels(first column, columns)` gives the block's panels from that column on, of W.
// Columns come outermost, so that a block of panels is read from memory (or made) once, and then from the cache for every
// tile of rows. With `alike` a row's bits do not depend on how many rows there are.
template <typename W, typename T>
void multiply_block(
    const Block& block, std::int64_t k, std::int64_t step, bool alike, const PanelSource<W>& panels,
    const InputRows<T>& row, const Output& out
) {
    if constexpr (kTiled<W>) {
        if (by_tiles(block, alike)) return multiply_block_by_tiles<W>(block, k, step, panels, row, out);
    }
    alignas(64) Sums results[kBlockRows][kTilePanels];
    const auto multiply_columns = [&](std::int64_t first, std::int64_t columns, const auto& x, const auto& w) {
        const bool last = first + step >= k, alone = first == 0 && last;
        for_each_tile(block.rows, block.panels, [&](int rows, int count, std::int64_t tile, std::int64_t panel) {
            alignas(64) Sums of_tile[kTileRows][kTilePanels];  // in the nearest cache, where nothing is carried on
            Sums* sums = alone ? of_tile[0] : &results[tile][panel];
            const Factor<T>* from[kTileRows];
            for (int r = 0; r < rows; ++r) from[r] = x.at(tile + r);
            with_tile(rows, count, [&](auto r, auto p) {
                multiply<r, p>(sums, kTilePanels, first > 0, from, w.first + panel * w.stride, w.stride, columns);
            });
            if (!last) return;
            const std::int64_t column = (block.first_panel + panel) * kPanelRows;
            out.write(block.first_row + tile, rows, column, count, sums, kTilePanels);
        });
    };
    std::int64_t first = 0;
    do {
        const std::int64_t columns = std::min(step, k - first);
        const FactorRows<T> x(block, row, first, columns);
        const Panels<W> w = panels(first, columns);
        if constexpr (std::is_same_v<W, Factor<W>>) {
            multiply_columns(first, columns, x, w);
        } else if (block.rows > kNarrowRows) {
            multiply_columns(first, columns, x, float_panels(w, block.panels, columns));
        } else {
            multiply_columns(first, columns, x, w);
        }
        first += step;
    } while (first < k);
}

// Compiled in linear.cpp, for all kernels that use it.
#define HARDPOINT_MULTIPLY_BLOCK(W, T)                                                                    \
    template void multiply_block<W, T>(                                                                   \
        const Block&, std::int64_t, std::int64_t, bool, const PanelSource<W>&, const InputRows<T>&, const Output& \
    )
extern HARDPOINT_MULTIPLY_BLOCK(float, float);
extern HARDPOINT_MULTIPLY_BLOCK(float, float16);
extern HARDPOINT_MULTIPLY_BLOCK(float16, float16);
extern HARDPOINT_MULTIPLY_BLOCK(bfloat16, bfloat16);
#if !defined(__AVX512BF16__)
extern HARDPOINT_MULTIPLY_BLOCK(float, bfloat16);
#endif

// A weight [N, K] in panels.
template <typename T>
struct PlainWeight {
    const T* panels;
    std::int64_t k;
    bool alike;  // see multiply_block

    void multiply(const Block& block, const InputRows<T>& row, const Output& out) const {
        const std::int64_t stride = panel_size<T>(k), step = block.rows > kNarrowRows ? kBlockColumns<Factor<T>> : k;
        const auto give = [&](std::int64_t first, std::int64_t) {
            return Panels<T>{panels + block.first_panel * stride + first * kPanelRows, stride};
        };
        multiply_block<T>(block, k, step, alike, PanelSource<T>(give), row, out);
    }
};

// out [M, N] = x [M, K] @ w.T + bias [N] or null. K is a multiple of kGroup. See multiply_block for `alike`.
template <typename T>
struct Linear {
    static constexpr char signature[] = "ppppiiiii";
    const T* x;
    const T* w;
    const T* bias;
    T* out;
    std::int64_t m, n, k, x_stride, alike;

    std::int64_t chunks() const { return Cut(m, n).chunks(); }
    void run(std::int64_t chunk) const {
        for_each_block(Cut(m, n), chunk, [&](const Block& block) {
            PlainWeight<T>{w, k, alike != 0}.multiply(block, {x, x_stride, {}}, Output::of(out, bias, n));
        });
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
        const std::int64_t size = num_panels(n) * panel_size<T>(k);
        routed.for_each_block(chunk, n, kTilePanels, [&](std::int64_t expert, const Block& block) {
            const PlainWeight<T> weight{w + expert * size, k, alike != 0};
            weight.multiply(block, {x, x_stride, routed.places()}, out.of(expert, n));
        });
    }
};

// Rows [first, first + 16) of a weight [N, K] -> one panel, `group` columns side by side. Padding becomes zeros.
template <int group, typename T>
inline void scatter_rows(
    const T* weight, std::int64_t stride, T* panel, std::int64_t first, std::int64_t n, std::int64_t k
) {
    struct Group {
        T columns[group];
    };
    for (int row = 0; row < kPanelRows; ++row) {
        auto* to = reinterpret_cast<Group*>(panel) + row;
        const T* from = weight + (first + row) * stride;
        const std::int64_t whole = first + row < n ? k / group : 0, groups = ceil_div(k, group);
        for (std::int64_t g = 0; g < whole; ++g) std::memcpy(to + g * kPanelRows, from + g * group, sizeof(Group));
        for (std::int64_t g = whole; g < groups; ++g) {
            Group rest = {};
            for (int i = 0; first + row < n && g * group + i < k; ++i) rest.columns[i] = from[g * group + i];
            to[g * kPanelRows] = rest;
        }
    }
}

// Weight [N, K] as it is stored -> panels.
template <typename T>
struct PackLinear {
    static constexpr char signature[] = "ppiii";
    const T* weight;
    T* packed;
    std::int64_t n, k, stride;

    std::int64_t chunks() const { return num_panels(n); }
    void run(std::int64_t panel) const {
        scatter_rows<kGroup<T>>(weight, stride, packed + panel * panel_size<T>(k), panel * kPanelRows, n, k);
    }
};

// out [count, K]: rows `ids` (int64; all N in order where it is null) of a packed weight.
template <typename T>
struct UnpackRows {
    static constexpr char signature[] = "pppiii";
    const T* packed;
    const std::int64_t* ids;
    T* out;
    std::int64_t count, n, k;

    std::int64_t chunks() const { return ceil_div(count, rows_per_chunk(k)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(k), count);
        for (auto i = mine.first; i < mine.last; ++i) {
            const std::int64_t row = ids ? ids[i] : i;
            const T* from = packed + row / kPanelRows * panel_size<T>(k) + row % kPanelRows * kGroup<T>;
            for (std::int64_t c = 0; c < k; ++c) {
                out[i * k + c] = from[c / kGroup<T> * kGroup<T> * kPanelRows + c % kGroup<T>];
            }
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
