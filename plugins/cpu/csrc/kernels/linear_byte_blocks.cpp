#include "each_float.h"
#include "experts_blocks.h"
#include "linear_blocks.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("linear_byte_blocks", LinearByteBlocks),
    EACH_FLOAT("experts_linear_byte_blocks", ExpertsLinearByteBlocks),
    EACH_FLOAT("unpack_byte_blocks", UnpackByteBlocks),
    kernel<PackBlocks<255>>("pack_byte_blocks"),
};
extern const Family linear_byte_blocks_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
