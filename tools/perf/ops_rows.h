#ifndef QUERN_TOOLS_PERF_OPS_ROWS_H_
#define QUERN_TOOLS_PERF_OPS_ROWS_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry RmsNormOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_OPS_ROWS_H_
