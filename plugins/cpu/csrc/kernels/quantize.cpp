#include "quantize.h"

#include "each_float.h"
#include "round_blocks.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("quantize_rows", QuantizeRows),
    EACH_FLOAT("round_blocks", RoundBlocks),
};
extern const Family quantize_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
