#include "quern/tools/perf/rows/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/sampling/adjust_logits.h"
#include "quern/ops/sampling/philox.h"
#include "quern/ops/sampling/sampler.h"
#include "quern/ops/sampling/token_logprobs.h"
#include "quern/testing/reference_sampling.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr absl::string_view kFilters[] = {
    "none", "greedy", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p"};

const std::vector<Key>& Shape() {
  static const auto* const keys = new std::vector<Key>{
      {"rows", "32", "sequences"}, {"vocab", "151936", "logits of a row"}};
  return *keys;
}

// Rows of logits like those of a language model: tails are exponential, so that
// a few tokens have most of the probability.
class LogitsOp : public Op {
 protected:
  absl::Status TakeShape(const Args& args) {
    QUERN_ASSIGN_OR_RETURN(rows_, args.Int("rows", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(vocab_, args.Int("vocab", 1, kMaxDim));
    return absl::OkStatus();
  }
  absl::Status FillLogits(int64_t sets) {
    QUERN_RETURN_IF_ERROR(logits_.Create(sets, bytes()));
    FillReals<float>(1e-6, 1, logits_);
    for (int64_t set = 0; set < sets; ++set) {
      float* const l = logits_.at<float>(set);
      for (int64_t i = 0; i < rows_ * vocab_; ++i) {
        l[i] = -1.5f * std::log(l[i]);
      }
    }
    return absl::OkStatus();
  }
  OpInfo InfoOf(const char* target) const {
    OpInfo info;
    info.shape = absl::StrCat("rows=", rows_, " vocab=", vocab_);
    info.dtype = "f32";
    info.isa = target;
    // Comparisons, 8 for an exponential, and a sum.
    info.flops = 10.0 * static_cast<double>(rows_ * vocab_);
    return info;
  }
  int64_t bytes() const {
    return rows_ * vocab_ * static_cast<int64_t>(sizeof(float));
  }
  MatrixView<float> Logits(int64_t set) {
    return DenseMatrix(logits_.at<float>(set), rows_, vocab_);
  }
  // The workspace of a plan.
  template <class Plan>
  Workspace Scratch(const Plan& plan, Executor& executor) {
    const int64_t bytes = *plan.WorkspaceBytes(rows_, executor.num_workers());
    if (static_cast<int64_t>(scratch_.bytes()) < bytes) {
      scratch_ = *AlignedBuffer::Create(bytes);
    }
    return Workspace(scratch_);
  }
  std::vector<float> Row(int64_t row) {
    const float* const l = logits_.at<float>(0) + row * vocab_;
    return std::vector<float>(l, l + vocab_);
  }

  int64_t rows_ = 0, vocab_ = 0;
  SetBuffer logits_;
  AlignedBuffer scratch_;
};

class Sample final : public LogitsOp {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = absl::WrapUnique(new Sample());
    QUERN_RETURN_IF_ERROR(op->TakeShape(args));
    QUERN_ASSIGN_OR_RETURN(op->filter_, args.Choice("filter", kFilters));
    QUERN_ASSIGN_OR_RETURN(const SamplerPlan plan,
                           SamplerPlan::Create({op->vocab_}));
    op->plan_.push_back(plan);
    for (int64_t r = 0; r < op->rows_; ++r) {
      SamplingParams params;
      params.temperature = op->filter_ == "greedy" ? 0.0f : 0.8f;
      params.seed = static_cast<uint64_t>(r);
      if (op->filter_ == "top_k") params.top_k = 40;
      if (op->filter_ == "top_p") params.top_p = 0.9f;
      if (op->filter_ == "min_p") params.min_p = 0.05f;
      if (op->filter_ == "top_n_sigma") params.top_n_sigma = 1.0f;
      if (op->filter_ == "typical_p") params.typical_p = 0.9f;
      op->params_.push_back(params);
    }
    op->tokens_.resize(op->params_.size());
    return op;
  }

  // Two reads of the logits: for their maximum and for their weights.
  OpInfo Info() const override {
    OpInfo info = InfoOf(plan_[0].target());
    absl::StrAppend(&info.shape, " filter=", filter_);
    info.SetTraffic(2.0 * static_cast<double>(bytes()), 0);
    return info;
  }
  int64_t set_bytes() const override { return bytes(); }
  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(FillLogits(sets));
    Scratch(plan_[0], executor);
    return plan_[0].CheckArgs(Logits(0), params_, tokens_);
  }
  void Run(int64_t set, Executor& executor) override {
    plan_[0].Execute(Logits(set), params_, absl::MakeSpan(tokens_),
                     Scratch(plan_[0], executor), executor);
  }
  // Rows are left out whose draw is so close to the edge of a token that
  // rounding may decide.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    Verdict all;
    executor.ParallelFor(rows_, [&](int64_t r, int) {
      const SamplingParams& params = params_[static_cast<size_t>(r)];
      const std::vector<float> row = Row(r);
      ReferenceToken want;
      if (params.temperature == 0.0f) {
        want.token = static_cast<int32_t>(
            std::max_element(row.begin(), row.end()) - row.begin());
      } else {
        ReferenceSamplingRule rule;
        rule.temperature = static_cast<double>(params.temperature);
        rule.top_k = params.top_k;
        rule.top_p = static_cast<double>(params.top_p);
        rule.min_p = static_cast<double>(params.min_p);
        rule.top_n_sigma = static_cast<double>(params.top_n_sigma);
        rule.typical_p = static_cast<double>(params.typical_p);
        want = ReferenceDraw(ReferenceSampling(row, rule),
                             PhiloxUniform(params.seed, params.step));
      }
      if (want.margin < 0x1p-20) return;
      Verdict mine;
      mine.Add(r, tokens_[static_cast<size_t>(r)], want.token, 0);
      all.Merge(mine);
    });
    return all.Result("sample");
  }

 private:
  std::string filter_;
  std::vector<SamplerPlan> plan_;  // a single plan
  std::vector<SamplingParams> params_;
  std::vector<int32_t> tokens_;
};

