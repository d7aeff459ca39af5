#include "attention_prefill.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_ELEMENT("attention_prefill", attention::Prefill),
    ::hardpoint::kernel<attention::Prefill<nvfp4>>("attention_prefill_nvfp4"),
};
extern const Family attention_prefill_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
