#ifndef QUERN_TOOLS_PERF_OPS_SCALED_LINEAR_H_
#define QUERN_TOOLS_PERF_OPS_SCALED_LINEAR_H_

#include "tools/perf/op.h"

namespace quern {

OpEntry ScaledLinearOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_OPS_SCALED_LINEAR_H_
