// The meaning of 4-bit codes: integers less 8, and e2m1 (OCP Microscaling Formats 1.0, section 5.3.3).
//
// `values(words)` are the numbers of the codes in the lowest four bits of each word, whatever stands above them.
// `for_each_column(words, f)` calls f(constant column, numbers) for the 8 columns of a step's word (see nibbles.h), with
// numbers that are to be multiplied by kUnit, once for all of them. `positive_bytes(codes)` are whole numbers u,
// of (u - kShortZero) * kShortUnit.
#pragma once

#include "panels.h"

namespace hardpoint::HARDPOINT_LEVEL {

constexpr int kNibbleColumns = 8;  // in a step
constexpr int kStepBytes = kNibbleColumns * kPanelRows / 2;
constexpr std::int64_t kNibblePanels = 4 * kTilePanels;  // in a chunk: as many bytes as of int8
constexpr int kNibbleZero = 8;  // of integers without zero points

// The codes' numbers times kPerOne, which are whole, as bytes; twice, as AVX2 looks up within 16 bytes.
struct Int4Table {
    static constexpr float kPerOne = 1;
    static constexpr int kLeast = -8;
    alignas(32) static constexpr std::int8_t bytes[32] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7,
                                                          -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
};
struct E2M1Table {
    static constexpr float kPerOne = 2;
    static constexpr int kLeast = -12;
    alignas(32) static constexpr std::int8_t bytes[32] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                                                          0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

template <typename Table>
struct TableCodes {
    static constexpr float value(int code) { return Table::bytes[code] / Table::kPerOne; }

    struct Floats16 {
        alignas(64) float at[16];
    };
    struct Halves32 {
        alignas(64) std::uint16_t at[32];
    };
    static constexpr Floats16 floats = [] {
        Floats16 found{};
        for (int code = 0; code < 16; ++code) found.at[code] = value(code);
        return found;
    }();
    // As bfloat16, twice, since the index of 16-bit words has a fifth bit, the next nibble's lowest.
    static constexpr Halves32 bfloat16s = [] {
        Halves32 found{};
        for (int i = 0; i < 32; ++i) {
            found.at[i] = static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, value(i % 16)) >> 16);
        }
        return found;
    }();

    static Floats values(Words words) {
#if defined(__AVX512F__)
        return bits_as<Floats>(_mm512_permutexvar_ps(bits_as<__m512i>(words), load_raw<__m512>(floats.at)));
#elif defined(__AVX2__)
        // Each word's code in its lowest byte, and zeros above it, whose table entry does not matter.
        const auto found = _mm256_shuffle_epi8(load_raw<__m256i>(Table::bytes), bits_as<__m256i>(words & 0xf));
        return __builtin_convertvector(bits_as<Ints>(found) << 24 >> 24, Floats) * (1 / Table::kPerOne);
#else
        Floats found;
        for (int i = 0; i < kLanes; ++i) found[i] = floats.at[words[i] & 0xf];
        return found;
#endif
    }

#if defined(__AVX2__) && !defined(__AVX512F__)
    // The numbers less the least of them. Those of integers are their codes.
    static constexpr bool kInOrder = Table::bytes[15] == Table::bytes[0] + 15;
    static constexpr float kShortZero = -Table::kLeast, kShortUnit = 1 / Table::kPerOne;
    static constexpr int kMostCode = kInOrder ? 15 : -2 * Table::kLeast;

    struct Bytes16 {
        alignas(16) std::uint8_t at[16];
    };
    static constexpr Bytes16 positive = [] {
        Bytes16 found{};
        for (int code = 0; code < 16; ++code) found.at[code] = static_cast<std::uint8_t>(Table::bytes[code] - Table::kLeast);
        return found;
    }();

    // Of codes in a byte each.
    [[gnu::always_inline]] static Words positive_bytes(Words codes) {
        if constexpr (kInOrder) return codes;
        const auto table = load_raw<__m128i>(positive.at);
        return bits_as<Words>(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bits_as<__m256i>(codes)));
    }

    // A byte in the place of a word's highest is its number times 2^24, so that the others need only be cleared.
    static constexpr float kUnit = 0x1p-24f / Table::kPerOne;

    template <typename F>
    [[gnu::always_inline]] static void for_each_column(Words words, F&& f) {
        const auto table = load_raw<__m256i>(Table::bytes);
        const Words low = bits_as<Words>(_mm256_shuffle_epi8(table, bits_as<__m256i>(words & 0x0f0f0f0fu)));
        const Words high = bits_as<Words>(_mm256_shuffle_epi8(table, bits_as<__m256i>(words >> 4 & 0x0f0f0f0fu)));
        // Byte b of `low` is column {0, 4, 1, 5}[b], of `high` {2, 6, 3, 7}[b].
        unrolled<4>([&](auto b) __attribute__((always_inline)) {
            constexpr int column = b % 2 * 4 + b / 2;
            f(std::integral_constant<int, column>{}, of_byte<b>(low));
            f(std::integral_constant<int, column + 2>{}, of_byte<b>(high));
        });
    }

  private:
    template <int b>
    [[gnu::always_inline]] static Floats of_byte(Words words) {
        Words top = words << (24 - 8 * b);
        if constexpr (b > 0) top &= 0xff000000u;
        return __builtin_convertvector(bits_as<Ints>(top), Floats);
    }
#else
    static constexpr float kUnit = 1;

    template <typename F>
    [[gnu::always_inline]] static void for_each_column(Words words, F&& f) {
        unrolled<4>([&](auto i) __attribute__((always_inline)) {
            f(std::integral_constant<int, 2 * i>{}, values(words >> (4 * i)));
            f(std::integral_constant<int, 2 * i + 1>{}, values(words >> (16 + 4 * i)));
        });
    }
#endif
};

using Int4Codes = TableCodes<Int4Table>;
using E2M1Codes = TableCodes<E2M1Table>;

}  // namespace hardpoint::HARDPOINT_LEVEL
