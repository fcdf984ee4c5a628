#include "tools/perf/ops_scaled_linear.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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
#include "gemm/linear_impl.h"
#include "gemm/packed_scaled_linear.h"
#include "gemm/scaled_linear.h"
#include "quant/int8_quantize.h"
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

// W8A8, quantisation of the activations included.
class ScaledLinear final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = std::make_unique<ScaledLinear>();
    ScaledLinearSpec& spec = op->spec_;
    QUERN_ASSIGN_OR_RETURN(spec.impl, LinearImplOf(args));
    QUERN_ASSIGN_OR_RETURN(spec.a, args.Type("dtype", kTypes));
    QUERN_ASSIGN_OR_RETURN(spec.c, args.Type("out", kTypes));
    QUERN_ASSIGN_OR_RETURN(op->m_, args.Int("m", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(spec.n, args.Int("n", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(spec.k,
                           args.Int("k", 1, PackedScaledLinearPlan::kMaxK));
    QUERN_ASSIGN_OR_RETURN(const std::string act,
                           args.Choice("act", {"token", "tensor"}));
    QUERN_ASSIGN_OR_RETURN(const bool azp, args.Flag("azp"));
    if (azp) spec.zero_points = Int8ZeroPoint::kUsed;
    if (act == "tensor") {
      spec.granularity = Int8Granularity::kPerTensor;
      spec.a_scale = 1.0f / 64;  // of values in [-2, 2)
      spec.a_zero_point = azp ? 3 : 0;
    }
    QUERN_RETURN_IF_ERROR(op->MakeQuantizer());
    return op;
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat(
        "m=", m_, " n=", n(), " k=", k(), per_token() ? " token" : " tensor",
        spec_.zero_points == Int8ZeroPoint::kUsed ? " azp" : "");
    info.dtype = absl::StrCat(DTypeName(spec_.a), "*i8->", DTypeName(spec_.c));
    if (!plans_.empty()) info.isa = LinearIsa(plans_.front().Explain(m_));
    info.SetTraffic(static_cast<double>(set_bytes() - c_bytes()),
                    static_cast<double>(c_bytes()));
    info.flops = 2.0 * static_cast<double>(m_) * static_cast<double>(n()) *
                 static_cast<double>(k());
    info.peak_kind = PeakKind::kI8;
    return info;
  }

  int64_t set_bytes() const override {
    return n() * k() + n() * 4 + a_bytes() + c_bytes();
  }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(weights_.Create(1, n() * k()));
    QUERN_RETURN_IF_ERROR(scales_.Create(1, n() * 4));
    QUERN_RETURN_IF_ERROR(a_.Create(sets, a_bytes()));
    QUERN_RETURN_IF_ERROR(c_.Create(sets, c_bytes()));
    FillReals<int8_t>(-127, 127, weights_);
    FillReals<float>(0.001, 0.01, scales_);
    WithType(spec_.a,
             [this](auto type) { FillReals<decltype(type)>(-2, 2, a_); });
    const AnyTensorView w = Matrix(DType::kI8, weights_.at(0), n(), k());
    const AnyTensorView s = DenseVector(scales_.at<float>(0), n());
    for (int64_t set = 0; set < sets; ++set) {
      QUERN_ASSIGN_OR_RETURN(
          ScaledLinearPlan plan,
          ScaledLinearPlan::Create(spec_, w, s, AnyTensorView(), executor));
      plans_.push_back(std::move(plan));
      QUERN_RETURN_IF_ERROR(scratch_.Reserve(plans_.back(), m_, executor));
      QUERN_RETURN_IF_ERROR(plans_.back().CheckArgs(ArgsOf(set)));
      Run(set, executor);  // oneDNN generates code
    }
    // What the quantiser writes, for Check.
    QUERN_RETURN_IF_ERROR(q_.Create(1, m_ * k()));
    QUERN_RETURN_IF_ERROR(q_scales_.Create(1, m_ * 4));
    QUERN_RETURN_IF_ERROR(q_zeros_.Create(1, m_ * 4));
    q_scales_.at<float>(0)[0] = spec_.a_scale;
    q_zeros_.at<int32_t>(0)[0] = spec_.a_zero_point;
    return absl::OkStatus();
  }

  void Run(int64_t set, Executor& executor) override {
    plans_[static_cast<size_t>(set)].Execute(ArgsOf(set), scratch_, executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    RunQuantizer(0, executor);  // its codes are checked by `perf quantize`
    return WithType(spec_.c,
                    [&](auto out) { return Compare<decltype(out)>(executor); });
  }

 private:
  int64_t n() const { return spec_.n; }
  int64_t k() const { return spec_.k; }
  bool per_token() const {
    return spec_.granularity == Int8Granularity::kPerToken;
  }
  int64_t a_bytes() const {
    return m_ * k() * static_cast<int64_t>(SizeOf(spec_.a));
  }
  int64_t c_bytes() const {
    return m_ * n() * static_cast<int64_t>(SizeOf(spec_.c));
  }
  AnyTensorView A(int64_t set) { return Matrix(spec_.a, a_.at(set), m_, k()); }
  AnyTensorView C(int64_t set) { return Matrix(spec_.c, c_.at(set), m_, n()); }

  ScaledLinearArgs ArgsOf(int64_t set) { return {A(set), {}, {}, C(set)}; }

  absl::Status MakeQuantizer() {
    QUERN_ASSIGN_OR_RETURN(quantizer_,
                           Int8QuantizePlan::Create(
                               PackedScaledLinearPlan::QuantizeSpecOf(spec_)));
    return absl::OkStatus();
  }

  void RunQuantizer(int64_t set, Executor& executor) {
    const bool zeros = per_token() && spec_.zero_points == Int8ZeroPoint::kUsed;
    quantizer_->Execute(
        A(set), DenseMatrix(q_.at<int8_t>(0), m_, k()),
        DenseVector(q_scales_.at<float>(0), per_token() ? m_ : 0),
        DenseVector(q_zeros_.at<int32_t>(0), zeros ? m_ : 0), executor);
  }

  // Rows spread evenly, the last among them, against every column: exact
  // integers, four roundings in f32, one to c.
  template <typename Out>
  absl::StatusOr<double> Compare(Executor& executor) {
    const int64_t rows = std::min(m_, kCheckedRows);
    Verdict all;
    executor.ParallelFor(n(), [&](int64_t col, int) {
      const int8_t* w = weights_.at<int8_t>(0) + col * k();
      Verdict mine;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = (r + 1) * m_ / rows - 1;
        const int64_t term = per_token() ? row : 0;
        const int8_t* q = q_.at<int8_t>(0) + row * k();
        const int32_t zero = q_zeros_.at<int32_t>(0)[term];
        int64_t dot = 0;
        for (int64_t i = 0; i < k(); ++i) dot += (q[i] - zero) * w[i];
        const double want = static_cast<double>(dot) *
                            q_scales_.at<float>(0)[term] *
                            scales_.at<float>(0)[col];
        const int64_t at = row * n() + col;
        mine.Add(at, ToDouble(c_.at<Out>(0)[at]), want,
                 std::abs(want) * (RelativeRoundoff(spec_.c) + 4 * 0x1p-24));
      }
      all.Merge(mine);
    });
    return all.Result("scaled_linear");
  }

  ScaledLinearSpec spec_;
  int64_t m_ = 0;
  std::optional<Int8QuantizePlan> quantizer_;
  SetBuffer weights_, scales_, a_, c_, q_, q_scales_, q_zeros_;
  std::vector<ScaledLinearPlan> plans_;
  LinearScratch scratch_;
};

}  // namespace

OpEntry ScaledLinearOp() {
  return {"scaled_linear",
          "W8A8: c = round(s[m] * w_s[n] * sum over k of q(a)[m, k] * w[n, k])",
          LinearKeys({{"dtype", "bf16", "f32, bf16 or f16, of a"},
                      {"out", "bf16", "f32, bf16 or f16, of c"},
                      {"act", "token", "scales of a: token or tensor"},
                      {"azp", "0", "1: a has zero points"}}),
          &ScaledLinear::Create, &LinearCases};
}

}  // namespace quern
