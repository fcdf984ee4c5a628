#ifndef QUERN_TOOLS_PERF_ROWS_ALL_REDUCE_H_
#define QUERN_TOOLS_PERF_ROWS_ALL_REDUCE_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry AllReduceOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ROWS_ALL_REDUCE_H_
