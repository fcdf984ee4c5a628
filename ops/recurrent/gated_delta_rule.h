#ifndef QUERN_OPS_RECURRENT_GATED_DELTA_RULE_H_
#define QUERN_OPS_RECURRENT_GATED_DELTA_RULE_H_

// The delta rule with a decay for each head, on projections in place of gates:
// delta_gates.h makes g and beta in f32, and delta_rule.h takes them. The bits
// are those of the two after each other.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/delta_gates.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/sequence_batch.h"

namespace quern {

struct GatedDeltaRuleSpec {
  // decay is kPerHead. The dtypes of g and beta have no effect.
  DeltaRuleSpec rule;
  DType gate_dtype = DType::kF32;  // of a and b: f32, bf16 or f16
  DType log_dtype = DType::kF32;   // of a_log: f32, bf16 or f16
  DType bias_dtype = DType::kF32;  // of dt_bias: f32, bf16 or f16
};

struct GatedDeltaRuleArgs {
  AnyTensorView a_log;    // [value_heads]
  AnyTensorView dt_bias;  // [value_heads]
  AnyTensorView q;        // [tokens, key_heads, dk]
  AnyTensorView k;        // [tokens, key_heads, dk]
  AnyTensorView v;        // [tokens, value_heads, dv]
  AnyTensorView a;        // [tokens, value_heads]
  AnyTensorView b;        // [tokens, value_heads]
  AnyTensorView state;    // [slots, value_heads, dk, dv]
  SequenceBatch batch;
  AnyTensorView out;  // [tokens, value_heads, dv]
};

class GatedDeltaRulePlan {
 public:
  // InvalidArgument for a decay for each channel. Otherwise refuses what the
  // two plans refuse.
  static absl::StatusOr<GatedDeltaRulePlan> Create(
      const GatedDeltaRuleSpec& spec);

  const char* target() const { return rule_.target(); }
  // rule is that of DeltaRulePlan::spec.
  const GatedDeltaRuleSpec& spec() const { return spec_; }

  // Bytes of workspace that Execute needs: the gates of all tokens in f32, and
  // what DeltaRulePlan needs.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // InvalidArgument names the argument, as the two plans do.
  absl::Status CheckArgs(const GatedDeltaRuleArgs& args) const;

  // Writes what DeltaRulePlan::Execute writes. Rows of a and b before the first
  // sequence and after the last are not read. Allocates nothing; safe to call
  // concurrently on distinct slots, each call with its own workspace.
  void Execute(const GatedDeltaRuleArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  GatedDeltaRulePlan(const GatedDeltaRuleSpec& spec, const DeltaRulePlan& rule,
                     const DeltaGatesPlan& gates);

  GatedDeltaRuleSpec spec_;
  DeltaRulePlan rule_;
  DeltaGatesPlan gates_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_GATED_DELTA_RULE_H_
