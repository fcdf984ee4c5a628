#include <cstdint>

#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/registry/families/recurrent/recurrent_binding.h"
#include "quern/ops/registry/families/recurrent/recurrent_ops.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/recurrent.h"

namespace quern {
namespace {

using Spec = DeltaRuleSpec;
using Args = SequenceArgs<DeltaRuleArgs>;
using Op = OpDeclaration<DeltaRulePlan, Spec, Args>;

// One decay for each head, or one for each channel of it.
absl::Status FillDecay(Spec& spec, const OpCall& call) {
  const TensorMeta& g = *call.Tensor("g");
  const bool per_channel = g.extents.size() == 3;
  spec.decay = per_channel ? DeltaDecay::kPerChannel : DeltaDecay::kPerHead;
  return per_channel ? absl::OkStatus() : CheckRank(call.op(), "g", g, 2);
}

absl::Status FillNorm(Spec& spec, const OpCall& call) {
  spec.norm = call.Bool("use_qk_l2norm") ? DeltaNorm::kL2 : DeltaNorm::kNone;
  return absl::OkStatus();
}

// The tensors of both operators, up to the indices of states.
Op DeltaOp(const char* name) {
  Op op(name);
  op.In("q", &Args::q, {kRows, &Spec::key_heads, &Spec::dk}, &Spec::dtype)
      .In("k", &Args::k)
      .In("v", &Args::v, {kAny, &Spec::value_heads, &Spec::dv})
      .In("g", &Args::g, {}, &Spec::g_dtype)
      .Then(&FillDecay)
      .In("beta", &Args::beta, {}, &Spec::beta_dtype)
      .InOut("state", &Args::state, nullptr, {kAny, kAny, kAny, kAny},
             &Spec::state_dtype);
  return op;
}

// `starts`: the operator has no query_start_loc yet.
absl::Status AddDelta(Op& op, bool starts, OpRegistry& registry) {
  op.Attr("use_qk_l2norm", false)
      .Then(&FillNorm)
      .Attr("scale", 0.0, &Spec::scale)
      .Attr("null_slot", int64_t{-1}, &Spec::null_slot);
  if (starts) {
    op.Maybe("query_start_loc", &Args::starts, {kAny}, IndexDType<Spec>());
  }
  return OrDrafts(op, "state_indices", "destination_indices")
      .Out("out", &Args::out, Like("v"), Like("v"))
      .InPlace("v", "out")
      .Reference([](const Spec& spec, const Args& args) {
        NativeDeltaRule(spec, args);
      })
      .Example({{"q", {4, 1, 4}},
                {"k", {4, 1, 4}},
                {"v", {4, 2, 8}},
                {"g", {4, 2}, DType::kF32},
                {"beta", {4, 2}, DType::kF32},
                {"state", {128, 2, 4, 8}},
                {"state_indices", {4}, DType::kI32},
                {"use_qk_l2norm", true}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterDeltaRuleOps(OpRegistry& registry) {
  Op chunks = DeltaOp("chunk_gated_delta_rule");
  InBatch(chunks, "state_indices", {});
  QUERN_RETURN_IF_ERROR(AddDelta(chunks, /*starts=*/false, registry));
  Op update = DeltaOp("gated_delta_rule_update");
  InTokens(update, "state_indices", {}).Given(&Spec::chunk, int64_t{1});
  return AddDelta(update, /*starts=*/true, registry);
}

}  // namespace quern
