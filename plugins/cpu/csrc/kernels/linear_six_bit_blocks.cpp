#include "each_float.h"
#include "experts_blocks.h"
#include "linear_blocks.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("linear_six_bit_blocks", LinearSixBitBlocks),
    EACH_FLOAT("experts_linear_six_bit_blocks", ExpertsLinearSixBitBlocks),
    EACH_FLOAT("unpack_six_bit_blocks", UnpackSixBitBlocks),
    kernel<PackBlocks<63>>("pack_six_bit_blocks"),
};
extern const Family linear_six_bit_blocks_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
