// Products with GGUF's codes where bytes are multiplied in pairs, to sums of 16 bits: AVX2.
//
// Sums of a span of columns stay exact in 16 bits, so that they are widened once, by the multiplication with the group's
// inner scale, a whole number as well. Numbers of 16 bits hold them as follows, since activations are within 127:
//     codes up to 15    32 columns, of which each number has 16: 16 * 15 * 127 = 30,480
//     codes up to 63    16 columns, 32 taken off each code: 8 * 32 * 127 = 32,512
// That taken off is the starting value of a sum: minus `center` times the activations' sum. Sums may pass 16 bits on the
// way, as they wrap, but products of two bytes, up to 2 * 63 * 127, must not. Bytes are multiplied signed by signed, as
// magnitudes by activations with the codes' signs, and each product is widened.
//
// Several tiles of rows of x read codes that are unpacked once.
#pragma once

#include "block_weights.h"
#include "scratch.h"

namespace hardpoint::HARDPOINT_LEVEL {

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kPairProducts = true;
typedef std::int16_t Shorts16 __attribute__((vector_size(32)));

inline Shorts16 multiply_pairs(Words codes, Words x) {
    return bits_as<Shorts16>(_mm256_maddubs_epi16(bits_as<__m256i>(codes), bits_as<__m256i>(x)));
}

inline Ints add_pairs(Shorts16 v, Shorts16 times) {
    return bits_as<Ints>(_mm256_madd_epi16(bits_as<__m256i>(v), bits_as<__m256i>(times)));
}

inline Words magnitudes(Words v) { return bits_as<Words>(_mm256_abs_epi8(bits_as<__m256i>(v))); }

constexpr int kWidth = 8;
constexpr int kPairPanels = 4 * kTilePanels;  // of a block, at most: for each block rows of x are laid beside each other

// Taken off codes of six bits that have no zero of their own.
constexpr std::int64_t kSixBitCenter = 32;

// The inner scales of kLanes rows, each twice.
[[gnu::always_inline]] inline __m256i scale_pairs(const std::uint8_t* inner, bool is_signed) {
    const auto eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(inner));
    const auto pairs = _mm_unpacklo_epi8(eight, eight);
    return is_signed ? _mm256_cvtepi8_epi16(pairs) : _mm256_cvtepu8_epi16(pairs);
}

// Rows of activations beside each other, kWidth of them, or one row as it lies: number i of row r at [i * width + r]. All
// of a tile's addresses are then constants apart.
struct CodeTile {
    const std::uint32_t* words;  // four codes each
    const float* scales;
    const std::int32_t* starts;
    const float* sums;
};

// Numbers of 32 bits of `rows` rows, `stride` apart, beside each other.
inline void put_beside(const std::uint32_t* const* from, std::int64_t n, std::uint32_t* to) {
    static_assert(kLanes == 8 && kWidth == 8 && kCodeRows == kWidth);
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        __m256 v[8], pairs[8], fours[8];
        for (int r = 0; r < 8; ++r) v[r] = load_raw<__m256>(from[r] + i);
        for (int r = 0; r < 8; r += 2) {
            pairs[r] = _mm256_unpacklo_ps(v[r], v[r + 1]);
            pairs[r + 1] = _mm256_unpackhi_ps(v[r], v[r + 1]);
        }
        for (int r = 0; r < 8; r += 4) {
            fours[r] = _mm256_shuffle_ps(pairs[r], pairs[r + 2], 0x44);
            fours[r + 1] = _mm256_shuffle_ps(pairs[r], pairs[r + 2], 0xee);
            fours[r + 2] = _mm256_shuffle_ps(pairs[r + 1], pairs[r + 3], 0x44);
            fours[r + 3] = _mm256_shuffle_ps(pairs[r + 1], pairs[r + 3], 0xee);
        }
        for (int c = 0; c < 4; ++c) {
            const auto low = _mm256_permute2f128_ps(fours[c], fours[c + 4], 0x20);
            const auto high = _mm256_permute2f128_ps(fours[c], fours[c + 4], 0x31);
            std::memcpy(to + (i + c) * 8, &low, sizeof(low));
            std::memcpy(to + (i + c + 4) * 8, &high, sizeof(high));
        }
    }
    for (; i < n; ++i) {
        for (int r = 0; r < 8; ++r) to[i * 8 + r] = from[r][i];
    }
}

// How a weight is multiplied: in spans of columns, each a group's or a part of it; from starting values or from zero;
// with scales of two levels or one; bytes with signs.
template <int group_columns, int span_columns, bool starts, bool levels, bool bytes = false>
struct PairManner {
    static constexpr int group = group_columns, span = span_columns;
    static constexpr bool with_starts = starts, two_levels = levels, with_signs = bytes;
};

