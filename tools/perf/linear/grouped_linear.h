#ifndef QUERN_TOOLS_PERF_LINEAR_GROUPED_LINEAR_H_
#define QUERN_TOOLS_PERF_LINEAR_GROUPED_LINEAR_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry GroupedLinearOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_GROUPED_LINEAR_H_
