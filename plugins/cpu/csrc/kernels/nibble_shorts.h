// Products of 4-bit codes with activations of 16 bits, for processors with AVX2 alone: activations become
// whole numbers of 16 bits, each span of columns with a scale of its own, which is more than a bfloat16 or a float16
// tells of any but the largest of them. Sums are exact within a span. Twice as many products fit an instruction as of
// floats, and codes need not become floats.
//
// With codes u >= 0, activations x = q * s, and S the sum of q over the span:
//     sum of w * x  =  s * scale * unit * (sum of u * q - zero * S)
#pragma once

#include <algorithm>

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
constexpr float kLargestShort = 32767;

// Rounded rows of x: codes [rows, K], and for each span the scale, and the sum times the scale, [rows, spans]. A group of
// the weight's columns is one span, or some.
struct ShortRows {
    std::int64_t k, group, per_group, spans;
    std::int16_t* codes;
    float *scales, *sums;

    // In memory of this thread.
    ShortRows(std::int64_t rows, std::int64_t k, std::int64_t group)
        : k(k), group(group), per_group(ceil_div(group, kMostSpan)), spans(k / group * per_group) {
        struct Memory {
            float element;
        };
        scales = &scratch<Memory>(rows * (2 * spans + ceil_div(k, 2)))->element;
        sums = scales + rows * spans;
        codes = reinterpret_cast<std::int16_t*>(sums + rows * spans);
    }

    // Columns of span s of a group.
    std::int64_t columns(std::int64_t s) const { return std::min(kMostSpan, group - s * kMostSpan); }

    template <typename T>
    void round(std::int64_t row, const T* x) {
        std::int16_t* to = codes + row * k;
        for (std::int64_t span = 0; span < spans;) {
            for (std::int64_t s = 0; s < per_group; ++s, ++span) {
                round_span(x, to, row * spans + span, columns(s));
                x += columns(s);
                to += columns(s);
            }
        }
    }

  private:
    // Whole vectors, since groups are multiples of 8 columns. As in quantize_row, what is no number makes the scale NaN.
    // What is too small to be divided by becomes zero.
    template <typename T>
    void round_span(const T* x, std::int16_t* to, std::int64_t at, std::int64_t columns) {
        Floats most = {}, none = {};
        for (std::int64_t c = 0; c < columns; c += kLanes) {
            const Floats v = load(x + c);
            const auto magnitude = bits_as<Floats>(bits_as<Words>(v) & 0x7fffffffu);
            most = magnitude > most ? magnitude : most;
            none += v - v;
        }
        const float scale = largest(most) / kLargestShort;
        if (sum(none) != 0) {
            scales[at] = sums[at] = std::nanf("");
            std::memset(to, 0, columns * sizeof(*to));
            return;
        }
        const float inverse = scale > 0x1p-100f ? 1 / scale : 0.0f;
        Ints total = {};
        for (std::int64_t c = 0; c < columns; c += kLanes) {
            const Floats shifted = load(x + c) * inverse + 12582912.0f;  // 1.5 * 2^23: the last bits are a whole number
            const Ints number = bits_as<Ints>(shifted) - 0x4b400000;
            total += number;
            const Halves shorts = low_halves(bits_as<Words>(number));
            std::memcpy(to + c, &shorts, sizeof(shorts));
        }
        int whole_sum = 0;
        for (int i = 0; i < kLanes; ++i) whole_sum += total[i];
        scales[at] = scale;
        sums[at] = scale * static_cast<float>(whole_sum);
    }
};

// sums + the products of two numbers of 16 bits in each lane.
[[gnu::always_inline]] inline Ints multiply_shorts(Ints sums, Words codes, Words x) {
    sums += bits_as<Ints>(_mm256_madd_epi16(bits_as<__m256i>(codes), bits_as<__m256i>(x)));
    asm("" : "+x"(sums));  // or GCC computes products of several steps before it adds them up, and runs out of registers
    return sums;
}