// Where codes come from, 32 columns after the other: a panel as it is packed,
template <int largest>
struct PackedCodes {
    static constexpr int step = kStepColumns<largest> / kWordBytes;
    static constexpr std::int64_t size = kBlockGroup / kStepColumns<largest> * kStepWords<largest> * kWordStride;
    const std::uint8_t* at;

    template <int word>
    [[gnu::always_inline]] void read(int part, Words& codes, Words& magnitude) const {
        const std::uint8_t* from = at + word / step * kStepWords<largest> * kWordStride;
        codes = word_of_step<largest, word % step>(from + part * HARDPOINT_VECTOR_BYTES);
        if constexpr (largest == 255) magnitude = magnitudes(codes ^= 0x80808080u);
    }
    void next() {
        for (std::int64_t i = 0; i < size; i += 64) fetch<kFetchAheadInOrder>(at + i);
        at += size;
    }
};

// or bytes for several tiles of rows: parts of a panel one after the other, with signs each word before its magnitudes.
template <bool with_signs>
struct UnpackedCodes {
    static constexpr std::int64_t stride = with_signs ? 2 * HARDPOINT_VECTOR_BYTES : HARDPOINT_VECTOR_BYTES;
    const std::uint8_t* at;
    std::int64_t part_size;

    template <int word>
    [[gnu::always_inline]] void read(int part, Words& codes, Words& magnitude) const {
        const std::uint8_t* from = at + part * part_size + word * stride;
        codes = load_raw<Words>(from);
        if constexpr (with_signs) magnitude = load_raw<Words>(from + HARDPOINT_VECTOR_BYTES);
    }
    void next() { at += kBlockGroup / kWordBytes * stride; }
};

template <int largest>
void unpack_codes(PackedCodes<largest> from, std::int64_t k, std::uint8_t* to, std::int64_t part_size) {
    constexpr std::int64_t stride = UnpackedCodes<largest == 255>::stride;
    for (std::int64_t c = 0; c < k; c += kBlockGroup, to += kBlockGroup / kWordBytes * stride) {
        unrolled<kBlockGroup / kWordBytes * kVectors>([&](auto i) __attribute__((always_inline)) {
            constexpr int word = i / kVectors, part = i % kVectors;
            Words codes, magnitude;
            from.template read<word>(part, codes, magnitude);
            std::memcpy(to + part * part_size + word * stride, &codes, sizeof(codes));
            if constexpr (largest == 255) {
                constexpr std::int64_t behind = word * stride + HARDPOINT_VECTOR_BYTES;
                std::memcpy(to + part * part_size + behind, &magnitude, sizeof(magnitude));
            }
        });
        from.next();
    }
}

// The scales of one panel, and the factors of its groups' sums of activations, [groups, 16]: null where there are none, or
// where they are no more than two levels of minima, and one row of x reads these as it goes.
struct PairScales {
    BlockScales::OfPanel of_panel;
    const float* offsets;
    std::int64_t k, blocks, units;  // columns, outer scales, and 32 columns in each of these
};

// Products of `rows` rows of x, `width` beside each other, with `parts` times kLanes rows of a panel from `first` on.
template <typename Manner, int rows, int width, int parts>
struct PairTile {
    static constexpr int group = Manner::group, span = Manner::span;
    static constexpr int count = rows * parts;
    const PairScales& scales;
    int first;

