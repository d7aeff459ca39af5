// Vectors as wide as the level's registers, and the numbers that they are loaded from. GCC's vector extensions do the
// arithmetic, so that one source serves every level and every processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#define HARDPOINT_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define HARDPOINT_VECTOR_BYTES 32
#else
#define HARDPOINT_VECTOR_BYTES 16
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hardpoint::HARDPOINT_LEVEL {

constexpr int kLanes = HARDPOINT_VECTOR_BYTES / 4;  // of 32 bits

typedef float Floats __attribute__((vector_size(HARDPOINT_VECTOR_BYTES)));
typedef std::int32_t Ints __attribute__((vector_size(HARDPOINT_VECTOR_BYTES)));
typedef std::uint32_t Words __attribute__((vector_size(HARDPOINT_VECTOR_BYTES)));
typedef std::uint16_t Halves __attribute__((vector_size(HARDPOINT_VECTOR_BYTES / 2)));
typedef std::uint8_t Bytes __attribute__((vector_size(HARDPOINT_VECTOR_BYTES / 4)));

// Element types. They are storage alone: numbers are computed as float.
struct bfloat16 {
    std::uint16_t bits;
};
struct float16 {
    std::uint16_t bits;
};

template <typename T, typename From>
inline T bits_as(const From& from) {
    static_assert(sizeof(T) == sizeof(From));
    T to;
    std::memcpy(&to, &from, sizeof(T));
    return to;
}

template <typename V>
inline V load_raw(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}

// Not the sum with zero: that is an addition, since -0 + 0 is 0.
inline Floats broadcast(float x) { return x - Floats{}; }

// --- bfloat16: the upper half of a float; rounded to nearest, ties to even, NaN kept quiet.

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return bits_as<float>(static_cast<std::uint32_t>(x.bits) << 16); }

inline bfloat16 round_to_bfloat16(float x) {
    const auto bits = bits_as<std::uint32_t>(x);
    if (x != x) return {static_cast<std::uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// --- float16: in hardware where there is F16C, else by bits.

inline float to_float(float16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    const std::uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    if (rest >= 0x7c00) return bits_as<float>(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    const float magnitude = bits_as<float>(rest << 13) * 0x1p112f;  // subnormals come out right as well
    return bits_as<float>(sign | bits_as<std::uint32_t>(magnitude));
#endif
}

inline float16 round_to_float16(float x) {
#if defined(__F16C__)
    return {static_cast<std::uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
    const auto bits = bits_as<std::uint32_t>(x);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    const std::uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {static_cast<std::uint16_t>(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {static_cast<std::uint16_t>(sign | 0x7c00)};
    if (magnitude < 0x38800000) {  // subnormal: let the addition round
        const float shifted = bits_as<float>(magnitude) + 0.5f;
        return {static_cast<std::uint16_t>(sign | (bits_as<std::uint32_t>(shifted) - 0x3f000000))};
    }
    return {static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13))};
#endif
}

template <typename T>
inline T round_to(float x) {
    if constexpr (std::is_same_v<T, float>) return x;
    if constexpr (std::is_same_v<T, bfloat16>) return round_to_bfloat16(x);
    if constexpr (std::is_same_v<T, float16>) return round_to_float16(x);
}

// --- between widths. GCC's __builtin_convertvector takes these apart into halves, or into single numbers.

inline Words widen(Halves v) {
#if defined(__AVX512F__)
    return bits_as<Words>(_mm512_cvtepu16_epi32(bits_as<__m256i>(v)));
#elif defined(__AVX2__)
    return bits_as<Words>(_mm256_cvtepu16_epi32(bits_as<__m128i>(v)));
#else
    return __builtin_convertvector(v, Words);
#endif
}

inline Words widen(Bytes v) {
#if defined(__AVX512F__)
    return bits_as<Words>(_mm512_cvtepu8_epi32(bits_as<__m128i>(v)));
#elif defined(__AVX2__)
    return bits_as<Words>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&v))));
#else
    return __builtin_convertvector(v, Words);
#endif
}

