#ifndef QUERN_TOOLS_PERF_OPS_BLOCK_LINEAR_H_
#define QUERN_TOOLS_PERF_OPS_BLOCK_LINEAR_H_

#include <vector>

#include "tools/perf/op.h"

namespace quern {

// fp8_block_linear and int4_linear.
std::vector<OpEntry> BlockLinearOps();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_OPS_BLOCK_LINEAR_H_
