#ifndef QUERN_TOOLS_PERF_ROWS_CONVERT_H_
#define QUERN_TOOLS_PERF_ROWS_CONVERT_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry ConvertOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ROWS_CONVERT_H_
