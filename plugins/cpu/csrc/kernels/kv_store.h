// The paged cache's elements, and how one head's row of keys or values is written to a page.
//
// Layout "plain": a page holds keys [block, heads, size], then values. Layout "plain_scaled" holds 8-bit elements, and
// behind them a float32 scale for each token and head, unless one scale serves all. Rounding is the references' own:
// hardpoint.ops.store_kv and hardpoint.attention.quantized_cache.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

// 8-bit elements, beside std::int8_t. Storage alone, like bfloat16. OCP's OFP8 specification 1.0.
struct float8_e4m3fn {
    std::uint8_t bits;
};
struct float8_e5m2 {
    std::uint8_t bits;
};

// Dtypes by number, in the order of CODES in native_attention.py.
enum Code : std::int64_t { kFloat32, kFloat16, kBfloat16, kFloat8E4m3fn, kFloat8E5m2, kInt8, kNvfp4 };

template <typename T>
struct Type {
    using type = T;
};

// visit(Type<T>{}) for the floating-point type of that code.
template <typename Visit>
inline void with_float(std::int64_t code, Visit visit) {
    if (code == kFloat32) visit(Type<float>{});
    if (code == kFloat16) visit(Type<float16>{});
    if (code == kBfloat16) visit(Type<bfloat16>{});
}

// Bytes of a floating-point element.
constexpr std::int64_t float_size(std::int64_t code) { return code == kFloat32 ? 4 : 2; }

// visit(Type<T>{}) for the cache element of that code, unless it is kNvfp4: see cache_groups.h.
template <typename Visit>
inline void with_element(std::int64_t code, Visit visit) {
    with_float(code, visit);
    if (code == kFloat8E4m3fn) visit(Type<float8_e4m3fn>{});
    if (code == kFloat8E5m2) visit(Type<float8_e5m2>{});
    if (code == kInt8) visit(Type<std::int8_t>{});
}

// --- 8-bit elements in vectors

template <typename T>
constexpr float kLargest = 127.0f;
template <>
inline constexpr float kLargest<float8_e4m3fn> = 448.0f;
template <>
inline constexpr float kLargest<float8_e5m2> = 57344.0f;

template <typename T>
constexpr bool kIsScaled = sizeof(T) == 1;

// Exponent bias and mantissa bits.
template <typename T>
struct SmallFloat;
template <>
struct SmallFloat<float8_e4m3fn> {
    static constexpr int bias = 7, mantissa = 3;
};
template <>
struct SmallFloat<float8_e5m2> {
    static constexpr int bias = 15, mantissa = 2;
};

// Rounded to the nearest element, ties to even; beyond the largest it saturates; NaN stays NaN.
template <typename T>
inline Bytes round_to_small_float(Floats x) {
    constexpr int mantissa = SmallFloat<T>::mantissa, bias = SmallFloat<T>::bias, shift = 23 - mantissa;
    const auto all = bits_as<Words>(x);
    const Words sign = (all >> 24) & 0x80;
    auto magnitude = bits_as<Floats>(all & 0x7fffffff);
    magnitude = magnitude > broadcast(kLargest<T>) ? broadcast(kLargest<T>) : magnitude;
    const auto bits = bits_as<Words>(magnitude);
    constexpr std::uint32_t half = (1u << (shift - 1)) - 1, lowest = static_cast<std::uint32_t>(128 - bias) << 23;
    const Words normal = (bits - ((127 - bias) << 23) + half + ((bits >> shift) & 1)) >> shift;
    // Below the least normal number, adding a power of two lets the processor round to multiples of the least element.
    constexpr std::uint32_t magic = static_cast<std::uint32_t>(127 + 23 + 1 - bias - mantissa) << 23;
    const Words subnormal = bits_as<Words>(magnitude + bits_as<float>(magic)) - magic;
    Words code = bits < lowest ? subnormal : normal;
    code = x != x ? Words{} + 0x7f : code;
    return low_bytes(code | sign);
}

template <typename T>
inline Floats small_float_to_floats(Bytes bytes) {
    constexpr int shift = 23 - SmallFloat<T>::mantissa, bias = SmallFloat<T>::bias;
    const Words codes = widen(bytes);
    const Words rest = codes & 0x7f;
    const Floats magnitude = bits_as<Floats>(rest << shift) * bits_as<float>((254u - bias) << 23);
    Words bits = bits_as<Words>(magnitude);
    if constexpr (std::is_same_v<T, float8_e4m3fn>) bits = rest == 0x7f ? Words{} + 0x7fc00000u : bits;
    if constexpr (std::is_same_v<T, float8_e5m2>) bits = rest >= 0x7c ? (rest << shift) | 0x7f800000u : bits;
    return bits_as<Floats>(bits | (codes & 0x80) << 24);
}

inline Floats load(const float8_e4m3fn* from) { return small_float_to_floats<float8_e4m3fn>(load_raw<Bytes>(from)); }
inline Floats load(const float8_e5m2* from) { return small_float_to_floats<float8_e5m2>(load_raw<Bytes>(from)); }

