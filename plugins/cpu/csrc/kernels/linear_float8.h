// Products with a weight of e4m3 (OCP 8-bit floating point, 1.0), with a scale for each row, or for each group of a
// row's columns. Activations stay as they are.
//
// The bits of a code, moved into a float's place, are 2^-120 of its number. So x is multiplied by a power of two before,
// and its results after. Numbers that are subnormal in e4m3 would be so as floats, which some processors take long to
// multiply, or take for zeros: groups of four columns that have some are marked, and read with a larger exponent.
#pragma once

#include "../task.h"
#include "byte_scales.h"
#include "kv_store.h"
#include "linear_int8.h"

namespace hardpoint::HARDPOINT_LEVEL {

typedef std::int16_t SignedHalves __attribute__((vector_size(HARDPOINT_VECTOR_BYTES)));

// Columns of a panel that a byte of marks is for, a bit for four.
constexpr std::int64_t kMarkColumns = 8 * kBytesInGroup;
inline std::int64_t num_marks(std::int64_t k) { return ceil_div(k, kMarkColumns); }

// Rows of x whose products are summed in registers.
#if defined(__AVX512F__)
constexpr int kFloat8Rows = 4;
#else
constexpr int kFloat8Rows = 1;
#endif

// The four columns of each lane's row of a panel, times 2^-120. None may be subnormal, unless it is zero.
struct Float8Numbers {
    Words low, high;  // columns 0 and 2, 1 and 3, as bfloat16

    Float8Numbers() = default;
    explicit Float8Numbers(const std::uint8_t* from) {
        const auto codes = load_raw<SignedHalves>(from);
        low = bits_as<Words>((codes << 8) >> 4) & 0x87f087f0u;
        high = bits_as<Words>(codes >> 4) & 0x87f087f0u;
    }
    template <int column>
    Floats at() const {
        const Words pair = column % 2 ? high : low;
        return bits_as<Floats>(column / 2 ? pair & 0xffff0000u : pair << 16);
    }
};

// One of them times 2^-`less`, whatever it is; the code 0x7f counts as 480.
template <int column, int less>
[[gnu::always_inline]] inline Floats float8_at(const std::uint8_t* from) {
    const auto top = bits_as<Ints>(load_raw<Words>(from) << (24 - 8 * column));
    const Words bits = bits_as<Words>(top >> 4) & 0x87f00000u, magnitude = bits & 0x07f00000u;
    const auto number = bits_as<Floats>(magnitude + ((120u - less) << 23));
    // Without exponent it is (1 + m / 8) / 2 of the least normal number, in place of m / 8.
    const Floats least = broadcast(bits_as<float>((121u - less) << 23));
    const Floats right = magnitude < 0x00800000u ? number + number - least : number;
    return bits_as<Floats>(bits_as<Words>(right) | (bits & 0x80000000u));
}

// A row of x as multiply_float8 reads it: floats, of which the largest is about 2^kLargestExponent.
constexpr int kLargestExponent = 100;

struct ScaledRow {
    const float* numbers;
    float unit;  // results are to be multiplied by it, and by kResultUnit
};
constexpr float kResultUnit = 0x1p20f;  // 2^(120 - kLargestExponent)

// x [k] -> `to` [padded], zeros behind it.
template <typename T>
inline ScaledRow scale_row(const T* x, float* to, std::int64_t k, std::int64_t padded) {
    Floats most = {};
    std::int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) {
        const auto magnitude = bits_as<Floats>(bits_as<Words>(load(x + i)) & 0x7fffffffu);
        most = magnitude > most ? magnitude : most;
    }
    float amax = largest(most);
    for (; i < k; ++i) amax = std::max(amax, std::fabs(to_float(x[i])));
    const int exponent = std::clamp(static_cast<int>(bits_as<std::uint32_t>(amax) >> 23), kLargestExponent, 254);
    const auto scale = bits_as<float>(static_cast<std::uint32_t>(254 + kLargestExponent - exponent) << 23);
    for (i = 0; i + kLanes <= k; i += kLanes) store(to + i, load(x + i) * scale);
    for (; i < k; ++i) to[i] = to_float(x[i]) * scale;
    for (; i < padded; ++i) to[i] = 0.0f;
    return {to, bits_as<float>(static_cast<std::uint32_t>(exponent) << 23)};
}

