// A weight of 4-bit elements in groups of columns, each with a scale, and products with it. Activations stay as they are.
//
// A panel (see panels.h) is cut into steps of 8 columns of its 16 rows, 64 bytes: 32 words, word 2 * row + j holding in
// its nibble i, low first, column 2 * i + j of the step. So a word shifted right by 4 * i is an index of four bits into
// a table of 32 words, and one permutation makes 16 pairs of bfloat16 out of 32 nibbles, as the dot product takes them.
// `Codes` says what the 16 codes mean.
#pragma once

#include "linear.h"
#include "nibble_codes.h"
#include "nibble_shorts.h"
#include "scratch.h"

namespace hardpoint::HARDPOINT_LEVEL {

// Nibbles are multiplied as they come for tiles of at most so many rows of x, one panel after the other, which the
// memory delivers fastest. For a block of more rows than kMostNibbleRows they become numbers in memory first.
#if defined(__AVX512F__)
constexpr int kNibbleRows = 8;
#else
constexpr int kNibbleRows = 4;  // whose sums fit 16 registers
#endif
constexpr int kMostNibbleRows = 32;

inline std::int64_t nibble_panel_size(std::int64_t k) { return k / kNibbleColumns * 4 * kPanelRows; }  // bytes

// One group of one panel: its scales and zero points.
template <typename S>
struct NibbleGroup {
    const S* scales;            // [16]
    const std::uint8_t* zeros;  // [16], or null: all kNibbleZero

    NibbleGroup next() const { return {scales + kPanelRows, zeros ? zeros + kPanelRows : nullptr}; }
    Floats scale(int j) const { return load(scales + j * kLanes); }
    // The number taken off the value of a code.
    Floats zero(int j) const {
        if (!zeros) return Floats{};
        return __builtin_convertvector(bits_as<Ints>(widen(load_raw<Bytes>(zeros + j * kLanes))), Floats) - kNibbleZero;
    }
};

// A weight as PackInt4 leaves it: steps of all panels; scales S and zero points uint8, [panels, groups, 16] each, and
// `outer` [panels, 16] or null, by which a row's numbers are multiplied as well. w = (value - zero) * scale * outer.
template <typename S, typename C>
struct Nibbles {
    using Codes = C;
    using Scale = S;
    const std::uint8_t* steps;
    const S* scales;
    const std::uint8_t* zeros;
    const float* outer;
    std::int64_t k, group;

