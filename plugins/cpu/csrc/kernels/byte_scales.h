// Scales of one byte: e8m0, a power of two (OCP Microscaling Formats 1.0, section 5.4.1), and e4m3 (OCP 8-bit floating
// point, 1.0), as torch's float8_e8m0fnu and float8_e4m3fn hold them.
#pragma once

#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

struct e8m0 {
    std::uint8_t bits;
};
struct e4m3 {
    std::uint8_t bits;
};

// The exponent of a float; code 0 is 2^-127, which is subnormal, and 255 NaN: both have the mantissa's top bit set.
inline float to_float(e8m0 x) {
    const std::uint32_t top = x.bits == 0 || x.bits == 255 ? 0x00400000u : 0;
    return bits_as<float>(static_cast<std::uint32_t>(x.bits) << 23 | top);
}

inline Floats load(const e8m0* from) {
    const Words codes = widen(load_raw<Bytes>(from));
#if defined(__AVX2__) && !defined(__AVX512F__)
    const Words bits = codes << 23;
    const auto fitting = _mm256_max_epi32(bits_as<__m256i>(bits), _mm256_set1_epi32(0x00400000));
    return bits_as<Floats>(bits_as<Words>(fitting) | bits_as<Words>(bits == 0x7f800000u));
#else
    const auto special = bits_as<Words>((codes == 0) | (codes == 255));
    return bits_as<Floats>(codes << 23 | (special & 0x00400000u));
#endif
}

// A float16 of the same exponent and mantissa bits is 2^-8 of it. Subnormals come out right, whatever the processor
// does with those of float.
inline float to_float(e4m3 x) {
    const auto magnitude = static_cast<std::uint32_t>(x.bits & 0x7f), sign = static_cast<std::uint32_t>(x.bits & 0x80);
    if (magnitude == 0x7f) return bits_as<float>(0x7fc00000u);
    return to_float(float16{static_cast<std::uint16_t>(sign << 8 | magnitude << 7)}) * 256.0f;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Plain codes take fewest instructions: up to the last that is a number, and of e4m3 those without a sign.
template <typename S>
constexpr int kMostPlain = std::is_same_v<S, e8m0> ? 254 : 126;

// Whether `count` codes are plain, a multiple of 16.
template <typename S>
inline bool are_plain(const S* codes, std::int64_t count) {
    const auto last = _mm256_set1_epi8(static_cast<char>(kMostPlain<S>));
    __m256i most = last;
    std::int64_t i = 0;
#pragma GCC unroll 8
    for (; i + 32 <= count; i += 32) most = _mm256_max_epu8(most, load_raw<__m256i>(codes + i));
    if (i < count) most = _mm256_max_epu8(most, _mm256_broadcastsi128_si256(load_raw<__m128i>(codes + i)));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, last)) == -1;
}

inline Floats load_plain(const e8m0* from) {
    const Words bits = widen(load_raw<Bytes>(from)) << 23;
    return bits_as<Floats>(_mm256_max_epi32(bits_as<__m256i>(bits), _mm256_set1_epi32(0x00400000)));
}
inline __m256i plain_e4m3_as_halves(__m128i codes) { return _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 7); }

// Codes of e4m3 as float16, times 2^-8.
inline __m256i e4m3_as_halves(__m128i codes) {
    // In the upper bytes of words; shifted as numbers with a sign, which then stands twice.
    const auto words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    const auto none = _mm256_cmpeq_epi16(_mm256_or_si256(words, _mm256_set1_epi16(-0x8000)), _mm256_set1_epi16(-0x100));
    return _mm256_or_si256(_mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(-0x4080)), none);
}
#endif

inline Floats load(const e4m3* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i halves = e4m3_as_halves(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return bits_as<Floats>(_mm256_cvtph_ps(_mm256_castsi256_si128(halves))) * 256.0f;
#else
    const Words codes = widen(load_raw<Bytes>(from)), magnitudes = codes & 0x7f;
    const Halves halves = low_halves((codes & 0x80) << 8 | magnitudes << 7);
    const Floats numbers = load(reinterpret_cast<const float16*>(&halves)) * 256.0f;
    return magnitudes == 0x7f ? bits_as<Floats>(Words{} + 0x7fc00000u) : numbers;
#endif
}

}  // namespace hardpoint::HARDPOINT_LEVEL
