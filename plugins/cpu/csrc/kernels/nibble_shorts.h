// Products of 4-bit codes with activations of 16 bits, for processors with AVX2 alone: activations become
// whole numbers of some 16 bits, each span of columns with a scale of its own, which is more than a bfloat16 or a float16
// tells of any but the largest of them. Sums are exact within a span. A number is split into two bytes, as products of
// bytes with codes need no codes of 16 bits, and four times as many fit an instruction as of floats.
//
// With codes u >= 0, activations x = q * s, and S the sum of q over the span:
//     sum of w * x  =  s * scale * unit * (sum of u * q - zero * S)
#pragma once

#include <algorithm>

#include "byte_scales.h"
#include "nibble_codes.h"
#include "scratch.h"

namespace hardpoint::HARDPOINT_LEVEL {

#if defined(__AVX2__) && !defined(__AVX512F__)
template <typename T>
constexpr bool kByShorts = !std::is_same_v<T, float>;
#else
template <typename T>
constexpr bool kByShorts = false;
#endif

// Panels that a block of x meets: all of a chunk where it is rounded for them.
template <typename T>
constexpr std::int64_t kNibbleBlock = kByShorts<T> ? kNibblePanels : kTilePanels;

#if defined(__AVX2__) && !defined(__AVX512F__)
static_assert(kLanes == kNibbleColumns);
constexpr int kShortRows = 4;  // of x, whose sums stay in registers

// Columns that share a scale of activations: 256 products of 32,767 by a code's 24 fit 32 bits.
constexpr std::int64_t kMostSpan = 256;

// How q is split: q = upper * 2^lower_bits + lower, both bytes with a sign. The products of a code and a byte are added in
// pairs and then over kByteSteps steps, in 16 bits: eight times the pair's, of at most kMostCode * 2 * the largest byte.
constexpr std::int64_t kByteSteps = 4;
template <typename Codes>
struct ShortSplit {
    static constexpr int lower_bits = Codes::kMostCode <= 15 ? 8 : 7;
    static constexpr int most_upper = std::min<int>(127, 32767 / (2 * kByteSteps * 2 * Codes::kMostCode));
    static_assert(2 * kByteSteps * 2 * Codes::kMostCode << (lower_bits - 1) <= 32768);
    static constexpr float largest = (most_upper << lower_bits) + (1 << (lower_bits - 1)) - 1;
};

// Rounded rows of x: for each step the upper bytes of its columns and then the lower ones, in the order of a step's nibbles,
// [rows, steps, 2, 8]; for each span the scale, and the sum of whole numbers times `zero`, [rows, spans]. A group of the
// weight's columns is one span, or some.
struct ShortRows {
    static constexpr std::int64_t kStep = 2 * kNibbleColumns;  // bytes

    std::int64_t k, group, per_group, spans;
    int zero;
    std::int8_t* codes;
    float* scales;
    std::int32_t* sums;

    // In memory of this thread.
    ShortRows(std::int64_t rows, std::int64_t k, std::int64_t group, int zero)
        : k(k), group(group), per_group(ceil_div(group, kMostSpan)), spans(k / group * per_group), zero(zero) {
        struct Memory {
            float element;
        };
        scales = &scratch<Memory>(rows * (2 * spans + ceil_div(k, 2)))->element;
        sums = reinterpret_cast<std::int32_t*>(scales + rows * spans);
        codes = reinterpret_cast<std::int8_t*>(sums + rows * spans);
    }

    // Columns of span s of a group.
    std::int64_t columns(std::int64_t s) const { return std::min(kMostSpan, group - s * kMostSpan); }
    const std::int8_t* row(std::int64_t r) const { return codes + r * k * 2; }

    template <typename Split, typename T>
    void round(std::int64_t row, const T* x) {
        std::int8_t* to = codes + row * k * 2;
        for (std::int64_t span = 0; span < spans;) {
            for (std::int64_t s = 0; s < per_group; ++s, ++span) {
                round_span<Split>(x, to, row * spans + span, columns(s));
                x += columns(s);
                to += columns(s) * 2;
            }
        }
    }

