#include "experts.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    kernel<SortByExpert>("sort_by_expert"),
    EACH_FLOAT("sum_of_experts", SumOfExperts),
};
extern const Family experts_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