    template <typename Codes>
    [[gnu::noinline]] void multiply(Sums* results, Codes codes, CodeTile x) const {
        const BlockScales::OfPanel& of_panel = scales.of_panel;
        Floats sums[parts][rows];
        unrolled<count>([&](auto i) __attribute__((always_inline)) { sums[i / rows][i % rows] = Floats{}; });
        if (scales.offsets) {
            const float* offsets = scales.offsets + first * kLanes;
            for (std::int64_t g = 0; g < scales.k / group; ++g, offsets += kPanelRows, x.sums += width) {
                unrolled<count>([&](auto i) __attribute__((always_inline)) {
                    sums[i / rows][i % rows] += load(offsets + i / rows * kLanes) * x.sums[i % rows];
                });
            }
        } else if constexpr (Manner::two_levels && rows == 1) {
            if (of_panel.outer_minima) add_minima(sums, x);
        }
        const auto next = [&] {
            codes.next();
            x.words += kBlockGroup / kWordBytes * width;
            x.starts += kBlockGroup / span * width;
            x.scales += width;
        };
        const auto outer = [&](std::int64_t b, int j) {
            return load(of_panel.outer + b * kPanelRows + (first + j) * kLanes);
        };
        Ints totals[parts][rows];
        if constexpr (Manner::two_levels) {
            const std::uint8_t* inner = of_panel.inner + first * kLanes;
            for (std::int64_t b = 0; b < scales.blocks; ++b) {
                Floats scaled[parts][rows];
                unrolled<count>([&](auto i) __attribute__((always_inline)) { scaled[i / rows][i % rows] = Floats{}; });
                for (std::int64_t unit = 0; unit < scales.units; ++unit) {
                    multiply_columns(totals, codes, x, [&](auto s, auto j) __attribute__((always_inline)) {
                        constexpr int g = s * span / group;
                        return bits_as<Shorts16>(scale_pairs(inner + g * kPanelRows + j * kLanes, of_panel.is_signed));
                    });
                    inner += kBlockGroup / group * kPanelRows;
                    unrolled<count>([&](auto i) __attribute__((always_inline)) {
                        constexpr int j = i / rows, r = i % rows;
                        scaled[j][r] += __builtin_convertvector(totals[j][r], Floats) * x.scales[r];
                    });
                    next();
                }
                unrolled<count>([&](auto i) __attribute__((always_inline)) {
                    sums[i / rows][i % rows] += outer(b, i / rows) * scaled[i / rows][i % rows];
                });
            }
        } else {
            const Shorts16 ones = Shorts16{} + 1;
            for (std::int64_t b = 0; b < scales.blocks; ++b) {
                multiply_columns(totals, codes, x, [&](auto, auto) __attribute__((always_inline)) { return ones; });
                unrolled<count>([&](auto i) __attribute__((always_inline)) {
                    constexpr int j = i / rows, r = i % rows;
                    sums[j][r] += __builtin_convertvector(totals[j][r], Floats) * (outer(b, j) * x.scales[r]);
                });
                next();
            }
        }
        unrolled<count>([&](auto i) __attribute__((always_inline)) {
            results[i % rows * kPairPanels].v[first + i / rows] = sums[i / rows][i % rows];
        });
    }

  private:
    // What offsets add, as they would be written, by the same operations.
    [[gnu::always_inline]] void add_minima(Floats (&sums)[parts][rows], const CodeTile& x) const {
        const std::uint8_t* minima = scales.of_panel.inner_minima + first * kLanes;
        const float* of_group = x.sums;
        for (std::int64_t b = 0; b < scales.blocks; ++b) {
            Floats outer[parts];
            unrolled<parts>([&](auto j) __attribute__((always_inline)) {
                outer[j] = load(scales.of_panel.outer_minima + b * kPanelRows + (first + j) * kLanes);
            });
            for (std::int64_t g = 0; g < scales.units * (kBlockGroup / group); ++g, minima += kPanelRows, ++of_group) {
                unrolled<parts>([&](auto j) __attribute__((always_inline)) {
                    const auto few = load_raw<Bytes>(minima + j * kLanes);
                    const Floats offset = outer[j] * __builtin_convertvector(bits_as<Ints>(widen(few)), Floats);
                    sums[j][0] += offset * *of_group;
                });
            }
        }
    }

    // totals = 32 columns, each span times what `times` gives for it.
    template <typename Codes, typename Times>
    [[gnu::always_inline]] static void multiply_columns(
        Ints (&totals)[parts][rows], const Codes& codes, const CodeTile& x, const Times& times
    ) {
        unrolled<kBlockGroup / span>([&](auto s) __attribute__((always_inline)) {
            Shorts16 pair_times[parts], narrow[parts][rows];
            unrolled<parts>([&](auto j) __attribute__((always_inline)) { pair_times[j] = times(s, j); });
            if constexpr (Manner::with_starts) {
                unrolled<count>([&](auto i) __attribute__((always_inline)) {
                    narrow[i / rows][i % rows] = bits_as<Shorts16>(Ints{} + x.starts[s * width + i % rows]);
                });
            }
            unrolled<span / kWordBytes>([&](auto i) __attribute__((always_inline)) {
                constexpr int word = s * span / kWordBytes + i;
                Words of_word[parts], magnitude[parts];
                unrolled<parts>([&](auto j) __attribute__((always_inline)) {
                    codes.template read<word>(j, of_word[j], magnitude[j]);
                });
                unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                    const Words four = Words{} + x.words[word * width + r];
                    unrolled<parts>([&](auto j) __attribute__((always_inline)) {
                        // Sums in this order: GCC would put them off, and write all rows' products to memory meanwhile.
                        if constexpr (Manner::with_signs) {
                            const auto by = _mm256_sign_epi8(bits_as<__m256i>(four), bits_as<__m256i>(of_word[j]));
                            const Shorts16 products = multiply_pairs(magnitude[j], bits_as<Words>(by));
                            const Ints more = add_pairs(products, pair_times[j]);
                            totals[j][r] = word ? totals[j][r] + more : more;
                            asm("" : "+x"(totals[j][r]));
                        } else {
                            const Shorts16 products = multiply_pairs(of_word[j], four);
                            narrow[j][r] = i || Manner::with_starts ? narrow[j][r] + products : products;
                            asm("" : "+x"(narrow[j][r]));
                        }
                    });
                });
            });
            if constexpr (!Manner::with_signs) {
                unrolled<count>([&](auto i) __attribute__((always_inline)) {
                    constexpr int j = i / rows, r = i % rows;
                    const Ints more = add_pairs(narrow[j][r], pair_times[j]);
                    totals[j][r] = s ? totals[j][r] + more : more;
                });
            }
        });
    }
};

