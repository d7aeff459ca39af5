// Rounding rows to int8, alone or behind what makes them.
#pragma once

#include <algorithm>

#include "../task.h"
#include "chunking.h"
#include "scratch.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

// x [n] -> codes [n] and their scale: the greatest magnitude becomes 127, halves are rounded to even, a row of zeros
// has the scale 1. Quotients are held within int8: a scale that is denormal is itself rounded by up to half.
template <typename T>
void quantize_row(const T* x, std::int8_t* codes, float* scale, std::int64_t n) {
    // Magnitudes are ordered as their bits are, behind them infinity and what is no number.
    const auto magnitude = [](auto bits) { return bits & 0x7fffffff; };
    Ints most = {};
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const Ints bits = magnitude(bits_as<Ints>(load(x + i)));
        most = bits > most ? bits : most;
    }
    std::int32_t greatest = largest(most);
    for (; i < n; ++i) greatest = std::max(greatest, magnitude(bits_as<std::int32_t>(to_float(x[i]))));
    if (greatest >= 0x7f800000) {  // products with it are NaN, as they are where such a row is divided by its scale
        *scale = std::nanf("");
        std::memset(codes, 0, n);
        return;
    }
    const auto amax = bits_as<float>(greatest);
    *scale = amax / 127.0f;
    if (*scale == 0) *scale = 1;
    i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        Floats quotient = load(x + i) / *scale;
        quotient = quotient > 127.0f ? broadcast(127.0f) : quotient < -128.0f ? broadcast(-128.0f) : quotient;
        const Floats rounded = quotient + 12582912.0f;  // 1.5 * 2^23: the last bits are a whole number
        const Bytes bytes = low_bytes(bits_as<Words>(rounded));
        std::memcpy(codes + i, &bytes, sizeof(bytes));
    }
    for (; i < n; ++i) {
        codes[i] = static_cast<std::int8_t>(std::nearbyint(std::clamp(to_float(x[i]) / *scale, -128.0f, 127.0f)));
    }
}

// The results of a kernel: rows of n numbers as they are.
template <typename T>
struct PlainRows {
    T* out;

    // Call make(row) with where row i belongs.
    template <typename Make>
    void write(std::int64_t i, std::int64_t n, const Make& make) const {
        make(out + i * n);
    }
};

// The same, rounded while they are in the nearest cache: codes [rows, n] and scales [rows].
template <typename T>
struct RoundedRows {
    std::int8_t* codes;
    float* scales;

    template <typename Make>
    void write(std::int64_t i, std::int64_t n, const Make& make) const {
        T* row = scratch<T>(n);
        make(row);
        quantize_row(row, codes + i * n, scales + i, n);
    }
};

// x [rows, n] with `x_stride` elements from row to row -> codes int8 [rows, n] and scales float32 [rows].
template <typename T>
struct QuantizeRows {
    static constexpr char signature[] = "pppiii";
    const T* x;
    std::int8_t* codes;
    float* scales;
    std::int64_t rows, n, x_stride;

    std::int64_t chunks() const { return ceil_div(rows, rows_per_chunk(n)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(n), rows);
        for (auto row = mine.first; row < mine.last; ++row) {
            quantize_row(x + row * x_stride, codes + row * n, scales + row, n);
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
