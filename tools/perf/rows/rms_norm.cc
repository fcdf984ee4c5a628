#include "quern/tools/perf/rows/rms_norm.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/testing/reference_norm.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kBF16};
constexpr int64_t kMaxDim = int64_t{1} << 24;

class RmsNorm final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    RmsNormSpec spec;
    QUERN_ASSIGN_OR_RETURN(const int64_t rows, args.Int("rows", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(spec.hidden, args.Int("hidden", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(const DType dtype, args.Type("dtype", kTypes));
    spec.x_dtype = spec.weight_dtype = spec.out_dtype = dtype;
    QUERN_ASSIGN_OR_RETURN(RmsNormPlan plan, RmsNormPlan::Create(spec));
    return absl::WrapUnique<Op>(new RmsNorm(std::move(plan), rows));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("rows=", rows_, " hidden=", hidden());
    info.dtype = std::string(DTypeName(dtype()));
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(x_bytes() + row_bytes()),
                    static_cast<double>(x_bytes()));
    // A square and a sum; a product with the weight and one with 1 / rms.
    info.flops = 4.0 * static_cast<double>(rows_ * hidden());
    return info;
  }

  int64_t set_bytes() const override { return 2 * x_bytes() + row_bytes(); }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(x_.Create(sets, x_bytes()));
    QUERN_RETURN_IF_ERROR(weight_.Create(sets, row_bytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, x_bytes()));
    WithType(dtype(), [this](auto type) {
      FillReals<decltype(type)>(-2, 2, x_);
      FillReals<decltype(type)>(0.5, 1.5, weight_);
    });
    return plan_.CheckArgs(X(0), Weight(0), Out(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(X(set), Weight(set), Out(set), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    const std::vector<double> weight = Doubles(dtype(), weight_, 0, hidden());
    // The sum of squares: hidden roundings, halved by the root; then a root, a
    // quotient, two products, and one rounding to the output.
    const double relative =
        (0.5 * static_cast<double>(hidden()) + 8) * 0x1p-24 +
        RelativeRoundoff(dtype());
    return JudgeRows("rms_norm", dtype(), out_, rows_, hidden(), relative,
                     executor, [&](int64_t row) {
                       return ReferenceRmsNorm(
                           1, hidden(),
                           Doubles(dtype(), x_, row * hidden(), hidden()),
                           weight, plan_.spec().eps);
                     });
  }

 private:
  RmsNorm(RmsNormPlan plan, int64_t rows)
      : plan_(std::move(plan)), rows_(rows) {}

  int64_t hidden() const { return plan_.spec().hidden; }
  DType dtype() const { return plan_.spec().x_dtype; }
  int64_t row_bytes() const {
    return hidden() * static_cast<int64_t>(SizeOf(dtype()));
  }
  int64_t x_bytes() const { return rows_ * row_bytes(); }
  AnyTensorView X(int64_t set) {
    return Matrix(dtype(), x_.at(set), rows_, hidden());
  }
  AnyTensorView Out(int64_t set) {
    return Matrix(dtype(), out_.at(set), rows_, hidden());
  }
  AnyTensorView Weight(int64_t set) {
    return AnyTensorView(dtype(), static_cast<void*>(weight_.at(set)), 1,
                         {hidden()}, {1});
  }

  RmsNormPlan plan_;
  int64_t rows_;
  SetBuffer x_, weight_, out_;
};

}  // namespace

OpEntry RmsNormOp() {
  return {"rms_norm",
          "out[t, i] = x[t, i] * weight[i] / rms(x[t])",
          {{"dtype", "bf16", "f32 or bf16, of x, weight and out"},
           {"rows", "4096", "tokens"},
           {"hidden", "4096", "elements of a row"}},
          &RmsNorm::Create};
}

}  // namespace quern
