#include "linear.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

HARDPOINT_MULTIPLY_BLOCK(float, float);
HARDPOINT_MULTIPLY_BLOCK(float, float16);
HARDPOINT_MULTIPLY_BLOCK(float16, float16);
HARDPOINT_MULTIPLY_BLOCK(bfloat16, bfloat16);
#if !defined(__AVX512BF16__)
HARDPOINT_MULTIPLY_BLOCK(float, bfloat16);
#endif

static constexpr Kernel kernels[] = {
    EACH_FLOAT("linear", Linear),
    EACH_FLOAT("experts_linear", ExpertsLinear),
    EACH_FLOAT("pack_linear", PackLinear),
    EACH_FLOAT("unpack_rows", UnpackRows),
};
extern const Family linear_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
