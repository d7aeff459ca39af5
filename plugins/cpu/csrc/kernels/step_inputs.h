// The ends of a step: what the model reads first, and where its tokens are stored.
#pragma once

#include "../task.h"
#include "chunking.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

// The rows of a table that `ids` [count] name, in bytes.
struct TakeRows {
    static constexpr char signature[] = "pppiii";
    const char* table;
    const std::int64_t* ids;
    char* out;
    std::int64_t count, row_bytes, stride_bytes;

    std::int64_t per_chunk() const { return rows_per_chunk(ceil_div(row_bytes, 2)); }
    std::int64_t chunks() const { return ceil_div(count, per_chunk()); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, per_chunk(), count);
        for (auto row = mine.first; row < mine.last; ++row) {
            std::memcpy(out + row * row_bytes, table + ids[row] * stride_bytes, row_bytes);
        }
    }
};

// See the op slot_mapping. A step is a few thousand tokens at the most: one chunk.
struct SlotMapping {
    static constexpr char signature[] = "pppppiiiii";
    const std::int64_t* positions;
    const std::int32_t *rows, *starts, *tables;
    std::int32_t* slots;
    std::int64_t tokens, requests, table_stride, block, null_slot;

    std::int64_t chunks() const { return 1; }
    void run(std::int64_t) const {
        std::int64_t token = 0;
        for (std::int64_t request = 0; request < requests; ++request) {
            const std::int32_t* table = tables + rows[request] * table_stride;
            const std::int64_t end = std::min<std::int64_t>(starts[request + 1], tokens);
            for (; token < end; ++token) {
                const auto page = positions[token] / block, offset = positions[token] % block;
                slots[token] = static_cast<std::int32_t>(table[page] * block + offset);
            }
        }
        for (; token < tokens; ++token) slots[token] = static_cast<std::int32_t>(null_slot);
    }
};

// See the op keep_tokens.
struct KeepTokens {
    static constexpr char signature[] = "pppi";
    std::int64_t* kept;
    const std::int64_t *slots, *tokens;
    std::int64_t count;

    std::int64_t chunks() const { return 1; }
    void run(std::int64_t) const {
        for (std::int64_t row = 0; row < count; ++row) kept[slots[row]] = tokens[row];
    }
};

// See the op decode_inputs: rows [3 + G, N], of slots, lengths, tokens and each group's new pages. Strides count
// elements: of a group, of a row, or of a slot of the block tables.
struct DecodeInputs {
    static constexpr char signature[] = "pppppppppiiiiiiiiii";
    const std::int32_t* rows;
    const std::int64_t* last_tokens;
    std::int32_t* tables;
    std::int64_t *ids, *positions, *slots;
    std::int32_t *seq_lens, *step_tables, *mapping;
    std::int64_t count, groups, width, block;
    std::int64_t rows_stride, tables_group_stride, table_stride, step_group_stride, step_stride, mapping_stride;

    static constexpr std::int32_t kLastDrawn = -1, kNullPage = 0;

    std::int64_t per_chunk() const { return rows_per_chunk(std::max<std::int64_t>(1, groups * width)); }
    std::int64_t chunks() const { return ceil_div(count, per_chunk()); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, per_chunk(), count);
        for (auto row = mine.first; row < mine.last; ++row) {
            const std::int32_t slot = rows[row], length = rows[rows_stride + row], token = rows[2 * rows_stride + row];
            const std::int64_t position = length - 1, page = position / block;
            ids[row] = token == kLastDrawn ? last_tokens[slot] : token;
            positions[row] = position;
            slots[row] = slot;
            seq_lens[row] = length;
            for (std::int64_t group = 0; group < groups; ++group) {
                std::int32_t* table = tables + group * tables_group_stride + slot * table_stride;
                // Padding, whose slot may stand several times, has no new page: nothing is written where others read.
                const std::int32_t begins = rows[(3 + group) * rows_stride + row];
                if (begins != kNullPage) table[page] = begins;
                const std::int64_t at = table[page] * block + position % block;
                mapping[group * mapping_stride + row] = static_cast<std::int32_t>(at);
                std::int32_t* to = step_tables + group * step_group_stride + row * step_stride;
                std::memcpy(to, table, (page + 1) * sizeof(*to));
            }
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
