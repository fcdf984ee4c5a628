#ifndef QUERN_TOOLS_PERF_OPS_REGISTERED_H_
#define QUERN_TOOLS_PERF_OPS_REGISTERED_H_

#include <vector>

#include "tools/perf/op.h"

namespace quern {

// Operators that are made by name and checked against their own reference:
// fused_add_rms_norm, gemma_rms_norm, rms_norm_gated, mixer2_gated_rms_norm,
// rotary_embedding and more.
std::vector<OpEntry> RegisteredOps();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_OPS_REGISTERED_H_