// A weight as PackFloat8 leaves it: panels as of int8; for each panel and four columns a bit, set where some are
// subnormal; scales [panels, groups of columns, 16].
struct Float8Weight {
    const std::uint8_t* panels;
    const std::uint8_t* marks;
    const float* scales;
    std::int64_t k, group;  // columns; one group where it is k or more
    bool alike;             // see multiply_block

    bool has_groups() const { return group < k; }
    const float* scales_of(std::int64_t panel, std::int64_t column) const {
        return scales + (panel * ceil_div(k, group) + column / group) * kPanelRows;
    }

    // `out` has the scales where there are no groups.
    template <typename T>
    void multiply(const Block& block, const InputRows<T>& row, const Output& out) const {
        if (block.rows <= kFloat8Rows && !alike) {
            const std::int64_t padded = ceil_div(k, kBytesInGroup) * kBytesInGroup;
            float* memory = scratch<float>(block.rows * padded);
            ScaledRow x[kFloat8Rows];
            for (std::int64_t r = 0; r < block.rows; ++r) {
                x[r] = scale_row(row(block.first_row + r), memory + r * padded, k, padded);
            }
            return multiply_few(block, x, out);
        }
        const std::int64_t step = std::min(k, block.rows <= kFewRows ? kFewColumns : kBlockColumns<Made<T>>),
                           stride = ceil_div(step, kGroup<Made<T>>) * kGroup<Made<T>> * kPanelRows;
        Made<T>* wide = scratch<Made<T>>(block.panels * stride);
        const auto give = [&](std::int64_t first, std::int64_t columns) {
            for (std::int64_t p = 0; p < block.panels; ++p) {
                widen(block.first_panel + p, first, columns, wide + p * stride);
            }
            return Panels<Made<T>>{wide, stride};
        };
        multiply_block<Made<T>>(block, k, step, alike, PanelSource<Made<T>>(give), row, out);
    }

  private:
    [[gnu::noinline]] void multiply_few(const Block& block, const ScaledRow* x, const Output& out) const {
        with_constant<kFloat8Rows>(block.rows, [&](auto rows) {
            alignas(64) Sums results[rows * kTilePanels];
            for (std::int64_t p = 0; p < block.panels; ++p) {
                Sums sums[rows];
                multiply_panel<rows>(sums, block.first_panel + p, x);
                for (int r = 0; r < rows; ++r) {
                    for (int j = 0; j < kVectors; ++j) {
                        results[r * kTilePanels + p].v[j] = sums[r].v[j] * x[r].unit * kResultUnit;
                    }
                }
            }
            out.write(block.first_row, rows, block.first_panel * kPanelRows, block.panels, results, kTilePanels);
        });
    }

