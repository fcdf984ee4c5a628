#include "quern/tools/perf/linear/router.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/moe/reference_router.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

constexpr absl::string_view kScores[] = {"softmax", "sigmoid", "sqrtsoftplus"};
constexpr int64_t kMaxTokens = int64_t{1} << 24;

class Router final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    RouterSpec spec;
    QUERN_ASSIGN_OR_RETURN(const int64_t tokens,
                           args.Int("tokens", 1, kMaxTokens));
    QUERN_ASSIGN_OR_RETURN(spec.experts,
                           args.Int("experts", 1, RouterSpec::kMaxExperts));
    QUERN_ASSIGN_OR_RETURN(spec.top_k,
                           args.Int("top_k", 1, RouterSpec::kMaxTopK));
    QUERN_ASSIGN_OR_RETURN(spec.groups, args.Int("groups", 1, spec.experts));
    QUERN_ASSIGN_OR_RETURN(spec.top_groups,
                           args.Int("top_groups", 1, spec.groups));
    QUERN_ASSIGN_OR_RETURN(spec.biased, args.Flag("bias"));
    QUERN_ASSIGN_OR_RETURN(spec.renormalize, args.Flag("renormalize"));
    QUERN_ASSIGN_OR_RETURN(spec.logits_dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(const std::string score,
                           args.Choice("score", kScores));
    spec.score = score == "softmax"   ? RouterScore::kSoftmax
                 : score == "sigmoid" ? RouterScore::kSigmoid
                                      : RouterScore::kSqrtSoftplus;
    QUERN_ASSIGN_OR_RETURN(const RouterPlan plan, RouterPlan::Create(spec));
    return absl::WrapUnique<Op>(new Router(plan, tokens, score));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape =
        absl::StrCat("tokens=", tokens_, " experts=", spec().experts,
                     " top_k=", spec().top_k, " score=", score_,
                     " bias=", spec().biased ? 1 : 0, " groups=", spec().groups,
                     " top_groups=", spec().top_groups,
                     " renormalize=", spec().renormalize ? 1 : 0);
    info.dtype = absl::StrCat(DTypeName(spec().logits_dtype), "->f32");
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(logits_bytes() + bias_bytes()),
                    static_cast<double>(2 * route_bytes()));
    // A comparison for each expert is the least that a choice takes. A score
    // counts 8: 6 for its exponential, a sum and a quotient. All experts have
    // one where a bias is added to it, and where a softmax sums over all;
    // otherwise those that are chosen.
    const bool all = spec().biased || (spec().score == RouterScore::kSoftmax &&
                                       !spec().renormalize);
    const int64_t scores = all ? spec().experts : spec().top_k;
    info.flops = static_cast<double>(tokens_) *
                 static_cast<double>(spec().experts + 8 * scores);
    return info;
  }

  int64_t set_bytes() const override {
    return logits_bytes() + bias_bytes() + 2 * route_bytes();
  }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(logits_.Create(sets, logits_bytes()));
    QUERN_RETURN_IF_ERROR(bias_.Create(sets, spec().experts * 4));
    QUERN_RETURN_IF_ERROR(weights_.Create(sets, route_bytes()));
    QUERN_RETURN_IF_ERROR(ids_.Create(sets, route_bytes()));
    WithType(spec().logits_dtype,
             [this](auto type) { FillReals<decltype(type)>(-6, 6, logits_); });
    FillReals<float>(-1, 1, bias_);
    return plan_.CheckArgs(Logits(0), Bias(0), Weights(0), Ids(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(Logits(set), Bias(set), Weights(set), Ids(set), executor);
  }

  // Ids exactly, and weights within their bound. Tokens are left out where two
  // sums of a score and its bias are so close that rounding may decide.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    std::vector<double> bias;
    if (spec().biased) bias = Doubles(DType::kF32, bias_, 0, spec().experts);
    Verdict all;
    executor.ParallelFor(tokens_, [&](int64_t t, int) {
      const std::vector<double> logits = Doubles(
          spec().logits_dtype, logits_, t * spec().experts, spec().experts);
      const ReferenceRoute want = ReferenceRouter(spec(), logits, bias);
      // By router_spec.h, for logits in [-6, 6): a score and two sums.
      const double units =
          20 + 2 * (20 + static_cast<double>(spec().experts) / 4);
      Verdict mine;
      if (spec().biased && !(want.margin > 8 * units * 0x1p-24)) return;
      for (int64_t j = 0; j < spec().top_k; ++j) {
        const int64_t at = t * spec().top_k + j;
        const auto slot = static_cast<size_t>(j);
        mine.Add(at, ids_.at<int32_t>(0)[at], want.ids[slot], 0);
        mine.Add(at, double{weights_.at<float>(0)[at]}, want.weights[slot],
                 units * 0x1p-24 * want.weights[slot]);
      }
      all.Merge(mine);
    });
    return all.Result("router");
  }

 private:
  Router(const RouterPlan& plan, int64_t tokens, std::string score)
      : plan_(plan), tokens_(tokens), score_(std::move(score)) {}

  const RouterSpec& spec() const { return plan_.spec(); }
  int64_t logits_bytes() const {
    return tokens_ * spec().experts *
           static_cast<int64_t>(SizeOf(spec().logits_dtype));
  }
  int64_t bias_bytes() const { return spec().biased ? spec().experts * 4 : 0; }
  // The weights; ids are as many.
  int64_t route_bytes() const { return tokens_ * spec().top_k * 4; }

  AnyTensorView Logits(int64_t set) {
    return Matrix(spec().logits_dtype, logits_.at(set), tokens_,
                  spec().experts);
  }
  AnyTensorView Bias(int64_t set) {
    if (!spec().biased) return AnyTensorView();
    return DenseVector<const float>(bias_.at<float>(set), spec().experts);
  }
  MatrixView<float> Weights(int64_t set) {
    return DenseMatrix(weights_.at<float>(set), tokens_, spec().top_k);
  }
  MatrixView<int32_t> Ids(int64_t set) {
    return DenseMatrix(ids_.at<int32_t>(set), tokens_, spec().top_k);
  }

  RouterPlan plan_;
  int64_t tokens_;
  std::string score_;
  SetBuffer logits_, bias_, weights_, ids_;
};

}  // namespace

OpEntry RouterOp() {
  return {"router",
          "the top_k experts of each token, and their weights",
          {{"tokens", "256", "rows of logits"},
           {"experts", "128", "columns of logits"},
           {"top_k", "8", "experts of a token"},
           {"dtype", "f32", "of the logits: f32, bf16 or f16"},
           {"score", "softmax", "softmax, sigmoid or sqrtsoftplus"},
           {"bias", "0", "1: a correction bias decides with the scores"},
           {"renormalize", "1", "1: the weights of a token sum to 1"},
           {"groups", "1", "of the experts"},
           {"top_groups", "1", "groups that may be chosen from"}},
          &Router::Create};
}

}  // namespace quern
