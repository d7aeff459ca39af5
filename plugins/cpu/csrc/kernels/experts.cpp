#include "experts.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    kernel<SortByExpert>("sort_by_expert"),
    EACH_FLOAT("experts_linear", ExpertsLinear),
    EACH_FLOAT("experts_linear_int8", ExpertsLinearInt8),
    EACH_PAIR("experts_linear_int4", ExpertsLinearInt4),
    EACH_FLOAT("experts_linear_mxfp4", ExpertsLinearMxfp4),
    EACH_FLOAT("experts_linear_nvfp4", ExpertsLinearNvfp4),
    EACH_FLOAT("sum_of_experts", SumOfExperts),
};
extern const Family experts_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