// A block's rows in tiles, beside each other, made before the first product.
struct CodeTiles {
    std::int64_t rows, count, k, groups, spans;
    std::uint32_t* memory = nullptr;

    void make(const Block& block, const BlockInput<void>& x) {
        memory = scratch<std::uint32_t>(count * size());
        for (std::int64_t i = 0; i < count; ++i) {
            std::uint32_t* to = memory + i * size();
            const std::int64_t first = i * kWidth, mine = rows - first;
            const auto put = [&](const void* all, std::int64_t n) {
                const std::uint32_t* from[kWidth];
                for (std::int64_t r = 0; r < kWidth; ++r) {
                    const std::int64_t row = x.places(block.first_row + first + (r < mine ? r : 0));
                    from[r] = static_cast<const std::uint32_t*>(all) + row * n;
                }
                put_beside(from, n, to);
                to += n * kWidth;
            };
            put(x.codes, k / kWordBytes);
            put(x.scales, k / kBlockGroup);
            put(x.sums, groups);
            put(x.starts, spans);
        }
    }
    CodeTile tile(std::int64_t i) const {
        const std::uint32_t* words = memory + i * size();
        const auto* of_scales = reinterpret_cast<const float*>(words + k / kWordBytes * kWidth);
        const float* of_sums = of_scales + k / kBlockGroup * kWidth;
        return {words, of_scales, reinterpret_cast<const std::int32_t*>(of_sums + groups * kWidth), of_sums};
    }
    // One row as it lies.
    CodeTile row(const BlockInput<void>& x, std::int64_t i) const {
        const auto* words = reinterpret_cast<const std::uint32_t*>(x.codes + i * k);
        return {words, x.scales + i * (k / kBlockGroup), x.starts + i * spans, x.sums + i * groups};
    }

  private:
    std::int64_t size() const { return (k / kWordBytes + k / kBlockGroup + groups + spans) * kWidth; }
};

// Memory of unpacked codes and of offsets, apart from that of tiles.
struct UnpackedByte {
    std::uint8_t code;
};
struct Offset {
    float factor;
};

template <int largest>
struct PairWeight {
    const std::uint8_t* codes;
    BlockScales scales;

    void multiply(const Block& block, const BlockInput<void>& x, const Output& out) const {
        constexpr int all = kBlockGroup, half = kBlockGroup / 2, span = largest == 63 ? half : all;
        if constexpr (largest == 255) {
            multiply_rows<PairManner<all, all, false, false, true>>(block, x, out);
        } else if (scales.group == half) {
            multiply_rows<PairManner<half, half, true, true>>(block, x, out);
        } else if (scales.inner) {
            multiply_rows<PairManner<all, span, largest == 63, true>>(block, x, out);
        } else {
            multiply_rows<PairManner<all, span, true, false>>(block, x, out);
        }
    }

  private:
    // Taken off codes while they are multiplied.
    template <typename Manner>
    std::int64_t center() const {
        if (Manner::with_signs) return 128;
        return !Manner::with_starts ? 0 : scales.zero || largest == 15 ? scales.zero : kSixBitCenter;
    }

    // The factors of sums of activations, [groups, 16]. `shift` is what of the zero is not taken off codes.
    void write_offsets(const BlockScales::OfPanel& of_panel, float shift, float* to) const {
        const std::int64_t groups = scales.k / scales.group, in_block = scales.groups_in_block();
        const auto numbers = [](const std::uint8_t* from) {
            return __builtin_convertvector(bits_as<Ints>(widen(load_raw<Bytes>(from))), Floats);
        };
        for (std::int64_t b = 0, g = 0; g < groups; ++b) {
            const auto low = of_panel.block(b, 0), high = of_panel.block(b, kVectors - 1);
            for (const std::int64_t end = g + in_block; g < end; ++g) {
                for (int j = 0; j < kVectors; ++j, to += kLanes) {
                    const auto& block = j == 0 ? low : high;
                    Floats offset = block.outer_minimum;
                    if (of_panel.inner_minima) offset *= numbers(of_panel.inner_minima + g * kPanelRows + j * kLanes);
                    if (shift != 0) offset += shift * of_panel.scale(block, g, j);
                    store(to, offset);
                }
            }
        }
    }

