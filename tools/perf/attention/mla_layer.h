#ifndef QUERN_TOOLS_PERF_ATTENTION_MLA_LAYER_H_
#define QUERN_TOOLS_PERF_ATTENTION_MLA_LAYER_H_

#include "quern/tools/perf/op.h"

namespace quern {

OpEntry MlaLayerOp();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ATTENTION_MLA_LAYER_H_
