// Sizes that Python needs as well, the same at every level: members of the module `_native`.
#pragma once

#include <cstdint>

namespace hardpoint {

// Rows of a weight in a panel; see kernels/panels.h.
constexpr int kPanelRows = 16;

// Results of a linear kernel that a chunk collects before they are written: this many rows of x times some panels. It
// is the most rows of one expert that one piece of work takes, too.
constexpr int kBlockRows = 192;

// Some sorted rows of one expert, few enough for one block of results; see kernels/experts.h.
struct ExpertRows {
    std::int64_t expert, first, rows;
};

// Splits of decode attention for each thread, all requests together.
constexpr std::int64_t kSplitsPerThread = 6;

// Elements of the cache that a split of latent attention has at least; see kLeastSplit in kernels/attention_decode.h.
constexpr std::int64_t kLeastLatentSplit = 32768;

}  // namespace hardpoint
