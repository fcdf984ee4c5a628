#ifndef QUERN_TOOLS_PERF_ROWS_QUANTIZE_H_
#define QUERN_TOOLS_PERF_ROWS_QUANTIZE_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry QuantizeOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ROWS_QUANTIZE_H_
