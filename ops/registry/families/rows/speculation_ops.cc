#include "quern/ops/registry/families/rows/speculation_ops.h"

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/speculation/recovered_tokens.h"
#include "quern/ops/speculation/rejection.h"

namespace quern {
namespace {

using GreedySpec = GreedyRejectionSpec;
using RandomSpec = RandomRejectionSpec;
using GreedyArgs = GreedyRejectionArgs;
using RandomArgs = RandomRejectionArgs;
using RecoveredSpec = RecoveredTokensSpec;
using RecoveredArgs = RecoveredTokensArgs;

constexpr DType kI64 = DType::kI64;

// Whether there are draft probabilities: if they are given, or as vLLM's bool
// says.
template <class Spec>
absl::Status FillDraftProbs(Spec& spec, const OpCall& call, bool given) {
  spec.draft_probs = given;
  if (!given || call.has("draft_probs")) return absl::OkStatus();
  return InvalidArgument(call.op(),
                         "draft_probs is missing; need them without "
                         "no_draft_probs");
}
template <class Op>
void AddDraftProbs(bool vllm, Op& op) {
  if (vllm) {
    op.template Need<bool>("no_draft_probs")
        .Then([](auto& spec, const OpCall& call) {
          return FillDraftProbs(spec, call, !call.Bool("no_draft_probs"));
        });
  } else {
    op.Then([](auto& spec, const OpCall& call) {
      return FillDraftProbs(spec, call, call.has("draft_probs"));
    });
  }
}

absl::Status AddGreedy(bool vllm, OpRegistry& registry) {
  OpDeclaration<GreedyRejectionPlan, GreedySpec, GreedyArgs> op(
      vllm ? "rejection_greedy_sample_kernel_impl" : "rejection_sample_greedy");
  op.InOut("output_token_ids", &GreedyArgs::output_token_ids, nullptr, {},
           IndexDType<GreedySpec>())
      .In("cu_num_draft_tokens", &GreedyArgs::cu_num_draft_tokens, {kAny},
          IndexDType<GreedySpec>())
      .In("draft_token_ids", &GreedyArgs::draft_token_ids, {kAny},
          OpDType<GreedySpec>(Like("output_token_ids")))
      .In("target_argmax", &GreedyArgs::target_argmax, {kAny},
          OpDType<GreedySpec>(Like("output_token_ids")))
      .In("bonus_token_ids", &GreedyArgs::bonus_token_ids, {},
          OpDType<GreedySpec>(Like("output_token_ids")))
      .Maybe("is_greedy", &GreedyArgs::is_greedy, {kAny}, DType::kU8);
  if (vllm) {
    op.Need("max_spec_len", &GreedySpec::max_drafts)
        .Word("max_drafts", "max_spec_len");
  }
  return op.Layer()
      .Providers({"reference"})
      .ExampleOf([vllm](DType) {
        NamedArgs args = {{"output_token_ids", TensorMeta{kI64, {3, 4}}},
                          {"cu_num_draft_tokens", TensorMeta{kI64, {3}}},
                          {"draft_token_ids", TensorMeta{kI64, {4}}},
                          {"target_argmax", TensorMeta{kI64, {4}}},
                          {"bonus_token_ids", TensorMeta{kI64, {3, 1}}},
                          {"is_greedy", TensorMeta{DType::kU8, {3}}}};
        if (vllm) args.emplace_back("max_spec_len", int64_t{3});
        return args;
      })
      .AddTo(registry);
}

absl::Status AddRandom(bool vllm, OpRegistry& registry) {
  const OpShape<RandomSpec> ours = {kAny, &RandomSpec::vocab};
  OpDeclaration<RandomRejectionPlan, RandomSpec, RandomArgs> op(
      vllm ? "rejection_random_sample_kernel_impl" : "rejection_sample");
  op.InOut("output_token_ids", &RandomArgs::output_token_ids, nullptr, {},
           IndexDType<RandomSpec>())
      .In("cu_num_draft_tokens", &RandomArgs::cu_num_draft_tokens, {kAny},
          IndexDType<RandomSpec>())
      .In("draft_token_ids", &RandomArgs::draft_token_ids, {kAny},
          OpDType<RandomSpec>(Like("output_token_ids")))
      .Maybe("draft_probs", &RandomArgs::draft_probs, {kAny, kAny}, DType::kF32)
      .In("target_probs", &RandomArgs::target_probs,
          vllm ? OpShape<RandomSpec>{kAny, kAny} : ours, DType::kF32)
      .In("bonus_token_ids", &RandomArgs::bonus_token_ids, {},
          OpDType<RandomSpec>(Like("output_token_ids")))
      .In("recovered_token_ids", &RandomArgs::recovered_token_ids, {kAny},
          OpDType<RandomSpec>(Like("output_token_ids")))
      .In("uniform_probs", &RandomArgs::uniform_probs, {kAny}, DType::kF32)
      .Maybe("is_greedy", &RandomArgs::is_greedy, {kAny}, DType::kU8);
  if (vllm) {
    op.Need("max_spec_len", &RandomSpec::max_drafts)
        .Need("vocab_size", &RandomSpec::vocab)
        .Given(&RandomSpec::wider, true)
        .Word("max_drafts", "max_spec_len")
        .Word("vocab", "vocab_size");
  }
  AddDraftProbs(vllm, op);
  return op.Layer()
      .Providers({"reference"})
      .ExampleOf([vllm](DType) {
        NamedArgs args = {{"output_token_ids", TensorMeta{kI64, {3, 4}}},
                          {"cu_num_draft_tokens", TensorMeta{kI64, {3}}},
                          {"draft_token_ids", TensorMeta{kI64, {4}}},
                          {"draft_probs", TensorMeta{DType::kF32, {4, 8}}},
                          {"target_probs", TensorMeta{DType::kF32, {4, 8}}},
                          {"bonus_token_ids", TensorMeta{kI64, {3, 1}}},
                          {"recovered_token_ids", TensorMeta{kI64, {4}}},
                          {"uniform_probs", TensorMeta{DType::kF32, {4}}},
                          {"is_greedy", TensorMeta{DType::kU8, {3}}}};
        if (vllm) {
          args.emplace_back("max_spec_len", int64_t{3});
          args.emplace_back("vocab_size", int64_t{8});
          args.emplace_back("no_draft_probs", false);
        }
        return args;
      })
      .AddTo(registry);
}

absl::Status AddExpand(bool vllm, OpRegistry& registry) {
  using Spec = ExpandSpec;
  OpDeclaration<ExpandPlan, Spec, ExpandArgs> op(vllm ? "expand_kernel_impl"
                                                      : "expand_to_tokens");
  op.InOut("output", &ExpandArgs::output, nullptr, {kAny},
           OpDType<Spec>::OneOf({DType::kF32, DType::kI32, DType::kI64}))
      .In("input", &ExpandArgs::input, {kAny}, OpDType<Spec>(Like("output")))
      .In("cu_num_tokens", &ExpandArgs::cu_num_tokens, {kAny},
          IndexDType<Spec>());
  if (vllm) {
    op.Need("replace_from", &Spec::replace_from)
        .Need("replace_to", &Spec::replace_to);
  } else {
    op.Attr("replace_from", int64_t{0}, &Spec::replace_from)
        .Attr("replace_to", int64_t{0}, &Spec::replace_to);
  }
  return op.Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"output", TensorMeta{kI64, {4}}},
                         {"input", TensorMeta{kI64, {3}}},
                         {"cu_num_tokens", TensorMeta{kI64, {3}}},
                         {"replace_from", int64_t{0}},
                         {"replace_to", int64_t{1}}};
      })
      .AddTo(registry);
}

