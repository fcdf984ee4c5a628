#include "quern/ops/registry/sglang/recurrent_ops.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/delta_gates.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/gated_delta_rule.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/recurrent/recurrent_binding.h"
#include "quern/ops/registry/op_call.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/op_shape.h"
#include "quern/ops/registry/reference/recurrent.h"

namespace quern {
namespace {

using FusedSpec = GatedDeltaRuleSpec;
using FusedArgs = SequenceArgs<GatedDeltaRuleArgs>;
using Fused = OpDeclaration<GatedDeltaRulePlan, FusedSpec, FusedArgs>;

absl::Status RegisterGating(OpRegistry& registry) {
  using Spec = DeltaGatesSpec;
  using Args = DeltaGatesArgs;
  return OpDeclaration<DeltaGatesPlan, Spec, Args>("fused_gdn_gating_cpu")
      .In("a_log", &Args::a_log, {&Spec::heads}, &Spec::log_dtype)
      .In("a", &Args::a, {kRows, &Spec::heads}, &Spec::dtype)
      .In("b", &Args::b, Like("a"), {&Spec::dtype, &Spec::beta_dtype})
      .In("dt_bias", &Args::dt_bias, {&Spec::heads}, &Spec::bias_dtype)
      .Out("g", &Args::g, Like("a"), DType::kF32)
      .Out("beta", &Args::beta, Like("a"), Like("b"))
      .Reference([](const Spec& spec, const Args& args) {
        NativeDeltaGates(spec, args);
      })
      .Example({{"a_log", {4}, DType::kF32},
                {"a", {4, 4}},
                {"b", {4, 4}},
                {"dt_bias", {4}}})
      .AddTo(registry);
}

absl::Status CheckSoftplus(FusedSpec&, const OpCall& call) {
  if (call.Float("softplus_beta") != 1.0) {
    return InvalidArgument(
        call.op(), "softplus_beta=", call.Float("softplus_beta"), "; need 1");
  }
  // ln(1 + e^x) is x and less than 2^-24 of it from here on.
  if (!(call.Float("softplus_threshold") >= 17.0)) {
    return InvalidArgument(
        call.op(), "softplus_threshold=", call.Float("softplus_threshold"),
        "; need 17 or more");
  }
  return absl::OkStatus();
}

DeltaRuleSpec& RuleOf(FusedSpec& spec) { return spec.rule; }
int64_t& KeyHeads(FusedSpec& spec) { return RuleOf(spec).key_heads; }
int64_t& ValueHeads(FusedSpec& spec) { return RuleOf(spec).value_heads; }
int64_t& Dk(FusedSpec& spec) { return RuleOf(spec).dk; }
int64_t& Dv(FusedSpec& spec) { return RuleOf(spec).dv; }
DType& TokenDType(FusedSpec& spec) { return RuleOf(spec).dtype; }
DType& StateDType(FusedSpec& spec) { return RuleOf(spec).state_dtype; }

absl::Status RegisterUpdate(const char* name, bool drafts,
                            OpRegistry& registry) {
  using Args = FusedArgs;
  using Spec = FusedSpec;
  Fused op(name);
  op.In("a_log", &Args::a_log, {&ValueHeads}, &Spec::log_dtype)
      .In("dt_bias", &Args::dt_bias, {&ValueHeads}, &Spec::bias_dtype)
      .In("q", &Args::q, {kRows, &KeyHeads, &Dk}, &TokenDType)
      .In("k", &Args::k)
      .In("v", &Args::v, {kRows, &ValueHeads, &Dv})
      .In("a", &Args::a, {kRows, &ValueHeads}, &Spec::gate_dtype)
      .In("b", &Args::b)
      .InOut("initial_state_source", &Args::state, nullptr,
             {kAny, &ValueHeads, &Dk, &Dv}, &StateDType)
      .Word("state", "initial_state_source");
  const char* const slots =
      drafts ? "spec_state_indices" : "initial_state_indices";
  InTokens(op, slots, drafts ? OpShape<Spec>{kAny, kAny} : OpShape<Spec>{kAny});
  if (drafts) {
    op.In("num_accepted_tokens", &Args::accepted, {kAny}, IndexDType<Spec>())
        .Finish([](Args& a) {
          a.batch.num_accepted_tokens =
              IndicesOf(a.accepted, a.batch.sequences());
        })
        .CheckFirst([slots](const Args& a) -> absl::Status {
          QUERN_RETURN_IF_ERROR(
              CheckBatch("sequences", slots, a.indices, a.starts, a.initial));
          const int64_t sequences = a.starts.extent(0) - 1;
          QUERN_RETURN_IF_ERROR(CheckIndexView(
              "sequences", "num_accepted_tokens", a.accepted, {kAnyExtent}));
          return CheckAtLeast("sequences", "num_accepted_tokens",
                              a.accepted.extent(0), sequences);
        });
  }
  op.In("cu_seqlens", &Args::starts, {kAny}, IndexDType<Spec>())
      .Word("query_start_loc", "cu_seqlens")
      .Need<bool>("use_qk_l2norm_in_kernel")
      .Then([](Spec& spec, const OpCall& call) {
        spec.rule.chunk = 1;
        spec.rule.norm = call.Bool("use_qk_l2norm_in_kernel")
                             ? DeltaNorm::kL2
                             : DeltaNorm::kNone;
        return absl::OkStatus();
      })
      .Attr("softplus_beta", 1.0)
      .Attr("softplus_threshold", 20.0)
      .Then(&CheckSoftplus)
      .Out("out", &Args::out, Like("v"), Like("v"))
      .Rows("q")
      .InPlace("v", "out")
      .Reference([](const Spec& spec, const Args& args) {
        NativeGatedDeltaRule(spec, args);
      });
  std::vector<OpExampleArg> example = {
      {"a_log", {2}, DType::kF32},
      {"dt_bias", {2}},
      {"q", {4, 1, 4}},
      {"k", {4, 1, 4}},
      {"v", {4, 2, 8}},
      {"a", {4, 2}},
      {"b", {4, 2}},
      {"initial_state_source", {128, 2, 4, 8}, DType::kF32},
      {"cu_seqlens", {5}, DType::kI32},
      {"use_qk_l2norm_in_kernel", true}};
  if (drafts) {
    example.push_back({slots, {4, 5}, DType::kI32});
    example.push_back({"num_accepted_tokens", {4}, DType::kI32});
  } else {
    example.push_back({slots, {4}, DType::kI32});
  }
  return op.Example(std::move(example)).AddTo(registry);
}

absl::Status RegisterChunks(OpRegistry& registry) {
  using Spec = DeltaRuleSpec;
  using Args = SequenceArgs<DeltaRuleArgs>;
  OpDeclaration<DeltaRulePlan, Spec, Args> op("chunk_gated_delta_rule_cpu");
  op.In("query", &Args::q, {kRows, &Spec::key_heads, &Spec::dk}, &Spec::dtype)
      .In("key", &Args::k)
      .In("value", &Args::v, {kAny, &Spec::value_heads, &Spec::dv})
      .In("g", &Args::g, {kAny, kAny}, &Spec::g_dtype)
      .In("beta", &Args::beta, {}, &Spec::beta_dtype)
      .InOut("initial_state", &Args::state, nullptr, {kAny, kAny, kAny, kAny},
             &Spec::state_dtype)
      .Word("q", "query")
      .Word("k", "key")
      .Word("v", "value")
      .Word("state", "initial_state")
      .Need<bool>("output_final_state")
      .In("cu_seqlens", &Args::starts, {kAny}, IndexDType<Spec>())
      .Word("query_start_loc", "cu_seqlens")
      .Need<bool>("head_first")
      .Need<bool>("use_qk_l2norm_in_kernel");
  InTokens(op, "initial_state_indices");
  return op.Attr("eps", 1e-6, &Spec::norm_eps)
      .Then([](Spec& spec, const OpCall& call) -> absl::Status {
        if (call.Bool("head_first")) {
          return InvalidArgument(call.op(), "head_first=true; need false");
        }
        spec.norm = call.Bool("use_qk_l2norm_in_kernel") ? DeltaNorm::kL2
                                                         : DeltaNorm::kNone;
        return absl::OkStatus();
      })
      .Out("out", &Args::out, Like("value"), Like("value"))
      .InPlace("value", "out")
      .Reference([](const Spec& spec, const Args& args) {
        NativeDeltaRule(spec, args);
      })
      .Example({{"query", {4, 1, 4}},
                {"key", {4, 1, 4}},
                {"value", {4, 2, 8}},
                {"g", {4, 2}, DType::kF32},
                {"beta", {4, 2}},
                {"initial_state", {128, 2, 4, 8}, DType::kF32},
                {"output_final_state", true},
                {"cu_seqlens", {5}, DType::kI32},
                {"head_first", false},
                {"use_qk_l2norm_in_kernel", true},
                {"initial_state_indices", {4}, DType::kI32}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangDeltaRuleOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterGating(registry));
  QUERN_RETURN_IF_ERROR(RegisterUpdate(
      "fused_sigmoid_gating_delta_rule_update_cpu", false, registry));
  QUERN_RETURN_IF_ERROR(RegisterUpdate(
      "fused_sigmoid_gating_delta_rule_update_spec_cpu", true, registry));
  return RegisterChunks(registry);
}

}  // namespace quern
