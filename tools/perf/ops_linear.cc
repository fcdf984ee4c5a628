#include "tools/perf/ops_linear.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "testing/reference_convert.h"
#include "tools/perf/args.h"
#include "tools/perf/linear_cases.h"
#include "tools/perf/op.h"
#include "tools/perf/op_util.h"

namespace quern {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
// Rows that Check compares, all columns of each.
constexpr int64_t kCheckedRows = 16;

AnyTensorView Matrix(DType dtype, void* data, int64_t rows, int64_t cols) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {cols, 1});
}

// c[m, n] = sum over k of a[m, k] * weights[n, k]. Each working set has packed
// weights of its own.
class Linear final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = std::make_unique<Linear>();
    QUERN_ASSIGN_OR_RETURN(op->dtype_, args.Type("dtype", kTypes));
    QUERN_ASSIGN_OR_RETURN(op->spec_.c, args.Type("out", kTypes));
    QUERN_ASSIGN_OR_RETURN(op->m_, args.Int("m", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(op->spec_.n, args.Int("n", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(op->spec_.k, args.Int("k", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(op->spec_.impl, LinearImplOf(args));
    op->spec_.a = op->dtype_;
    op->spec_.b = op->dtype_;
    return op;
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("m=", m_, " n=", n(), " k=", k());
    info.dtype = absl::StrCat(DTypeName(dtype_), "->", DTypeName(spec_.c));
    if (!plans_.empty()) info.isa = LinearIsa(plans_.front().Explain(m_));
    info.SetTraffic(static_cast<double>(weight_bytes() + a_bytes()),
                    static_cast<double>(c_bytes()));
    info.flops = 2.0 * static_cast<double>(m_) * static_cast<double>(n()) *
                 static_cast<double>(k());
    info.peak_kind = PeakKindOf(dtype_);
    return info;
  }

  int64_t set_bytes() const override {
    return weight_bytes() + a_bytes() + c_bytes();
  }

  // Each has a plan, whose weights are packed one by one.
  int64_t max_sets() const override { return 4096; }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(weights_.Create(1, weight_bytes()));
    QUERN_RETURN_IF_ERROR(a_.Create(sets, a_bytes()));
    QUERN_RETURN_IF_ERROR(c_.Create(sets, c_bytes()));
    WithType(dtype_, [this](auto type) {
      FillReals<decltype(type)>(-1, 1, weights_);
      FillReals<decltype(type)>(-1, 1, a_);
    });
    for (int64_t set = 0; set < sets; ++set) {
      const AnyTensorView w = Matrix(dtype_, weights_.at(0), n(), k());
      QUERN_ASSIGN_OR_RETURN(
          LinearPlan plan,
          LinearPlan::Create(spec_, w, AnyTensorView(), executor));
      plans_.push_back(std::move(plan));
      QUERN_RETURN_IF_ERROR(plans_.back().CheckArgs(A(set), C(set)));
      QUERN_RETURN_IF_ERROR(scratch_.Reserve(plans_.back(), m_, executor));
      Run(set, executor);  // oneDNN generates code
    }
    return absl::OkStatus();
  }

  void Run(int64_t set, Executor& executor) override {
    plans_[static_cast<size_t>(set)].Execute(A(set), C(set), scratch_,
                                             executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    return WithType(dtype_, [&](auto in) {
      return WithType(spec_.c, [&](auto out) {
        return Compare<decltype(in), decltype(out)>(executor);
      });
    });
  }

 private:
  int64_t n() const { return spec_.n; }
  int64_t k() const { return spec_.k; }
  int64_t weight_bytes() const {
    return n() * k() * static_cast<int64_t>(SizeOf(dtype_));
  }
  int64_t a_bytes() const {
    return m_ * k() * static_cast<int64_t>(SizeOf(dtype_));
  }
  int64_t c_bytes() const {
    return m_ * n() * static_cast<int64_t>(SizeOf(spec_.c));
  }
  AnyTensorView A(int64_t set) { return Matrix(dtype_, a_.at(set), m_, k()); }
  AnyTensorView C(int64_t set) { return Matrix(spec_.c, c_.at(set), m_, n()); }

  // Rows spread evenly, the last among them, against every column. Each sum is
  // of k rounded products: off by at most k units of the sum of magnitudes.
  template <typename In, typename Out>
  absl::StatusOr<double> Compare(Executor& executor) {
    const int64_t rows = std::min(m_, kCheckedRows);
    Verdict all;
    executor.ParallelFor(n(), [&](int64_t col, int) {
      std::vector<double> w;
      const In* weights = weights_.at<In>(0) + col * k();
      for (int64_t i = 0; i < k(); ++i) w.push_back(ToDouble(weights[i]));
      Verdict mine;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = (r + 1) * m_ / rows - 1;
        const In* a = a_.at<In>(0) + row * k();
        double sum = 0, magnitude = 0;
        for (size_t i = 0; i < w.size(); ++i) {
          const double product = ToDouble(a[i]) * w[i];
          sum += product;
          magnitude += std::abs(product);
        }
        const double bound = magnitude * static_cast<double>(k()) * 0x1p-23 +
                             std::abs(sum) * RelativeRoundoff(spec_.c);
        const int64_t at = row * n() + col;
        mine.Add(at, ToDouble(c_.at<Out>(0)[at]), sum, bound);
      }
      all.Merge(mine);
    });
    return all.Result("linear");
  }

  DType dtype_ = DType::kBF16;
  LinearSpec spec_;
  int64_t m_ = 0;
  SetBuffer weights_, a_, c_;
  std::vector<LinearPlan> plans_;
  LinearScratch scratch_;
};

}  // namespace

OpEntry LinearOp() {
  return {"linear", "c[m, n] = sum over k of a[m, k] * weights[n, k]",
          LinearKeys({{"dtype", "bf16", "f32, bf16 or f16, of a and weights"},
                      {"out", "bf16", "f32, bf16 or f16, of c"}}),
          &Linear::Create, &LinearCases};
}

}  // namespace quern
