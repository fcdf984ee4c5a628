#ifndef QUERN_TOOLS_PERF_RECURRENT_MIXER_H_
#define QUERN_TOOLS_PERF_RECURRENT_MIXER_H_

#include "quern/tools/perf/op.h"

namespace quern {

// ops/mixer: whole layers over pools of windows and states.
OpEntry MixerOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_RECURRENT_MIXER_H_
