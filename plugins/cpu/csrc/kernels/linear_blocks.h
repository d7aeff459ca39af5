// Products with weights as GGUF stores them: whole-numbered elements in groups of 16 or 32 columns, each with a scale of
// one or two levels, and with or without a minimum: w = (code - zero) * scale + minimum. Activations are rounded to int8
// before, 32 columns with a scale of their own, as llama.cpp does.
//
// Within a group sums are exact whole numbers. With codes u >= 0, activations x = q * s, and S the sum of q over the group:
//     sum of w * x  =  s * (scale * (sum of u * q) + (minimum - zero * scale) * S)
// so that neither zero nor minimum costs anything for each element.
#pragma once

#include "../task.h"
#include "block_weights.h"
#include "pair_products.h"

namespace hardpoint::HARDPOINT_LEVEL {

// Two numbers of each lane as bfloat16, the first in the lower half.
inline Words rounded_pair(Floats first, Floats second) {
    const auto rounded = [](Floats v) {  // scales are finite, or nothing is right
        const auto bits = bits_as<Words>(v);
        return bits + 0x7fff + (bits >> 16 & 1);
    };
    return rounded(first) >> 16 | (rounded(second) & 0xffff0000u);
}

inline Words spread(const std::int8_t* four) { return Words{} + load_raw<std::uint32_t>(four); }

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
typedef std::int16_t BlockShorts __attribute__((vector_size(HARDPOINT_VECTOR_BYTES)));

// Products of bytes, unsigned by signed, in pairs: of codes up to 63 they cannot overflow.
inline BlockShorts multiply_pairs(Words codes, Words x) {
    return bits_as<BlockShorts>(_mm512_maddubs_epi16(bits_as<__m512i>(codes), bits_as<__m512i>(x)));
}

inline Ints add_pairs(BlockShorts v) {
    return bits_as<Ints>(_mm512_madd_epi16(bits_as<__m512i>(v), _mm512_set1_epi16(1)));
}

// Sums of products of the words of a group, `number` of them from 0 on, in 16 bits as long as these hold them.
template <int largest>
struct CodeSums {
    static constexpr int most = largest == 15 ? 8 : largest == 63 ? 2 : 1;  // products of a word that fit 16 bits
    Ints wide = {};
    BlockShorts narrow = {};

    template <int number>
    [[gnu::always_inline]] void add(Words codes, Words x) {
        if constexpr (largest == 255) {
            wide = multiply_bytes(wide, codes, bits_as<Ints>(x));
            return;
        }
        const BlockShorts products = multiply_pairs(codes, x);
        narrow = number % most ? narrow + products : products;
        // Sums in this order: GCC would put them off, and write the products of all rows to memory meanwhile.
        asm("" : "+x"(narrow));
        if constexpr (number % most == most - 1) wide = number < most ? add_pairs(narrow) : wide + add_pairs(narrow);
    }
    template <int count>
    [[gnu::always_inline]] Ints total() const {
        if constexpr (most == 1 || count % most == 0) return wide;
        return count < most ? add_pairs(narrow) : wide + add_pairs(narrow);
    }
};
#else
template <int largest>
struct CodeSums {
    Ints wide = {};
    template <int number>
    [[gnu::always_inline]] void add(Words codes, Words x) {
        wide = multiply_bytes(wide, codes, bits_as<Ints>(x));
    }
    template <int count>
    [[gnu::always_inline]] Ints total() const {
        return wide;
    }
};
#endif

// Columns [first, first + columns) of one panel as numbers of bfloat16, in its panel layout; whole groups.
template <int largest>
inline void widen_codes(
    const std::uint8_t* panel, const BlockScales& scales, std::int64_t p, std::int64_t first, std::int64_t columns,
    bfloat16* to
) {
    constexpr int step = kStepColumns<largest>;
    const BlockScales::OfPanel of_panel = scales.panel(p);
    for (std::int64_t c = first; c < first + columns; c += scales.group) {
        const std::int64_t g = c / scales.group, b = c / scales.outer_columns;
        for (int j = 0; j < kVectors; ++j) {
            const auto block = of_panel.block(b, j);
            const Floats scale = of_panel.scale(block, g, j), offset = of_panel.offset(block, g, j, scale);
            for (std::int64_t s = 0; s < scales.group / step; ++s) {
                const std::int64_t at = (c / step + s) * kStepWords<largest> * kWordStride;
                bfloat16* pairs = to + (c - first + s * step) * kPanelRows + j * 2 * kLanes;
                for_each_word<largest>(panel + at + j * HARDPOINT_VECTOR_BYTES, [&](auto i, Words words) {
                    const auto number = [&](int column) {
                        const auto codes = bits_as<Ints>(words >> (8 * column) & 0xff);
                        return __builtin_convertvector(codes, Floats) * scale + offset;
                    };
                    for (int column = 0; column < kWordBytes; column += 2) {
                        const Words both = rounded_pair(number(column), number(column + 1));
                        std::memcpy(pairs + (i * kWordBytes + column) * kPanelRows, &both, sizeof(both));
                    }
                });
            }
        }
    }
}

// x[r] times one group of columns of a part of a panel, kLanes rows: whole numbers.
template <int largest, int group, int rows>
[[gnu::always_inline]] inline void multiply_codes(
    Ints (&totals)[rows], const std::int8_t* const (&x)[rows], const std::uint8_t* step
) {
    constexpr int columns = kStepColumns<largest>;
    CodeSums<largest> sums[rows];
    unrolled<group / columns>([&](auto s) __attribute__((always_inline)) {
        const std::uint8_t* words_of_step = step + s * kStepWords<largest> * kWordStride;
        for_each_word<largest>(words_of_step, [&](auto i, Words words) __attribute__((always_inline)) {
            constexpr int word = s * columns / kWordBytes + i;
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                sums[r].template add<word>(words, spread(x[r] + word * kWordBytes));
            });
        });
    });
    unrolled<rows>([&](auto r) __attribute__((always_inline)) {
        totals[r] = sums[r].template total<group / kWordBytes>();
    });
}