    // sums + four columns of a panel from c on, `number(column, j)`, times those of x and `factor`. A sum waits for its last
    // product, so that each has some `chains`: of single columns, or of every other.
    template <int rows, int chains, typename F>
    [[gnu::always_inline]] static void add(
        Floats (&sums)[rows * kVectors * chains], const ScaledRow* x, std::int64_t c, float factor, const F& number
    ) {
        unrolled<kBytesInGroup>([&](auto column) __attribute__((always_inline)) {
            Floats numbers[kVectors];
            unrolled<kVectors>([&](auto j) __attribute__((always_inline)) { numbers[j] = number(column, j); });
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                const float of_x = x[r].numbers[c + column] * factor;
                unrolled<kVectors>([&](auto j) __attribute__((always_inline)) {
                    sums[(r * kVectors + j) * chains + column % chains] += numbers[j] * of_x;
                });
            });
        });
    }

    template <int rows, int chains>
    [[gnu::always_inline]] static void add_unmarked(
        Floats (&sums)[rows * kVectors * chains], const ScaledRow* x, std::int64_t c, const std::uint8_t* from
    ) {
        fetch<kFetchAheadInOrder>(from);
        Float8Numbers numbers[kVectors];
        unrolled<kVectors>([&](auto j) __attribute__((always_inline)) {
            numbers[j] = Float8Numbers(from + j * HARDPOINT_VECTOR_BYTES);
        });
        add<rows, chains>(sums, x, c, 1, [&](auto column, auto j) __attribute__((always_inline)) {
            return numbers[j].template at<column>();
        });
    }

    // Columns [c, end) of which some are marked. Not inline, since it would take registers from those that are not.
    template <int rows>
    [[gnu::noinline]] static void multiply_marked(
        Floats (&sums)[rows * kVectors], const ScaledRow* x, const std::uint8_t* codes, unsigned marked, std::int64_t c,
        std::int64_t end
    ) {
        Floats found[rows * kVectors] = {};
        for (; c < end; c += kBytesInGroup) {
            const std::uint8_t* from = codes + c * kPanelRows;
            if (marked >> (c % kMarkColumns / kBytesInGroup) & 1) {
                add<rows, 1>(found, x, c, 0x1p-60f, [&](auto column, auto j) __attribute__((always_inline)) {
                    return float8_at<column, 60>(from + j * HARDPOINT_VECTOR_BYTES);
                });
            } else {
                add_unmarked<rows, 1>(found, x, c, from);
            }
        }
        unrolled<rows * kVectors>([&](auto i) __attribute__((always_inline)) { sums[i] = found[i]; });
    }

    template <int rows>
    [[gnu::always_inline]] void multiply_panel(Sums (&sums)[rows], std::int64_t panel, const ScaledRow* x) const {
        constexpr int chains = rows * kVectors * kBytesInGroup <= 8 ? kBytesInGroup : 2, all = rows * kVectors * chains;
        const std::uint8_t* codes = panels + panel * byte_panel_size(k);
        const std::uint8_t* marked = marks + panel * num_marks(k);
        unrolled<rows>([&](auto r) __attribute__((always_inline)) { sums[r] = Sums{}; });
        for (std::int64_t first = 0; first < k; first += group) {
            const std::int64_t end = std::min(k, first + group);
            Floats acc[all];
            unrolled<all>([&](auto i) __attribute__((always_inline)) { acc[i] = Floats{}; });
            for (std::int64_t c = first; c < end;) {
                const std::int64_t next = std::min(end, (c / kMarkColumns + 1) * kMarkColumns);
                if (marked[c / kMarkColumns]) [[unlikely]] {
                    Floats more[rows * kVectors];
                    multiply_marked<rows>(more, x, codes, marked[c / kMarkColumns], c, next);
                    unrolled<rows * kVectors>([&](auto i) __attribute__((always_inline)) { acc[i * chains] += more[i]; });
                    c = next;
                    continue;
                }
                for (; c < next; c += kBytesInGroup) add_unmarked<rows, chains>(acc, x, c, codes + c * kPanelRows);
            }
            const float* scale = has_groups() ? scales_of(panel, first) : nullptr;
            if (scale) fetch(scale);
            unrolled<rows * kVectors>([&](auto i) __attribute__((always_inline)) {
                constexpr int r = i / kVectors, j = i % kVectors;
                Floats sum = acc[i * chains];
                unrolled<chains - 1>([&](auto chain) __attribute__((always_inline)) { sum += acc[i * chains + chain + 1]; });
                sums[r].v[j] = scale ? sums[r].v[j] + sum * load(scale + j * kLanes) : sum;
            });
        }
    }

    // Columns [first, first + columns) of one panel as numbers of T, in T's panel layout; `first` begins a group of four.
    template <typename T>
    [[gnu::noinline]] void widen(std::int64_t panel, std::int64_t first, std::int64_t columns, T* to) const {
        const std::uint8_t* codes = panels + panel * byte_panel_size(k);
        const std::uint8_t* marked = marks + panel * num_marks(k);
        const float* scales_of_group = nullptr;
        std::int64_t end_of_group = has_groups() ? first : k;
        for (std::int64_t c = first; c < first + columns; c += kBytesInGroup, to += kBytesInGroup * kPanelRows) {
            fetch(codes + c * kPanelRows);
            if (c >= end_of_group) {
                scales_of_group = scales_of(panel, c);
                end_of_group = (c / group + 1) * group;
            }
            const bool exact = marked[c / kMarkColumns] >> (c % kMarkColumns / kBytesInGroup) & 1;
            const std::int64_t some = std::min<std::int64_t>(kBytesInGroup, first + columns - c);
            unrolled<kVectors>([&](auto j) __attribute__((always_inline)) {
                const std::uint8_t* from = codes + c * kPanelRows + j * HARDPOINT_VECTOR_BYTES;
                T* at = to + j * kLanes * kGroup<T>;
                if constexpr (kGroup<T> == 2) {
                    if (!exact && !has_groups()) return widen_pairs(Float8Numbers(from), some, at);
                }
                const Floats scale = scales_of_group ? load(scales_of_group + j * kLanes) : broadcast(1);
                Floats numbers[kBytesInGroup];
                if (exact) [[unlikely]] {
                    unrolled<kBytesInGroup>([&](auto i) __attribute__((always_inline)) {
                        numbers[i] = float8_at<i, 0>(from) * scale;
                    });
                } else {
                    const Float8Numbers four(from);
                    const Floats larger = scale * 0x1p60f;
                    unrolled<kBytesInGroup>([&](auto i) __attribute__((always_inline)) {
                        numbers[i] = four.template at<i>() * 0x1p60f * larger;
                    });
                }
                for (int i = 0; i < some; i += kGroup<T>) {
                    if constexpr (kGroup<T> == 2) {
                        const Words pairs = as_bfloat16(numbers[i]) | as_bfloat16(numbers[i + 1]) << 16;
                        std::memcpy(at + i * kPanelRows, &pairs, sizeof(pairs));
                    } else {
                        store(at + i * kPanelRows, numbers[i]);
                    }
                }
            });
        }
    }

    // Rounded to bfloat16, in the lower halves.
    static Words as_bfloat16(Floats numbers) {
#if defined(__AVX512BF16__)
        return widen_halves(bits_as<Halves>(_mm512_cvtneps_pbh(bits_as<__m512>(numbers))));
#else
        bfloat16 halves[kLanes];
        store(halves, numbers);
        return widen_halves(load_raw<Halves>(halves));
#endif
    }
    static Words widen_halves(Halves halves) { return hardpoint::HARDPOINT_LEVEL::widen(halves); }

    // Two or four columns as pairs of bfloat16, which hold every number of e4m3: exponents grow by 120, but for zeros.
    template <typename T>
    [[gnu::always_inline]] static void widen_pairs(const Float8Numbers& numbers, std::int64_t columns, T* at) {
        const auto grown = [](Words words) __attribute__((always_inline)) {
            constexpr std::int16_t magnitude = 0x7fff, more = 120 << 7;
            const auto halves = bits_as<SignedHalves>(words);
            return bits_as<Words>(halves + (((halves & magnitude) != 0) & more));
        };
        const Words low = grown(numbers.low), high = grown(numbers.high);  // columns 0 and 2, 1 and 3
        const Words first = (low & 0xffffu) | high << 16, second = low >> 16 | (high & 0xffff0000u);
        std::memcpy(at, &first, sizeof(first));
        if (columns > 2) std::memcpy(at + 2 * kPanelRows, &second, sizeof(second));
    }
};

