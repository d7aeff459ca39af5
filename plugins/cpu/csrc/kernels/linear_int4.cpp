#include "linear_int4.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_PAIR("linear_int4", LinearInt4),
    EACH_PAIR("experts_linear_int4", ExpertsLinearInt4),
    EACH_PAIR("unpack_int4", UnpackInt4),
    kernel<PackInt4>("pack_int4"),
};
extern const Family linear_int4_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
