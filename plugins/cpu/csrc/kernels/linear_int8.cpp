#include "linear_int8.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("linear_int8", LinearInt8),
    EACH_FLOAT("experts_linear_int8", ExpertsLinearInt8),
    EACH_FLOAT("linear_int8_weight", LinearInt8Weight),
    EACH_FLOAT("unpack_int8", UnpackInt8),
    kernel<PackInt8>("pack_int8"),
};
extern const Family linear_int8_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