// Each number as the plan's header says, one after the other.
void NativeRecovered(const RecoveredSpec& spec, const RecoveredArgs& args) {
  const IndexView ends = IndicesOf(args.cu_num_draft_tokens);
  const IndexView drafts = IndicesOf(args.draft_token_ids);
  int64_t t = 0;
  for (int64_t r = 0; r < ends.size(); ++r) {
    const ScalarRow inv_q(args.inv_q, r);
    for (; t < ends[r]; ++t) {
      const ScalarRow target(args.target_probs, t);
      float most = -1.0f;
      int64_t token = 0;
      for (int64_t v = 0; v < spec.vocab; ++v) {
        float w = v == drafts[t] ? 0.0f : target[v];
        if (spec.draft_probs) {
          const float more = target[v] - ScalarRow(args.draft_probs, t)[v];
          w = more > 0.0f ? more : 0.0f;
        }
        if (!(w * inv_q[v] > most)) continue;
        most = w * inv_q[v];
        token = v;
      }
      void* const out = args.output_token_ids.mutable_data();
      if (args.output_token_ids.dtype() == kI64) {
        static_cast<int64_t*>(out)[t] = token;
      } else {
        static_cast<int32_t*>(out)[t] = static_cast<int32_t>(token);
      }
    }
  }
}

