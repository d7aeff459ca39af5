// Products with a weight of 4-bit elements in groups of columns, each with a scale and, where it has them, zero points:
// w = (code - zero) * scale. Activations stay as they are.
//
// A panel (see panels.h) is cut into steps of 8 columns of its 16 rows, 64 bytes: 32 words, word 2 * row + j holding in
// its nibble i, low first, column 2 * i + j of the step. So a word shifted right by 4 * i is an index of four bits into
// a table of 32 words, and one permutation makes 16 pairs of bfloat16 out of 32 nibbles, as the dot product takes them.
// Signed elements are stored with 8 added; without zero points, 8 is the zero.
#pragma once

#include "../task.h"
#include "linear.h"
#include "scratch.h"

namespace hardpoint::HARDPOINT_LEVEL {

constexpr int kNibbleColumns = 8;  // in a step
constexpr int kStepBytes = kNibbleColumns * kPanelRows / 2;
constexpr int kNibbleZero = 8;
constexpr std::int64_t kNibblePanels = 4 * kTilePanels;  // as many bytes as of int8

// Nibbles are multiplied as they come for tiles of at most so many rows of x, one panel after the other, which the
// memory delivers fastest. For a block of more rows than kMostNibbleRows they become numbers in memory first.
constexpr int kNibbleRows = 8;
constexpr int kMostNibbleRows = 32;

inline std::int64_t nibble_panel_size(std::int64_t k) { return k / kNibbleColumns * 4 * kPanelRows; }  // bytes

// One group of one panel: its scales and zero points.
template <typename S>
struct NibbleGroup {
    const S* scales;            // [16]
    const std::uint8_t* zeros;  // [16], or null: all 8

