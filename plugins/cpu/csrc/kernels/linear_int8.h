// Products with a weight of int8 elements, a scale for each row: with activations rounded to int8, each row by a scale
// of its own, or with activations as they are.
//
// The dot-product instructions multiply unsigned by signed bytes. So a rounded activation q is multiplied as q + 128,
// and 128 times the sum of the weight's row is taken off again; the sums are exact whole numbers.
#pragma once

#include "../task.h"
#include "linear.h"
#include "scratch.h"

namespace hardpoint::HARDPOINT_LEVEL {

constexpr int kBytesInGroup = 4;
constexpr int kOffset = 128;

// Panels in a chunk: 128 KiB where K is 1024.
constexpr std::int64_t kBytePanels = 2 * kTilePanels;

// Rows of x whose products with bytes are summed in registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kByteTileRows = 4;
#else
constexpr int kByteTileRows = kTileRows;
#endif

inline std::int64_t byte_panel_size(std::int64_t k) { return ceil_div(k, kBytesInGroup) * kBytesInGroup * kPanelRows; }

struct IntSums {
    Ints v[kVectors];
};

// sums + the products of four bytes in each lane: those of `x` unsigned, `w` signed.
inline Ints multiply_bytes(Ints sums, Words x, Ints w) {
#if defined(__AVX512VNNI__)
    return bits_as<Ints>(_mm512_dpbusd_epi32(bits_as<__m512i>(sums), bits_as<__m512i>(x), bits_as<__m512i>(w)));
#elif defined(__x86_64__)
    // Bytes 0 and 2, then 1 and 3, as 16-bit numbers, whose products are added in pairs. The instruction for bytes
    // would add in 16 bits, which overflow.
    typedef std::int16_t Shorts __attribute__((vector_size(HARDPOINT_VECTOR_BYTES)));
    const auto shorts = bits_as<Shorts>(w);
    const Shorts even = (shorts << 8) >> 8, odd = shorts >> 8;
    const auto even_x = bits_as<Shorts>(x & 0x00ff00ffu), odd_x = bits_as<Shorts>(x >> 8 & 0x00ff00ffu);
#if defined(__AVX512BW__)
    const auto a = _mm512_madd_epi16(bits_as<__m512i>(even), bits_as<__m512i>(even_x));
    const auto b = _mm512_madd_epi16(bits_as<__m512i>(odd), bits_as<__m512i>(odd_x));
#elif defined(__AVX2__)
    const auto a = _mm256_madd_epi16(bits_as<__m256i>(even), bits_as<__m256i>(even_x));
    const auto b = _mm256_madd_epi16(bits_as<__m256i>(odd), bits_as<__m256i>(odd_x));
#else
    const auto a = _mm_madd_epi16(bits_as<__m128i>(even), bits_as<__m128i>(even_x));
    const auto b = _mm_madd_epi16(bits_as<__m128i>(odd), bits_as<__m128i>(odd_x));
#endif
    return sums + bits_as<Ints>(a) + bits_as<Ints>(b);
#else
    for (int i = 0; i < kBytesInGroup; ++i) {
        sums += ((w << (24 - 8 * i)) >> 24) * bits_as<Ints>(x >> (8 * i) & 0xffu);
    }
    return sums;
#endif
}

// The next `count` bytes of a row of x, plus 128, in each lane. `offset` is 128 in each byte.
inline Words offset_bytes(const std::int8_t* x, int count, Words offset) {
    std::uint32_t four = 0;
    std::memcpy(&four, x, count);
    return (Words{} + four) ^ offset;
}

// sums [rows, panels] = x[r] times panel p, of bytes plus 128 by bytes.
template <int rows, int panels>
[[gnu::noinline]] void multiply(
    IntSums* sums, const std::int8_t* const* x, const std::int8_t* w, std::int64_t panel_stride, std::int64_t k
) {
    Ints acc[rows][panels][kVectors];
    // One by one: GCC clears an array, and fills sums from it, by instructions that take long to start.
    unrolled<rows * panels * kVectors>([&](auto i) __attribute__((always_inline)) {
        acc[i / (panels * kVectors)][i / kVectors % panels][i % kVectors] = Ints{};
    });
    Words offset = Words{} + 0x80808080u;
#if defined(__AVX512VNNI__)
    // Unknown to the compiler, which would add it to one number and then spend one port on spreading.
    asm("" : "+v"(offset));
#endif
    const auto add = [&](std::int64_t g, int count) __attribute__((always_inline)) {
        Ints column[panels][kVectors];
        for (int p = 0; p < panels; ++p) {
            const std::int8_t* from = w + p * panel_stride + g * kBytesInGroup * kPanelRows;
            fetch(from);
            for (int j = 0; j < kVectors; ++j) column[p][j] = load_raw<Ints>(from + j * HARDPOINT_VECTOR_BYTES);
        }
        for (int r = 0; r < rows; ++r) {
            const Words four = offset_bytes(x[r] + g * kBytesInGroup, count, offset);
            for (int p = 0; p < panels; ++p) {
                for (int j = 0; j < kVectors; ++j) acc[r][p][j] = multiply_bytes(acc[r][p][j], four, column[p][j]);
            }
        }
    };
    for (std::int64_t g = 0; g < k / kBytesInGroup; ++g) add(g, kBytesInGroup);
    if (k % kBytesInGroup) add(k / kBytesInGroup, k % kBytesInGroup);
    unrolled<rows * panels * kVectors>([&](auto i) __attribute__((always_inline)) {
        sums[i / kVectors].v[i % kVectors] = acc[i / (panels * kVectors)][i / kVectors % panels][i % kVectors];
    });
}

// A weight as PackInt8 leaves it, with its scales float32 [N] and the sums of its rows int32 [N], both padded to whole
// panels; for activations that were rounded by quantize_row.
struct ByteWeight {
    const std::int8_t* panels;
    const float* scales;
    const std::int32_t* row_sums;
    std::int64_t k;

