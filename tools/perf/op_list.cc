#include <utility>
#include <vector>

#include "quern/tools/perf/op.h"
#include "quern/tools/perf/ops_activation.h"
#include "quern/tools/perf/ops_all_reduce.h"
#include "quern/tools/perf/ops_attention.h"
#include "quern/tools/perf/ops_causal_conv1d.h"
#include "quern/tools/perf/ops_conv.h"
#include "quern/tools/perf/ops_convert.h"
#include "quern/tools/perf/ops_delta_rule.h"
#include "quern/tools/perf/ops_grouped_linear.h"
#include "quern/tools/perf/ops_kv_write.h"
#include "quern/tools/perf/ops_linear.h"
#include "quern/tools/perf/ops_mixer.h"
#include "quern/tools/perf/ops_mla_layer.h"
#include "quern/tools/perf/ops_moe.h"
#include "quern/tools/perf/ops_pack.h"
#include "quern/tools/perf/ops_quantize.h"
#include "quern/tools/perf/ops_registered.h"
#include "quern/tools/perf/ops_router.h"
#include "quern/tools/perf/ops_rows.h"
#include "quern/tools/perf/ops_schedule.h"
#include "quern/tools/perf/ops_speculation.h"
#include "quern/tools/perf/ops_state_update.h"
#include "quern/tools/perf/ops_varlen_attention.h"

namespace quern {

std::vector<OpEntry> AllOps() {
  std::vector<OpEntry> ops = {ConvertOp(), PackOp(), QuantizeOp(), RmsNormOp()};
  for (OpEntry& op : RegisteredOps()) ops.push_back(std::move(op));
  for (OpEntry& op : ActivationOps()) ops.push_back(std::move(op));
  for (OpEntry& op : LinearOps()) ops.push_back(std::move(op));
  ops.push_back(GroupedLinearOp());
  for (OpEntry& op : ConvOps()) ops.push_back(std::move(op));
  ops.push_back(RouterOp());
  ops.push_back(MoeOp());
  ops.push_back(KvWriteOp());
  ops.push_back(AttentionOp());
  ops.push_back(ScheduleOp());
  ops.push_back(MlaOp());
  ops.push_back(MlaLayerOp());
  ops.push_back(VarlenAttentionOp());
  ops.push_back(CausalConv1dOp());
  ops.push_back(DeltaRuleOp());
  ops.push_back(StateUpdateOp());
  ops.push_back(MixerOp());
  ops.push_back(RecoveredTokensOp());
  ops.push_back(AllReduceOp());
  return ops;
}

}  // namespace quern
