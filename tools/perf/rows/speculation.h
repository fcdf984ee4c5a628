#ifndef QUERN_TOOLS_PERF_ROWS_SPECULATION_H_
#define QUERN_TOOLS_PERF_ROWS_SPECULATION_H_

#include "quern/tools/perf/op.h"

namespace quern {

// sample_recovered_tokens. The other operators of ops/speculation move a few
// numbers for each request.
OpEntry RecoveredTokensOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ROWS_SPECULATION_H_