    // `x_scales` are those of the rows of x.
    [[gnu::noinline]] void multiply(
        const Block& block, const InputRows<std::int8_t>& row, const float* x_scales, const Output& out
    ) const {
        const std::int64_t stride = byte_panel_size(k);
        if constexpr (kTiled<std::int8_t>) {
            if (by_tiles(block)) return multiply_signed(block, row, x_scales, out);
        }
        for_each_tile<kByteTileRows>(block.rows, block.panels, [&](int rows, int count, std::int64_t tile, std::int64_t panel) {
            alignas(64) IntSums sums[kByteTileRows * kTilePanels];
            alignas(64) Sums results[kByteTileRows * kTilePanels];
            const std::int64_t first = block.first_panel + panel, first_row = block.first_row + tile;
            const std::int8_t* x[kByteTileRows];
            for (int r = 0; r < rows; ++r) x[r] = row(first_row + r);
            with_tile<kByteTileRows>(rows, count, [&](auto r, auto p) {
                hardpoint::HARDPOINT_LEVEL::multiply<r, p>(sums, x, panels + first * stride, stride, k);
            });
            for (int r = 0; r < rows; ++r) {
                const float x_scale = x_scales[row.places(first_row + r)];
                for (int p = 0; p < count; ++p) {
                    const std::int64_t column = (first + p) * kPanelRows;
                    IntSums& exact = sums[r * count + p];
                    for (int j = 0; j < kVectors; ++j) {
                        exact.v[j] -= load_raw<Ints>(row_sums + column + j * kLanes) * kOffset;
                    }
                    results[r * count + p] = scaled(exact, column, x_scale);
                }
            }
            out.write(first_row, rows, first * kPanelRows, count, results, count);
        });
    }

  private:
    Sums scaled(const IntSums& sums, std::int64_t column, float x_scale) const {
        Sums results;
        for (int j = 0; j < kVectors; ++j) {
            const Floats exact = __builtin_convertvector(sums.v[j], Floats);
            results.v[j] = exact * (load(scales + column + j * kLanes) * x_scale);
        }
        return results;
    }

