#include "quern/tools/perf/attention/merge_states.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/attention/merge_states.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

class MergeStates final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    MergeStatesSpec spec;
    QUERN_ASSIGN_OR_RETURN(const int64_t tokens,
                           args.Int("tokens", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(spec.heads, args.Int("heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(spec.head_dim, args.Int("head_dim", 1, 1 << 16));
    QUERN_ASSIGN_OR_RETURN(spec.dtype, args.Type("dtype", kFloatDTypes));
    spec.out_dtype = spec.dtype;
    QUERN_ASSIGN_OR_RETURN(spec.lse_by_head, args.Flag("by_head"));
    QUERN_ASSIGN_OR_RETURN(const MergeStatesPlan plan,
                           MergeStatesPlan::Create(spec));
    return absl::WrapUnique<Op>(new MergeStates(plan, tokens));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("tokens=", tokens_, " heads=", spec().heads,
                              " head_dim=", spec().head_dim,
                              " by_head=", spec().lse_by_head ? 1 : 0);
    info.dtype = DTypeName(spec().dtype);
    info.isa = plan_.target();
    info.SetTraffic(2 * static_cast<double>(rows_bytes() + lse_bytes()),
                    static_cast<double>(rows_bytes() + lse_bytes()));
    // A product and a multiply-add.
    info.flops = 3 * static_cast<double>(rows() * spec().head_dim);
    return info;
  }

  int64_t set_bytes() const override {
    return 3 * (rows_bytes() + lse_bytes());
  }

  absl::Status Setup(int64_t sets, Executor&) override {
    for (Part* part : {&a_, &b_, &out_}) {
      QUERN_RETURN_IF_ERROR(part->out.Create(sets, rows_bytes()));
      QUERN_RETURN_IF_ERROR(part->lse.Create(sets, lse_bytes()));
    }
    WithType(spec().dtype, [this](auto type) {
      FillReals<decltype(type)>(-1, 1, a_.out);
      FillReals<decltype(type)>(-1, 1, b_.out);
    });
    FillReals<float>(-4, 4, a_.lse);
    FillReals<float>(-5, 3, b_.lse);
    return plan_.CheckArgs(MakeArgs(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(MakeArgs(set), executor);
  }

  // The bounds of attention/merge_states_test.cc.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    Verdict all;
    executor.ParallelFor(tokens_, [&](int64_t token, int) {
      Verdict mine;
      WithType(spec().dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (!std::is_integral_v<T>) {
          for (int64_t head = 0; head < spec().heads; ++head) {
            CheckRow<T>(token, head, mine);
          }
        }
      });
      all.Merge(mine);
    });
    return all.Result("merge_states");
  }

 private:
  struct Part {
    SetBuffer out, lse;
  };

  MergeStates(const MergeStatesPlan& plan, int64_t tokens)
      : plan_(plan), tokens_(tokens) {}

  const MergeStatesSpec& spec() const { return plan_.spec(); }
  int64_t rows() const { return tokens_ * spec().heads; }
  int64_t rows_bytes() const {
    return rows() * spec().head_dim *
           static_cast<int64_t>(SizeOf(spec().dtype));
  }
  int64_t lse_bytes() const { return rows() * 4; }

  MergeStatesArgs MakeArgs(int64_t set) {
    const int64_t heads = spec().heads, dim = spec().head_dim;
    const auto state = [&](Part& part) {
      return AnyTensorView(spec().dtype, static_cast<void*>(part.out.at(set)),
                           3, {tokens_, heads, dim}, {heads * dim, dim, 1});
    };
    const auto lse = [&](Part& part) -> AnyTensorView {
      return spec().lse_by_head
                 ? DenseMatrix(part.lse.at<float>(set), heads, tokens_)
                 : DenseMatrix(part.lse.at<float>(set), tokens_, heads);
    };
    return {{state(a_), lse(a_)}, {state(b_), lse(b_)}, state(out_), lse(out_)};
  }

  template <typename T>
  void CheckRow(int64_t token, int64_t head, Verdict& verdict) {
    const int64_t row = token * spec().heads + head;
    const int64_t at = spec().lse_by_head ? head * tokens_ + token : row;
    const auto a = double{a_.lse.at<float>(0)[at]};
    const auto b = double{b_.lse.at<float>(0)[at]};
    const double lse = std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
    constexpr double kEps = 0x1p-24;
    verdict.Add(row, double{out_.lse.at<float>(0)[at]}, lse,
                (10 + std::abs(lse)) * kEps);
    for (int64_t d = 0; d < spec().head_dim; ++d) {
      const int64_t i = row * spec().head_dim + d;
      const double want = std::exp(a - lse) * ToDouble(a_.out.at<T>(0)[i]) +
                          std::exp(b - lse) * ToDouble(b_.out.at<T>(0)[i]);
      const double error = 21 * kEps;
      verdict.Add(i, ToDouble(out_.out.at<T>(0)[i]), want,
                  error + RoundingBound<T>(std::abs(want) + error));
    }
  }

  MergeStatesPlan plan_;
  int64_t tokens_;
  Part a_, b_, out_;
};

}  // namespace

OpEntry MergeStatesOp() {
  return {"merge_states",
          "attention over two parts of the keys becomes attention over all",
          {{"tokens", "4096", "queries"},
           {"heads", "32", "of the queries"},
           {"head_dim", "128", "of the values"},
           {"dtype", "bf16", "of the parts and of the result"},
           {"by_head", "0", "1: log-sum-exps are [heads, tokens]"}},
          &MergeStates::Create};
}

}  // namespace quern