// out [M, N] = x [M, K] @ w.T + bias. A group is a multiple of 4 columns, or the whole row. See multiply_block for `alike`.
template <typename T>
struct LinearFloat8 {
    static constexpr char signature[] = "ppppppiiiiii";
    const T* x;
    const std::uint8_t* w;
    const std::uint8_t* marks;
    const float* scales;
    const T* bias;
    T* out;
    std::int64_t m, n, k, group, x_stride, alike;

    std::int64_t chunks() const { return Cut(m, n, kBytePanels).chunks(); }
    void run(std::int64_t chunk) const {
        const Float8Weight weight{w, marks, scales, k, group, alike != 0};
        const float* at_last = weight.has_groups() ? nullptr : scales;
        for_each_block(Cut(m, n, kBytePanels), chunk, [&](const Block& block) {
            weight.multiply<T>(block, {x, x_stride, {}}, Output::of(out, bias, n, at_last));
        });
    }
};

// Weight e4m3 [N, K] -> panels and marks; see Float8Weight. Scales of groups with an element that is no number become NaN,
// as multiply_few knows none.
struct PackFloat8 {
    static constexpr char signature[] = "ppppiiii";
    const std::uint8_t* weight;
    std::uint8_t* packed;
    std::uint8_t* marks;
    float* scales;
    std::int64_t n, k, group, stride;

