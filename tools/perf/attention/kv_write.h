#ifndef QUERN_TOOLS_PERF_ATTENTION_KV_WRITE_H_
#define QUERN_TOOLS_PERF_ATTENTION_KV_WRITE_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry KvWriteOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ATTENTION_KV_WRITE_H_
