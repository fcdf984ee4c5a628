#include "quern/ops/recurrent/gated_delta_rule.h"

#include <cstdint>
#include <utility>

#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "gated_delta_rule";

struct Gates {
  float *g, *beta;
};
template <typename Allocator>
Gates LayOutGates(Allocator& allocator, int64_t tokens, int64_t heads) {
  int64_t gates = 0;
  if (!CheckedMul(tokens, heads, &gates)) gates = -1;
  Gates made = {};
  made.g = allocator.template Allocate<float>("g", gates);
  made.beta = allocator.template Allocate<float>("beta", gates);
  return made;
}

// The arguments of the rule, whose gates have no memory if gates.g is null.
DeltaRuleArgs RuleArgs(const GatedDeltaRuleArgs& args, const Gates& gates,
                       int64_t heads) {
  const int64_t tokens = args.q.extent(0);
  DeltaRuleArgs rule;
  rule.q = args.q;
  rule.k = args.k;
  rule.v = args.v;
  rule.g = DenseMatrix(gates.g, tokens, heads);
  rule.beta = DenseMatrix(gates.beta, tokens, heads);
  rule.state = args.state;
  rule.batch = args.batch;
  rule.out = args.out;
  return rule;
}

}  // namespace

GatedDeltaRulePlan::GatedDeltaRulePlan(const GatedDeltaRuleSpec& spec,
                                       const DeltaRulePlan& rule,
                                       const DeltaGatesPlan& gates)
    : spec_(spec), rule_(rule), gates_(gates) {
  spec_.rule = rule.spec();
}

absl::StatusOr<GatedDeltaRulePlan> GatedDeltaRulePlan::Create(
    const GatedDeltaRuleSpec& spec) {
  if (spec.rule.decay != DeltaDecay::kPerHead) {
    return InvalidArgument(kOp, "a decay for each channel; need one a head");
  }
  DeltaRuleSpec rule_spec = spec.rule;
  rule_spec.g_dtype = rule_spec.beta_dtype = DType::kF32;
  QUERN_ASSIGN_OR_RETURN(const DeltaRulePlan rule,
                         DeltaRulePlan::Create(rule_spec));
  DeltaGatesSpec gates_spec;
  gates_spec.heads = spec.rule.value_heads;
  gates_spec.dtype = spec.gate_dtype;
  gates_spec.log_dtype = spec.log_dtype;
  gates_spec.bias_dtype = spec.bias_dtype;
  QUERN_ASSIGN_OR_RETURN(const DeltaGatesPlan gates,
                         DeltaGatesPlan::Create(gates_spec));
  return GatedDeltaRulePlan(spec, rule, gates);
}

absl::StatusOr<int64_t> GatedDeltaRulePlan::WorkspaceBytes(
    int64_t max_tokens, int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(const int64_t rule,
                         rule_.WorkspaceBytes(max_tokens, max_workers));
  WorkspaceLayout layout;
  LayOutGates(layout, max_tokens, spec_.rule.value_heads);
  layout.Allocate<char>("delta rule", rule);
  if (layout.overflow()) {
    return InvalidArgument(kOp, "max_tokens=", max_tokens,
                           ": the workspace exceeds 2^63 bytes");
  }
  return layout.bytes();
}

absl::Status GatedDeltaRulePlan::CheckArgs(
    const GatedDeltaRuleArgs& args) const {
  const DeltaRuleSpec& s = spec_.rule;
  const int64_t tokens = args.q.extent(0);
  const std::pair<absl::string_view, const AnyTensorView*> projections[] = {
      {"a", &args.a}, {"b", &args.b}};
  for (const auto& [name, view] : projections) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, name, *view, spec_.gate_dtype,
                                     {tokens, s.value_heads}));
    if (tokens > 1 && view->stride(0) < s.value_heads) {
      return InvalidArgument(kOp, "rows of ", name, " are ", view->stride(0),
                             " apart; need ", s.value_heads, " or more");
    }
  }
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a_log", args.a_log, spec_.log_dtype, {s.value_heads}));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "dt_bias", args.dt_bias,
                                   spec_.bias_dtype, {s.value_heads}));
  const std::pair<absl::string_view, const AnyTensorView*> inputs[] = {
      {"a", &args.a},
      {"b", &args.b},
      {"a_log", &args.a_log},
      {"dt_bias", &args.dt_bias}};
  for (const auto& [name, view] : inputs) {
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "state", args.state));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "out", args.out));
  }
  return rule_.CheckArgsButGates(RuleArgs(args, {}, s.value_heads));
}

void GatedDeltaRulePlan::Execute(const GatedDeltaRuleArgs& args,
                                 Workspace workspace,
                                 Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const SequenceBatch& batch = args.batch;
  const int64_t sequences = batch.sequences();
  if (sequences == 0) return;
  const int64_t heads = spec_.rule.value_heads;
  const Gates memory = LayOutGates(workspace, args.q.extent(0), heads);
  const DeltaRuleArgs rule = RuleArgs(args, memory, heads);
  const int64_t first = batch.begin(0);
  const int64_t count = batch.end(sequences - 1) - first;
  DeltaGatesArgs gates;
  gates.a = RowSlice(args.a, first, count);
  gates.b = RowSlice(args.b, first, count);
  gates.a_log = args.a_log;
  gates.dt_bias = args.dt_bias;
  gates.g = DenseMatrix(memory.g + first * heads, count, heads);
  gates.beta = DenseMatrix(memory.beta + first * heads, count, heads);
  gates_.Execute(gates, executor);
  rule_.Execute(rule, workspace, executor);
}

}  // namespace quern
