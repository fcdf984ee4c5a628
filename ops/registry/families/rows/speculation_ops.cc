#include "quern/ops/registry/families/rows/speculation_ops.h"

#include <cstdint>
#include <vector>

#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/speculation/recovered_tokens.h"
#include "quern/ops/speculation/rejection.h"

namespace quern {
namespace {

using Example = std::vector<OpExampleArg>;

constexpr DType kI64 = DType::kI64;

// What vLLM's names have, and ours lack, goes behind the arguments of both.
Example And(Example example, bool vllm, const Example& more) {
  if (vllm) example.insert(example.end(), more.begin(), more.end());
  return example;
}

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
  using Spec = GreedyRejectionSpec;
  using Args = GreedyRejectionArgs;
  const OpDType<Spec> index = IndexDType<Spec>(), id = Like("output_token_ids");
  OpDeclaration<GreedyRejectionPlan, Spec, Args> op(
      vllm ? "rejection_greedy_sample_kernel_impl" : "rejection_sample_greedy");
  op.InOut("output_token_ids", &Args::output_token_ids, nullptr, {}, index)
      .In("cu_num_draft_tokens", &Args::cu_num_draft_tokens, {kAny}, index)
      .In("draft_token_ids", &Args::draft_token_ids, {kAny}, id)
      .In("target_argmax", &Args::target_argmax, {kAny}, id)
      .In("bonus_token_ids", &Args::bonus_token_ids, {}, id)
      .Maybe("is_greedy", &Args::is_greedy, {kAny}, DType::kU8);
  if (vllm) {
    op.Need("max_spec_len", &Spec::max_drafts)
        .Word("max_drafts", "max_spec_len");
  }
  return op.Layer()
      .Providers({"reference"})
      .Example(And({{"output_token_ids", {3, 4}, kI64},
                    {"cu_num_draft_tokens", {3}, kI64},
                    {"draft_token_ids", {4}, kI64},
                    {"target_argmax", {4}, kI64},
                    {"bonus_token_ids", {3, 1}, kI64},
                    {"is_greedy", {3}, DType::kU8}},
                   vllm, {{"max_spec_len", 3}}))
      .AddTo(registry);
}

// vLLM's tables of probabilities may be wider than vocab_size.
template <class Spec>
OpShape<Spec> ProbsShape(bool vllm) {
  return vllm ? OpShape<Spec>{kAny, kAny} : OpShape<Spec>{kAny, &Spec::vocab};
}

absl::Status AddRandom(bool vllm, OpRegistry& registry) {
  using Spec = RandomRejectionSpec;
  using Args = RandomRejectionArgs;
  const OpDType<Spec> index = IndexDType<Spec>(), id = Like("output_token_ids");
  OpDeclaration<RandomRejectionPlan, Spec, Args> op(
      vllm ? "rejection_random_sample_kernel_impl" : "rejection_sample");
  op.InOut("output_token_ids", &Args::output_token_ids, nullptr, {}, index)
      .In("cu_num_draft_tokens", &Args::cu_num_draft_tokens, {kAny}, index)
      .In("draft_token_ids", &Args::draft_token_ids, {kAny}, id)
      .Maybe("draft_probs", &Args::draft_probs, {kAny, kAny}, DType::kF32)
      .In("target_probs", &Args::target_probs, ProbsShape<Spec>(vllm),
          DType::kF32)
      .In("bonus_token_ids", &Args::bonus_token_ids, {}, id)
      .In("recovered_token_ids", &Args::recovered_token_ids, {kAny}, id)
      .In("uniform_probs", &Args::uniform_probs, {kAny}, DType::kF32)
      .Maybe("is_greedy", &Args::is_greedy, {kAny}, DType::kU8);
  if (vllm) {
    op.Need("max_spec_len", &Spec::max_drafts)
        .Need("vocab_size", &Spec::vocab)
        .Given(&Spec::wider, true)
        .Word("max_drafts", "max_spec_len")
        .Word("vocab", "vocab_size");
  }
  AddDraftProbs(vllm, op);
  return op.Layer()
      .Providers({"reference"})
      .Example(And(
          {{"output_token_ids", {3, 4}, kI64},
           {"cu_num_draft_tokens", {3}, kI64},
           {"draft_token_ids", {4}, kI64},
           {"draft_probs", {4, 8}, DType::kF32},
           {"target_probs", {4, 8}, DType::kF32},
           {"bonus_token_ids", {3, 1}, kI64},
           {"recovered_token_ids", {4}, kI64},
           {"uniform_probs", {4}, DType::kF32},
           {"is_greedy", {3}, DType::kU8}},
          vllm,
          {{"max_spec_len", 3}, {"vocab_size", 8}, {"no_draft_probs", false}}))
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
      .Example({{"output", {4}, kI64},
                {"input", {3}, kI64},
                {"cu_num_tokens", {3}, kI64},
                {"replace_from", 0},
                {"replace_to", 1}})
      .AddTo(registry);
}

// Each number as the plan's header says, one after the other.
void NativeRecovered(const RecoveredTokensSpec& spec,
                     const RecoveredTokensArgs& args) {
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
  using Spec = RecoveredTokensSpec;
  using Args = RecoveredTokensArgs;
  const OpDType<Spec> index = IndexDType<Spec>();
  OpDeclaration<RecoveredTokensPlan, Spec, Args> op(
      vllm ? "sample_recovered_tokens_kernel_impl" : "sample_recovered_tokens");
  op.InOut("output_token_ids", &Args::output_token_ids, nullptr, {kAny}, index)
      .In("cu_num_draft_tokens", &Args::cu_num_draft_tokens, {kAny}, index)
      .In("draft_token_ids", &Args::draft_token_ids, {kAny}, index)
      .Maybe("draft_probs", &Args::draft_probs, {kAny, kAny}, DType::kF32)
      .In("target_probs", &Args::target_probs, ProbsShape<Spec>(vllm),
          DType::kF32)
      .In("inv_q", &Args::inv_q, {kAny, kAny}, DType::kF32);
  if (vllm) {
    op.Need("vocab_size", &Spec::vocab)
        .Given(&Spec::wider, true)
        .Word("vocab", "vocab_size");
  }
  AddDraftProbs(vllm, op);
  return op.Reference(&NativeRecovered)
      .Layer()
      .Example(And({{"output_token_ids", {4}, kI64},
                    {"cu_num_draft_tokens", {3}, kI64},
                    {"draft_token_ids", {4}, kI64},
                    {"draft_probs", {4, 19}, DType::kF32},
                    {"target_probs", {4, 19}, DType::kF32},
                    {"inv_q", {3, 19}, DType::kF32}},
                   vllm, {{"vocab_size", 19}, {"no_draft_probs", false}}))
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
