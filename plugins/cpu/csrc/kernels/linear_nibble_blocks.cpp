#include "each_float.h"
#include "experts_blocks.h"
#include "linear_blocks.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("linear_nibble_blocks", LinearNibbleBlocks),
    EACH_FLOAT("experts_linear_nibble_blocks", ExpertsLinearNibbleBlocks),
    EACH_FLOAT("unpack_nibble_blocks", UnpackNibbleBlocks),
    kernel<PackBlocks<15>>("pack_nibble_blocks"),
};
extern const Family linear_nibble_blocks_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
