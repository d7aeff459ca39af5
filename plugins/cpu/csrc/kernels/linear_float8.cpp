#include "linear_float8.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("linear_float8", LinearFloat8),
    EACH_FLOAT("unpack_float8", UnpackFloat8),
    EACH_FLOAT("round_float8", RoundFloat8),
    kernel<PackFloat8>("pack_float8"),
};
extern const Family linear_float8_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