    // Tiles multiply signed numbers: there is no offset to take off.
    void multiply_signed(
        const Block& block, const InputRows<std::int8_t>& row, const float* x_scales, const Output& out
    ) const {
        alignas(64) IntSums sums[kBlockRows][kTilePanels];
        const std::int64_t stride = byte_panel_size(k), first_column = block.first_panel * kPanelRows;
        multiply_by_tiles(block, row, 0, k, panels + block.first_panel * stride, stride, false, sums);
        for (std::int64_t i = 0; i < block.rows; ++i) {
            alignas(64) Sums results[kTilePanels];
            const float x_scale = x_scales[row.places(block.first_row + i)];
            for (std::int64_t p = 0; p < block.panels; ++p) {
                results[p] = scaled(sums[i][p], first_column + p * kPanelRows, x_scale);
            }
            out.write(block.first_row + i, 1, first_column, block.panels, results, kTilePanels);
        }
    }
};

// out [M, N] = codes [M, K] @ w.T * x_scales [M] * w_scales [N] + bias.
template <typename T>
struct LinearInt8 {
    static constexpr char signature[] = "pppppppiii";
    const std::int8_t* codes;
    const float* x_scales;
    const std::int8_t* w;
    const float* w_scales;
    const std::int32_t* row_sums;
    const T* bias;
    T* out;
    std::int64_t m, n, k;

    std::int64_t chunks() const { return Cut(m, n, kBytePanels).chunks(); }
    void run(std::int64_t chunk) const {
        for_each_block(Cut(m, n, kBytePanels), chunk, [&](const Block& block) {
            ByteWeight{w, w_scales, row_sums, k}.multiply(block, {codes, k, {}}, x_scales, Output::of(out, bias, n));
        });
    }
};

// The same for experts: see ExpertsLinear.
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
        const std::int64_t padded = num_panels(n) * kPanelRows, size = num_panels(n) * byte_panel_size(k);
        routed.for_each_block(chunk, n, kBytePanels, [&](std::int64_t expert, const Block& block) {
            const ByteWeight weight{w + expert * size, w_scales + expert * padded, row_sums + expert * padded, k};
            weight.multiply(block, {codes, k, routed.places()}, x_scales, out.of(expert, n));
        });
    }
};

// Weight int8 [N, K] -> panels, and the sums of its rows, int32 [N padded].
struct PackInt8 {
    static constexpr char signature[] = "pppiii";
    const std::int8_t* weight;
    std::int8_t* packed;
    std::int32_t* row_sums;
    std::int64_t n, k, stride;

    std::int64_t chunks() const { return num_panels(n); }
    void run(std::int64_t panel) const {
        const std::int64_t first = panel * kPanelRows;
        scatter_rows<kBytesInGroup>(weight, stride, packed + panel * byte_panel_size(k), first, n, k);
        for (std::int64_t row = first; row < first + kPanelRows; ++row) {
            row_sums[row] = 0;
            for (std::int64_t c = 0; row < n && c < k; ++c) row_sums[row] += weight[row * stride + c];
        }
    }
};

// Columns [first, first + columns) of one panel as numbers of T, in T's panel layout; `first` begins a group.
template <typename T>
[[gnu::noinline]] void widen_bytes(const std::int8_t* panel, std::int64_t first, std::int64_t columns, T* to) {
    const std::int8_t* from = panel + first * kPanelRows;
    for (std::int64_t c = 0; c < columns; c += kBytesInGroup) {
        fetch(from + c * kPanelRows);
        for (int j = 0; j < kVectors; ++j) {
            const auto four = load_raw<Ints>(from + c * kPanelRows + j * HARDPOINT_VECTOR_BYTES);
            Floats numbers[kBytesInGroup];  // of kLanes rows each
            for (int i = 0; i < kBytesInGroup; ++i) {
                numbers[i] = __builtin_convertvector(four << (24 - 8 * i) >> 24, Floats);
            }
            T* at = to + c * kPanelRows + j * kLanes * kGroup<T>;
            for (int i = 0; i < std::min<std::int64_t>(kBytesInGroup, columns - c); i += kGroup<T>) {
                if constexpr (kGroup<T> == 2) {  // bfloat16 is a float's upper half, and these have nothing below it
                    const Words pair =
                        bits_as<Words>(numbers[i]) >> 16 | (bits_as<Words>(numbers[i + 1]) & 0xffff0000u);
                    std::memcpy(at + i * kPanelRows, &pair, sizeof(pair));
                } else {
                    store(at + i * kPanelRows, numbers[i]);
                }
            }
        }
    }
}