    Floats scale(int j) const { return load(scales + j * kLanes); }
    Floats zero(int j) const {
        if (!zeros) return broadcast(kNibbleZero);
        return __builtin_convertvector(bits_as<Ints>(widen(load_raw<Bytes>(zeros + j * kLanes))), Floats);
    }
};

// A weight as PackInt4 leaves it: steps of all panels; scales S and zero points uint8, [panels, groups, 16] each.
template <typename S>
struct Nibbles {
    const std::uint8_t* steps;
    const S* scales;
    const std::uint8_t* zeros;
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
template <typename T, typename S>
void widen_nibbles(const Nibbles<S>& w, std::int64_t p, std::int64_t first, std::int64_t columns, T* to) {
    const std::uint8_t* panel = w.panel(p);
    for (std::int64_t c = first; c < first + columns; c += kNibbleColumns) {
        const NibbleGroup<S> group = w.of_group(p, c / w.group);
        const std::uint8_t* step = panel + c * kPanelRows / 2;
        Floats zeros[kVectors], scales[kVectors];
        for (int j = 0; j < kVectors; ++j) {
            zeros[j] = group.zero(j);
            scales[j] = group.scale(j);
        }
        // Pairs of words: the columns 2 * i (low half) and 2 * i + 1 (high half) of kLanes rows.
        for (int i = 0; i < kNibbleColumns / 2; ++i) {
            for (int j = 0; j < kVectors; ++j) {
                const auto words = load_raw<Words>(step + j * HARDPOINT_VECTOR_BYTES);
                const Ints even = bits_as<Ints>((words >> (4 * i)) & 0xf),
                           odd = bits_as<Ints>((words >> (16 + 4 * i)) & 0xf);
                const Floats a = (__builtin_convertvector(even, Floats) - zeros[j]) * scales[j];
                const Floats b = (__builtin_convertvector(odd, Floats) - zeros[j]) * scales[j];
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

// Each x[r] times `steps` steps of a panel, of codes less 8.
template <int rows, typename T>
inline void multiply_steps(
    Sums (&sums)[rows], const T* const (&x)[rows], const std::uint8_t* step, std::int64_t steps
) {
    Floats acc[rows][kVectors];
    for (int r = 0; r < rows; ++r) {
        for (int j = 0; j < kVectors; ++j) acc[r][j] = Floats{};
    }
    for (std::int64_t s = 0; s < steps; ++s, step += kStepBytes) {
        fetch<kFetchAheadInOrder>(step);
        for (int j = 0; j < kVectors; ++j) {
            auto words = load_raw<Words>(step + j * HARDPOINT_VECTOR_BYTES);
            for (int i = 0; i < kNibbleColumns / 2; ++i) {
                const Floats even = __builtin_convertvector(bits_as<Ints>(words & 0xf) - kNibbleZero, Floats);
                const Floats odd = __builtin_convertvector(bits_as<Ints>(words >> 16 & 0xf) - kNibbleZero, Floats);
                for (int r = 0; r < rows; ++r) {
                    const T* pair = x[r] + s * kNibbleColumns + 2 * i;
                    acc[r][j] += even * to_float(pair[0]);
                    acc[r][j] += odd * to_float(pair[1]);
                }
                words >>= 4;
            }
        }
    }
    for (int r = 0; r < rows; ++r) {
        for (int j = 0; j < kVectors; ++j) sums[r].v[j] = acc[r][j];
    }
}

#if defined(__AVX512BF16__)
// A sum waits for its last product, so each row of x has several, `chains`: those of one step, of two or of a half.
template <int rows, int chains>
inline void multiply_in_chains(
    Sums (&sums)[rows], const bfloat16* const (&x)[rows], const std::uint8_t* step, std::int64_t steps
) {
    // (code - 8) as bfloat16, twice, since the index has a fifth bit, the next nibble's lowest.
    alignas(64) static constexpr std::uint16_t table[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000,
                                                            0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                                            0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080,
                                                            0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040,
                                                            0x4080, 0x40a0, 0x40c0, 0x40e0};
    const auto numbers = load_raw<__m512i>(table);
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

template <int rows>
inline void multiply_steps(
    Sums (&sums)[rows], const bfloat16* const (&x)[rows], const std::uint8_t* step, std::int64_t steps
) {
    if (rows == 1 && steps % 2 == 0) return multiply_in_chains<rows, kNibbleColumns>(sums, x, step, steps);
    constexpr int most = kNibbleColumns / 2;
    return multiply_in_chains<rows, rows <= 4 ? most : most / 2>(sums, x, step, steps);
}
#endif

// A weight [N, K] of nibbles; see LinearInt4 for `alike`.
template <typename T, typename S>
struct NibbleWeight {
    using Input = T;
    Nibbles<S> w;
    std::int64_t n;
    bool alike;

    template <typename Row, typename Finish>
    void multiply(const Block& block, const Row& row, const Finish& finish) const {
        if (block.rows <= kMostNibbleRows && !alike) {
            const std::int64_t tiles = ceil_div(block.rows, kNibbleRows);
            for (std::int64_t i = 0; i < tiles; ++i) {
                const std::int64_t first = block.rows * i / tiles, count = block.rows * (i + 1) / tiles - first;
                const Block tile{block.first_row + first, count, block.first_panel, block.panels};
                with_constant<kNibbleRows>(count, [&](auto rows) {
                    multiply_few<decltype(rows)::value>(tile, row, finish);
                });
            }
            return;
        }
        const std::int64_t step = std::min(w.k, kBlockColumns), stride = step * kPanelRows;
        T* wide = scratch<T>(block.panels * stride);
        const auto give = [&](std::int64_t first, std::int64_t columns) {
            for (std::int64_t p = 0; p < block.panels; ++p) {
                widen_nibbles(w, block.first_panel + p, first, columns, wide + p * stride);
            }
            return Panels<T>{wide, stride};
        };
        multiply_block<T>(block, w.k, step, alike, give, row, finish);
    }

  private:
    template <int rows, typename Row, typename Finish>
    void multiply_few(const Block& block, const Row& row, const Finish& finish) const {
        const T* x[rows];
        for (int r = 0; r < rows; ++r) x[r] = row(block.first_row + r);
        const float* x_sums = w.zeros ? sums_of_groups(x) : nullptr;
        for (std::int64_t p = block.first_panel; p < block.first_panel + block.panels; ++p) {
            multiply_panel<rows>(block.first_row, p, x, x_sums, finish);
        }
    }

    // `x_sums` are those of x's rows over each group of columns, null where all zero points are 8.
    template <int rows, typename Finish>
    void multiply_panel(
        std::int64_t first_row, std::int64_t panel, const T* const (&x)[rows], const float* x_sums, const Finish& finish
    ) const {
        const std::int64_t groups = w.k / w.group, steps = w.group / kNibbleColumns;
        Sums sums[rows];
        for (int r = 0; r < rows; ++r) sums[r] = Sums{};
        for (std::int64_t g = 0; g < groups; ++g) {
            const T* from[rows];
            for (int r = 0; r < rows; ++r) from[r] = x[r] + g * w.group;
            Sums products[rows];
            multiply_steps<rows>(products, from, w.panel(panel) + g * steps * kStepBytes, steps);
            const NibbleGroup<S> group = w.of_group(panel, g);
            for (int j = 0; j < kVectors; ++j) {
                const Floats scale = group.scale(j);
                if (x_sums) {
                    const Floats shift = static_cast<float>(kNibbleZero) - group.zero(j);
                    for (int r = 0; r < rows; ++r) products[r].v[j] += shift * x_sums[r * groups + g];
                }
                for (int r = 0; r < rows; ++r) sums[r].v[j] += scale * products[r].v[j];
            }
        }
        for (int r = 0; r < rows; ++r) finish(first_row + r, sums[r], panel * kPanelRows);
    }

    // The sums of x's rows over each group of columns, [rows, groups].
    template <int rows>
    const float* sums_of_groups(const T* const (&x)[rows]) const {
        const std::int64_t groups = w.k / w.group;
        float* sums = scratch<float>(rows * groups);
        for (int r = 0; r < rows; ++r) {
            for (std::int64_t g = 0; g < groups; ++g) sums[r * groups + g] = sum_of(x[r] + g * w.group, w.group);
        }
        return sums;
    }

    static float sum_of(const T* x, std::int64_t count) {
        Floats sums = {};
        std::int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) sums += load(x + i);
        float rest = 0;
        for (; i < count; ++i) rest += to_float(x[i]);
        return sum(sums) + rest;
    }
};

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
        const auto row = [&](std::int64_t i) { return x + i * x_stride; };
        const auto finish = [&](std::int64_t i, const Sums& sums, std::int64_t column) {
            store_results(out + i * n + column, sums, bias ? bias + column : nullptr, n - column);
        };
        for_each_block(Cut(m, n, kNibblePanels), chunk, [&](const Block& block) {
            NibbleWeight<T, S>{{steps, scales, zeros, k, group}, n, alike != 0}.multiply(block, row, finish);
        });
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
        const Nibbles<S> w{steps, scales, zeros, k, group};
        const Rows mine(chunk, rows_per_chunk(k), count);
        for (auto i = mine.first; i < mine.last; ++i) {
            const std::int64_t row = ids ? ids[i] : i, panel = row / kPanelRows;
            const int within = static_cast<int>(row % kPanelRows);
            for (std::int64_t c = 0; c < k; ++c) {
                const NibbleGroup<S> g = w.of_group(panel, c / group);
                const int zero = g.zeros ? g.zeros[within] : kNibbleZero;
                const auto code = static_cast<float>(nibble(w.panel(panel), within, c) - zero);
                out[i * k + c] = round_to<T>(code * to_float(g.scales[within]));
            }
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
