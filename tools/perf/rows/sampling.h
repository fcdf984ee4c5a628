#ifndef QUERN_TOOLS_PERF_ROWS_SAMPLING_H_
#define QUERN_TOOLS_PERF_ROWS_SAMPLING_H_

#include <vector>

#include "quern/tools/perf/op.h"

namespace quern {

// sample, adjust_logits and token_logprobs.
std::vector<OpEntry> SamplingOps();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ROWS_SAMPLING_H_
