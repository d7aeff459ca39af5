// Paged attention: what its kernels share. See hardpoint.attention.reference for what is computed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "../task.h"
#include "cache_groups.h"
#include "chunking.h"
#include "kv_store.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL::attention {

// The arguments of all attention kernels. q and out are [tokens, heads, size] of dtype `dtype` (see Code), without gaps
// within a token, `*_stride` elements from token to token. The cache's pages of keys and of values, [block, kv_heads,
// size], are `*_page` elements apart. Of 8-bit elements, `*_scales` are floats [block, kv_heads] in pages
// `*_scale_page` floats apart, or, where that is 0, one float for all, as it is of NVFP4, whose pages are bytes apart.
//
// Everything that changes from step to step is read from memory, so that a recorded call serves later steps: int32
// query_start [requests + 1], seq_lens [requests], block_table [requests, table_stride].
struct Attention {
    static constexpr char signature[] = "pipiipipipipipppiiiiiiffiipppi";
    const void* q;
    std::int64_t q_stride;
    void* out;
    std::int64_t out_stride, dtype;
    const void* k;
    std::int64_t k_page;
    const void* v;
    std::int64_t v_page;
    const float* k_scales;
    std::int64_t k_scale_page;
    const float* v_scales;
    std::int64_t v_scale_page;
    const std::int32_t* query_start;
    const std::int32_t* seq_lens;
    const std::int32_t* block_table;
    std::int64_t table_stride, requests, heads, kv_heads, size, block;
    double scale, soft_cap;      // soft_cap 0: none
    std::int64_t window, chunk;  // 0: none
    const float* sinks;          // [heads], or null
    const float* slopes;         // [heads], or null
    float* partial;              // see decode
    std::int64_t threads;

    std::int64_t groups() const { return heads / kv_heads; }
    std::int64_t num_queries(std::int64_t request) const { return query_start[request + 1] - query_start[request]; }

    // The oldest position that a query reads.
    std::int64_t first(std::int64_t position) const {
        if (window > 0) return std::max<std::int64_t>(0, position - window + 1);
        return chunk > 0 ? position - position % chunk : 0;
    }

    template <typename Write>
    void with_output(std::int64_t token, std::int64_t head, Write write) const {
        with_float(dtype, [&](auto type) {
            write(static_cast<typename decltype(type)::type*>(out) + token * out_stride + head * size);
        });
    }
};

// Keys (or values) of neighbouring positions of one request, wherever their pages lie: at most `most` of them.
template <typename Element, int most>
struct Tile {
    std::int64_t count = 0;
    Row<Element> keys[most];
    Row<Element> values[most];
    const float* key_scales[most];
    const float* value_scales[most];

    // Rows of KV head 0. Behind the last, the last is repeated, so that no loop has to end early.
    void find(const Attention& a, std::int64_t request, std::int64_t begin, std::int64_t end) {
        count = end - begin;
        const std::int32_t* table = a.block_table + request * a.table_stride;
        const std::int64_t width = a.kv_heads * a.size;
        std::int64_t number = begin / a.block, offset = begin % a.block;
        for (std::int64_t i = 0; i < count; ++number, offset = 0) {
            const std::int64_t page = table[number];
            for (; offset < a.block && i < count; ++offset, ++i) {
                keys[i] = row(a.k, page * a.k_page, offset * width, a.block * width);
                values[i] = row(a.v, page * a.v_page, offset * width, a.block * width);
                if constexpr (kIsScaled<Element>) {
                    key_scales[i] = a.k_scale_page ? a.k_scales + page * a.k_scale_page + offset * a.kv_heads : nullptr;
                    value_scales[i] =
                        a.v_scale_page ? a.v_scales + page * a.v_scale_page + offset * a.kv_heads : nullptr;
                }
            }
        }
        for (std::int64_t i = count; i < most && count > 0; ++i) {
            keys[i] = keys[count - 1];
            values[i] = values[count - 1];
            if constexpr (kIsScaled<Element>) {
                key_scales[i] = key_scales[count - 1];
                value_scales[i] = value_scales[count - 1];
            }
        }
    }

    // The elements from `at` on in the page that begins at `page`, of `whole` elements.
    static Row<Element> row(const void* pages, std::int64_t page, std::int64_t at, std::int64_t whole) {
        const auto* first = static_cast<const Element*>(pages) + page;
        if constexpr (std::is_same_v<Element, nvfp4>) {
            const auto* codes = reinterpret_cast<const std::uint8_t*>(first);
            return {codes + at / 2, codes + whole / 2 + at / kGroup, 0};
        } else {
            return first + at;
        }
    }

    // The scales of one KV head, each [most].
    void gather_scales(const Attention& a, std::int64_t head, float* for_keys, float* for_values) const {
        if constexpr (kIsScaled<Element>) {
            for (int i = 0; i < most; ++i) {
                for_keys[i] = key_scales[i] ? key_scales[i][head] : *a.k_scales;
                for_values[i] = value_scales[i] ? value_scales[i][head] : *a.v_scales;
            }
        }
    }
};