template <int largest>
struct CodeWeight {
    const std::uint8_t* codes;
    BlockScales scales;

    // A row's bits depend on how many rows there are only where x has numbers, which tiles multiply in blocks of more rows
    // than vector registers are as fast for.
    template <typename T>
    void multiply(const Block& block, const BlockInput<T>& x, const Output& out) const {
        if constexpr (std::is_same_v<T, bfloat16>) {
            if (x.numbers && block.rows > kMostCodeRows) return multiply_numbers(block, x, out);
        }
        const Rounded rounded{x.codes, x.scales, x.sums, x.starts, nullptr, x.places};
        if constexpr (kPairProducts) {
            PairWeight<largest>{codes, scales}.multiply(block, rounded, out);
        } else {
            multiply_rows(block, rounded, out);
        }
    }

  private:
    using Rounded = BlockInput<void>;  // without numbers: products are compiled once for whatever elements x has

    [[gnu::noinline]] void multiply_rows(const Block& block, const Rounded& x, const Output& out) const {
        const std::int64_t tiles = ceil_div(block.rows, kCodeRows), first_column = block.first_panel * kPanelRows;
        alignas(64) Sums results[kCodeRows][kTilePanels];  // of all panels where there is one tile of rows, else of one
        for (std::int64_t p = 0; p < block.panels; ++p) {
            for (std::int64_t i = 0; i < tiles; ++i) {
                const std::int64_t first = block.rows * i / tiles, count = block.rows * (i + 1) / tiles - first;
                Sums* sums = &results[0][tiles == 1 ? p : 0];
                with_constant<kCodeRows>(count, [&](auto rows) {
                    if (scales.group == kBlockGroup) {
                        multiply_panel<kBlockGroup, rows>(sums, block.first_row + first, block.first_panel + p, x);
                    } else {
                        multiply_panel<kBlockGroup / 2, rows>(sums, block.first_row + first, block.first_panel + p, x);
                    }
                });
                if (tiles == 1) continue;
                out.write(block.first_row + first, count, first_column + p * kPanelRows, 1, sums, kTilePanels);
            }
        }
        if (tiles == 1) out.write(block.first_row, block.rows, first_column, block.panels, results[0], kTilePanels);
    }

    // The weight becomes bfloat16, once for a block of rows.
    [[gnu::noinline]] void multiply_numbers(
        const Block& block, const BlockInput<bfloat16>& x, const Output& out
    ) const {
        const std::int64_t k = scales.k, step = std::min(k, kBlockColumns<bfloat16>), stride = step * kPanelRows;
        bfloat16* wide = scratch<bfloat16>(block.panels * stride);
        const auto give = [&](std::int64_t first, std::int64_t columns) {
            for (std::int64_t p = block.first_panel; p < block.first_panel + block.panels; ++p) {
                const std::uint8_t* panel = codes + p * code_panel_size<largest>(k);
                widen_codes<largest>(panel, scales, p, first, columns, wide + (p - block.first_panel) * stride);
            }
            return Panels<bfloat16>{wide, stride};
        };
        multiply_block<bfloat16, bfloat16>(
            block, k, step, false, PanelSource<bfloat16>(give), {x.numbers, k, x.places}, out
        );
    }

