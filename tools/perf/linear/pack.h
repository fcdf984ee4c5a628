#ifndef QUERN_TOOLS_PERF_LINEAR_PACK_H_
#define QUERN_TOOLS_PERF_LINEAR_PACK_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry PackOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_PACK_H_