// Memory of this thread's own for the time of one chunk, given out in pieces. It is kept for the next chunk.
class Scratch {
  public:
    explicit Scratch(std::size_t bytes) {
        if (kept().size < bytes) {
            kept().memory.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64})));
            kept().size = bytes;
        }
        next_ = kept().memory.get();
    }
    template <typename T>
    static std::size_t bytes(std::int64_t count) {
        return (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    }
    template <typename T>
    T* take(std::int64_t count) {
        auto* piece = reinterpret_cast<T*>(next_);
        next_ += bytes<T>(count);
        return piece;
    }

  private:
    struct Free {
        void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{64}); }
    };
    struct Kept {
        std::unique_ptr<std::byte, Free> memory;
        std::size_t size = 0;
    };
    static Kept& kept() {
        thread_local Kept kept;
        return kept;
    }
    std::byte* next_;
};

#if defined(__AVX512BF16__)
// Elements that bfloat16 holds exactly.
template <typename Element>
constexpr bool kIsBfloat16 = std::is_same_v<Element, bfloat16> || kIsScaled<Element>;
#endif

// call(std::integral_constant<int, n>) for 1 <= n <= most.
template <int most, typename Call>
inline void with_count(std::int64_t n, Call call) {
    if constexpr (most > 0) {
        if (n == most) return call(std::integral_constant<int, most>{});
        with_count<most - 1>(n, call);
    }
}

inline std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return ceil_div(n, multiple) * multiple; }

inline Ints lane_numbers() {
    Ints lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    return lanes;
}

inline float lanes_largest(Floats v) {  // NaN does not count
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(bits_as<__m512>(v));
#else
    float most = -__builtin_inff();
    for (int i = 0; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// The number subtracted from scores before their exponentials. Where all so far are -inf that weighs them nothing.
inline float origin_of(float largest) { return largest == -__builtin_inff() ? 0.0f : largest; }

// Near zero by the series, whose relative error stays small there; else by the exponential.
inline Floats hyperbolic_tangent(Floats x) {
    const Floats square = x * x;
    Floats series = broadcast(-1382.0f / 155925.0f);
    series = series * square + 62.0f / 2835.0f;
    series = series * square - 17.0f / 315.0f;
    series = series * square + 2.0f / 15.0f;
    series = series * square - 1.0f / 3.0f;
    series = x + x * square * series;
    const Floats other = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return square < 0.16f ? series : other;
}

// A dot product as it enters the softmax: scaled, capped, less the slope times the distance of the key.
struct ScoreRule {
    float scale, soft_cap, slope;

    ScoreRule(const Attention& a, std::int64_t head)
        : scale(static_cast<float>(a.scale)),
          soft_cap(static_cast<float>(a.soft_cap)),
          slope(a.slopes ? a.slopes[head] : 0) {}

    // `keys` count from `distance` before the query: lane 0 lies so far before it.
    Floats apply(Floats dot, Ints lanes, std::int64_t distance) const {
        Floats score = dot * scale;
        if (soft_cap != 0.0f) score = soft_cap * hyperbolic_tangent(score / soft_cap);
        if (slope != 0.0f) {
            score = score - slope * __builtin_convertvector(static_cast<std::int32_t>(distance) - lanes, Floats);
        }
        return score;
    }
};

// The last factor of a row's sum of weighted values. `most` is its largest score, `total` the sum of
// e^(score
// - most); a sink joins the latter.
inline float normalizer(const Attention& a, std::int64_t head, float most, float total) {
    if (!a.sinks) return 1.0f / total;
    const float sink = a.sinks[head], larger = sink > most ? sink : most;
    const float factor = std::exp(most - larger);
    return factor / (total * factor + std::exp(sink - larger));
}

// sums [size] * factor to out [size].
template <typename T>
inline void store_scaled_sums(T* to, const float* sums, std::int64_t size, float factor) {
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, load(sums + i) * factor);
    if (i < size) store_some(to + i, load_some(sums + i, size - i) * factor, size - i);
}

// Elements to a row of numbers; `padded` of them, zeros behind the first n.
template <typename Number, typename From>
inline void convert(From from, std::int64_t n, std::int64_t padded, Number* to) {
    if constexpr (std::is_same_v<From, const Number*>) {
        std::memcpy(to, from, n * sizeof(Number));
    } else {
        std::int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
        if (i < n) store_some(to + i, load_some(from + i, n - i), n - i);
    }
    std::memset(static_cast<void*>(to + n), 0, (padded - n) * sizeof(Number));
}

#define EACH_ELEMENT(name, Arguments)                                                                                 \
    ::hardpoint::kernel<Arguments<float>>(name "_float32"), ::hardpoint::kernel<Arguments<float16>>(name "_float16"), \
        ::hardpoint::kernel<Arguments<bfloat16>>(name "_bfloat16"),                                                   \
        ::hardpoint::kernel<Arguments<float8_e4m3fn>>(name "_float8_e4m3fn"),                                         \
        ::hardpoint::kernel<Arguments<float8_e5m2>>(name "_float8_e5m2"),                                             \
        ::hardpoint::kernel<Arguments<std::int8_t>>(name "_int8")

}  // namespace hardpoint::HARDPOINT_LEVEL::attention
