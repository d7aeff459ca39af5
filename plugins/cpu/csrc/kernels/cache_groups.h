// Rows of keys and values in NVFP4, the layout "plain_group_scaled": e2m1, two elements a byte, the first in the low bits,
// and a scale of e4m3 for 16 neighbours (OCP Microscaling Formats 1.0, section 5.3.3; OCP 8-bit floating point, 1.0). A
// page holds the codes [block, heads, size / 2], and behind them the scales [block, heads, size / 16]. Rounding is that
// of write_group_rounded in hardpoint_plugin_api. The product of an element and its scale is exact in 16 bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "kv_store.h"
#include "nibble_codes.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

// An element: storage of two.
struct nvfp4 {
    std::uint8_t pair;
};

constexpr std::int64_t kGroup = 16;

// The places of numbers of one token from `at` on, over all heads: as a pointer to them would be.
struct GroupRow {
    const std::uint8_t *codes, *scales;
    std::int64_t at;

    GroupRow operator+(std::int64_t count) const { return {codes, scales, at + count}; }
};

// What points to elements of a cache.
template <typename Element>
struct RowOf {
    using type = const Element*;
};
template <>
struct RowOf<nvfp4> {
    using type = GroupRow;
};
template <typename Element>
using Row = typename RowOf<Element>::type;

template <typename Element>
inline const char* address(const Element* row) {
    return reinterpret_cast<const char*>(row);
}
inline const char* address(GroupRow row) { return reinterpret_cast<const char*>(row.codes); }

// The bytes of `count` elements, scales of groups left out.
template <typename Element>
constexpr std::int64_t bytes_of(std::int64_t count) {
    if constexpr (std::is_same_v<Element, nvfp4>) return count / 2;
    return count * static_cast<std::int64_t>(sizeof(Element));
}

// The number of each code of e4m3, made by the compiler: no code of this level may run before the level is chosen.
struct GroupScales {
    float of[256];
};
constexpr GroupScales kGroupScales = [] {
    GroupScales found{};
    for (int code = 0; code < 256; ++code) {
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        float number = (exponent ? 8 + mantissa : mantissa) / 512.0f;  // of exponent 0 or 1
        for (int i = 1; i < exponent; ++i) number *= 2;
        if ((code & 0x7f) == 0x7f) number = __builtin_nanf("");
        found.of[code] = code & 0x80 ? -number : number;
    }
    return found;
}();

// The codes of kLanes neighbours, one in each word.
inline Words load_codes(const std::uint8_t* from) {
#if defined(__AVX512F__)
    const auto pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return bits_as<Words>(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(pairs, _mm_srli_epi16(pairs, 4))));
#elif defined(__AVX2__)
    const auto pairs = _mm_cvtsi32_si128(load_raw<std::int32_t>(from));
    return bits_as<Words>(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(pairs, _mm_srli_epi16(pairs, 4))));
#else
    Words codes;
    for (int i = 0; i < kLanes; ++i) codes[i] = from[i / 2] >> (i % 2 * 4);
    return codes;
#endif
}

// `row.at` is a multiple of kLanes, which divides a group.
inline Floats load(GroupRow row) {
    static_assert(kGroup % kLanes == 0);
    const Floats elements = TableCodes<E2M1Table>::values(load_codes(row.codes + row.at / 2));
    return elements * kGroupScales.of[row.scales[row.at / kGroup]];
}

// Rows are whole groups, so that nothing is ever left of one.
inline Floats load_some(GroupRow, std::int64_t) { return Floats{}; }

// Numbers over their group's scale to codes, one in each word: saturated at 6, ties to even codes. Codes are 0.5 apart up
// to 2, 1 up to 4, then 2: the least of three lines, each rounded to even codes.
inline Words e2m1_codes(Floats x) {
    const auto whole = [](Floats v) { return v + 12582912.0f - 12582912.0f; };  // 1.5 * 2^23: ties to even
    const auto bits = bits_as<Words>(x);
    const auto magnitude = bits_as<Floats>(bits & 0x7fffffff);
    const Floats most = magnitude < broadcast(6.0f) ? magnitude : broadcast(6.0f);  // of NaN, too
    Floats code = whole(most * 2.0f);
    const Floats second = whole(most) + 2.0f, third = whole(most * 0.5f) + 4.0f;
    code = second < code ? second : code;
    code = third < code ? third : code;
    return bits_as<Words>(__builtin_convertvector(code, Ints)) | (bits >> 28 & 8);
}

// One head's numbers [n] to its codes [n / 2] and scales [n / 16]; divided by `*given` first unless that is null.
template <typename T>
inline void store_groups(const T* x, std::uint8_t* codes, std::uint8_t* scales, std::int64_t n, const float* given) {
    for (std::int64_t group = 0; group < n / kGroup; ++group, x += kGroup, codes += kGroup / 2) {
        float numbers[kGroup];
        for (std::int64_t i = 0; i < kGroup; i += kLanes) {
            const Floats v = load(x + i);
            store(numbers + i, given ? v / broadcast(*given) : v);
        }
        std::uint32_t code = round_to_small_float<float8_e4m3fn>(broadcast(fitting_scale(numbers, kGroup, 6.0f)))[0];
        if (code == 0) code = 0x38;  // 1
        scales[group] = static_cast<std::uint8_t>(code);
        const Floats scale = broadcast(kGroupScales.of[code]);
        std::uint32_t found[kGroup];
        for (std::int64_t i = 0; i < kGroup; i += kLanes) {
            const Words some = e2m1_codes(load(numbers + i) / scale);
            std::memcpy(found + i, &some, sizeof(some));
        }
        for (std::int64_t i = 0; i < kGroup / 2; ++i) {
            codes[i] = static_cast<std::uint8_t>(found[2 * i] | found[2 * i + 1] << 4);
        }
    }
}

// x [heads, size] of one token to a slot, as store_token does. `scales` is the first page's; both strides are in bytes.
template <typename T>
inline void store_group_token(
    const T* x, std::uint8_t* codes, std::int64_t page_stride, std::uint8_t* scales, std::int64_t scale_page_stride,
    std::int64_t block_size, std::int64_t width, std::int64_t slot, const float* given
) {
    if (slot < block_size) return;
    const auto page = slot / block_size, offset = slot % block_size;
    store_groups(
        x, codes + page * page_stride + offset * width / 2, scales + page * scale_page_stride + offset * width / kGroup,
        width, given
    );
}

}  // namespace hardpoint::HARDPOINT_LEVEL
