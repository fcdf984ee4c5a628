#ifndef QUERN_OPS_NORM_RMS_NORM_H_
#define QUERN_OPS_NORM_RMS_NORM_H_

// Root-mean-square normalisation, alone or after a residual addition.
//
//   Execute:     h[t, i] = x[t, i]
//   ExecuteAdd:  h[t, i] = round(x[t, i] + residual[t, i])   -> residual_out
//   both:        out[t, i] = round(h[t, i] * w[i] / rms[t])
//                rms[t] = sqrt(sum over i < span of h[t, i]^2 / span + eps)
//
//   kPlain    w = weight                rms_norm
//   kOnePlus  w = 1 + weight, in f32    gemma_rms_norm
//   kNone     w = 1; weight is not given
//
// span is hidden, or fewer where a model says so (variance of a prefix).
// Arithmetic is f32; `round` is to the dtype of what is written, to nearest
// even. The norm reads the rounded sum, so ExecuteAdd(x, r) is exactly
// Execute(residual_out).
//
// A NaN or infinity makes its row NaN or zero and touches no other row. Squares
// are summed in f32: a row whose sum of squares exceeds 3.4e38 comes out as 0.
// Zeros stay zero unless eps is 0 too, which makes them NaN.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/rms_norm_kernels.h"

namespace quern {

enum class NormWeight : uint8_t { kPlain, kOnePlus, kNone };

struct RmsNormSpec {
  int64_t hidden = 0;  // elements of a row, >= 1
  float eps = 1e-6f;   // finite, >= 0
  NormWeight weight = NormWeight::kPlain;
  int64_t span = 0;  // 1 <= span <= hidden; 0: hidden
  // Each f32 or bf16; or x and residual f16, and weight and out f16 or f32.
  DType x_dtype = DType::kF32;
  DType weight_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  DType residual_dtype = DType::kF32;  // residual and residual_out
  // Stores of out alone. kAuto streams where rms_norm reads and writes more
  // than the last-level cache holds.
  Stores stores = Stores::kAuto;

  // The columns whose squares are summed.
  int64_t SpanColumns() const { return span == 0 ? hidden : span; }
};

// For ExecuteAdd: x, out, residual and residual_out are [rows, hidden], weight
// is [hidden] (kNone: ignored).
struct RmsNormArgs {
  AnyTensorView x;
  AnyTensorView weight;
  AnyTensorView out;
  AnyTensorView residual;
  AnyTensorView residual_out;
};

class RmsNormPlan {
 public:
  // InvalidArgument unless 1 <= hidden < 2^59, if span is out of range, or eps
  // is negative, infinite or NaN; Unimplemented for other dtypes.
  static absl::StatusOr<RmsNormPlan> Create(const RmsNormSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const RmsNormSpec& spec() const { return spec_; }

  // Whether Execute may be called with these: dtypes, shapes, strides, memory,
  // aliasing. x and out are [rows, hidden], or [tokens, heads, hidden] with any
  // token and head strides; weight is [hidden] (kNone: ignored).
  // InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& weight,
                         const AnyTensorView& out) const;
  // The same for ExecuteAdd.
  absl::Status CheckAddArgs(const RmsNormArgs& args) const;

  // Writes the rows of out and nothing between them. Rows may have any stride.
  // out may be x itself, where their dtypes agree, and overlaps weight
  // nowhere. rows = 0 does nothing. Allocates nothing; safe to call
  // concurrently. A row is computed by one worker, in an order that depends on
  // hidden alone; workers divide rows, or tokens.
  void Execute(const AnyTensorView& x, const AnyTensorView& weight,
               const AnyTensorView& out, Executor& executor) const noexcept;

  // Writes residual_out, then out. Each may be x or residual itself, where
  // dtypes agree; they overlap neither each other nor weight. Otherwise as
  // Execute.
  void ExecuteAdd(const RmsNormArgs& args, Executor& executor) const noexcept;

 private:
  explicit RmsNormPlan(const RmsNormSpec& spec);
  RmsNormScale ScaleOf(const AnyTensorView& weight, int64_t rows,
                       bool may_stream) const;
  void Normalise(const AnyTensorView& x, const AnyTensorView& out,
                 RmsNormScale scale, int64_t begin, int64_t end) const;

  RmsNormSpec spec_;
  RmsNormKernels kernels_;
  int64_t stream_from_bytes_;
};

}  // namespace quern

#endif  // QUERN_OPS_NORM_RMS_NORM_H_