inline Halves low_halves(Words v) {
#if defined(__AVX512F__)
    return bits_as<Halves>(_mm512_cvtepi32_epi16(bits_as<__m512i>(v)));
#else
    return __builtin_convertvector(v, Halves);
#endif
}

inline Bytes low_bytes(Words v) {
#if defined(__AVX512F__)
    return bits_as<Bytes>(_mm512_cvtepi32_epi8(bits_as<__m512i>(v)));
#elif defined(__AVX2__)
    const auto bytes = bits_as<__m256i>(v & 0xff);
    const auto halves = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    return bits_as<Bytes>(_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
#else
    return __builtin_convertvector(v, Bytes);
#endif
}

// --- whole vectors

inline Floats load(const float* from) { return load_raw<Floats>(from); }

inline Floats load(const bfloat16* from) { return bits_as<Floats>(widen(load_raw<Halves>(from)) << 16); }

inline Floats load(const float16* from) {
#if defined(__AVX512F__)
    return bits_as<Floats>(_mm512_cvtph_ps(load_raw<__m256i>(from)));
#elif defined(__F16C__)
    return bits_as<Floats>(_mm256_cvtph_ps(load_raw<__m128i>(from)));
#else
    Floats v;
    for (int i = 0; i < kLanes; ++i) v[i] = to_float(from[i]);
    return v;
#endif
}

inline Floats load(const std::int8_t* from) {
#if defined(__AVX512F__)
    const auto numbers = bits_as<Ints>(_mm512_cvtepi8_epi32(load_raw<__m128i>(from)));
#elif defined(__AVX2__)
    const auto numbers = bits_as<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    const auto numbers = bits_as<Ints>(widen(load_raw<Bytes>(from)) << 24) >> 24;
#endif
    return __builtin_convertvector(numbers, Floats);
}

// Four numbers, again and again.
inline Floats load_four(const float* from) {
#if defined(__AVX512F__)
    return bits_as<Floats>(_mm512_broadcast_f32x4(_mm_loadu_ps(from)));
#elif defined(__AVX2__)
    return bits_as<Floats>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from)));
#else
    static_assert(kLanes == 4);
    return load(from);
#endif
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }

inline void store(bfloat16* to, Floats v) {
    const auto bits = bits_as<Words>(v);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    const auto chosen = v != v ? quiet : rounded;
    const Halves halves = low_halves(chosen);
    std::memcpy(to, &halves, sizeof(halves));
}

inline void store(float16* to, Floats v) {
#if defined(__AVX512F__)
    const auto halves = _mm512_cvtps_ph(bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &halves, sizeof(halves));
#elif defined(__F16C__)
    const auto halves = _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &halves, sizeof(halves));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = round_to_float16(v[i]);
#endif
}

inline float sum(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(bits_as<__m512>(v));
#endif
    for (int step = kLanes / 2; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) v[i] += v[i + step];
    }
    return v[0];
}

inline float largest(Floats v) {
    float most = v[0];
    for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
}

inline std::int32_t largest(Ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32(bits_as<__m512i>(v));
#elif defined(__AVX2__)
    const auto all = bits_as<__m256i>(v);
    auto most = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
    std::int32_t most = v[0];
    for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// e^x to within one unit in the last place or two (Cody and Waite's reduction, a polynomial of degree 6); 0 below the
// least normal number, infinity above the greatest, NaN for NaN.
inline Floats exponential(Floats x) {
    const Floats low = broadcast(-87.33654f), high = broadcast(88.72283f);
    Floats clamped = x < low ? low : x;
    clamped = clamped > high ? high : clamped;
    const Floats shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23 rounds to a whole number
    const Floats whole = shifted - 12582912.0f;
    Floats r = clamped - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    Floats p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // In two steps, since 2^128 is no float.
    const Ints exponent = __builtin_convertvector(whole, Ints);
    const Ints half = exponent >> 1;
    const auto first = bits_as<Floats>((half + 127) << 23), second = bits_as<Floats>((exponent - half + 127) << 23);
    Floats result = p * first * second;
    result = x < low ? Floats{} : result;
    result = x > high ? broadcast(__builtin_inff()) : result;
    return x != x ? x : result;
}

}  // namespace hardpoint::HARDPOINT_LEVEL
