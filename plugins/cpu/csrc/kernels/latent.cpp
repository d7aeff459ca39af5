#include "latent.h"

#include "each_float.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_ELEMENT("latent_attention", attention::LatentAttention),
    ::hardpoint::kernel<attention::MergeLatentSplits>("latent_merge_splits"),
    EACH_FLOAT("latent_store", attention::LatentStore),
};
extern const Family latent_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
