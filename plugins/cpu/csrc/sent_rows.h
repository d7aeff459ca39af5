// Tokens of a mixture of experts on their way to the ranks of their experts, and back.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shared_ranks.h"

namespace hardpoint {

// Rows of so many bytes each, one after the other.
struct Columns {
    char* rows;
    std::int64_t bytes;
};

// One dispatch: every token goes once to each rank that has experts of it.
class SentRows {
  public:
    // ids [tokens, top_k] number the experts of all ranks, of which each rank has `own_experts`; -1: none.
    void dispatch(
        SharedRanks& ranks, const std::int32_t* ids, std::int64_t tokens, std::int64_t top_k,
        std::int64_t own_experts, const std::vector<Columns>& columns);

    std::int64_t came() const { return came_; }  // rows

    // Copy what came: ids [came, top_k] that count from this rank's first expert (-1: another rank's), and the columns.
    void take(std::int32_t* ids, const std::vector<Columns>& columns) const;

    // Send the rows y [came, elements] back; out [tokens, elements] = the sums for each token, in the order of the ranks.
    void combine(
        SharedRanks& ranks, const Kernel& sum, const char* y, char* out, std::int64_t tokens, std::int64_t elements,
        std::int64_t element_bytes) const;

  private:
    Sizes sent_, received_;             // rows to and from each rank
    std::vector<std::int64_t> tokens_;  // that were sent, rank after rank
    std::unique_ptr<char[]> rows_;      // what came: ids, then the columns
    std::int64_t came_ = 0, top_k_ = 0, row_bytes_ = 0;
};

}  // namespace hardpoint