inline void store(float8_e4m3fn* to, Floats v) {
    const Bytes bytes = round_to_small_float<float8_e4m3fn>(v);
    std::memcpy(to, &bytes, sizeof(bytes));
}
inline void store(float8_e5m2* to, Floats v) {
    const Bytes bytes = round_to_small_float<float8_e5m2>(v);
    std::memcpy(to, &bytes, sizeof(bytes));
}
inline void store(std::int8_t* to, Floats v) {
    v = v < broadcast(-128.0f) ? broadcast(-128.0f) : v;
    v = v > broadcast(127.0f) ? broadcast(127.0f) : v;
    v = v != v ? Floats{} : v;
    const Floats whole = v + 12582912.0f - 12582912.0f;  // 1.5 * 2^23 rounds to a whole number, ties to even
    const Bytes bytes = low_bytes(bits_as<Words>(__builtin_convertvector(whole, Ints)));
    std::memcpy(to, &bytes, sizeof(bytes));
}

// The first n < kLanes elements, zeros behind them.
template <typename T>
inline Floats load_some(const T* from, std::int64_t n) {
    T whole[kLanes] = {};
    std::memcpy(whole, from, n * sizeof(T));
    return load(whole);
}

template <typename T>
inline void store_some(T* to, Floats v, std::int64_t n) {
    T whole[kLanes];
    store(whole, v);
    std::memcpy(to, whole, n * sizeof(T));
}

// --- rows

// to = x / divisor, rounded; both [n].
template <typename T, typename Element>
inline void round_row(const T* x, Element* to, std::int64_t n, float divisor) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(x + i) / divisor);
    if (i < n) store_some(to + i, load_some(x + i, n - i) / divisor, n - i);
}

// A row to a page of the layout "plain", rounded to its elements.
template <typename T, typename Element>
inline void store_row(const T* x, Element* to, std::int64_t n) {
    static_assert(!kIsScaled<Element>);
    if constexpr (std::is_same_v<T, Element>) {
        std::memcpy(to, x, n * sizeof(T));
    } else {
        std::int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) store(to + i, load(x + i));
        if (i < n) store_some(to + i, load_some(x + i, n - i), n - i);
    }
}

// The scale with which a row just fits the elements: 1 for zeros, NaN where the row holds one.
template <typename T>
inline float fitting_scale(const T* x, std::int64_t n, float largest_element) {
    Floats most = {};
    Words not_a_number = {};
    const auto take = [&](Floats v) {
        const auto magnitude = bits_as<Floats>(bits_as<Words>(v) & 0x7fffffff);
        most = magnitude > most ? magnitude : most;
        not_a_number |= bits_as<Words>(v != v);
    };
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) take(load(x + i));
    if (i < n) take(load_some(x + i, n - i));
    for (int lane = 0; lane < kLanes; ++lane) {
        if (not_a_number[lane]) return __builtin_nanf("");
    }
    const float scale = largest(most) / largest_element;
    return scale == 0.0f ? 1.0f : scale;
}

// A row to a page of the layout "plain_scaled": divided by `*given`, or, where that is null, by what just fits it,
// which is kept at `*kept`.
template <typename T, typename Element>
inline void store_scaled_row(const T* x, Element* to, std::int64_t n, float* kept, const float* given) {
    static_assert(kIsScaled<Element>);
    const float scale = given ? *given : fitting_scale(x, n, kLargest<Element>);
    if (!given) *kept = scale;
    round_row(x, to, n, scale);
}

// Where in the pages of keys (or of values) a slot's rows lie. `elements` and `scales` are the views of the layout,
// `page_stride` and `scale_page_stride` their first strides; `scales` is null where there are none in the page.
template <typename Element>
struct CachePages {
    Element* elements;
    std::int64_t page_stride;
    float* scales;
    std::int64_t scale_page_stride;
    std::int64_t block_size, num_heads, head_size;

    Element* row(std::int64_t page, std::int64_t offset) const {  // of head 0; the other heads' follow
        return elements + page * page_stride + offset * num_heads * head_size;
    }
    float* scale(std::int64_t page, std::int64_t offset) const {
        return scales + page * scale_page_stride + offset * num_heads;
    }
};

// x [heads, size] of one token, `head_stride` elements from head to head, to a slot (page * block_size + offset). Slots
// of the null page, page 0, are left alone: nobody reads them, and rows of padding, on several threads, share them.
template <typename T, typename Element>
inline void store_token(
    const T* x, std::int64_t head_stride, const CachePages<Element>& pages, std::int64_t slot,
    const float* given = nullptr
) {
    if (slot < pages.block_size) return;
    const auto page = slot / pages.block_size, offset = slot % pages.block_size;
    Element* to = pages.row(page, offset);
    for (std::int64_t head = 0; head < pages.num_heads; ++head) {
        if constexpr (kIsScaled<Element>) {
            float* kept = given ? nullptr : pages.scale(page, offset) + head;
            store_scaled_row(x + head * head_stride, to + head * pages.head_size, pages.head_size, kept, given);
        } else {
            store_row(x + head * head_stride, to + head * pages.head_size, pages.head_size);
        }
    }
}

}  // namespace hardpoint::HARDPOINT_LEVEL
