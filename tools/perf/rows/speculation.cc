#include "quern/tools/perf/rows/speculation.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/recovered_tokens.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 20;
constexpr int64_t kMaxVocab = int64_t{1} << 24;

class RecoveredTokens final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    QUERN_ASSIGN_OR_RETURN(const int64_t requests,
                           args.Int("requests", 1, kMaxTokens));
    QUERN_ASSIGN_OR_RETURN(const int64_t drafts, args.Int("drafts", 1, 64));
    RecoveredTokensSpec spec;
    QUERN_ASSIGN_OR_RETURN(spec.vocab, args.Int("vocab", 1, kMaxVocab));
    QUERN_ASSIGN_OR_RETURN(spec.draft_probs, args.Flag("draft_probs"));
    QUERN_ASSIGN_OR_RETURN(const RecoveredTokensPlan plan,
                           RecoveredTokensPlan::Create(spec));
    return absl::WrapUnique<Op>(new RecoveredTokens(plan, requests, drafts));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("requests=", requests_, " drafts=", drafts_,
                              " vocab=", vocab(),
                              " draft_probs=", draft_probs() ? 1 : 0);
    info.dtype = "f32";
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(read_bytes()),
                    static_cast<double>(4 * tokens()));
    // A product and a comparison, and with two probabilities a difference and
    // its comparison with 0.
    info.flops =
        static_cast<double>(tokens() * vocab()) * (draft_probs() ? 4.0 : 2.0);
    return info;
  }

  int64_t set_bytes() const override { return read_bytes() + 4 * tokens(); }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(target_.Create(sets, tokens() * vocab() * 4));
    QUERN_RETURN_IF_ERROR(
        draft_.Create(sets, draft_probs() ? tokens() * vocab() * 4 : 0));
    QUERN_RETURN_IF_ERROR(inv_q_.Create(sets, requests_ * vocab() * 4));
    QUERN_RETURN_IF_ERROR(ends_.Create(sets, requests_ * 4));
    QUERN_RETURN_IF_ERROR(ids_.Create(sets, tokens() * 4));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, tokens() * 4));
    FillReals<float>(0, 1, target_);
    FillReals<float>(0, 1, draft_);
    FillReals<float>(0.05, 20, inv_q_);
    for (int64_t set = 0; set < sets; ++set) {
      for (int64_t r = 0; r < requests_; ++r) {
        ends_.at<int32_t>(set)[r] = static_cast<int32_t>((r + 1) * drafts_);
      }
      for (int64_t t = 0; t < tokens(); ++t) {
        ids_.at<int32_t>(set)[t] = static_cast<int32_t>(7 * t % vocab());
      }
    }
    return plan_.CheckArgs(Tensors(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(Tensors(set), executor);
  }

  // Tokens exactly: a difference and a product of f32 are rounded as in double.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    Verdict all;
    executor.ParallelFor(tokens(), [&](int64_t t, int) {
      const float* const p = target_.at<float>(0) + t * vocab();
      const float* const q =
          draft_probs() ? draft_.at<float>(0) + t * vocab() : nullptr;
      const float* const inv_q = inv_q_.at<float>(0) + t / drafts_ * vocab();
      double most = -1;
      int64_t token = 0;
      for (int64_t v = 0; v < vocab(); ++v) {
        double w = v == ids_.at<int32_t>(0)[t] ? 0.0 : double{p[v]};
        if (draft_probs()) {
          w = std::max(0.0,
                       double{static_cast<float>(double{p[v]} - double{q[v]})});
        }
        const double product = double{static_cast<float>(w * double{inv_q[v]})};
        if (product > most) {
          most = product;
          token = v;
        }
      }
      Verdict mine;
      mine.Add(t, out_.at<int32_t>(0)[t], static_cast<double>(token), 0);
      all.Merge(mine);
    });
    return all.Result("sample_recovered_tokens");
  }

 private:
  RecoveredTokens(const RecoveredTokensPlan& plan, int64_t requests,
                  int64_t drafts)
      : plan_(plan), requests_(requests), drafts_(drafts) {}

  int64_t vocab() const { return plan_.spec().vocab; }
  bool draft_probs() const { return plan_.spec().draft_probs; }
  int64_t tokens() const { return requests_ * drafts_; }
  int64_t read_bytes() const {
    const int64_t rows = tokens() * (draft_probs() ? 2 : 1) + requests_;
    return (rows * vocab() + requests_ + tokens()) * 4;
  }

  RecoveredTokensArgs Tensors(int64_t set) {
    RecoveredTokensArgs args;
    args.output_token_ids = DenseVector(out_.at<int32_t>(set), tokens());
    args.cu_num_draft_tokens = DenseVector(ends_.at<int32_t>(set), requests_);
    args.draft_token_ids = DenseVector(ids_.at<int32_t>(set), tokens());
    args.target_probs = DenseMatrix(target_.at<float>(set), tokens(), vocab());
    if (draft_probs()) {
      args.draft_probs = DenseMatrix(draft_.at<float>(set), tokens(), vocab());
    }
    args.inv_q = DenseMatrix(inv_q_.at<float>(set), requests_, vocab());
    return args;
  }

  RecoveredTokensPlan plan_;
  int64_t requests_, drafts_;
  SetBuffer target_, draft_, inv_q_, ends_, ids_, out_;
};

}  // namespace

OpEntry RecoveredTokensOp() {
  return {"sample_recovered_tokens",
          "the token in place of each draft that is rejected",
          {{"requests", "32", "rows of inv_q"},
           {"drafts", "3", "of a request"},
           {"vocab", "151936", "tokens to choose from"},
           {"draft_probs", "1", "1: the drafts have probabilities"}},
          &RecoveredTokens::Create};
}

}  // namespace quern