    const std::uint8_t* panel(std::int64_t p) const { return steps + p * nibble_panel_size(k); }
    NibbleGroup<S> of_group(std::int64_t p, std::int64_t g) const {
        const std::int64_t place = (p * (k / group) + g) * kPanelRows;
        return {scales + place, zeros ? zeros + place : nullptr};
    }
};

// The code of one element.
inline int nibble(const std::uint8_t* panel, int row, std::int64_t column) {
    const std::uint8_t* word = panel + column / kNibbleColumns * 4 * kPanelRows + (2 * row + column % 2) * 2;
    const int place = static_cast<int>(column % kNibbleColumns / 2);
    return word[place / 2] >> (place % 2 * 4) & 0xf;
}

// Columns [first, first + columns) of one panel as numbers of T, in T's panel layout; whole steps.
template <typename T, typename S, typename Codes>
[[gnu::noinline]] void widen_nibbles(const Nibbles<S, Codes>& w, std::int64_t p, std::int64_t first, std::int64_t columns, T* to) {
    const std::uint8_t* panel = w.panel(p);
    for (std::int64_t c = first; c < first + columns; c += kNibbleColumns) {
        const NibbleGroup<S> group = w.of_group(p, c / w.group);
        const std::uint8_t* step = panel + c * kPanelRows / 2;
        Floats zeros[kVectors], scales[kVectors];
        for (int j = 0; j < kVectors; ++j) {
            zeros[j] = group.zero(j);
            scales[j] = group.scale(j);
            if (w.outer) scales[j] *= load(w.outer + p * kPanelRows + j * kLanes);
        }
        // Pairs of words: the columns 2 * i (low half) and 2 * i + 1 (high half) of kLanes rows.
        for (int i = 0; i < kNibbleColumns / 2; ++i) {
            for (int j = 0; j < kVectors; ++j) {
                const auto words = load_raw<Words>(step + j * HARDPOINT_VECTOR_BYTES);
                const Floats a = (Codes::values(words >> (4 * i)) - zeros[j]) * scales[j];
                const Floats b = (Codes::values(words >> (16 + 4 * i)) - zeros[j]) * scales[j];
                if constexpr (kGroup<T> == 2) {
                    T halves[2][kLanes];
                    store(halves[0], a);
                    store(halves[1], b);
                    const auto low = __builtin_convertvector(load_raw<Halves>(halves[0]), Words);
                    const auto high = __builtin_convertvector(load_raw<Halves>(halves[1]), Words);
                    const Words pairs = low | high << 16;
                    std::memcpy(to + j * 2 * kLanes, &pairs, sizeof(pairs));
                } else {
                    store(to + j * kLanes, a);
                    store(to + kPanelRows + j * kLanes, b);
                }
            }
            to += 2 * kPanelRows;
        }
    }
}

// Each x[r] times `steps` steps of a panel, of the codes' values.
template <typename Codes, int rows>
inline void multiply_steps(
    Sums (&sums)[rows], const float* const (&x)[rows], const std::uint8_t* step, std::int64_t steps
) {
    constexpr int chains = rows == 1 ? 4 : rows == 2 ? 2 : 1;  // since a sum waits for its last product
    Floats acc[rows][kVectors][chains] = {};
    for (std::int64_t s = 0; s < steps; ++s, step += kStepBytes) {
        fetch<kFetchAheadInOrder>(step);
        unrolled<kVectors>([&](auto j) {
            Codes::for_each_column(load_raw<Words>(step + j * HARDPOINT_VECTOR_BYTES), [&](auto column, Floats numbers) {
                unrolled<rows>([&](auto r) {
                    acc[r][j][column % chains] += numbers * x[r][s * kNibbleColumns + column];
                });
            });
        });
    }
    for (int r = 0; r < rows; ++r) {
        for (int j = 0; j < kVectors; ++j) {
            Floats sum = acc[r][j][0];
            for (int c = 1; c < chains; ++c) sum += acc[r][j][c];
            sums[r].v[j] = sum * Codes::kUnit;
        }
    }
}

// The elements of x that multiply_steps reads: bfloat16 where there is an instruction for its products, else floats.
#if defined(__AVX512BF16__)
template <typename T>
using NibbleInput = std::conditional_t<std::is_same_v<T, bfloat16>, bfloat16, float>;
#else
template <typename T>
using NibbleInput = float;
#endif

#if defined(__AVX512BF16__)
constexpr std::int64_t kShortSteps = 4;  // of groups so short that the next one's products fill the waits

// A sum waits for its last product, so each row of x has several, `chains`: those of one step, of two or of a half.
template <typename Codes, int rows, int chains>
inline void multiply_in_chains(
    Sums (&sums)[rows], const bfloat16* const (&x)[rows], const std::uint8_t* step, std::int64_t steps
) {
    const auto numbers = load_raw<__m512i>(Codes::bfloat16s.at);
    constexpr int pairs = kNibbleColumns / 2, together = std::max(1, chains / pairs);
    __m512 acc[rows][chains];
    unrolled<rows * chains>([&](auto i) { acc[i / chains][i % chains] = _mm512_setzero_ps(); });
    for (std::int64_t s = 0; s < steps; s += together) {
        unrolled<together>([&](auto t) {
            const std::uint8_t* from = step + (s + t) * kStepBytes;
            fetch<kFetchAheadInOrder>(from);
            auto words = load_raw<__m512i>(from);
            unrolled<pairs>([&](auto i) {
                const auto column = bits_as<__m512bh>(_mm512_permutexvar_epi16(words, numbers));
                words = _mm512_srli_epi16(words, 4);
                unrolled<rows>([&](auto r) {
                    const auto pair = _mm512_set1_epi32(load_raw<int>(x[r] + (s + t) * kNibbleColumns + 2 * i));
                    __m512& sum = acc[r][(t * pairs + i) % chains];
                    sum = _mm512_dpbf16_ps(sum, column, bits_as<__m512bh>(pair));
                });
            });
        });
    }
    unrolled<rows>([&](auto r) {
        __m512 sum = acc[r][0];
        unrolled<chains - 1>([&](auto c) { sum += acc[r][c + 1]; });
        sums[r].v[0] = bits_as<Floats>(sum);
    });
}

template <typename Codes, int rows>
inline void multiply_steps(
    Sums (&sums)[rows], const bfloat16* const (&x)[rows], const std::uint8_t* step, std::int64_t steps
) {
    constexpr int most = kNibbleColumns / 2;
    if (rows == 1 && steps % 2 == 0 && steps > kShortSteps) {
        return multiply_in_chains<Codes, rows, kNibbleColumns>(sums, x, step, steps);
    }
    if (steps <= kShortSteps) return multiply_in_chains<Codes, rows, 2>(sums, x, step, steps);
    return multiply_in_chains<Codes, rows, rows <= 4 ? most : most / 2>(sums, x, step, steps);
}
#endif

// A weight [N, K] of nibbles; see LinearInt4 for `alike`.
template <typename W>
struct NibbleWeight {
    W w;
    bool alike;

