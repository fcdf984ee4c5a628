#ifndef QUERN_TOOLS_PERF_LINEAR_LINEAR_H_
#define QUERN_TOOLS_PERF_LINEAR_LINEAR_H_

#include <vector>

#include "quern/tools/perf/op.h"

namespace quern {

// The linear layer on weights of each format: linear, scaled_linear,
// fp8_block_linear, int4_linear and int8_group_linear.
std::vector<OpEntry> LinearOps();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_LINEAR_H_
