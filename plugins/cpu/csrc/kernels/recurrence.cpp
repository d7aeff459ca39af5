#include "recurrence.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_FLOAT("causal_conv", recurrence::CausalConv),
    EACH_FLOAT("linear_recurrence", recurrence::LinearRecurrence),
    EACH_FLOAT("recurrence_gates", recurrence::RecurrenceGates),
    EACH_FLOAT("gated_rms_norm", recurrence::GatedRmsNorm),
};
extern const Family recurrence_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