  private:
    // Whole vectors, since groups are multiples of 8 columns. As in quantize_row, what is no number makes the scale NaN.
    // What is too small to be divided by becomes zero.
    template <typename Split, typename T>
    void round_span(const T* x, std::int8_t* to, std::int64_t at, std::int64_t columns) {
        Words most = {};
        for (std::int64_t c = 0; c < columns; c += kLanes) {
            const Words magnitude = bits_as<Words>(load(x + c)) & 0x7fffffffu;
            most = bits_as<Words>(_mm256_max_epu32(bits_as<__m256i>(most), bits_as<__m256i>(magnitude)));
        }
        auto four = _mm_max_epu32(_mm256_castsi256_si128(bits_as<__m256i>(most)), _mm256_extracti128_si256(bits_as<__m256i>(most), 1));
        four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0b01001110));
        four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0b10110001));
        const auto bits = static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
        if (bits >= 0x7f800000u) {
            scales[at] = std::nanf("");
            sums[at] = 0;
            std::memset(to, 0, columns * 2);
            return;
        }
        const float amax = bits_as<float>(bits), scale = amax * (1 / Split::largest);
        const float inverse = scale > 0x1p-100f ? Split::largest / amax : 0.0f;
        const __m256i order = _mm256_setr_epi8(
            1, -1, 5, -1, 9, -1, 13, -1, 0, -1, 4, -1, 8, -1, 12, -1, -1, 1, -1, 5, -1, 9, -1, 13, -1, 0, -1, 4, -1, 8, -1, 12
        );
        // With half of a lower byte's range added, its bits count from the least of it, and those above are the upper byte.
        constexpr int half = 1 << (Split::lower_bits - 1);
        const __m128i least = _mm_set_epi64x(static_cast<long long>(half * 0x0101010101010101ull), 0);
        Ints total = {};
        for (std::int64_t c = 0; c < columns; c += kLanes, to += kStep) {
            const Floats shifted = load(x + c) * inverse + 12582912.0f;  // 1.5 * 2^23: the last bits are a whole number
            const Ints number = bits_as<Ints>(shifted) - (0x4b400000 - half);
            total += number;
            Ints both = number;
            if constexpr (Split::lower_bits < 8) both = (number & (2 * half - 1)) | (number << (8 - Split::lower_bits) & 0xff00);
            const __m256i parts = _mm256_shuffle_epi8(bits_as<__m256i>(both), order);
            const __m128i bytes = _mm_or_si128(_mm256_castsi256_si128(parts), _mm256_extracti128_si256(parts, 1));
            const __m128i apart = _mm_sub_epi8(bytes, least);
            std::memcpy(to, &apart, sizeof(apart));
        }
        auto sum = _mm_add_epi32(_mm256_castsi256_si128(bits_as<__m256i>(total)), _mm256_extracti128_si256(bits_as<__m256i>(total), 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b01001110));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b10110001));
        scales[at] = scale;
        sums[at] = (_mm_cvtsi128_si32(sum) - half * static_cast<int>(columns)) * zero;
    }
};

// Numbers of 16 bits in memory, since GCC would make them anew for each group.
template <int number>
struct Shorts16 {
    alignas(32) static constexpr std::int16_t at[16] = {number, number, number, number, number, number, number, number,
                                                        number, number, number, number, number, number, number, number};
};

// totals + the products of two numbers of 16 bits in each lane, of `shorts` and `number`.
template <int number>
[[gnu::always_inline]] inline Ints add_pairs(Ints totals, __m256i shorts) {
    return totals + bits_as<Ints>(_mm256_madd_epi16(shorts, load_raw<__m256i>(Shorts16<number>::at)));
}

