#ifndef QUERN_TOOLS_PERF_RECURRENT_DELTA_RULE_H_
#define QUERN_TOOLS_PERF_RECURRENT_DELTA_RULE_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry DeltaRuleOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_RECURRENT_DELTA_RULE_H_
