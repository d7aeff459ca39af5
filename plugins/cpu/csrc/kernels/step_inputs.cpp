#include "step_inputs.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    kernel<TakeRows>("take_rows"),
    kernel<SlotMapping>("slot_mapping"),
    kernel<DecodeInputs>("decode_inputs"),
    kernel<KeepTokens>("keep_tokens"),
};
extern const Family step_inputs_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