    template <int group, int rows>
    void multiply_panel(Sums* results, std::int64_t first_row, std::int64_t p, const Rounded& x) const {
        const std::int64_t k = scales.k;
        CodeRows<rows> of_x;
        for (int r = 0; r < rows; ++r) {
            const std::int64_t row = x.places(first_row + r);
            of_x.codes[r] = x.codes + row * k;
            of_x.scales[r] = x.scales + row * (k / kBlockGroup);
            of_x.sums[r] = x.sums + row * (k / group);
        }
        Sums sums[rows];
        constexpr int together = kPartsTogether<rows>;
        for (int j = 0; j < kVectors; j += together) multiply_parts<group, rows, together>(sums, p, j, of_x);
        for (int r = 0; r < rows; ++r) {
            for (int j = 0; j < kVectors; ++j) results[r * kTilePanels].v[j] = sums[r].v[j];
        }
    }

    // `parts` times kLanes rows of a panel from `first_part` on, so that all sums stay in registers.
    template <int group, int rows, int parts>
    [[gnu::noinline]] void multiply_parts(
        Sums (&results)[rows], std::int64_t p, int first_part, const CodeRows<rows>& x
    ) const {
        // A constant makes one row 4 % faster; GCC 12 allots registers to more rows worse with it (3 %; Zen 5).
        const int first = parts == kVectors && rows == 1 ? 0 : first_part;
        constexpr std::int64_t step = group / kStepColumns<largest> * kStepWords<largest> * kWordStride;
        const std::int64_t k = scales.k, groups_in_block = scales.groups_in_block(), groups = k / group;
        const BlockScales::OfPanel of_panel = scales.panel(p);
        const std::uint8_t* panel = codes + p * code_panel_size<largest>(k) + first * HARDPOINT_VECTOR_BYTES;
        const std::int8_t* from[rows];
        Floats sums[parts][rows];
        unrolled<rows>([&](auto r) __attribute__((always_inline)) {
            from[r] = x.codes[r];
            unrolled<parts>([&](auto j) __attribute__((always_inline)) { sums[j][r] = Floats{}; });
        });
        for (std::int64_t b = 0, g = 0; g < groups; ++b) {
            BlockScales::OfPanel::Level block[parts];
            unrolled<parts>([&](auto j) __attribute__((always_inline)) { block[j] = of_panel.block(b, first + j); });
            for (const std::int64_t end = g + groups_in_block; g < end; ++g, panel += step) {
                if (first == 0) {
                    for (std::int64_t at = 0; at < step; at += 64) fetch<kFetchAheadInOrder>(panel + at);
                }
                unrolled<parts>([&](auto j) __attribute__((always_inline)) {
                    Ints totals[rows];
                    multiply_codes<largest, group, rows>(totals, from, panel + j * HARDPOINT_VECTOR_BYTES);
                    const Floats scale = of_panel.scale(block[j], g, first + j);
                    const Floats offset = of_panel.offset(block[j], g, first + j, scale);
                    unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                        const float x_scale = x.scales[r][g * group / kBlockGroup];
                        sums[j][r] += scale * x_scale * __builtin_convertvector(totals[r], Floats);
                        sums[j][r] += offset * x.sums[r][g];
                    });
                });
                unrolled<rows>([&](auto r) __attribute__((always_inline)) { from[r] += group; });
            }
        }
        unrolled<rows>([&](auto r) __attribute__((always_inline)) {
            unrolled<parts>([&](auto j) __attribute__((always_inline)) { results[r].v[first + j] = sums[j][r]; });
        });
    }
};

// out [M, N] = x [M, K] @ w.T + bias; x as RoundBlocks leaves it, of the same `group`.
template <typename T, int largest>
struct LinearBlocks {
    static constexpr char signature[] = "ppppppppppppiiiiiii";
    const std::int8_t* x_codes;
    const float *x_scales, *x_sums;
    const std::int32_t* x_starts;
    const T* x_numbers;
    const std::uint8_t* codes;
    const std::uint8_t* inner;
    const float16* outer;
    const std::uint8_t* inner_minima;
    const float16* outer_minima;
    const T* bias;
    T* out;
    std::int64_t m, n, k, group, outer_columns, zero, is_signed;

    std::int64_t chunks() const { return Cut(m, n, kCodePanels<largest>).chunks(); }
    void run(std::int64_t chunk) const {
        const BlockScales scales{inner, outer, inner_minima, outer_minima, k, group, outer_columns, zero, is_signed};
        for_each_block<kCodeBlock<largest>>(Cut(m, n, kCodePanels<largest>), chunk, [&](const Block& block) {
            const BlockInput<T> x{x_codes, x_scales, x_sums, x_starts, x_numbers, {}};
            CodeWeight<largest>{codes, scales}.multiply(block, x, Output::of(out, bias, n));
        });
    }
};

template <typename T>
struct LinearNibbleBlocks : LinearBlocks<T, 15> {};
template <typename T>
struct LinearSixBitBlocks : LinearBlocks<T, 63> {};
template <typename T>
struct LinearByteBlocks : LinearBlocks<T, 255> {};