// totals + each x[r] times at most kByteSteps steps of `parts` vectors of a panel: `fixed`, or `count` where that is 0.
template <typename Codes, int rows, int parts, int fixed>
[[gnu::always_inline]] inline void multiply_bytes(
    Ints (&totals)[rows * parts], const std::int8_t* const (&x)[rows], const std::uint8_t* step, std::int64_t count
) {
    constexpr int all = rows * parts;
    __m256i upper[all], lower[all];
    unrolled<all>([&](auto i) __attribute__((always_inline)) { upper[i] = lower[i] = _mm256_setzero_si256(); });
    const auto add = [&](std::int64_t s) __attribute__((always_inline)) {
        const std::uint8_t* from = step + s * kStepBytes;
        fetch<kFetchAheadInOrder>(from);
        __m256i nibbles[parts][2];
        unrolled<parts>([&](auto j) __attribute__((always_inline)) {
            const auto words = load_raw<Words>(from + j * HARDPOINT_VECTOR_BYTES);
            nibbles[j][0] = bits_as<__m256i>(Codes::positive_bytes(words & 0x0f0f0f0fu));
            nibbles[j][1] = bits_as<__m256i>(Codes::positive_bytes(words >> 4 & 0x0f0f0f0fu));
        });
        unrolled<rows * 2>([&](auto i) __attribute__((always_inline)) {
            constexpr int r = i / 2, n = i % 2;
            const std::int8_t* bytes = x[r] + s * ShortRows::kStep + 4 * n;
            const __m256i high = _mm256_set1_epi32(load_raw<int>(bytes));
            const __m256i low = _mm256_set1_epi32(load_raw<int>(bytes + kNibbleColumns));
            unrolled<parts>([&](auto j) __attribute__((always_inline)) {
                __m256i &up = upper[r * parts + j], &down = lower[r * parts + j];
                up = _mm256_add_epi16(up, _mm256_maddubs_epi16(nibbles[j][n], high));
                down = _mm256_add_epi16(down, _mm256_maddubs_epi16(nibbles[j][n], low));
                asm("" : "+x"(up), "+x"(down));  // or GCC adds up later, and runs out of registers
            });
        });
    };
    if constexpr (fixed) {
        unrolled<fixed>(add);
    } else {
        for (std::int64_t s = 0; s < count; ++s) add(s);
    }
    unrolled<all>([&](auto i) __attribute__((always_inline)) {
        totals[i] = add_pairs<1 << ShortSplit<Codes>::lower_bits>(totals[i], upper[i]);
        totals[i] = add_pairs<1>(totals[i], lower[i]);
    });
}

// Scales of a group, times kShortScales.
template <typename S>
constexpr float kShortScales = 1;
template <>
inline constexpr float kShortScales<e4m3> = 0x1p-8f;

