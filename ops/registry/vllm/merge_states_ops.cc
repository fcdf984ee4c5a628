#include "quern/ops/registry/vllm/merge_states_ops.h"

#include <cstdint>

#include "absl/status/status.h"
#include "quern/attention/merge_states.h"
#include "quern/core/dtype.h"
#include "quern/ops/registry/families/attention/merge_states_ops.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

absl::Status RegisterVllmMergeStatesOps(OpRegistry& registry) {
  using Spec = MergeStatesSpec;
  using Args = MergeStatesTensors;
  return OpDeclaration<MergeStatesPlan, Spec, Args>("merge_attn_states")
      .Layer()
      .Given(&Spec::lse_by_head, true)
      .InOut("output", &Args::out, nullptr,
             {kRows, &Spec::heads, &Spec::head_dim}, &Spec::out_dtype)
      .Word("out", "output")
      .MaybeInOut("output_lse", &Args::lse, {&Spec::heads, kRows}, DType::kF32)
      .Word("lse", "output_lse")
      .In("prefix_output", &Args::a, {kRows, &Spec::heads, &Spec::head_dim},
          &Spec::dtype)
      .Word("a.out", "prefix_output")
      .In("prefix_lse", &Args::a_lse, {&Spec::heads, kRows}, DType::kF32)
      .Word("a.lse", "prefix_lse")
      .In("suffix_output", &Args::b, {kRows, &Spec::heads, &Spec::head_dim},
          Like("prefix_output"))
      .Word("b.out", "suffix_output")
      .In("suffix_lse", &Args::b_lse, {&Spec::heads, kRows}, DType::kF32)
      .Word("b.lse", "suffix_lse")
      .Attr("prefill_tokens_with_context", int64_t{-1}, &Spec::a_tokens)
      .Word("a_tokens", "prefill_tokens_with_context")
      .InPlace("prefix_output", "output")
      .InPlace("suffix_output", "output")
      .InPlace("prefix_lse", "output_lse")
      .InPlace("suffix_lse", "output_lse")
      .Calls(&CheckMergeStates, &ExecuteMergeStates)
      .Reference(&ReferenceMergeStates)
      .Example({{"output", {4, 2, 16}},
                {"output_lse", {2, 4}, DType::kF32},
                {"prefix_output", {4, 2, 16}},
                {"prefix_lse", {2, 4}, DType::kF32},
                {"suffix_output", {4, 2, 16}},
                {"suffix_lse", {2, 4}, DType::kF32}})
      .AddTo(registry);
}

}  // namespace quern
