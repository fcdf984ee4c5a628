#ifndef QUERN_TOOLS_PERF_ATTENTION_VARLEN_ATTENTION_H_
#define QUERN_TOOLS_PERF_ATTENTION_VARLEN_ATTENTION_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry VarlenAttentionOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ATTENTION_VARLEN_ATTENTION_H_
