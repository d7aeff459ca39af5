// The ops between the query-key-value projection and attention: head norms, rotation, the write to the cache.
#pragma once

#include "../task.h"
#include "chunking.h"
#include "kv_store.h"
#include "norm.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

// The even (or odd) ones of the 2 * kLanes numbers of two vectors; and two vectors' numbers taken in turns.
inline Floats every_second(Floats a, Floats b, int first) {
    Ints places;
    for (int i = 0; i < kLanes; ++i) places[i] = 2 * i + first;
    return __builtin_shuffle(a, b, places);
}
inline Floats in_turns(Floats a, Floats b, int first) {
    Ints places;
    for (int i = 0; i < kLanes; ++i) places[i] = first + i / 2 + (i % 2) * kLanes;
    return __builtin_shuffle(a, b, places);
}

// Rotates the first `rotary` of a head's `size` elements by a row of the table, cosines first, and passes the rest
// through: in pairs (i, i + rotary / 2), or (2i, 2i + 1) if `interleaved`. `out` may be `x`.
template <typename T>
void rotate_head(const T* x, T* out, const float* table, std::int64_t size, std::int64_t rotary, bool interleaved) {
    const std::int64_t half = rotary / 2;
    const float *cosines = table, *sines = table + half;
    std::int64_t i = 0;
    if (interleaved) {
        for (; i + kLanes <= half; i += kLanes) {
            const Floats low = load(x + 2 * i), high = load(x + 2 * i + kLanes);
            const Floats a = every_second(low, high, 0), b = every_second(low, high, 1);
            const Floats cosine = load(cosines + i), sine = load(sines + i);
            const Floats c = a * cosine - b * sine, d = b * cosine + a * sine;
            store(out + 2 * i, in_turns(c, d, 0));
            store(out + 2 * i + kLanes, in_turns(c, d, kLanes / 2));
        }
    } else {
        for (; i + kLanes <= half; i += kLanes) {
            const Floats a = load(x + i), b = load(x + half + i);
            const Floats cosine = load(cosines + i), sine = load(sines + i);
            store(out + i, a * cosine - b * sine);
            store(out + half + i, b * cosine + a * sine);
        }
    }
    for (; i < half; ++i) {
        const std::int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : half + i;
        const float a = to_float(x[first]), b = to_float(x[second]);
        out[first] = round_to<T>(a * cosines[i] - b * sines[i]);
        out[second] = round_to<T>(b * cosines[i] + a * sines[i]);
    }
    if (out != x && rotary < size) std::memcpy(out + rotary, x + rotary, (size - rotary) * sizeof(T));
}

// q [tokens, heads, size], k and v [tokens, kv_heads, size], each token's heads one behind the other and `*_stride`
// elements from token to token; outputs without gaps. What is null is left out: the norm of q or k, the rotation, an
// output (then nothing happens to that input), the store. Caches and their scales are as in kv_store.h.
template <typename T>
struct QkNormRopeStore {
    static constexpr char signature[] = "ppppppppppppppiiiiiiiiiiiiiiif";
    const T *q, *k, *v;
    const float* table;
    const std::int64_t* positions;
    void *k_cache, *v_cache;
    float *k_scales, *v_scales;
    const std::int32_t* slots;
    const T *q_weight, *k_weight;
    T *q_out, *k_out;
    std::int64_t tokens, heads, kv_heads, size, rotary, interleaved;
    std::int64_t q_stride, k_stride, v_stride, table_stride, k_page, v_page, scale_page, block, element;
    double eps;

    std::int64_t per_chunk() const { return rows_per_chunk((heads + 2 * kv_heads) * size); }
    std::int64_t chunks() const { return ceil_div(tokens, per_chunk()); }

    void run(std::int64_t chunk) const {
        const Rows mine(chunk, per_chunk(), tokens);
        for (auto token = mine.first; token < mine.last; ++token) {
            const float* row = table ? table + positions[token] * table_stride : nullptr;
            const T* keys = k + token * k_stride;
            if (q_out) turn(q + token * q_stride, q_out + token * heads * size, heads, q_weight, row);
            if (k_out) {
                T* turned = k_out + token * kv_heads * size;
                turn(keys, turned, kv_heads, k_weight, row);
                keys = turned;
            }
            if (k_cache) keep(keys, v + token * v_stride, slots[token]);
        }
    }

    // One token's keys and values to their slot.
    void keep(const T* keys, const T* values, std::int64_t slot) const {
        with_element(element, [&](auto type) {
            using Element = typename decltype(type)::type;
            const CachePages<Element> k_pages{
                static_cast<Element*>(k_cache), k_page, k_scales, scale_page, block, kv_heads, size
            };
            const CachePages<Element> v_pages{
                static_cast<Element*>(v_cache), v_page, v_scales, scale_page, block, kv_heads, size
            };
            store_token(keys, size, k_pages, slot);
            store_token(values, size, v_pages, slot);
        });
    }

    // The norms and the rotation of one token's heads.
    void turn(const T* x, T* out, std::int64_t count, const T* weight, const float* row) const {
        for (std::int64_t head = 0; head < count; ++head, x += size, out += size) {
            const T* current = x;
            if (weight) {
                rms_norm_row(current, weight, out, size, static_cast<float>(eps));
                current = out;
            }
            if (row) {
                rotate_head(current, out, row, size, rotary, interleaved != 0);
            } else if (current != out) {
                std::memcpy(out, current, size * sizeof(T));
            }
        }
    }
};

}  // namespace hardpoint::HARDPOINT_LEVEL