// For so many rows of x bytes become numbers in registers, as many as hold the sums; for more, or `alike`, in memory.
#if defined(__AVX512F__)
constexpr int kByteRows = 4;
#elif defined(__AVX2__)
constexpr int kByteRows = 1;
#else
constexpr int kByteRows = 0;
#endif

// Columns that become numbers in memory at a time for a few rows of x: these stay in the first-level cache.
constexpr std::int64_t kFewRows = 32, kFewColumns = 128;

// Each x[r] times `groups` groups of a panel's columns.
template <int rows>
inline void multiply_as_floats(
    Sums (&sums)[rows], const float* const* x, const std::int8_t* panel, std::int64_t groups
) {
    // A vector has a group of columns of each of some rows of the panel. A sum waits for its last product, so one row
    // of x has two for each.
    constexpr int parts = kPanelRows * kBytesInGroup / kLanes, together = rows == 1 && kLanes == 16 ? 2 : 1;
    Floats acc[rows][together][parts];
    unrolled<rows * together * parts>([&](auto i) {
        acc[i / (together * parts)][i / parts % together][i % parts] = Floats{};
    });
    const auto add = [&](auto t, std::int64_t g) __attribute__((always_inline)) {
        const std::int8_t* from = panel + g * kBytesInGroup * kPanelRows;
        fetch<kFetchAheadInOrder>(from);
        unrolled<parts>([&](auto part) {
            const Floats w = load(from + part * kLanes);
            unrolled<rows>([&](auto r) { acc[r][t][part] += load_four(x[r] + g * kBytesInGroup) * w; });
        });
    };
    std::int64_t g = 0;
    for (; g + together <= groups; g += together) unrolled<together>([&](auto t) { add(t, g + t); });
    for (; g < groups; ++g) add(std::integral_constant<int, 0>{}, g);
    unrolled<rows>([&](auto r) {
        float products[kPanelRows][kBytesInGroup], totals[kPanelRows];
        unrolled<parts>([&](auto part) {
            Floats of_part = acc[r][0][part];
            if constexpr (together == 2) of_part += acc[r][1][part];
            store(&products[part * kLanes / kBytesInGroup][0], of_part);
        });
        for (int i = 0; i < kPanelRows; ++i) {
            totals[i] = (products[i][0] + products[i][1]) + (products[i][2] + products[i][3]);
        }
        for (int j = 0; j < kVectors; ++j) sums[r].v[j] = load(totals + j * kLanes);
    });
}

// A weight as PackInt8 leaves it, for activations as they are. int8 elements are exact in every T, so they are widened,
// multiplied as plain numbers, and scaled in the end.
struct WideByteWeight {
    const std::int8_t* panels;
    std::int64_t k;
    bool alike;  // see multiply_block

