#include <utility>
#include <vector>

#include "quern/tools/perf/attention/attention.h"
#include "quern/tools/perf/attention/kv_write.h"
#include "quern/tools/perf/attention/merge_states.h"
#include "quern/tools/perf/attention/mla_layer.h"
#include "quern/tools/perf/attention/schedule.h"
#include "quern/tools/perf/attention/varlen_attention.h"
#include "quern/tools/perf/linear/conv.h"
#include "quern/tools/perf/linear/grouped_linear.h"
#include "quern/tools/perf/linear/linear.h"
#include "quern/tools/perf/linear/moe.h"
#include "quern/tools/perf/linear/pack.h"
#include "quern/tools/perf/linear/router.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/recurrent/causal_conv1d.h"
#include "quern/tools/perf/recurrent/delta_rule.h"
#include "quern/tools/perf/recurrent/mixer.h"
#include "quern/tools/perf/recurrent/state_update.h"
#include "quern/tools/perf/registered/registered.h"
#include "quern/tools/perf/rows/activation.h"
#include "quern/tools/perf/rows/all_reduce.h"
#include "quern/tools/perf/rows/convert.h"
#include "quern/tools/perf/rows/quantize.h"
#include "quern/tools/perf/rows/rms_norm.h"
#include "quern/tools/perf/rows/sampling.h"
#include "quern/tools/perf/rows/speculation.h"

namespace quern {

std::vector<OpEntry> AllOps() {
  std::vector<OpEntry> ops = {ConvertOp(), PackOp(), QuantizeOp(), RmsNormOp()};
  for (OpEntry& op : RegisteredOps()) ops.push_back(std::move(op));
  for (OpEntry& op : ActivationOps()) ops.push_back(std::move(op));
  for (OpEntry& op : LinearOps()) ops.push_back(std::move(op));
  ops.push_back(GroupedLinearOp());
  for (OpEntry& op : ConvOps()) ops.push_back(std::move(op));
  for (OpEntry& op : SamplingOps()) ops.push_back(std::move(op));
  ops.push_back(RouterOp());
  ops.push_back(MoeOp());
  ops.push_back(KvWriteOp());
  ops.push_back(AttentionOp());
  ops.push_back(ScheduleOp());
  ops.push_back(MlaOp());
  ops.push_back(MlaLayerOp());
  ops.push_back(VarlenAttentionOp());
  ops.push_back(MergeStatesOp());
  ops.push_back(CausalConv1dOp());
  ops.push_back(DeltaRuleOp());
  ops.push_back(StateUpdateOp());
  ops.push_back(MixerOp());
  ops.push_back(RecoveredTokensOp());
  ops.push_back(AllReduceOp());
  return ops;
}

}  // namespace quern
