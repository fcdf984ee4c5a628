#ifndef QUERN_TOOLS_PERF_LINEAR_MOE_H_
#define QUERN_TOOLS_PERF_LINEAR_MOE_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry MoeOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_MOE_H_
