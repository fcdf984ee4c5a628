#ifndef QUERN_TOOLS_PERF_ATTENTION_MERGE_STATES_H_
#define QUERN_TOOLS_PERF_ATTENTION_MERGE_STATES_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry MergeStatesOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ATTENTION_MERGE_STATES_H_
