#ifndef QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_MERGE_STATES_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_MERGE_STATES_OPS_H_

#include "absl/status/status.h"
#include "quern/attention/merge_states.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/reference/merge_states.h"

namespace quern {

// merge_states: attention over all keys from attention over two parts of them,
// by attention/merge_states.h, whose equations and roundings it has. With the
// lse that paged_attention writes, it is what cascades over a shared prefix,
// context parallelism and prefixes of other machines need.
//
// prefix, suffix and the first result[tokens, heads, head_dim], with any
// strides of tokens and heads, are f32, bf16 or f16, the first two of one
// dtype; prefix_lse, suffix_lse and the second result are f32[tokens, heads]. A
// result may be where a part, or its lse, is.
//
// Providers: simd, and reference, which runs plain loops in double.
absl::Status RegisterMergeStatesOps(OpRegistry& registry);

// What a declaration of this family binds, and how it calls the plan.
struct MergeStatesTensors {
  AnyTensorView a, a_lse, b, b_lse, out, lse;

  MergeStatesArgs args() const { return {{a, a_lse}, {b, b_lse}, out, lse}; }
};
inline absl::Status CheckMergeStates(const MergeStatesPlan& plan,
                                     const MergeStatesTensors& t) {
  return plan.CheckArgs(t.args());
}
inline void ExecuteMergeStates(const MergeStatesPlan& plan,
                               const MergeStatesTensors& t, Workspace,
                               Executor& executor) {
  plan.Execute(t.args(), executor);
}
inline void ReferenceMergeStates(const MergeStatesSpec& spec,
                                 const MergeStatesTensors& t) {
  NativeMergeStates(spec, t.args());
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_MERGE_STATES_OPS_H_
