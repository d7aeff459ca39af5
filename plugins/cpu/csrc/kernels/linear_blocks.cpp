#include "linear_blocks.h"

#include "each_float.h"
#include "experts_blocks.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("linear_nibble_blocks", LinearNibbleBlocks),
    EACH_FLOAT("linear_six_bit_blocks", LinearSixBitBlocks),
    EACH_FLOAT("linear_byte_blocks", LinearByteBlocks),
    EACH_FLOAT("experts_linear_nibble_blocks", ExpertsLinearNibbleBlocks),
    EACH_FLOAT("experts_linear_six_bit_blocks", ExpertsLinearSixBitBlocks),
    EACH_FLOAT("experts_linear_byte_blocks", ExpertsLinearByteBlocks),
    EACH_FLOAT("unpack_nibble_blocks", UnpackNibbleBlocks),
    EACH_FLOAT("unpack_six_bit_blocks", UnpackSixBitBlocks),
    EACH_FLOAT("unpack_byte_blocks", UnpackByteBlocks),
    EACH_FLOAT("round_blocks", RoundBlocks),
    kernel<PackBlocks<15>>("pack_nibble_blocks"),
    kernel<PackBlocks<63>>("pack_six_bit_blocks"),
    kernel<PackBlocks<255>>("pack_byte_blocks"),
};
extern const Family linear_blocks_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
