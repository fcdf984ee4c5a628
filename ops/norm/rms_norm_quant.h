#ifndef QUERN_OPS_NORM_RMS_NORM_QUANT_H_
#define QUERN_OPS_NORM_RMS_NORM_QUANT_H_

// rms_norm with int8 or fp8 e4m3fn results: the normalised row is never written
// to memory and never rounded to 16 bits.
//
//   y[t, i] = h[t, i] * w[i] / rms[t]         of ops/norm/rms_norm.h, as f32
//   q[t, i] = int8 or e4m3 of y[t, i] / scale
//
//   kStatic    the scale (and zero point) of the spec
//   kPerToken  the scale of a row is that of its largest |y|   -> scales[t]
//
// q and scales equal, bit for bit, what quant/int8_quantize.h and
// quant/fp8_quantize.h make of an f32 matrix y from RmsNormPlan. Those headers
// also say what NaN, infinity and rows of zeros become.

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/norm/rms_norm_kernels.h"
#include "quern/quant/fp8_quantize.h"
#include "quern/quant/int8_quantize.h"

namespace quern {

enum class NormScale : uint8_t { kStatic, kPerToken };

struct RmsNormQuantSpec {
  RmsNormSpec norm;            // out_dtype and stores are ignored
  DType q_dtype = DType::kI8;  // i8 or f8e4m3
  NormScale scale_of = NormScale::kPerToken;
  float scale = 1.0f;      // kStatic: 2^-125 <= scale <= 2^118
  int32_t zero_point = 0;  // kStatic, i8: in [-128, 127]
  float max_abs = 0.0f;    // kPerToken, fp8: clamps |y| for the scale; 0: none
};

// Arguments of both Execute functions: x[rows, hidden], weight[hidden] (kNone:
// ignored), q[rows, hidden] of q_dtype and scales[rows] of f32 (kStatic:
// ignored). ExecuteAdd also needs residual and residual_out, [rows, hidden].
struct RmsNormQuantArgs {
  AnyTensorView x;
  AnyTensorView weight;
  AnyTensorView q;
  AnyTensorView scales;
  AnyTensorView residual;
  AnyTensorView residual_out;
};

class RmsNormQuantPlan {
 public:
  // Refuses what RmsNormPlan, Int8QuantizePlan and Fp8QuantizePlan refuse.
  // Unimplemented for another q_dtype.
  static absl::StatusOr<RmsNormQuantPlan> Create(const RmsNormQuantSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const RmsNormQuantSpec& spec() const { return spec_; }

  // Whether Execute, or ExecuteAdd, may be called with these arguments: checks
  // dtypes, shapes, strides, memory and aliasing. InvalidArgument names the
  // argument.
  absl::Status CheckArgs(const RmsNormQuantArgs& args) const;
  absl::Status CheckAddArgs(const RmsNormQuantArgs& args) const;

  // Writes q and, with kPerToken, scales. Rows may have any stride; rows = 0
  // does nothing. The outputs must not overlap anything else. Allocates
  // nothing; safe to call concurrently. One worker computes a whole row. Cost:
  // one read of x from memory and one write of q.
  void Execute(const RmsNormQuantArgs& args, Executor& executor) const noexcept;

  // Computes h = round(x + residual), writes it to residual_out, and quantises
  // its norm. residual_out may be x or residual itself if their dtypes agree.
  // Everything else is as for Execute.
  void ExecuteAdd(const RmsNormQuantArgs& args,
                  Executor& executor) const noexcept;

 private:
  RmsNormQuantPlan(const RmsNormQuantSpec& spec,
                   std::optional<Int8QuantizePlan> int8,
                   std::optional<Fp8QuantizePlan> fp8);
  using ScaleRow = void (*)(const void* h, const RmsNormScale& scale, void* out,
                            size_t n);
  float QuantizeRow(const char* h, ScaleRow normalise, DType h_dtype,
                    RmsNormScale scale, float sum_squares, char* q) const;

  RmsNormQuantSpec spec_;
  RmsNormKernels kernels_;
  // Exactly one of the two is set.
  std::optional<Int8QuantizePlan> int8_;
  std::optional<Fp8QuantizePlan> fp8_;
};

}  // namespace quern

#endif  // QUERN_OPS_NORM_RMS_NORM_QUANT_H_