    std::int64_t chunks() const { return num_panels(n); }
    void run(std::int64_t panel) const {
        const std::int64_t first = panel * kPanelRows;
        scatter_rows<kBytesInGroup>(weight, stride, packed + panel * byte_panel_size(k), first, n, k);
        std::uint8_t* marked = marks + panel * num_marks(k);
        std::memset(marked, 0, num_marks(k));
        for (std::int64_t row = first; row < std::min(n, first + kPanelRows); ++row) {
            for (std::int64_t c = 0; c < k; ++c) {
                const int magnitude = weight[row * stride + c] & 0x7f;
                marked[c / kMarkColumns] |= (magnitude - 1u < 7) << (c % kMarkColumns / kBytesInGroup);
                if (magnitude == 0x7f) {
                    scales[(panel * ceil_div(k, group) + c / group) * kPanelRows + row - first] = std::nanf("");
                }
            }
        }
    }
};

// out [count, K]: rows `ids` (int64; all in order where it is null) as numbers.
template <typename T>
struct UnpackFloat8 {
    static constexpr char signature[] = "ppppiii";
    const std::uint8_t* packed;
    const float* scales;
    const std::int64_t* ids;
    T* out;
    std::int64_t count, k, group;

    std::int64_t chunks() const { return ceil_div(count, rows_per_chunk(k)); }
    void run(std::int64_t chunk) const {
        const Float8Weight weight{packed, nullptr, scales, k, group, false};
        const Rows mine(chunk, rows_per_chunk(k), count);
        for (auto i = mine.first; i < mine.last; ++i) {
            const std::int64_t row = ids ? ids[i] : i, panel = row / kPanelRows, within = row % kPanelRows;
            const std::uint8_t* from = packed + panel * byte_panel_size(k) + within * kBytesInGroup;
            for (std::int64_t c = 0; c < k; ++c) {
                const e4m3 code{from[c / kBytesInGroup * kBytesInGroup * kPanelRows + c % kBytesInGroup]};
                out[i * k + c] = round_to<T>(to_float(code) * weight.scales_of(panel, c)[within]);
            }
        }
    }
};

// x [rows, k] rounded to e4m3 and back, [rows, k]: with `scale`, or where that is null with one for each `group` columns,
// which maps the largest magnitude to 448 and is 1 for zeros. What is no number makes its group NaN.
template <typename T>
struct RoundFloat8 {
    static constexpr char signature[] = "pppiiii";
    const T* x;
    const float* scale;
    T* out;
    std::int64_t rows, k, group, x_stride;

    std::int64_t chunks() const { return ceil_div(rows, rows_per_chunk(k)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(k), rows);
        for (auto row = mine.first; row < mine.last; ++row) {
            for (std::int64_t c = 0; c < k; c += group) {
                round(x + row * x_stride + c, out + row * k + c, std::min(group, k - c));
            }
        }
    }

  private:
    void round(const T* from, T* to, std::int64_t count) const {
        const auto each = [&](const auto& use) {
            std::int64_t i = 0;
            for (; i + kLanes <= count; i += kLanes) use(i, load(from + i), kLanes);
            if (i < count) use(i, load_some(from + i, count - i), count - i);
        };
        float unit;
        if (scale) {
            unit = *scale;
        } else {
            Floats most = {}, none = {};
            each([&](std::int64_t, Floats v, std::int64_t) {
                const auto magnitude = bits_as<Floats>(bits_as<Words>(v) & 0x7fffffffu);
                most = magnitude > most ? magnitude : most;
                none += v - v;
            });
            unit = largest(most) / kLargest<float8_e4m3fn>;
            if (unit == 0) unit = 1;
            if (sum(none) != 0) unit = std::nanf("");
        }
        each([&](std::int64_t i, Floats v, std::int64_t some) {
            const auto rounded = small_float_to_floats<float8_e4m3fn>(round_to_small_float<float8_e4m3fn>(v / unit));
            T numbers[kLanes];
            store(numbers, rounded * unit);
            std::memcpy(to + i, numbers, some * sizeof(T));
        });
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
