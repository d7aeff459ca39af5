// Emulated tile instructions (csrc/kernels/tiles.h) used one by one, rightly and wrongly: see test_tiles.py.
#include <cstring>
#include <string_view>

#include "kernels/tiles.h"

namespace tiles = hardpoint::amx::tiles;

// Sums of `rows` by 16, x of that many rows of `bytes` bytes, w of a row for each four of them; in the tiles 0, 1, 2.
tiles::Shapes shapes(int rows, int bytes) {
    tiles::Shapes shapes;
    const int all[3][2] = {{rows, 64}, {rows, bytes}, {bytes / 4, 64}};
    for (int tile = 0; tile < 3; ++tile) {
        shapes.rows[tile] = static_cast<std::uint8_t>(all[tile][0]);
        shapes.row_bytes[tile] = static_cast<std::uint16_t>(all[tile][1]);
    }
    return shapes;
}

std::uint16_t half(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<std::uint16_t>(bits >> 16);
}

struct Halves {
    std::uint16_t at[16][32] = {};
};
struct Bytes {
    std::int8_t at[16][64] = {};
};
template <typename T>
struct Sums {
    T at[16][16] = {};
};

template <typename Sums, typename Factor, typename Multiply>
void multiply(Sums& sums, const Factor& x, const Factor& w, const tiles::Shapes& given, Multiply multiply) {
    tiles::configure(given);
    tiles::load<0>(sums.at, 64);
    tiles::load<1>(x.at, 64);
    tiles::load<2>(w.at, 64);
    multiply();
    tiles::store<0>(sums.at, 64);
    tiles::release();
}

constexpr auto multiply_halves = [] { tiles::multiply_bfloat16<0, 1, 2>(); };

// Small whole numbers: exact, whatever the order.
bool multiplies_halves() {
    Halves x, w;
    Sums<float> sums, wanted;
    for (int m = 0; m < 5; ++m) {
        for (int n = 0; n < 16; ++n) {
            sums.at[m][n] = wanted.at[m][n] = static_cast<float>(m - n);
            for (int k = 0; k < 12; ++k) {  // column k of w stands in pair k / 2
                const int a = 3 * m + k - 7, b = 2 * k - n;
                x.at[m][k] = half(static_cast<float>(a));
                w.at[k / 2][2 * n + k % 2] = half(static_cast<float>(b));
                wanted.at[m][n] += static_cast<float>(a * b);
            }
        }
    }
    multiply(sums, x, w, shapes(5, 24), multiply_halves);
    return std::memcmp(&sums, &wanted, sizeof(sums)) == 0;
}

// Read and written as zeros: factors, products and what they are added to.
bool flushes() {
    Halves x, w;
    Sums<float> sums;
    x.at[0][0] = 0x0040;  // not normal
    x.at[1][0] = x.at[2][0] = half(0x1p-70f);
    w.at[0][0] = half(0x1p+100f);
    w.at[0][2] = half(0x1p-70f);
    sums.at[1][1] = 1.0f;
    sums.at[2][1] = 0x1p-127f;
    multiply(sums, x, w, shapes(3, 4), multiply_halves);
    return sums.at[0][0] == 0 && sums.at[1][0] == 0x1p30f && sums.at[1][1] == 1.0f && sums.at[2][1] == 0;
}

bool multiplies_bytes() {
    Bytes x, w;
    Sums<std::int32_t> sums, wanted;
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) {
            for (int k = 0; k < 64; ++k) {
                const int a = (m * 37 + k * 11) % 256 - 128, b = (n * 53 + k * 29) % 256 - 128;
                x.at[m][k] = static_cast<std::int8_t>(a);
                w.at[k / 4][4 * n + k % 4] = static_cast<std::int8_t>(b);
                wanted.at[m][n] += a * b;
            }
        }
    }
    multiply(sums, x, w, shapes(16, 64), [] { tiles::multiply_int8<0, 1, 2>(); });
    return std::memcmp(&sums, &wanted, sizeof(sums)) == 0;
}

// Nothing is read or written beyond a shape, and what a tile held before is gone.
bool clears() {
    Bytes full, part;
    std::memset(full.at, 1, sizeof(full.at));
    tiles::configure(shapes(16, 64));
    tiles::load<1>(full.at, 64);
    tiles::configure(shapes(3, 8));
    tiles::store<1>(part.at, 64);
    return std::memcmp(part.at, Bytes{}.at, sizeof(part.at)) == 0;
}

int main(int, char** arguments) {
    const std::string_view name = arguments[1];
    if (name == "bfloat16") return multiplies_halves() ? 0 : 1;
    if (name == "small-numbers") return flushes() ? 0 : 1;
    if (name == "int8") return multiplies_bytes() ? 0 : 1;
    if (name == "zeros-behind") return clears() ? 0 : 1;
    if (name == "no-shapes") tiles::zero<0>();
    tiles::Shapes given = shapes(4, 16);
    if (name == "too-many-rows") given.rows[0] = 17;
    if (name == "rows") given.rows[1] = 5;
    if (name == "columns") given.rows[2] = 5;
    tiles::configure(given);
    if (name == "released") tiles::release();
    if (name == "released" || name == "unused-tile") tiles::zero<3>();
    multiply_halves();
    return 1;
}
