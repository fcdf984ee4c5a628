#include "quern/ops/registry/families/attention/merge_states_ops.h"

#include "absl/status/status.h"
#include "quern/attention/merge_states.h"
#include "quern/core/dtype.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

absl::Status RegisterMergeStatesOps(OpRegistry& registry) {
  using Spec = MergeStatesSpec;
  using Args = MergeStatesTensors;
  return OpDeclaration<MergeStatesPlan, Spec, Args>("merge_states")
      .Layer()
      .In("a", &Args::a, {kRows, &Spec::heads, &Spec::head_dim}, &Spec::dtype)
      .Word("a.out", "a")
      .In("a_lse", &Args::a_lse, {kRows, &Spec::heads}, DType::kF32)
      .Word("a.lse", "a_lse")
      .In("b", &Args::b, {kRows, &Spec::heads, &Spec::head_dim}, Like("a"))
      .Word("b.out", "b")
      .In("b_lse", &Args::b_lse, {kRows, &Spec::heads}, DType::kF32)
      .Word("b.lse", "b_lse")
      .DTypeAttr("out_dtype", Like("a"), &Spec::out_dtype)
      .Out("out", &Args::out, {kRows, &Spec::heads, &Spec::head_dim},
           &Spec::out_dtype)
      .Out("lse", &Args::lse, {kRows, &Spec::heads}, DType::kF32)
      .InPlace("a", "out0")
      .InPlace("b", "out0")
      .InPlace("a_lse", "out1")
      .InPlace("b_lse", "out1")
      .Calls(&CheckMergeStates, &ExecuteMergeStates)
      .Reference(&ReferenceMergeStates)
      .Example({{"a", {4, 2, 16}},
                {"a_lse", {4, 2}, DType::kF32},
                {"b", {4, 2, 16}},
                {"b_lse", {4, 2}, DType::kF32}})
      .AddTo(registry);
}

}  // namespace quern
