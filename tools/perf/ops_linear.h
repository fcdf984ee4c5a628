#ifndef QUERN_TOOLS_PERF_OPS_LINEAR_H_
#define QUERN_TOOLS_PERF_OPS_LINEAR_H_

#include "tools/perf/op.h"

namespace quern {

OpEntry LinearOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_OPS_LINEAR_H_
