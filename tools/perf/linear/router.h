#ifndef QUERN_TOOLS_PERF_LINEAR_ROUTER_H_
#define QUERN_TOOLS_PERF_LINEAR_ROUTER_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry RouterOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_ROUTER_H_
