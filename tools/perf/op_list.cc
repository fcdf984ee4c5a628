#include <vector>

#include "tools/perf/op.h"
#include "tools/perf/ops_attention.h"
#include "tools/perf/ops_convert.h"
#include "tools/perf/ops_linear.h"
#include "tools/perf/ops_pack.h"
#include "tools/perf/ops_quantize.h"
#include "tools/perf/ops_rows.h"
#include "tools/perf/ops_scaled_linear.h"

namespace quern {

std::vector<OpEntry> AllOps() {
  return {ConvertOp(),    PackOp(),   QuantizeOp(),     RmsNormOp(),
          SiluAndMulOp(), LinearOp(), ScaledLinearOp(), AttentionOp()};
}

}  // namespace quern
