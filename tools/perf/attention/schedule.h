#ifndef QUERN_TOOLS_PERF_ATTENTION_SCHEDULE_H_
#define QUERN_TOOLS_PERF_ATTENTION_SCHEDULE_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry ScheduleOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ATTENTION_SCHEDULE_H_