// Elements [N, K / 2], two nibbles a byte, the low one first, or [N, K] -> words; `flip` is added to each (to nibbles by
// exclusive or), which makes codes of signed elements.
template <int largest>
struct PackBlocks {
    static constexpr char signature[] = "ppiiii";
    const std::uint8_t* weight;
    std::uint8_t* packed;
    std::int64_t n, k, stride, flip;

    std::int64_t chunks() const { return num_panels(n); }
    void run(std::int64_t panel) const {
        constexpr int columns = kStepColumns<largest>;
        for (int row = 0; row < kPanelRows; ++row) {
            const std::int64_t r = panel * kPanelRows + row;
            std::uint8_t* to = packed + panel * code_panel_size<largest>(k) + kWordBytes * row;
            for (std::int64_t c = 0; c < k; c += columns) {
                std::uint8_t words[kStepWords<largest>][kWordBytes] = {};
                for (int i = 0; r < n && i < columns; ++i) {
                    const int code = element(r, c + i), byte = i % kWordBytes, word = i / kWordBytes;
                    if constexpr (largest == 63) {
                        words[word / 2][byte] |= static_cast<std::uint8_t>((code & 0xf) << (word % 2 * 4));
                        words[2][byte] |= static_cast<std::uint8_t>(code >> 4 << (word * 2));
                    } else {
                        words[0][byte] |= static_cast<std::uint8_t>(code << (word * 4));
                    }
                }
                for (int word = 0; word < kStepWords<largest>; ++word, to += kWordStride) {
                    std::memcpy(to, words[word], kWordBytes);
                }
            }
        }
    }

  private:
    std::uint8_t element(std::int64_t row, std::int64_t column) const {
        if constexpr (largest != 15) return static_cast<std::uint8_t>(weight[row * stride + column] + flip);
        const std::int64_t mask = flip ? 2 * flip - 1 : 0xf;
        return static_cast<std::uint8_t>((weight[row * stride + column / 2] >> (column % 2 * 4) ^ flip) & mask);
    }
};

// out [count, K]: rows `ids` (int64; all in order where it is null) as numbers.
template <typename T, int largest>
struct UnpackBlocks {
    static constexpr char signature[] = "pppppppiiiiii";
    const std::uint8_t* codes;
    const std::uint8_t* inner;
    const float16* outer;
    const std::uint8_t* inner_minima;
    const float16* outer_minima;
    const std::int64_t* ids;
    T* out;
    std::int64_t count, k, group, outer_columns, zero, is_signed;

    std::int64_t chunks() const { return ceil_div(count, rows_per_chunk(k)); }
    void run(std::int64_t chunk) const {
        const BlockScales scales{inner, outer, inner_minima, outer_minima, k, group, outer_columns, 0, is_signed};
        const Rows mine(chunk, rows_per_chunk(k), count);
        for (auto i = mine.first; i < mine.last; ++i) {
            const std::int64_t row = ids ? ids[i] : i, panel = row / kPanelRows;
            const BlockScales::OfPanel of_panel = scales.panel(panel);
            const int within = static_cast<int>(row % kPanelRows), j = within / kLanes, lane = within % kLanes;
            for (std::int64_t g = 0; g < k / group; ++g) {
                const auto block = of_panel.block(g * group / outer_columns, j);
                const Floats each = of_panel.scale(block, g, j);
                const float scale = each[lane], minimum = of_panel.offset(block, g, j, each)[lane];
                for (std::int64_t c = g * group; c < (g + 1) * group; ++c) {
                    const int number = code(panel, within, c) - static_cast<int>(zero);
                    out[i * k + c] = round_to<T>(static_cast<float>(number) * scale + minimum);
                }
            }
        }
    }

  private:
    int code(std::int64_t panel, int row, std::int64_t column) const {
        constexpr int columns = kStepColumns<largest>;
        const int i = static_cast<int>(column % columns), word = i / kWordBytes;
        const std::uint8_t* step = codes + panel * code_panel_size<largest>(k) + row * kWordBytes + i % kWordBytes +
                                   column / columns * kStepWords<largest> * kWordStride;
        if constexpr (largest == 255) return *step;
        const int low = step[word / 2 * kWordStride] >> (word % 2 * 4) & 0xf;
        return largest == 15 ? low : low | (step[2 * kWordStride] >> (word * 2) & 3) << 4;
    }
};

template <typename T>
struct UnpackNibbleBlocks : UnpackBlocks<T, 15> {};
template <typename T>
struct UnpackSixBitBlocks : UnpackBlocks<T, 63> {};
template <typename T>
struct UnpackByteBlocks : UnpackBlocks<T, 255> {};

}  // namespace hardpoint::HARDPOINT_LEVEL
