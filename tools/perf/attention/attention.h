#ifndef QUERN_TOOLS_PERF_ATTENTION_ATTENTION_H_
#define QUERN_TOOLS_PERF_ATTENTION_ATTENTION_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry AttentionOp();
OpEntry MlaOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ATTENTION_ATTENTION_H_
