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
      .In("prefix", &Args::a, {kRows, &Spec::heads, &Spec::head_dim},
          &Spec::dtype)
      .Word("a.out", "prefix")
      .In("prefix_lse", &Args::a_lse, {kRows, &Spec::heads}, DType::kF32)
      .Word("a.lse", "prefix_lse")
      .In("suffix", &Args::b, {kRows, &Spec::heads, &Spec::head_dim},
          Like("prefix"))
      .Word("b.out", "suffix")
      .In("suffix_lse", &Args::b_lse, {kRows, &Spec::heads}, DType::kF32)
      .Word("b.lse", "suffix_lse")
      .DTypeAttr("out_dtype", Like("prefix"), &Spec::out_dtype)
      .Out("out", &Args::out, {kRows, &Spec::heads, &Spec::head_dim},
           &Spec::out_dtype)
      .Out("lse", &Args::lse, {kRows, &Spec::heads}, DType::kF32)
      .InPlace("prefix", "out0")
      .InPlace("suffix", "out0")
      .InPlace("prefix_lse", "out1")
      .InPlace("suffix_lse", "out1")
      .Calls(&CheckMergeStates, &ExecuteMergeStates)
      .Reference(&ReferenceMergeStates)
      .Example({{"prefix", {4, 2, 16}},
                {"prefix_lse", {4, 2}, DType::kF32},
                {"suffix", {4, 2, 16}},
                {"suffix_lse", {4, 2}, DType::kF32}})
      .AddTo(registry);
}

}  // namespace quern