    // `out` has the weight's scales.
    template <typename T>
    void multiply(const Block& block, const InputRows<T>& row, const Output& out) const {
        if constexpr (kByteRows > 0) {
            if (block.rows <= kByteRows && !alike) {
                const std::int64_t padded = ceil_div(k, kBytesInGroup) * kBytesInGroup;
                float* wide = scratch<float>(block.rows * padded);
                for (std::int64_t r = 0; r < block.rows; ++r) {
                    widen_row(row(block.first_row + r), wide + r * padded, padded);
                }
                return multiply_few(block, wide, out);
            }
        }
        const std::int64_t step = std::min(k, block.rows <= kFewRows ? kFewColumns : kBlockColumns<Made<T>>),
                           stride = ceil_div(step, kGroup<Made<T>>) * kGroup<Made<T>> * kPanelRows;
        Made<T>* wide = scratch<Made<T>>(block.panels * stride);
        const auto give = [&](std::int64_t first, std::int64_t columns) {
            for (std::int64_t p = 0; p < block.panels; ++p) {
                widen_bytes(panels + (block.first_panel + p) * byte_panel_size(k), first, columns, wide + p * stride);
            }
            return Panels<Made<T>>{wide, stride};
        };
        multiply_block<Made<T>>(block, k, step, alike, PanelSource<Made<T>>(give), row, out);
    }

  private:
    // `wide` [rows, K rounded up to whole groups].
    [[gnu::noinline]] void multiply_few(const Block& block, const float* wide, const Output& out) const {
        const std::int64_t groups = ceil_div(k, kBytesInGroup);
        const float* x[std::max(kByteRows, 1)];
        for (std::int64_t r = 0; r < block.rows; ++r) x[r] = wide + r * groups * kBytesInGroup;
        with_constant<std::max(kByteRows, 1)>(block.rows, [&](auto rows) {
            alignas(64) Sums results[rows * kTilePanels];
            for (std::int64_t p = 0; p < block.panels; ++p) {
                Sums sums[rows];
                multiply_as_floats<rows>(sums, x, panels + (block.first_panel + p) * byte_panel_size(k), groups);
                for (int r = 0; r < rows; ++r) results[r * kTilePanels + p] = sums[r];
            }
            out.write(block.first_row, rows, block.first_panel * kPanelRows, block.panels, results, kTilePanels);
        });
    }

    // K numbers as floats, zeros behind them.
    template <typename T>
    void widen_row(const T* from, float* to, std::int64_t padded) const {
        std::int64_t i = 0;
        for (; i + kLanes <= k; i += kLanes) store(to + i, load(from + i));
        for (; i < k; ++i) to[i] = to_float(from[i]);
        for (; i < padded; ++i) to[i] = 0.0f;
    }
};

// out [M, N] = x [M, K] @ w.T * w_scales [N] + bias. See multiply_block for `alike`.
template <typename T>
struct LinearInt8Weight {
    static constexpr char signature[] = "pppppiiiii";
    const T* x;
    const std::int8_t* w;
    const float* w_scales;
    const T* bias;
    T* out;
    std::int64_t m, n, k, x_stride, alike;

    std::int64_t chunks() const { return Cut(m, n, kBytePanels).chunks(); }
    void run(std::int64_t chunk) const {
        for_each_block(Cut(m, n, kBytePanels), chunk, [&](const Block& block) {
            WideByteWeight{w, k, alike != 0}.multiply<T>(block, {x, x_stride, {}}, Output::of(out, bias, n, w_scales));
        });
    }
};

// out [count, K]: rows `ids` (int64; all in order where it is null) of a packed weight, scaled.
template <typename T>
struct UnpackInt8 {
    static constexpr char signature[] = "ppppii";
    const std::int8_t* packed;
    const float* scales;
    const std::int64_t* ids;
    T* out;
    std::int64_t count, k;

    std::int64_t chunks() const { return ceil_div(count, rows_per_chunk(k)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(k), count);
        for (auto i = mine.first; i < mine.last; ++i) {
            const std::int64_t row = ids ? ids[i] : i;
            const std::int8_t* from = packed + row / kPanelRows * byte_panel_size(k) + row % kPanelRows * kBytesInGroup;
            for (std::int64_t c = 0; c < k; ++c) {
                const auto code = from[c / kBytesInGroup * kBytesInGroup * kPanelRows + c % kBytesInGroup];
                out[i * k + c] = round_to<T>(static_cast<float>(code) * scales[row]);
            }
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
