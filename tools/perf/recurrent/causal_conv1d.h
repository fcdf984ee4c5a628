#ifndef QUERN_TOOLS_PERF_RECURRENT_CAUSAL_CONV1D_H_
#define QUERN_TOOLS_PERF_RECURRENT_CAUSAL_CONV1D_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry CausalConv1dOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_RECURRENT_CAUSAL_CONV1D_H_
