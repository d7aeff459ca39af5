#include "attention_decode.h"

namespace hardpoint::HARDPOINT_LEVEL {

static constexpr Kernel kernels[] = {
    EACH_ELEMENT("attention_decode", attention::Decode),
    ::hardpoint::kernel<attention::Decode<nvfp4>>("attention_decode_nvfp4"),
    ::hardpoint::kernel<attention::MergeSplits>("attention_merge_splits"),
};
extern const Family attention_decode_family = family(kernels);

}  // namespace hardpoint::HARDPOINT_LEVEL
