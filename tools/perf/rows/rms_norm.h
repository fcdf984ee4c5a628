#ifndef QUERN_TOOLS_PERF_ROWS_RMS_NORM_H_
#define QUERN_TOOLS_PERF_ROWS_RMS_NORM_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry RmsNormOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ROWS_RMS_NORM_H_
