#ifndef QUERN_TOOLS_PERF_LINEAR_CONV_H_
#define QUERN_TOOLS_PERF_LINEAR_CONV_H_

#include <vector>

#include "quern/tools/perf/op.h"

namespace quern {

// conv2d and conv3d: ops/conv.
std::vector<OpEntry> ConvOps();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_CONV_H_
