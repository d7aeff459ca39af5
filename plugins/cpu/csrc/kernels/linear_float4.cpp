#include "linear_float4.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("linear_mxfp4", LinearMxfp4),
    EACH_FLOAT("linear_nvfp4", LinearNvfp4),
    EACH_FLOAT("experts_linear_mxfp4", ExpertsLinearMxfp4),
    EACH_FLOAT("experts_linear_nvfp4", ExpertsLinearNvfp4),
    EACH_FLOAT("unpack_mxfp4", UnpackMxfp4),
    EACH_FLOAT("unpack_nvfp4", UnpackNvfp4),
};
extern const Family linear_float4_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
