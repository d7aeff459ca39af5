#include "rank_sum.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("rank_sum", RankSum),
};
extern const Family rank_sum_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
