// Products with weights as GGUF stores them: whole-numbered elements in groups of 16 or 32 columns, each with a scale of
// one or two levels, and with or without a minimum: w = (code - zero) * scale + minimum. Activations are rounded to int8
// before, 32 columns with a scale of their own, as llama.cpp does.
//
// Within a group sums are exact whole numbers. With codes u >= 0, activations x = q * s, and S the sum of q over the group:
//     sum of w * x  =  s * (scale * (sum of u * q) + (minimum - zero * scale) * S)
// so that neither zero nor minimum costs anything for each element.
//
// Codes of a panel (see panels.h) come in words of four bytes for each row, 64 bytes for all 16: four columns as bytes,
// or eight as nibbles, of which byte b has column b low and column 4 + b high. Codes of six bits come 16 columns at a
// time: two words of nibbles, then one whose byte b has the upper two bits of columns b, 4 + b, 8 + b and 12 + b.
#pragma once

#include "../task.h"
#include "linear_int8.h"
#include "quantize.h"

namespace hardpoint::HARDPOINT_LEVEL {

constexpr int kBlockGroup = 32;  // columns of activations that share a scale
constexpr int kWordBytes = 4;

// Panels in a chunk: as many bytes as of int8 where codes are nibbles.
template <int largest>
constexpr std::int64_t kCodePanels = largest == 15 ? 4 * kTilePanels : kBytePanels;

// Rows of x that are multiplied together.
#if defined(__AVX2__)
constexpr int kCodeRows = 8;
#else
constexpr int kCodeRows = 4;
#endif

// Vectors of a panel's rows that are multiplied at once: few rows of x leave registers for all of them, and then the
// panel is read once, in order, as the memory gives it.
template <int rows>
constexpr int kPartsTogether = rows * kVectors <= 8 ? kVectors : 1;

// Of x, in a block; more are multiplied by tiles, where there are any.
constexpr int kMostCodeRows = 16;

// Columns that a step of a panel has, and its words for each row. `largest` is that of the codes: 15, 63 or 255.
template <int largest>
constexpr int kStepColumns = largest == 15 ? 8 : largest == 63 ? 16 : 4;
template <int largest>
constexpr int kStepWords = largest == 63 ? 3 : 1;
constexpr int kWordStride = kWordBytes * kPanelRows;  // from a word of a step to the next, of the same row
// Taken off codes before they are multiplied: bytes are multiplied as signed numbers where an instruction takes signs.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int largest>
constexpr int kCodeOffset = largest == 255 ? 128 : 0;
#else
template <int largest>
constexpr int kCodeOffset = 0;
#endif
template <int largest>
inline std::int64_t code_panel_size(std::int64_t k) {
    return k / kStepColumns<largest> * kStepWords<largest> * kWordStride;
}

// One operand of weights: see the top. Scales and minima [panels, columns / block, 16]; the inner ones are null where
// there is one level, whose block is `group` then, and minima where there are none.
struct BlockScales {
    const std::uint8_t* inner;
    const float16* outer;
    const std::uint8_t* inner_minima;
    const float16* outer_minima;
    std::int64_t k, group, outer_columns, zero, is_signed;

    // Those of one panel, whose groups are counted from 0: nothing is divided for each of them. A block is what an outer
    // scale is for, which is one group where there is one level.
    struct OfPanel {
        const std::uint8_t* inner;
        const float16* outer;
        const std::uint8_t* inner_minima;
        const float16* outer_minima;
        bool is_signed;
        float zero;

        // The scales of kLanes rows.
        struct Level {
            Floats outer, outer_minimum;
        };
        Level block(std::int64_t b, int j) const {
            const std::int64_t at = b * kPanelRows + j * kLanes;
            return {load(outer + at), outer_minima ? load(outer_minima + at) : Floats{}};
        }
        Floats scale(const Level& block, std::int64_t g, int j) const { return within(block.outer, inner, is_signed, g, j); }
        // The factor of a sum of activations, where `taken_off` is off the codes already.
        Floats offset(const Level& block, std::int64_t g, int j, Floats scale, int taken_off = 0) const {
            const Floats of_zero = scale * (static_cast<float>(taken_off) - zero);
            return outer_minima ? of_zero + within(block.outer_minimum, inner_minima, false, g, j) : of_zero;
        }