// Each x[r] times `steps` steps of a part of a panel.
template <typename Codes, int rows>
[[gnu::always_inline]] inline void multiply_shorts(
    Ints (&totals)[rows], const std::int16_t* const (&x)[rows], const std::uint8_t* step, std::int64_t steps
) {
    unrolled<rows>([&](auto r) __attribute__((always_inline)) { totals[r] = Ints{}; });
    for (std::int64_t s = 0; s < steps; ++s, step += kStepBytes) {
        Codes::for_each_pair(load_raw<Words>(step), [&](auto pair, Words codes) __attribute__((always_inline)) {
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                const auto two = load_raw<std::uint32_t>(x[r] + s * kNibbleColumns + 2 * pair);
                totals[r] = multiply_shorts(totals[r], codes, Words{} + two);
            });
        });
    }
}

// Products with a weight of nibbles, as NibbleWeight's.
template <typename W>
struct ShortWeight {
    using Codes = typename W::Codes;
    const W& w;

    template <typename T>
    void multiply(const Block& block, const InputRows<T>& row, const Output& out) const {
        ShortRows x(block.rows, w.k, w.group);
        for (std::int64_t i = 0; i < block.rows; ++i) x.round(i, row(block.first_row + i));
        multiply_rounded(block, x, out);
    }

    [[gnu::noinline]] void multiply_rounded(const Block& block, const ShortRows& x, const Output& out) const {
        const std::int64_t tiles = ceil_div(block.rows, kShortRows);
        for (std::int64_t p = block.first_panel; p < block.first_panel + block.panels; ++p) {
            for (std::int64_t i = 0; i < tiles; ++i) {
                const std::int64_t first = block.rows * i / tiles, count = block.rows * (i + 1) / tiles - first;
                with_constant<kShortRows>(count, [&](auto rows) {
                    Sums sums[rows];
                    for (int j = 0; j < kVectors; ++j) multiply_part<rows>(sums, first, p, j, x);
                    out.write(block.first_row + first, rows, p * kPanelRows, 1, sums, 1);
                });
            }
        }
    }

  private:
    // kLanes rows of a panel, so that all sums stay in registers. Compiled once for all that x and results may be.
    template <int rows>
    [[gnu::noinline]] void multiply_part(
        Sums (&results)[rows], std::int64_t first, std::int64_t p, int j, const ShortRows& x
    ) const {
        const std::uint8_t* step = w.panel(p) + j * HARDPOINT_VECTOR_BYTES;
        const std::int16_t* from[rows];
        const float *scales[rows], *of_x[rows];
        Floats sums[rows];
        unrolled<rows>([&](auto r) __attribute__((always_inline)) {
            from[r] = x.codes + (first + r) * x.k;
            scales[r] = x.scales + (first + r) * x.spans;
            of_x[r] = x.sums + (first + r) * x.spans;
            sums[r] = Floats{};
        });
        auto group = w.of_group(p, 0);
        for (std::int64_t span = 0; span < x.spans; group = group.next()) {
            const Floats scale = group.scale(j) * Codes::kShortUnit;
            const Floats offset = scale * (-Codes::kShortZero - group.zero(j));
            for (std::int64_t s = 0; s < x.per_group; ++s, ++span) {
                const std::int64_t columns = x.columns(s), bytes = columns / kNibbleColumns * kStepBytes;
                if (j == 0) {
                    for (std::int64_t at = 0; at < bytes; at += 64) fetch<kFetchAheadInOrder>(step + at);
                }
                Ints totals[rows];
                multiply_shorts<Codes, rows>(totals, from, step, columns / kNibbleColumns);
                step += bytes;
                unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                    from[r] += columns;
                    sums[r] += scale * scales[r][span] * __builtin_convertvector(totals[r], Floats);
                    sums[r] += offset * of_x[r][span];
                });
            }
        }
        const Floats outer = w.outer ? load(w.outer + p * kPanelRows + j * kLanes) : broadcast(1);
        unrolled<rows>([&](auto r) __attribute__((always_inline)) { results[r].v[j] = sums[r] * outer; });
    }
};
#endif

}  // namespace hardpoint::HARDPOINT_LEVEL