class AdjustLogits final : public LogitsOp {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = absl::WrapUnique(new AdjustLogits());
    QUERN_RETURN_IF_ERROR(op->TakeShape(args));
    QUERN_ASSIGN_OR_RETURN(const AdjustLogitsPlan plan,
                           AdjustLogitsPlan::Create({op->vocab_}));
    op->plan_.push_back(plan);
    op->words_ = DivCeil(op->vocab_, int64_t{32});
    // Every other token of every other word is allowed, and all of the rest.
    for (int64_t w = 0; w < op->rows_ * op->words_; ++w) {
      op->masks_.push_back(w % 2 == 0 ? 0x55555555 : -1);
    }
    for (int64_t r = 0; r < op->rows_; ++r) {
      for (int64_t id = 0; id < op->vocab_; id += kEvery) {
        op->ids_.push_back(static_cast<int32_t>(id));
        op->counts_.push_back(2);
      }
      op->starts_.push_back(static_cast<int32_t>(op->ids_.size()));
    }
    op->repetition_.assign(static_cast<size_t>(op->rows_), 1.25f);
    op->half_.assign(static_cast<size_t>(op->rows_), 0.5f);
    return op;
  }

  OpInfo Info() const override {
    OpInfo info = InfoOf(plan_[0].target());
    // What every other word allows is touched where the token has a penalty,
    // by cache lines.
    const auto penalties = static_cast<double>(ids_.size());
    info.SetTraffic(4.0 * static_cast<double>(masks_.size()), 0,
                    static_cast<double>(bytes()) / 2 + 64 * penalties / 2);
    return info;
  }
  int64_t set_bytes() const override { return bytes(); }
  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(FillLogits(sets));
    return plan_[0].CheckArgs(ArgsOf(0));
  }
  void Run(int64_t set, Executor& executor) override {
    plan_[0].Execute(ArgsOf(set), executor);
  }
  absl::StatusOr<double> Check(Executor& executor) override {
    const float* const got = logits_.at<float>(0);
    const std::vector<float> before(got, got + rows_ * vocab_);
    Run(0, executor);
    return JudgeAll("adjust_logits", rows_ * vocab_, executor,
                    [&](int64_t i, Verdict& verdict) {
                      const int64_t id = i % vocab_;
                      const int64_t word = i / vocab_ * words_ + id / 32;
                      const auto l =
                          static_cast<double>(before[static_cast<size_t>(i)]);
                      if (word % 2 == 0 && id % 2 == 1) {
                        verdict.Add(i, got[i] == -kInfinity ? 1 : 0, 1, 0);
                        return;
                      }
                      double want = l;
                      if (id % kEvery == 0) {
                        want = (l > 0 ? l / 1.25 : l * 1.25) - 1.0 - 0.5;
                      }
                      // Three steps, of which each rounds.
                      verdict.Add(i, static_cast<double>(got[i]), want,
                                  3 * 0x1p-24 * (std::abs(l) + 2));
                    });
  }

 private:
  static constexpr int64_t kEvery = 257;  // tokens of the output

  AdjustLogitsArgs ArgsOf(int64_t set) {
    const auto list = [](const std::vector<int32_t>& v) {
      return DenseVector<const int32_t>(v.data(),
                                        static_cast<int64_t>(v.size()));
    };
    AdjustLogitsArgs args;
    args.logits = Logits(set);
    args.masks = DenseMatrix<const int32_t>(masks_.data(), rows_, words_);
    args.output = {list(ids_), list(starts_)};
    args.output_counts = list(counts_);
    args.repetition = repetition_;
    args.frequency = half_;
    args.presence = half_;
    return args;
  }

  std::vector<AdjustLogitsPlan> plan_;  // a single plan
  int64_t words_ = 0;
  std::vector<int32_t> masks_, ids_, counts_, starts_ = {0};
  std::vector<float> repetition_, half_;
};