// `plain` scales have codes up to kMostPlain<S> alone. The others take more instructions, and hardly a weight has any.
template <bool plain, typename S, int parts>
[[gnu::always_inline]] inline void load_short_scales(const S* from, Floats (&to)[parts]) {
    if constexpr (std::is_same_v<S, e4m3> && parts == 2) {
        const __m128i codes = load_raw<__m128i>(from);
        const __m256i halves = plain ? plain_e4m3_as_halves(codes) : e4m3_as_halves(codes);
        to[0] = bits_as<Floats>(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
        to[1] = bits_as<Floats>(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
    } else if constexpr (plain) {
        unrolled<parts>([&](auto j) __attribute__((always_inline)) { to[j] = load_plain(from + j * kLanes); });
    } else {
        unrolled<parts>([&](auto j) __attribute__((always_inline)) { to[j] = load(from + j * kLanes) * kShortScales<S>; });
    }
}

// Products with a weight of nibbles, as NibbleWeight's.
template <typename W>
struct ShortWeight {
    using Codes = typename W::Codes;
    const W& w;

    template <typename T>
    void multiply(const Block& block, const InputRows<T>& row, const Output& out) const {
        ShortRows x(block.rows, w.k, w.group, w.zeros ? 1 : static_cast<int>(Codes::kShortZero));
        for (std::int64_t i = 0; i < block.rows; ++i) x.round<ShortSplit<Codes>>(i, row(block.first_row + i));
        multiply_rounded(block, x, out);
    }

    [[gnu::noinline]] void multiply_rounded(const Block& block, const ShortRows& x, const Output& out) const {
        const std::int64_t tiles = ceil_div(block.rows, kShortRows);
        for (std::int64_t p = block.first_panel; p < block.first_panel + block.panels; ++p) {
            for (std::int64_t i = 0; i < tiles; ++i) {
                const std::int64_t first = block.rows * i / tiles, count = block.rows * (i + 1) / tiles - first;
                with_constant<kShortRows>(count, [&](auto rows) {
                    Sums sums[rows];
                    if constexpr (rows == 1) {
                        multiply_row(sums, first, p, x);
                    } else {
                        for (int j = 0; j < kVectors; ++j) multiply_part<rows, 1, Steps{0, false, true}>(sums, first, p, j, x);
                    }
                    out.write(block.first_row + first, rows, p * kPanelRows, 1, sums, 1);
                });
            }
        }
    }

  private:
    // Groups of so many steps, of a multiple of them unless `once`, or of any number where it is 0; with zero points or
    // without; with plain scales alone.
    struct Steps {
        int fixed;
        bool once = false, zeros = false, plain = false;
    };

    // A panel at once, since all sums stay in registers: memory then has one stream without pauses.
    void multiply_row(Sums (&sums)[1], std::int64_t row, std::int64_t p, const ShortRows& x) const {
        using Scale = typename W::Scale;
        constexpr bool may_have_zeros = Codes::kInOrder;
        constexpr int two = 2, some = kByteSteps;
        const auto multiply = [&](auto of) { multiply_part<1, kVectors, of()>(sums, row, p, 0, x); };
        const std::int64_t steps = w.group / kNibbleColumns;
        if constexpr (sizeof(Scale) == 1) {
            constexpr int only = std::is_same_v<Scale, e8m0> ? some : two;  // of MXFP4, and of NVFP4
            if (steps == only) {
                multiply([] { return Steps{only, true, false, true}; });
                // Asked afterwards, when the scales are in the cache, since almost always they are.
                if (are_plain(w.of_group(p, 0).scales, w.k / w.group * kPanelRows)) return;
            }
        } else if (!w.zeros && (steps == two || steps % some == 0)) {
            if (steps == two) return multiply([] { return Steps{two, true}; });
            if (steps == some) return multiply([] { return Steps{some, true}; });
            return multiply([] { return Steps{some}; });
        } else if (may_have_zeros && steps % some == 0) {
            return multiply([] { return Steps{some, false, may_have_zeros}; });
        }
        multiply([] { return Steps{0, false, true}; });
    }

    // `parts` times kLanes rows of a panel, from vector `first_part` on. Compiled once for all that x and results may be.
    template <int rows, int parts, Steps of>
    [[gnu::noinline]] void multiply_part(
        Sums (&results)[rows], std::int64_t first, std::int64_t p, int first_part, const ShortRows& x
    ) const {
        constexpr int all = rows * parts;
        const std::uint8_t* step = w.panel(p) + first_part * HARDPOINT_VECTOR_BYTES;
        const std::int8_t* from[rows];
        const float* scales[rows];
        const std::int32_t* of_x[rows];
        Floats sums[all];
        unrolled<rows>([&](auto r) __attribute__((always_inline)) {
            from[r] = x.row(first + r);
            scales[r] = x.scales + (first + r) * x.spans;
            of_x[r] = x.sums + (first + r) * x.spans;
        });
        unrolled<all>([&](auto i) __attribute__((always_inline)) { sums[i] = Floats{}; });
        const bool has_zeros = of.zeros && w.zeros;
        auto group = w.of_group(p, 0);
        for (std::int64_t span = 0, s = 0; span < x.spans; ++span) {
            Ints totals[all];
            unrolled<all>([&](auto i) __attribute__((always_inline)) { totals[i] = Ints{}; });
            std::int64_t steps = x.columns(s) / kNibbleColumns;
            do {
                const std::int64_t some = of.fixed ? of.fixed : std::min(steps, kByteSteps);
                multiply_bytes<Codes, rows, parts, of.fixed>(totals, from, step, some);
                unrolled<rows>([&](auto r) __attribute__((always_inline)) { from[r] += some * ShortRows::kStep; });
                step += some * kStepBytes;
                steps -= some;
            } while (!of.once && steps > 0);
            Floats of_group[parts];
            load_short_scales<of.plain>(group.scales + first_part * kLanes, of_group);
            fetch<kFetchAheadInOrder / 8>(group.scales);
            unrolled<parts>([&](auto j) __attribute__((always_inline)) {
                Floats zero;
                if (has_zeros) zero = group.zero(first_part + j) + Codes::kShortZero;
                unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                    const Ints whole = totals[r * parts + j], of_row = Ints{} + of_x[r][span];
                    Floats total;
                    if (has_zeros) {
                        total = __builtin_convertvector(whole, Floats) - zero * __builtin_convertvector(of_row, Floats);
                    } else {
                        total = __builtin_convertvector(whole - of_row, Floats);
                    }
                    sums[r * parts + j] += of_group[j] * scales[r][span] * total;
                });
            });
            if (++s == x.per_group) {
                s = 0;
                group = group.next();
            }
        }
        unrolled<parts>([&](auto j) __attribute__((always_inline)) {
            Floats outer = broadcast(Codes::kShortUnit / kShortScales<typename W::Scale>);
            if (w.outer) outer *= load(w.outer + p * kPanelRows + (first_part + j) * kLanes);
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                results[r].v[first_part + j] = sums[r * parts + j] * outer;
            });
        });
    }
};
#endif

}  // namespace hardpoint::HARDPOINT_LEVEL
