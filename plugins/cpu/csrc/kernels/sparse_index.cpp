#include "sparse_index.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("store_index_keys", attention::StoreIndexKeys),
    EACH_ELEMENT("index_scores", attention::IndexScores),
    ::hardpoint::kernel<attention::TopkPositions>("topk_positions"),
};
extern const Family sparse_index_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
