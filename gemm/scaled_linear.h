#ifndef QUERN_GEMM_SCALED_LINEAR_H_
#define QUERN_GEMM_SCALED_LINEAR_H_

// W8A8 linear layers: one plan over two implementations. Weights are int8 with
// a scale for each column, or one for all; activations are f32, bf16 or f16 and
// quantised on the way in, or int8 with scales and zero points of their own.
//
//   c[m, n] = round_c(a_scale[m] * b_scale[n] * dot[m, n] + bias[n])
//   dot[m, n] = sum over k of (q[m, k] - zero_point[m]) * b[k, n]     exact
//
// or that with an activation and a residual, gemm/epilogue.h.
//
//   packed   our kernels, gemm/packed_scaled_linear.h, whose spec this takes
//   oneDNN   quant/int8_quantize.h where a is not int8, then
//            gemm/onednn/scaled_linear.h, which has no epilogue; in programs
//            that link //gemm/onednn (gemm/linear_backend.h)
//
// Both have the same dot; the products with the scales may round differently in
// the last bit of f32. `impl` decides at Create which one runs; m never does.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/linear_backend.h"
#include "gemm/linear_impl.h"
#include "gemm/linear_spec.h"
#include "gemm/packed_scaled_linear.h"

namespace quern {

class ScaledLinearPlan {
 public:
  // As PackedScaledLinearPlan::Create, whichever is chosen; the plan owns the
  // packed weights. Where spec.impl is kOneDnn, besides, Unimplemented: an
  // activation; FailedPrecondition: a program without oneDNN.
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

  ScaledLinearSpec spec_;
  std::optional<PackedScaledLinearPlan> packed_;  // one of the two
  std::unique_ptr<const BackendScaledLinear> onednn_;
};

}  // namespace quern

#endif  // QUERN_GEMM_SCALED_LINEAR_H_
