// Tiles, the matrix registers of Intel's AMX: eight on each core, each of up to 16 rows of 64 bytes, and products of
// two of them that are added to a third. Source: Intel's Software Developer's Manual, volumes 1 (chapter "Programming
// with Intel Advanced Matrix Extensions") and 2 (each instruction).
//
// There are two forms. Where the compiler's flags allow, these are the instructions. With HARDPOINT_EMULATE_TILES, for
// tests on processors without, the same is done one number after the other, as the manual words it; what would fault
// ends the process, and says why. HARDPOINT_TILES is defined where there is either.
#pragma once

#include <cstdint>

#if defined(HARDPOINT_EMULATE_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define HARDPOINT_TILES
#endif

#if defined(HARDPOINT_EMULATE_TILES)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

namespace hardpoint::HARDPOINT_LEVEL::tiles {

constexpr int kRows = 16, kRowBytes = 64;

// Shapes of tiles: tiles in use have rows and bytes in each row.
struct alignas(64) Shapes {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};
static_assert(sizeof(Shapes) == 64);

#if defined(HARDPOINT_TILES) && !defined(HARDPOINT_EMULATE_TILES)

// Not by the compiler's intrinsics: GCC's take no tile that is a template's argument, and do not say what they read, so
// that what was written just before may come too late.

inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

inline void release() { asm volatile("tilerelease"); }

template <int tile>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

template <int tile>
inline void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// sums, float32, += x times w, both bfloat16 in pairs.
template <int sums, int x, int w>
inline void multiply_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(w));
}

// sums, int32, += x times w, both int8 in fours.
template <int sums, int x, int w>
inline void multiply_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(w));
}

#elif defined(HARDPOINT_EMULATE_TILES)

struct Core {
    bool configured = false;
    Shapes shapes;
    std::uint8_t tiles[8][kRows][kRowBytes];
};
inline thread_local Core core;

inline void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "a tile instruction would fault: %s\n", what);
    std::abort();
}

inline int rows_of(int tile) { return core.shapes.rows[tile]; }
inline int bytes_of(int tile) { return core.shapes.row_bytes[tile]; }

// A tile that is about to be written: an instruction leaves nothing of what it held.
inline auto& written(int tile) {
    expect(core.configured, "there are no shapes");
    expect(rows_of(tile) > 0, "the tile has no shape");
    return core.tiles[tile];
}

inline void configure(const Shapes& shapes) {
    expect(shapes.palette == 1, "ldtilecfg: the palette is unknown");
    for (int i = 0; i < 14; ++i) expect(shapes.reserved[i] == 0, "ldtilecfg: reserved bytes are not 0");
    for (int i = 0; i < 16; ++i) {
        const int rows = shapes.rows[i], bytes = shapes.row_bytes[i];
        expect(i < 8 || (rows == 0 && bytes == 0), "ldtilecfg: a shape for a tile beyond the eighth");
        expect(rows <= kRows && bytes <= kRowBytes, "ldtilecfg: a tile is too large");
        expect((rows == 0) == (bytes == 0), "ldtilecfg: a tile has rows or bytes, and not both");
    }
    core.configured = true;
    core.shapes = shapes;
    std::memset(core.tiles, 0, sizeof(core.tiles));
}

inline void release() {
    core.configured = false;
    std::memset(core.tiles, 0, sizeof(core.tiles));
}

template <int tile>
inline void zero() {
    std::memset(written(tile), 0, sizeof(core.tiles[tile]));
}

template <int tile>
inline void load(const void* from, std::int64_t stride) {
    auto& to = written(tile);
    std::memset(to, 0, sizeof(to));
    for (int row = 0; row < rows_of(tile); ++row) {
        std::memcpy(to[row], static_cast<const std::uint8_t*>(from) + row * stride, bytes_of(tile));
    }
}

template <int tile>
inline void store(void* to, std::int64_t stride) {
    const auto& from = written(tile);
    for (int row = 0; row < rows_of(tile); ++row) {
        std::memcpy(static_cast<std::uint8_t*>(to) + row * stride, from[row], bytes_of(tile));
    }
}

// x is m by k dwords, w k by n, sums m by n.
inline void expect_shapes(int sums, int x, int w) {
    for (int tile : {sums, x, w}) written(tile);
    expect(sums != x && sums != w && x != w, "one tile twice in a product");
    expect(rows_of(sums) == rows_of(x), "sums have not as many rows as x");
    expect(bytes_of(sums) == bytes_of(w), "sums have not as many columns as w");
    expect(bytes_of(x) == 4 * rows_of(w), "w has not as many rows as x has columns");
    expect(bytes_of(x) % 4 == 0 && bytes_of(w) % 4 == 0, "rows are no whole dwords");
}

// Numbers too small to be normal count as zeros, when they are read and when they are written.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float half(const std::uint8_t* row, int i) {
    std::uint16_t upper;
    std::memcpy(&upper, row + 2 * i, 2);
    const std::uint32_t bits = static_cast<std::uint32_t>(upper) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return flush(x);
}

template <int sums, int x, int w>
inline void multiply_bfloat16() {
    expect_shapes(sums, x, w);
    const int columns = bytes_of(sums) / 4;
    for (int m = 0; m < rows_of(sums); ++m) {
        float even[kRows] = {}, odd[kRows] = {};
        for (int k = 0; k < bytes_of(x) / 4; ++k) {
            const float a = half(core.tiles[x][m], 2 * k), b = half(core.tiles[x][m], 2 * k + 1);
            for (int n = 0; n < columns; ++n) {
                even[n] = flush(std::fma(a, half(core.tiles[w][k], 2 * n), even[n]));
                odd[n] = flush(std::fma(b, half(core.tiles[w][k], 2 * n + 1), odd[n]));
            }
        }
        for (int n = 0; n < columns; ++n) {
            float sum;
            std::memcpy(&sum, core.tiles[sums][m] + 4 * n, 4);
            sum = flush(flush(sum) + flush(even[n] + odd[n]));
            std::memcpy(core.tiles[sums][m] + 4 * n, &sum, 4);
        }
    }
}

template <int sums, int x, int w>
inline void multiply_int8() {
    expect_shapes(sums, x, w);
    for (int m = 0; m < rows_of(sums); ++m) {
        for (int n = 0; n < bytes_of(sums) / 4; ++n) {
            std::uint32_t sum;  // which wraps around
            std::memcpy(&sum, core.tiles[sums][m] + 4 * n, 4);
            for (int k = 0; k < bytes_of(x); ++k) {
                const auto a = static_cast<std::int8_t>(core.tiles[x][m][k]);
                const auto b = static_cast<std::int8_t>(core.tiles[w][k / 4][4 * n + k % 4]);
                sum += static_cast<std::uint32_t>(a * b);
            }
            std::memcpy(core.tiles[sums][m] + 4 * n, &sum, 4);
        }
    }
}

#endif

}  // namespace hardpoint::HARDPOINT_LEVEL::tiles
