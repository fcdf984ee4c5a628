#ifndef QUERN_TOOLS_PERF_ROWS_ACTIVATION_H_
#define QUERN_TOOLS_PERF_ROWS_ACTIVATION_H_

#include <vector>

#include "quern/tools/perf/op.h"

namespace quern {

// Every activation that models have a name for, gated ones first.
std::vector<OpEntry> ActivationOps();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ROWS_ACTIVATION_H_