absl::Status AddRecovered(bool vllm, OpRegistry& registry) {
  const OpShape<RecoveredSpec> ours = {kAny, &RecoveredSpec::vocab};
  OpDeclaration<RecoveredTokensPlan, RecoveredSpec, RecoveredArgs> op(
      vllm ? "sample_recovered_tokens_kernel_impl" : "sample_recovered_tokens");
  op.InOut("output_token_ids", &RecoveredArgs::output_token_ids, nullptr,
           {kAny}, IndexDType<RecoveredSpec>())
      .In("cu_num_draft_tokens", &RecoveredArgs::cu_num_draft_tokens, {kAny},
          IndexDType<RecoveredSpec>())
      .In("draft_token_ids", &RecoveredArgs::draft_token_ids, {kAny},
          IndexDType<RecoveredSpec>())
      .Maybe("draft_probs", &RecoveredArgs::draft_probs, {kAny, kAny},
             DType::kF32)
      .In("target_probs", &RecoveredArgs::target_probs,
          vllm ? OpShape<RecoveredSpec>{kAny, kAny} : ours, DType::kF32)
      .In("inv_q", &RecoveredArgs::inv_q, {kAny, kAny}, DType::kF32);
  if (vllm) {
    op.Need("vocab_size", &RecoveredSpec::vocab)
        .Given(&RecoveredSpec::wider, true)
        .Word("vocab", "vocab_size");
  }
  AddDraftProbs(vllm, op);
  return op.Reference(&NativeRecovered)
      .Layer()
      .ExampleOf([vllm](DType) {
        NamedArgs args = {{"output_token_ids", TensorMeta{kI64, {4}}},
                          {"cu_num_draft_tokens", TensorMeta{kI64, {3}}},
                          {"draft_token_ids", TensorMeta{kI64, {4}}},
                          {"draft_probs", TensorMeta{DType::kF32, {4, 19}}},
                          {"target_probs", TensorMeta{DType::kF32, {4, 19}}},
                          {"inv_q", TensorMeta{DType::kF32, {3, 19}}}};
        if (vllm) {
          args.emplace_back("vocab_size", int64_t{19});
          args.emplace_back("no_draft_probs", false);
        }
        return args;
      })
      .AddTo(registry);
}

}  // namespace

absl::Status AddRejectionOps(RejectionNames names, OpRegistry& registry) {
  const bool vllm = names == RejectionNames::kVllm;
  QUERN_RETURN_IF_ERROR(AddGreedy(vllm, registry));
  QUERN_RETURN_IF_ERROR(AddRandom(vllm, registry));
  QUERN_RETURN_IF_ERROR(AddExpand(vllm, registry));
  return AddRecovered(vllm, registry);
}

absl::Status RegisterSpeculationOps(OpRegistry& registry) {
  return AddRejectionOps(RejectionNames::kOurs, registry);
}

}  // namespace quern