      private:
        static Floats within(Floats outer, const std::uint8_t* in, bool with_sign, std::int64_t g, int j) {
            if (!in) return outer;
            const std::uint8_t* from = in + g * kPanelRows + j * kLanes;
            if (with_sign) return outer * load(reinterpret_cast<const std::int8_t*>(from));
            return outer * __builtin_convertvector(bits_as<Ints>(widen(load_raw<Bytes>(from))), Floats);
        }
    };
    OfPanel panel(std::int64_t p) const {
        const std::int64_t narrow = p * (k / group) * kPanelRows, wide = p * (k / outer_columns) * kPanelRows;
        return {
            inner ? inner + narrow : nullptr,
            outer + wide,
            inner_minima ? inner_minima + narrow : nullptr,
            outer_minima ? outer_minima + wide : nullptr,
            is_signed != 0,
            static_cast<float>(zero),
        };
    }
    std::int64_t groups_in_block() const { return outer_columns / group; }

    // Those of the weight `count` weights of `panels` panels behind this one.
    BlockScales behind(std::int64_t count, std::int64_t panels) const {
        const std::int64_t narrow = count * panels * (k / group) * kPanelRows;
        const std::int64_t wide = count * panels * (k / outer_columns) * kPanelRows;
        BlockScales found = *this;
        found.inner = inner ? inner + narrow : nullptr;
        found.outer = outer + wide;
        found.inner_minima = inner_minima ? inner_minima + narrow : nullptr;
        found.outer_minima = outer_minima ? outer_minima + wide : nullptr;
        return found;
    }
};

// Rounded activations: codes [M, K], scales [M, K / 32], and sums times scale over each group of the weight's columns.
// For tiles there are the numbers that these mean as well, [M, K]; else null. A block's row i is theirs `places(i)`.
template <typename T>
struct BlockInput {
    const std::int8_t* codes;
    const float* scales;
    const float* sums;
    const T* numbers;
    Places places;
};

// Some rows of activations: where each begins.
template <int rows>
struct CodeRows {
    const std::int8_t* codes[rows];
    const float* scales[rows];
    const float* sums[rows];
};

// Two numbers of each lane as bfloat16, the first in the lower half.
inline Words rounded_pair(Floats first, Floats second) {
    const auto rounded = [](Floats v) {  // scales are finite, or nothing is right
        const auto bits = bits_as<Words>(v);
        return bits + 0x7fff + (bits >> 16 & 1);
    };
    return rounded(first) >> 16 | (rounded(second) & 0xffff0000u);
}

inline Words spread(const std::int8_t* four) { return Words{} + load_raw<std::uint32_t>(four); }

// Call f(std::integral_constant<int, i>, codes) for each four columns of a step, 4 * i and on, as bytes.
template <int largest, typename F>
[[gnu::always_inline]] inline void for_each_word(const std::uint8_t* step, F&& f) {
    if constexpr (largest == 255) {
        f(std::integral_constant<int, 0>{}, load_raw<Words>(step));
        return;
    }
    constexpr int count = kStepColumns<largest> / kWordBytes;
    Words nibbles, upper;
    if constexpr (largest == 63) upper = load_raw<Words>(step + 2 * kWordStride);
    unrolled<count>([&](auto i) __attribute__((always_inline)) {
        if constexpr (i % 2 == 0) nibbles = load_raw<Words>(step + i / 2 * kWordStride);
        Words codes = (i % 2 == 0 ? nibbles : nibbles >> 4) & 0x0f0f0f0fu;
        if constexpr (largest == 63) {  // to bits 4 and 5
            constexpr int left = i < 2 ? 4 - 2 * i : 0, right = i < 2 ? 0 : 2 * i - 4;
            codes |= upper << left >> right & 0x30303030u;
        }
        f(i, codes);
    });
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
typedef std::int16_t BlockShorts __attribute__((vector_size(HARDPOINT_VECTOR_BYTES)));

// Products of bytes, unsigned by signed, in pairs: of codes up to 63 they cannot overflow.
inline BlockShorts multiply_pairs(Words codes, Words x) {
#if defined(__AVX512BW__)
    return bits_as<BlockShorts>(_mm512_maddubs_epi16(bits_as<__m512i>(codes), bits_as<__m512i>(x)));
#else
    return bits_as<BlockShorts>(_mm256_maddubs_epi16(bits_as<__m256i>(codes), bits_as<__m256i>(x)));
#endif
}

inline Ints add_pairs(BlockShorts v) {
#if defined(__AVX512BW__)
    return bits_as<Ints>(_mm512_madd_epi16(bits_as<__m512i>(v), _mm512_set1_epi16(1)));
#else
    return bits_as<Ints>(_mm256_madd_epi16(bits_as<__m256i>(v), _mm256_set1_epi16(1)));
#endif
}

// Sums of products of the words of a group, `number` of them from 0 on, in 16 bits as long as these hold them.
template <int largest>
struct CodeSums {
    static constexpr int most = largest == 15 ? 8 : largest == 63 ? 2 : 1;  // products of a word that fit 16 bits
    Ints wide = {};
    BlockShorts narrow = {};

    template <int number>
    [[gnu::always_inline]] void add(Words codes, Words x) {
#if defined(__AVX512BW__)
        if constexpr (largest == 255) {
            wide = multiply_bytes(wide, codes, bits_as<Ints>(x));
            return;
        }
#else
        // Signed by signed: magnitudes of codes, up to 128, by x with the codes' signs.
        if constexpr (largest == 255) {
            x = bits_as<Words>(_mm256_sign_epi8(bits_as<__m256i>(x), bits_as<__m256i>(codes)));
            codes = bits_as<Words>(_mm256_abs_epi8(bits_as<__m256i>(codes)));
        }
#endif
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
            if constexpr (kCodeOffset<largest> != 0) words ^= 0x80808080u;
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
        multiply_rows(block, {x.codes, x.scales, x.sums, nullptr, x.places}, out);
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
                    const Floats offset = of_panel.offset(block[j], g, first + j, scale, kCodeOffset<largest>);
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
    static constexpr char signature[] = "pppppppppppiiiiiii";
    const std::int8_t* x_codes;
    const float *x_scales, *x_sums;
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
        for_each_block(Cut(m, n, kCodePanels<largest>), chunk, [&](const Block& block) {
            const BlockInput<T> x{x_codes, x_scales, x_sums, x_numbers, {}};
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

// x [M, K] -> codes int8 [M, K], scales float32 [M, K / 32], and sums times scale over `group` columns, [M, K / group];
// unless `numbers` is null, what codes and scales mean, [M, K].
template <typename T>
struct RoundBlocks {
    static constexpr char signature[] = "pppppiiii";
    const T* x;
    std::int8_t* codes;
    float *scales, *sums;
    T* numbers;
    std::int64_t m, k, group, x_stride;

    std::int64_t blocks() const { return k / kBlockGroup; }
    std::int64_t chunks() const { return ceil_div(m * blocks(), kElementsPerChunk / kBlockGroup); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, kElementsPerChunk / kBlockGroup, m * blocks());
        for (auto i = mine.first; i < mine.last; ++i) {
            std::int8_t* to = codes + i * kBlockGroup;
            quantize_row(x + i / blocks() * x_stride + i % blocks() * kBlockGroup, to, scales + i, kBlockGroup);
            for (std::int64_t first = 0; first < kBlockGroup; first += group) {
                int sum = 0;
                for (std::int64_t c = 0; c < group; ++c) sum += to[first + c];
                sums[(i * kBlockGroup + first) / group] = scales[i] * static_cast<float>(sum);
            }
            for (int c = 0; numbers && c < kBlockGroup; c += kLanes) {
                store(numbers + i * kBlockGroup + c, load(to + c) * scales[i]);
            }
        }
    }
};

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
