#include "sent_rows.h"

#include <algorithm>
#include <cstring>

namespace hardpoint {
namespace {

Sizes times(const Sizes& rows, std::int64_t bytes) {
    Sizes found(rows);
    for (auto& size : found) size *= bytes;
    return found;
}

std::unique_ptr<char[]> room(std::int64_t bytes) { return std::unique_ptr<char[]>(new char[bytes]); }

}  // namespace

void SentRows::dispatch(
    SharedRanks& ranks, const std::int32_t* ids, std::int64_t tokens, std::int64_t top_k, std::int64_t own_experts,
    const std::vector<Columns>& columns) {
    const int world = ranks.world();
    const auto ids_bytes = top_k * static_cast<std::int64_t>(sizeof(std::int32_t));
    top_k_ = top_k;
    row_bytes_ = ids_bytes;
    for (const auto& column : columns) row_bytes_ += column.bytes;
    sent_.assign(world, 0);
    const auto is_of = [=](std::int32_t id, int rank) { return id >= 0 && id / own_experts == rank; };
    for (int rank = 0; rank < world; ++rank) {
        for (std::int64_t token = 0; token < tokens; ++token) {
            const auto* own = ids + token * top_k;
            if (std::none_of(own, own + top_k, [=](std::int32_t id) { return is_of(id, rank); })) continue;
            tokens_.push_back(token);
            ++sent_[rank];
        }
    }
    const auto packed = room(static_cast<std::int64_t>(tokens_.size()) * row_bytes_);
    char* to = packed.get();
    auto next = tokens_.begin();
    for (int rank = 0; rank < world; ++rank) {
        for (std::int64_t row = 0; row < sent_[rank]; ++row) {
            const auto token = *next++;
            for (std::int64_t k = 0; k < top_k; ++k) {
                const auto id = ids[token * top_k + k];
                const auto local = is_of(id, rank) ? static_cast<std::int32_t>(id - rank * own_experts) : -1;
                std::memcpy(to + k * sizeof(local), &local, sizeof(local));
            }
            to += ids_bytes;
            for (const auto& column : columns) {
                std::memcpy(to, column.rows + token * column.bytes, column.bytes);
                to += column.bytes;
            }
        }
    }
    ranks.all_to_all(packed.get(), times(sent_, row_bytes_), [&](const Sizes& coming) {
        received_ = coming;
        for (auto& size : received_) size /= row_bytes_;
        came_ = 0;
        for (const auto rows : received_) came_ += rows;
        rows_ = room(came_ * row_bytes_);
        return rows_.get();
    });
}

void SentRows::take(std::int32_t* ids, const std::vector<Columns>& columns) const {
    const auto ids_bytes = top_k_ * sizeof(std::int32_t);
    const char* from = rows_.get();
    for (std::int64_t row = 0; row < came_; ++row) {
        std::memcpy(ids + row * top_k_, from, ids_bytes);
        from += ids_bytes;
        for (const auto& column : columns) {
            std::memcpy(column.rows + row * column.bytes, from, column.bytes);
            from += column.bytes;
        }
    }
}

void SentRows::combine(
    SharedRanks& ranks, const Kernel& sum, const char* y, char* out, std::int64_t tokens, std::int64_t elements,
    std::int64_t element_bytes) const {
    const auto row_bytes = elements * element_bytes;
    const auto back = room(static_cast<std::int64_t>(tokens_.size()) * row_bytes);
    ranks.all_to_all(y, back.get(), times(received_, row_bytes), times(sent_, row_bytes));
    const auto world = ranks.world();
    std::vector<const void*> parts(tokens * world);
    std::vector<std::int64_t> counts(tokens, 0);
    const char* row = back.get();
    for (const auto token : tokens_) {
        parts[token * world + counts[token]++] = row;
        row += row_bytes;
    }
    Slot slots[4];
    slots[3].integer = elements;
    for (std::int64_t token = 0; token < tokens; ++token) {
        char* const to = out + token * row_bytes;
        if (counts[token] == 0) {
            std::memset(to, 0, row_bytes);
            continue;
        }
        slots[0].pointer = &parts[token * world];
        slots[1].pointer = to;
        slots[2].integer = counts[token];
        for (std::int64_t chunk = 0, chunks = sum.chunks(slots); chunk < chunks; ++chunk) sum.run(slots, chunk);
    }
}

}  // namespace hardpoint
