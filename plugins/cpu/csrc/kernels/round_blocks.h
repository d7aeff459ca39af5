// Rounding activations for products with GGUF's blocks.
#pragma once

#include "block_weights.h"
#include "quantize.h"

namespace hardpoint::HARDPOINT_LEVEL {

// Sums of 16 or 32 codes: of the first two of each four, and of the last two.
inline std::pair<int, int> halves(const std::int8_t* codes, std::int64_t columns) {
#if defined(__AVX2__)
    const auto ones = _mm_set1_epi8(1);
    const auto pairs_at = [&](std::int64_t i) { return _mm_maddubs_epi16(ones, load_raw<__m128i>(codes + i)); };
    auto pairs = columns == 32 ? _mm_add_epi16(pairs_at(0), pairs_at(16)) : pairs_at(0);
    pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0x4e));
    const int both = _mm_cvtsi128_si32(_mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0xb1)));
    return {static_cast<std::int16_t>(both), both >> 16};
#else
    int sums[2] = {};
    for (std::int64_t c = 0; c < columns; ++c) sums[c / 2 % 2] += codes[c];
    return {sums[0], sums[1]};
#endif
}

// x [M, K] -> codes int8 [M, K], scales float32 [M, K / 32], and sums times scale over `group` columns, [M, K / group];
// unless `numbers` is null, what codes and scales mean, [M, K]; unless `starts` is null, -center times the sums of codes
// over `span` columns, [M, K / span], as two numbers of 16 bits: of the first two of each four columns, and the last two.
template <typename T>
struct RoundBlocks {
    static constexpr char signature[] = "ppppppiiiiii";
    const T* x;
    std::int8_t* codes;
    float *scales, *sums;
    std::uint32_t* starts;
    T* numbers;
    std::int64_t m, k, group, x_stride, center, span;

    std::int64_t blocks() const { return k / kBlockGroup; }
    std::int64_t chunks() const { return ceil_div(m * blocks(), kElementsPerChunk / kBlockGroup); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, kElementsPerChunk / kBlockGroup, m * blocks());
        for (auto i = mine.first; i < mine.last; ++i) {
            std::int8_t* to = codes + i * kBlockGroup;
            quantize_row(x + i / blocks() * x_stride + i % blocks() * kBlockGroup, to, scales + i, kBlockGroup);
            for (std::int64_t first = 0; first < kBlockGroup; first += group) {
                const auto [low, high] = halves(to + first, group);
                sums[(i * kBlockGroup + first) / group] = scales[i] * static_cast<float>(low + high);
            }
            for (std::int64_t first = 0; starts && first < kBlockGroup; first += span) {
                const auto [low, high] = halves(to + first, span);
                const auto bits = [&](int half) { return static_cast<std::uint16_t>(-center * half); };
                starts[(i * kBlockGroup + first) / span] = bits(low) | std::uint32_t{bits(high)} << 16;
            }
            for (int c = 0; numbers && c < kBlockGroup; c += kLanes) {
                store(numbers + i * kBlockGroup + c, load(to + c) * scales[i]);
            }
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
