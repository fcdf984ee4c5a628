#include "quern/tools/perf/rows/quantize.h"

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
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_int8_quantize.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

constexpr absl::string_view kActs[] = {"token", "tensor"};
constexpr absl::string_view kStores[] = {"auto", "cached", "stream"};
constexpr int64_t kMaxDim = int64_t{1} << 24;

// x[m, k] to int8, with a scale for each row or one for all.
class Quantize final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    Int8QuantizeSpec spec;
    QUERN_ASSIGN_OR_RETURN(const int64_t m, args.Int("m", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(const int64_t k, args.Int("k", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(spec.dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(const std::string act, args.Choice("act", kActs));
    QUERN_ASSIGN_OR_RETURN(const bool azp, args.Flag("azp"));
    QUERN_ASSIGN_OR_RETURN(const std::string stores,
                           args.Choice("stores", kStores));
    if (azp) spec.zero_points = Int8ZeroPoint::kUsed;
    if (act == "tensor") {
      spec.granularity = Int8Granularity::kPerTensor;
      spec.scale = 1.0f / 64;  // of values in [-2, 2)
      spec.zero_point = azp ? 3 : 0;
    }
    if (stores == "cached") spec.stores = Stores::kCached;
    if (stores == "stream") spec.stores = Stores::kStream;
    QUERN_ASSIGN_OR_RETURN(Int8QuantizePlan plan,
                           Int8QuantizePlan::Create(spec));
    return absl::WrapUnique<Op>(new Quantize(std::move(plan), m, k));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("m=", m_, " k=", k_,
                              " act=", per_token() ? "token" : "tensor",
                              " azp=", azp() ? 1 : 0);
    info.dtype = absl::StrCat(DTypeName(dtype()), "->i8");
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(x_bytes()),
                    static_cast<double>(set_bytes() - x_bytes()));
    return info;
  }

  int64_t set_bytes() const override {
    return x_bytes() + m_ * k_ + scales() * 4 + zeros() * 4;
  }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(x_.Create(sets, x_bytes()));
    QUERN_RETURN_IF_ERROR(q_.Create(sets, m_ * k_));
    QUERN_RETURN_IF_ERROR(scales_.Create(sets, scales() * 4));
    QUERN_RETURN_IF_ERROR(zeros_.Create(sets, zeros() * 4));
    WithType(dtype(),
             [this](auto type) { FillReals<decltype(type)>(-2, 2, x_); });
    return plan_.CheckArgs(X(0), Q(0), Scales(0), Zeros(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(X(set), Q(set), Scales(set), Zeros(set), executor);
  }

  // The error is in steps of the scale; the bound, half a step and what the
  // header derives for rounding.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    Verdict all;
    executor.ParallelFor(m_, [&](int64_t row, int) {
      const std::vector<double> x = Doubles(row);
      double scale = plan_.spec().scale;
      int32_t zero_point = plan_.spec().zero_point;
      Verdict mine;
      if (per_token()) {
        const ReferenceInt8Terms want =
            azp() ? ReferenceInt8Asymmetric(x) : ReferenceInt8Symmetric(x);
        scale = double{scales_.at<float>(0)[row]};
        mine.Add(row, scale, want.scale, 0x1.01p-24 * want.scale);
        if (azp()) {
          zero_point = zeros_.at<int32_t>(0)[row];
          mine.Add(row, zero_point, want.exact_zero_point, 0.5 + 0x1p-15);
        }
      }
      const int8_t* q = q_.at<int8_t>(0) + row * k_;
      for (int64_t i = 0; i < k_; ++i) {
        mine.Add(
            row * k_ + i,
            Int8StepsOff(x[static_cast<size_t>(i)], scale, zero_point, q[i]),
            0.0, 0.5 + (azp() ? 0x1p-15 : 0x1p-16));
      }
      all.Merge(mine);
    });
    return all.Result("quantize");
  }

 private:
  Quantize(Int8QuantizePlan plan, int64_t m, int64_t k)
      : plan_(std::move(plan)), m_(m), k_(k) {}

  DType dtype() const { return plan_.spec().dtype; }
  bool per_token() const {
    return plan_.spec().granularity == Int8Granularity::kPerToken;
  }
  bool azp() const { return plan_.spec().zero_points == Int8ZeroPoint::kUsed; }
  int64_t x_bytes() const {
    return m_ * k_ * static_cast<int64_t>(SizeOf(dtype()));
  }
  int64_t scales() const { return per_token() ? m_ : 0; }
  int64_t zeros() const { return per_token() && azp() ? m_ : 0; }

  AnyTensorView X(int64_t set) {
    return AnyTensorView(dtype(), static_cast<const void*>(x_.at(set)), 2,
                         {m_, k_}, {k_, 1});
  }
  MatrixView<int8_t> Q(int64_t set) {
    return DenseMatrix(q_.at<int8_t>(set), m_, k_);
  }
  VectorView<float> Scales(int64_t set) {
    return DenseVector(scales_.at<float>(set), scales());
  }
  VectorView<int32_t> Zeros(int64_t set) {
    return DenseVector(zeros_.at<int32_t>(set), zeros());
  }
  std::vector<double> Doubles(int64_t row) {
    return WithType(dtype(), [&](auto type) {
      const auto* x = x_.at<decltype(type)>(0) + row * k_;
      std::vector<double> doubles;
      for (int64_t i = 0; i < k_; ++i) doubles.push_back(ToDouble(x[i]));
      return doubles;
    });
  }

  Int8QuantizePlan plan_;
  int64_t m_;
  int64_t k_;
  SetBuffer x_, q_, scales_, zeros_;
};

}  // namespace

OpEntry QuantizeOp() {
  return {"quantize",
          "q[m, k] = int8 of x[m, k], scale and zero point per row or given",
          {{"m", "4096", "rows (tokens)"},
           {"k", "4096", "columns"},
           {"dtype", "bf16", "of x: f32, bf16 or f16"},
           {"act", "token", "token: a scale for each row; tensor: one for all"},
           {"azp", "0", "1: with zero points"},
           {"stores", "auto", "auto, cached or stream"}},
          &Quantize::Create};
}

}  // namespace quern
