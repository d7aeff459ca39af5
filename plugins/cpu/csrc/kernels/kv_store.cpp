// Attention backends' `store`: keys and values of a step to the slots of their pages.
#include "kv_store.h"

#include "../task.h"
#include "cache_groups.h"
#include "chunking.h"
#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

// k, v [tokens, heads, size] with `*_stride` elements from token to token; caches of elements `element`, see
// CachePages; slots int32 [tokens]. `k_given` and `v_given` [1] are the static scales, or null. Of kNvfp4, `*_scales`
// are bytes, the scales of groups, and all strides of pages are in bytes.
template <typename T>
struct AttentionStore {
    static constexpr char signature[] = "pipippiippiippiiiiip";
    const T* k;
    std::int64_t k_stride;
    const T* v;
    std::int64_t v_stride;
    void* k_cache;
    float* k_scales;
    std::int64_t k_page_stride, k_scale_page_stride;
    void* v_cache;
    float* v_scales;
    std::int64_t v_page_stride, v_scale_page_stride;
    const float* k_given;
    const float* v_given;
    std::int64_t tokens, heads, size, block_size, element;
    const std::int32_t* slots;

    std::int64_t chunks() const { return ceil_div(tokens, rows_per_chunk(2 * heads * size)); }
    void run(std::int64_t chunk) const {
        const Rows mine(chunk, rows_per_chunk(2 * heads * size), tokens);
        if (element == kNvfp4) return store_in_groups(mine);
        with_element(element, [&](auto type) {
            using Element = typename decltype(type)::type;
            const CachePages<Element> keys{
                static_cast<Element*>(k_cache), k_page_stride, k_scales, k_scale_page_stride, block_size, heads, size
            };
            const CachePages<Element> values{
                static_cast<Element*>(v_cache), v_page_stride, v_scales, v_scale_page_stride, block_size, heads, size
            };
            for (auto token = mine.first; token < mine.last; ++token) {
                store_token(k + token * k_stride, size, keys, slots[token], k_given);
                store_token(v + token * v_stride, size, values, slots[token], v_given);
            }
        });
    }

    void store_in_groups(const Rows& mine) const {
        const auto width = heads * size;
        for (auto token = mine.first; token < mine.last; ++token) {
            store_group_token(
                k + token * k_stride, static_cast<std::uint8_t*>(k_cache), k_page_stride,
                reinterpret_cast<std::uint8_t*>(k_scales), k_scale_page_stride, block_size, width, slots[token], k_given
            );
            store_group_token(
                v + token * v_stride, static_cast<std::uint8_t*>(v_cache), v_page_stride,
                reinterpret_cast<std::uint8_t*>(v_scales), v_scale_page_stride, block_size, width, slots[token], v_given
            );
        }
    }
};

static constexpr Kernel kernels[] = {EACH_FLOAT("attention_store", AttentionStore)};
extern const Family kv_store_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