class TokenLogprobs final : public LogitsOp {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = absl::WrapUnique(new TokenLogprobs());
    QUERN_RETURN_IF_ERROR(op->TakeShape(args));
    QUERN_ASSIGN_OR_RETURN(op->top_n_, args.Int("top_n", 1, op->vocab_));
    QUERN_ASSIGN_OR_RETURN(
        const TokenLogprobsPlan plan,
        TokenLogprobsPlan::Create({op->vocab_, op->top_n_, 1}));
    op->plan_.push_back(plan);
    const auto rows = static_cast<size_t>(op->rows_);
    const auto all = rows * static_cast<size_t>(op->top_n_);
    for (int64_t r = 0; r < op->rows_; ++r) {
      op->ids_.push_back(static_cast<int32_t>(r * 7919 % op->vocab_));
    }
    op->ranks_.resize(rows);
    op->logprobs_.resize(rows);
    op->top_ids_.resize(all);
    op->top_logprobs_.resize(all);
    return op;
  }

  OpInfo Info() const override {
    OpInfo info = InfoOf(plan_[0].target());
    absl::StrAppend(&info.shape, " top_n=", top_n_);
    info.SetTraffic(2.0 * static_cast<double>(bytes()), 0);
    return info;
  }
  int64_t set_bytes() const override { return bytes(); }
  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(FillLogits(sets));
    Scratch(plan_[0], executor);
    return plan_[0].CheckArgs(ArgsOf(0));
  }
  void Run(int64_t set, Executor& executor) override {
    plan_[0].Execute(ArgsOf(set), Scratch(plan_[0], executor), executor);
  }
  // The equations of token_logprobs.h in double, and its bound.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    Verdict all;
    executor.ParallelFor(rows_, [&](int64_t r, int) {
      const std::vector<float> row = Row(r);
      std::vector<int32_t> order(row.size());
      for (size_t i = 0; i < order.size(); ++i) {
        order[i] = static_cast<int32_t>(i);
      }
      const auto logit = [&](int32_t i) {
        return static_cast<double>(row[static_cast<size_t>(i)]);
      };
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return logit(a) > logit(b);
      });
      double sum = 0.0;
      for (const int32_t i : order) sum += std::exp(logit(i) - logit(order[0]));
      Verdict mine;
      const auto judge = [&](float got, int32_t id) {
        const double want = logit(id) - logit(order[0]) - std::log(sum);
        mine.Add(r, static_cast<double>(got), want,
                 (std::abs(want) + std::log(row.size()) + 7) * 0x1p-24);
      };
      for (int64_t i = 0; i < top_n_; ++i) {
        const auto at = static_cast<size_t>(r * top_n_ + i);
        mine.Add(r, top_ids_[at], order[static_cast<size_t>(i)], 0);
        judge(top_logprobs_[at], order[static_cast<size_t>(i)]);
      }
      const auto at = static_cast<size_t>(r);
      const auto place = std::find(order.begin(), order.end(), ids_[at]);
      mine.Add(r, ranks_[at], static_cast<double>(place - order.begin() + 1),
               0);
      judge(logprobs_[at], ids_[at]);
      all.Merge(mine);
    });
    return all.Result("token_logprobs");
  }

 private:
  TokenLogprobsArgs ArgsOf(int64_t set) {
    return {Logits(set),
            DenseMatrix<const int32_t>(ids_.data(), rows_, 1),
            DenseMatrix(top_ids_.data(), rows_, top_n_),
            DenseMatrix(top_logprobs_.data(), rows_, top_n_),
            DenseMatrix(logprobs_.data(), rows_, 1),
            DenseMatrix(ranks_.data(), rows_, 1)};
  }

  std::vector<TokenLogprobsPlan> plan_;  // a single plan
  int64_t top_n_ = 0;
  std::vector<int32_t> ids_, ranks_, top_ids_;
  std::vector<float> logprobs_, top_logprobs_;
};

OpEntry EntryOf(absl::string_view name, absl::string_view summary,
                std::vector<Key> more,
                absl::StatusOr<std::unique_ptr<Op>> (*create)(const Args&)) {
  std::vector<Key> keys = Shape();
  for (Key& key : more) keys.push_back(key);
  return {name, summary, std::move(keys), create};
}

}  // namespace

std::vector<OpEntry> SamplingOps() {
  return {
      EntryOf("sample", "a token from each row of logits, read twice",
              {{"filter", "none",
                "none, greedy, top_k (40), top_p (0.9), min_p (0.05), "
                "top_n_sigma (1) or typical_p (0.9)"}},
              &Sample::Create),
      EntryOf("adjust_logits",
              "a mask of half of the words, and penalties of every 257th "
              "token",
              {}, &AdjustLogits::Create),
      EntryOf("token_logprobs",
              "log-probabilities of the likeliest tokens and of one, by "
              "two reads",
              {{"top_n", "20", "likeliest tokens"}}, &TokenLogprobs::Create)};
}

}  // namespace quern