    template <typename T>
    void multiply(const Block& block, const InputRows<T>& row, const Output& out) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (kByShorts<T>) return ShortWeight<W>{w}.multiply(block, row, out);
#endif
        if (block.rows <= kMostNibbleRows && !alike) {
            const std::int64_t tiles = ceil_div(block.rows, kNibbleRows);
            for (std::int64_t i = 0; i < tiles; ++i) {
                const std::int64_t first = block.rows * i / tiles, count = block.rows * (i + 1) / tiles - first;
                const T* x[kNibbleRows];
                for (int r = 0; r < count; ++r) x[r] = row(block.first_row + first + r);
                const Inputs<NibbleInput<T>> inputs = prepared(x, count);
                multiply_few({block.first_row + first, count, block.first_panel, block.panels}, inputs, out);
            }
            return;
        }
        const std::int64_t step = std::min(w.k, kBlockColumns<Made<T>>), stride = step * kPanelRows;
        Made<T>* wide = scratch<Made<T>>(block.panels * stride);
        const auto give = [&](std::int64_t first, std::int64_t columns) {
            for (std::int64_t p = 0; p < block.panels; ++p) {
                widen_nibbles(w, block.first_panel + p, first, columns, wide + p * stride);
            }
            return Panels<Made<T>>{wide, stride};
        };
        multiply_block<Made<T>>(block, w.k, step, alike, PanelSource<Made<T>>(give), row, out);
    }

  private:
    using Codes = typename W::Codes;

    // Beside some rows of x, as they are multiplied, `x_sums` has the sums of each over each group of columns, [rows,
    // groups]; null where no zero points want them.
    template <typename X>
    struct Inputs {
        const X* x[kNibbleRows];
        const float* x_sums;
    };

    template <typename X>
    [[gnu::noinline]] void multiply_few(const Block& block, const Inputs<X>& inputs, const Output& out) const {
        with_constant<kNibbleRows>(block.rows, [&](auto rows) {
            alignas(64) Sums results[rows * kTilePanels];
            for (std::int64_t p = 0; p < block.panels; ++p) {
                Sums sums[rows];
                multiply_panel<rows>(sums, block.first_panel + p, inputs);
                for (int r = 0; r < rows; ++r) results[r * kTilePanels + p] = sums[r];
            }
            out.write(block.first_row, rows, block.first_panel * kPanelRows, block.panels, results, kTilePanels);
        });
    }

