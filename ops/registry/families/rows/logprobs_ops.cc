// token_logprobs by name.

#include <cmath>
#include <cstdint>
#include <limits>

#include "quern/ops/registry/families/rows/logits_ops.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/sampling/token_logprobs.h"

namespace quern {
namespace {

constexpr char kOp[] = "token_logprobs";

struct Args {
  AnyTensorView logits, ids, top_ids, top_logprobs, logprobs, ranks;
};

TokenLogprobsArgs PlanArgs(const Args& a) {
  return {a.logits.As<const float, 2>(), a.ids.As<const int32_t, 2>(),
          a.top_ids.As<int32_t, 2>(),    a.top_logprobs.As<float, 2>(),
          a.logprobs.As<float, 2>(),     a.ranks.As<int32_t, 2>()};
}

absl::Status Check(const TokenLogprobsPlan& plan, const Args& a) {
  const TokenLogprobsSpec& spec = plan.spec();
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "logits", a.logits, DType::kF32,
                                   {kAnyExtent, spec.vocab}));
  const int64_t rows = a.logits.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "ids", a.ids, DType::kI32, {rows, spec.given}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "top_ids", a.top_ids, DType::kI32, {rows, spec.top_n}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "top_logprobs", a.top_logprobs,
                                    DType::kF32, {rows, spec.top_n}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "logprobs", a.logprobs, DType::kF32,
                                    {rows, spec.given}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "ranks", a.ranks, DType::kI32, {rows, spec.given}));
  return plan.CheckArgs(PlanArgs(a));
}
void Execute(const TokenLogprobsPlan& plan, const Args& a, Workspace workspace,
             Executor& executor) {
  plan.Execute(PlanArgs(a), workspace, executor);
}

// In double, by as many passes as there are results.
void Reference(const TokenLogprobsSpec& spec, const Args& tensors) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const TokenLogprobsArgs a = PlanArgs(tensors);
  for (int64_t r = 0; r < a.logits.extent(0); ++r) {
    const float* const l = a.logits.Row(r);
    // Whether token i comes before j; none comes before j = -1.
    const auto before = [l](int64_t i, int64_t j) {
      return j >= 0 && l[i] > kNone &&
             (!(l[j] > kNone) || l[i] > l[j] || (l[i] == l[j] && i < j));
    };
    float most = kNone;
    for (int64_t i = 0; i < spec.vocab; ++i) most = l[i] > most ? l[i] : most;
    const auto below = [l, most](int64_t i) {
      return l[i] == most
                 ? 0.0
                 : static_cast<double>(l[i]) - static_cast<double>(most);
    };
    double sum = 0.0;
    for (int64_t i = 0; i < spec.vocab; ++i) {
      if (l[i] > kNone) sum += std::exp(below(i));
    }
    const auto logprob = [&](int64_t i) {
      return i >= 0 && l[i] > kNone
                 ? static_cast<float>(below(i) - std::log(sum))
                 : kNone;
    };
    int32_t last = -1;
    for (int64_t place = 0; place < spec.top_n; ++place) {
      int32_t next = -1;
      for (int32_t i = 0; i < spec.vocab; ++i) {
        const bool left = place == 0 || before(last, i);
        if (l[i] > kNone && left && (next < 0 || before(i, next))) next = i;
      }
      a.top_ids.Row(r)[place] = next;
      a.top_logprobs.Row(r)[place] = logprob(next);
      if (next < 0) {
        for (; place < spec.top_n; ++place) {
          a.top_ids.Row(r)[place] = next;
          a.top_logprobs.Row(r)[place] = kNone;
        }
      }
      last = next;
    }
    for (int64_t g = 0; g < spec.given; ++g) {
      const int64_t id = a.ids.Row(r)[g];
      int32_t rank = id < 0 ? 0 : 1;
      for (int64_t i = 0; i < spec.vocab; ++i) rank += before(i, id) ? 1 : 0;
      a.ranks.Row(r)[g] = rank;
      a.logprobs.Row(r)[g] = logprob(id);
    }
  }
}

}  // namespace

absl::Status RegisterTokenLogprobs(OpRegistry& registry) {
  using Spec = TokenLogprobsSpec;
  return OpDeclaration<TokenLogprobsPlan, Spec, Args>(kOp)
      .In("logits", &Args::logits, {kRows, &Spec::vocab},
          OpDType<Spec>::OneOf({DType::kF32}))
      .In("ids", &Args::ids, {kRows, &Spec::given},
          OpDType<Spec>::OneOf({DType::kI32}))
      .Attr("top_n", int64_t{1}, &Spec::top_n)
      .Out("top_ids", &Args::top_ids, {kRows, &Spec::top_n}, DType::kI32)
      .Out("top_logprobs", &Args::top_logprobs, {kRows, &Spec::top_n},
           DType::kF32)
      .Out("logprobs", &Args::logprobs, {kRows, &Spec::given}, DType::kF32)
      .Out("ranks", &Args::ranks, {kRows, &Spec::given}, DType::kI32)
      .Calls(&Check, &Execute)
      .Reference(&Reference)
      .Example({{"logits", {4, 256}},
                {"ids", {4, 2}, DType::kI32},
                {"top_n", int64_t{5}}})
      .AddTo(registry);
}

}  // namespace quern
