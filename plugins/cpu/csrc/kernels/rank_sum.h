// The sum of what several ranks hold.
#pragma once

#include "../task.h"
#include "chunking.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

// Vectors that one pass over the ranks adds up side by side: enough to hide that each sum waits for the one before.
constexpr int kSumsAtOnce = 4;

// out[i] = the sum of parts[rank][i] over `ranks`, in their order, in float32, rounded once. `out` may be a part.
// A part is read in front of what is written, and every element goes through the same instructions.
template <typename T>
struct RankSum {
    static constexpr char signature[] = "ppii";
    const T* const* parts;
    T* out;
    std::int64_t ranks, elements;

    std::int64_t chunks() const { return ceil_div(elements, kElementsPerChunk); }

    void run(std::int64_t chunk) const {
        const auto last = std::min(elements, (chunk + 1) * kElementsPerChunk);
        auto i = chunk * kElementsPerChunk;
        for (; i + kSumsAtOnce * kLanes <= last; i += kSumsAtOnce * kLanes) add<kSumsAtOnce>(i);
        for (; i + kLanes <= last; i += kLanes) add<1>(i);
        if (i < last) {
            T rest[kLanes] = {};
            Floats total = {};
            for (std::int64_t rank = 0; rank < ranks; ++rank) {
                std::memcpy(rest, parts[rank] + i, (last - i) * sizeof(T));
                total = rank ? total + load(rest) : load(rest);
            }
            store(rest, total);
            std::memcpy(out + i, rest, (last - i) * sizeof(T));
        }
    }

  private:
    template <int count>
    void add(std::int64_t i) const {
        Floats total[count];
        for (int v = 0; v < count; ++v) total[v] = load(parts[0] + i + v * kLanes);
        for (std::int64_t rank = 1; rank < ranks; ++rank) {
            for (int v = 0; v < count; ++v) total[v] += load(parts[rank] + i + v * kLanes);
        }
        for (int v = 0; v < count; ++v) store(out + i + v * kLanes, total[v]);
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