    template <int rows, typename X>
    void multiply_panel(Sums (&sums)[rows], std::int64_t panel, const Inputs<X>& inputs) const {
        const std::int64_t groups = w.k / w.group, steps = w.group / kNibbleColumns;
        for (int r = 0; r < rows; ++r) sums[r] = Sums{};
        for (std::int64_t g = 0; g < groups; ++g) {
            const X* from[rows];
            for (int r = 0; r < rows; ++r) from[r] = inputs.x[r] + g * w.group;
            Sums products[rows];
            multiply_steps<Codes, rows>(products, from, w.panel(panel) + g * steps * kStepBytes, steps);
            const auto group = w.of_group(panel, g);
            fetch<kFetchAheadInOrder / 8>(group.scales);
            for (int j = 0; j < kVectors; ++j) {
                const Floats scale = group.scale(j);
                if (inputs.x_sums) {
                    const Floats zero = group.zero(j);
                    for (int r = 0; r < rows; ++r) products[r].v[j] -= zero * inputs.x_sums[r * groups + g];
                }
                for (int r = 0; r < rows; ++r) sums[r].v[j] += scale * products[r].v[j];
            }
        }
        for (int r = 0; r < rows; ++r) {
            for (int j = 0; w.outer && j < kVectors; ++j) sums[r].v[j] *= load(w.outer + panel * kPanelRows + j * kLanes);
        }
    }

    template <typename T>
    Inputs<NibbleInput<T>> prepared(const T* const* x, std::int64_t rows) const {
        constexpr bool same = std::is_same_v<T, NibbleInput<T>>;
        const std::int64_t groups = w.zeros ? w.k / w.group : 0, copied = same ? 0 : w.k;
        float* memory = groups || copied ? scratch<float>(rows * (groups + copied)) : nullptr;
        Inputs<NibbleInput<T>> inputs{{}, groups ? memory : nullptr};
        for (int r = 0; r < rows; ++r) {
            for (std::int64_t g = 0; g < groups; ++g) memory[r * groups + g] = sum_of(x[r] + g * w.group, w.group);
            if constexpr (same) {
                inputs.x[r] = x[r];
            } else {
                float* copy = memory + rows * groups + r * w.k;
                std::int64_t i = 0;
                for (; i + kLanes <= w.k; i += kLanes) store(copy + i, load(x[r] + i));
                for (; i < w.k; ++i) copy[i] = to_float(x[r][i]);
                inputs.x[r] = copy;
            }
        }
        return inputs;
    }

    template <typename T>
    static float sum_of(const T* x, std::int64_t count) {
        Floats sums = {};
        std::int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) sums += load(x + i);
        float rest = 0;
        for (; i < count; ++i) rest += to_float(x[i]);
        return sum(sums) + rest;
    }
};

// The products of experts' weights for one chunk. `of_expert(e)` is the weight of expert e.
template <typename T, typename OfExpert>
inline void multiply_experts(
    std::int64_t chunk, const Routed& routed, const T* x, std::int64_t x_stride, std::int64_t n, bool alike,
    const OfExpert& of_expert, const ExpertsOut<T>& out
) {
    routed.for_each_block<kNibbleBlock<T>>(chunk, n, kNibblePanels, [&](std::int64_t expert, const Block& block) {
        const NibbleWeight<std::invoke_result_t<OfExpert, std::int64_t>> weight{of_expert(expert), alike};
        weight.template multiply<T>(block, {x, x_stride, routed.places()}, out.of(expert, n));
    });
}

// A chunk of out [count, K]: rows `ids` (int64; all in order where it is null) of `w` as numbers.
template <typename T, typename S, typename Codes>
void unpack_rows(
    const Nibbles<S, Codes>& w, const std::int64_t* ids, T* out, std::int64_t count, std::int64_t chunk
) {
    const Rows mine(chunk, rows_per_chunk(w.k), count);
    for (auto i = mine.first; i < mine.last; ++i) {
        const std::int64_t row = ids ? ids[i] : i, panel = row / kPanelRows;
        const int within = static_cast<int>(row % kPanelRows);
        for (std::int64_t c = 0; c < w.k; ++c) {
            const NibbleGroup<S> g = w.of_group(panel, c / w.group);
            const float zero = g.zeros ? static_cast<float>(g.zeros[within] - kNibbleZero) : 0.0f;
            float number = (Codes::value(nibble(w.panel(panel), within, c)) - zero) * to_float(g.scales[within]);
            if (w.outer) number *= w.outer[row];
            out[i * w.k + c] = round_to<T>(number);
        }
    }
}

}  // namespace hardpoint::HARDPOINT_LEVEL
