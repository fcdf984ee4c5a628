#ifndef QUERN_GEMM_SCALED_LINEAR_H_
#define QUERN_GEMM_SCALED_LINEAR_H_

// The front door of W8A8 linear layers: one plan, the faster of two
// implementations. Weights are int8 with a scale for each column, or one for
// all; activations are f32, bf16 or f16 and quantised on the way in, or int8
// with scales and zero points of their own.
//
//   c[m, n] = round_c(a_scale[m] * b_scale[n] * dot[m, n] + bias[n])
//   dot[m, n] = sum over k of (q[m, k] - zero_point[m]) * b[k, n]     exact
//
// or that with an activation and a residual, gemm/epilogue.h.
//
//   packed   our kernels, gemm/packed_scaled_linear.h, whose spec this takes
//   oneDNN   quant/int8_quantize.h where a is not int8, then
//            gemm/onednn/scaled_linear.h, which has no epilogue
//
// Both have the same dot; the products with the scales may round differently in
// the last bit of f32. Which one runs is decided at Create, by `impl` or by a
// table of what was measured (gemm/scaled_linear.cc), and never by m.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/linear_impl.h"
#include "gemm/onednn/scaled_linear.h"
#include "gemm/packed_scaled_linear.h"
#include "quant/int8_quantize.h"

namespace quern {

struct ScaledLinearSpec : PackedScaledLinearSpec {
  LinearImpl impl = LinearImpl::kAuto;
};

// Arguments of Execute. Scales and zero points are given exactly where a is i8:
// see PackedScaledLinearPlan::CheckArgs.
struct ScaledLinearArgs {
  AnyTensorView a;              // [m, k]
  AnyTensorView a_scales;       // f32[m], or empty
  AnyTensorView a_zero_points;  // i32[m], or empty
  AnyTensorView c;              // [m, ColumnsOfC(activation, n)]
  AnyTensorView residual = {};  // like c, may be c; or of rank 0 for none
};

class ScaledLinearPlan {
 public:
  // As PackedScaledLinearPlan::Create, whichever is chosen; the plan owns the
  // packed weights. Unimplemented: an activation where spec.impl is kOneDnn.
  static absl::StatusOr<ScaledLinearPlan> Create(
      const ScaledLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& weight_scales, const AnyTensorView& bias,
      Executor& executor);

  const ScaledLinearSpec& spec() const { return spec_; }
  // kPacked or kOneDnn.
  LinearImpl impl() const {
    return packed_.has_value() ? LinearImpl::kPacked : LinearImpl::kOneDnn;
  }
  // What runs for m rows, and why.
  std::string Explain(int64_t m) const;
  size_t packed_bytes() const;

  // Whether Execute may be called with these, as PackedScaledLinearPlan's
  // CheckArgs. Where impl() is kOneDnn, besides, InvalidArgument: rows of a or
  // c whose stride is not in [columns, OneDnnScaledLinearPlan::kMaxExtent].
  // Unimplemented: a residual.
  absl::Status CheckArgs(const ScaledLinearArgs& args) const;

  // Writes c and nothing else; m = 0 does nothing. Any number of threads may
  // call it at once, each with a scratch of its own, reserved for at least a's
  // rows, and an executor that allows it. The packed kernels allocate nothing;
  // oneDNN allocates small blocks.
  void Execute(const ScaledLinearArgs& args, LinearScratch& scratch,
               Executor& executor) const noexcept;

 private:
  friend class LinearScratch;
  explicit ScaledLinearPlan(const ScaledLinearSpec& spec) : spec_(spec) {}
  absl::Status CreateOneDnn(const AnyTensorView& weights,
                            const AnyTensorView& weight_scales,
                            const AnyTensorView& bias, Executor& executor);

  ScaledLinearSpec spec_;
  std::optional<PackedScaledLinearPlan> packed_;  // one of the two
  std::optional<OneDnnScaledLinearPlan> onednn_;
  std::optional<Int8QuantizePlan> quantize_;  // of oneDNN, where a is not i8
};

}  // namespace quern

#endif  // QUERN_GEMM_SCALED_LINEAR_H_
