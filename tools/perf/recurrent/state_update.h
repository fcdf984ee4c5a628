#ifndef QUERN_TOOLS_PERF_RECURRENT_STATE_UPDATE_H_
#define QUERN_TOOLS_PERF_RECURRENT_STATE_UPDATE_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry StateUpdateOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_RECURRENT_STATE_UPDATE_H_