    template <typename Manner>
    [[gnu::noinline]] void multiply_rows(const Block& block, const BlockInput<void>& x, const Output& out) const {
        constexpr std::int64_t stride = UnpackedCodes<Manner::with_signs>::stride;
        const std::int64_t k = scales.k, count = ceil_div(block.rows, kCodeRows), center = this->center<Manner>();
        const bool has_offsets = scales.outer_minima || center != scales.zero;
        const std::int64_t spans = Manner::with_starts ? k / Manner::span : 0;
        CodeTiles tiles{block.rows, count, k, has_offsets ? k / Manner::group : 0, spans};
        if (block.rows > 1) tiles.make(block, x);
        const std::int64_t part_size = k / kWordBytes * stride;
        std::uint8_t* bytes = count > 1 ? &scratch<UnpackedByte>(kVectors * part_size)->code : nullptr;
        const bool written = has_offsets && !(block.rows == 1 && scales.inner_minima && center == scales.zero);
        float* offsets = written ? &scratch<Offset>(k / Manner::group * kPanelRows)->factor : nullptr;
        PairScales of_panel{{}, offsets, k, k / scales.outer_columns, scales.outer_columns / kBlockGroup};
        const std::int64_t first_column = block.first_panel * kPanelRows;
        alignas(64) Sums results[kCodeRows][kPairPanels];  // of all panels where there is one tile of rows, else of one
        for (std::int64_t p = 0; p < block.panels; ++p) {
            const std::int64_t panel = block.first_panel + p;
            const PackedCodes<largest> packed{codes + panel * code_panel_size<largest>(k)};
            of_panel.of_panel = scales.panel(panel);
            if (written) write_offsets(of_panel.of_panel, static_cast<float>(center - scales.zero), offsets);
            if (count > 1) unpack_codes(packed, k, bytes, part_size);
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t first = i * kCodeRows, rows = std::min<std::int64_t>(kCodeRows, block.rows - first);
                Sums* sums = &results[0][count == 1 ? p : 0];
                if (rows == 1) {
                    const CodeTile row = tiles.row(x, x.places(block.first_row + first));
                    PairTile<Manner, 1, 1, kVectors>{of_panel, 0}.multiply(sums, packed, row);
                } else if (rows == kCodeRows && count > 1) {
                    const CodeTile tile = tiles.tile(i);
                    for (int j = 0; j < kVectors; ++j) {
                        const UnpackedCodes<Manner::with_signs> from{bytes + j * part_size, part_size};
                        PairTile<Manner, kCodeRows, kWidth, 1>{of_panel, j}.multiply(sums, from, tile);
                    }
                } else {
                    const CodeTile tile = tiles.tile(i);
                    with_constant<kCodeRows>(rows, [&](auto n) {
                        if constexpr (n > 1) {
                            // Types but Q4_0, Q4_1, Q4_K, Q6_K and Q8_0 are compiled for even numbers of rows alone.
                            constexpr bool rare = (largest == 63) == (Manner::group == kBlockGroup) && largest != 255;
                            constexpr int taken = rare ? n + n % 2 : n, parts = kPartsTogether<taken>;
                            for (int j = 0; j < kVectors; j += parts) {
                                const PackedCodes<largest> from{packed.at + j * HARDPOINT_VECTOR_BYTES};
                                PairTile<Manner, taken, kWidth, parts>{of_panel, j}.multiply(sums, from, tile);
                            }
                        }
                    });
                }
                if (count == 1) continue;
                out.write(block.first_row + first, rows, first_column + p * kPanelRows, 1, sums, kPairPanels);
            }
        }
        if (count == 1) out.write(block.first_row, block.rows, first_column, block.panels, results[0], kPairPanels);
    }
};
#else
constexpr bool kPairProducts = false;
template <int largest>
struct PairWeight;
#endif

// Panels that a block of x meets: all of a chunk where what is made of x for a block takes long.
template <int largest>
constexpr std::int64_t kCodeBlock = kPairProducts ? kCodePanels<largest> : kTilePanels;

}  // namespace hardpoint::HARDPOINT_LEVEL
