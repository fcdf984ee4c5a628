#ifndef QUERN_OPS_NORM_RMS_NORM_H_
#define QUERN_OPS_NORM_RMS_NORM_H_

// Root-mean-square normalisation, alone or after a residual addition.
//
//   Execute:     h[t, i] = x[t, i]
//   ExecuteAdd:  h[t, i] = round(x[t, i] + residual[t, i])   -> residual_out
//   both:        out[t, i] = round(h[t, i] * w[i] / rms[t])
//                rms[t] = sqrt(sum over i < span of h[t, i]^2 / span + eps)
//
//   kPlain    w = weight                    rms_norm
//   kOnePlus  w = shift + weight, in f32    gemma_rms_norm, whose shift is 1
//   kNone     w = 1; weight is not given
//
// span is `hidden`, or fewer columns for models that take the variance of a
// prefix. Arithmetic is in f32; `round` is to the dtype of what is written, to
// nearest even. With NormSum::kRounded the norm reads the rounded sum, so
// ExecuteAdd(x, r) is exactly Execute(residual_out). With kExact it reads the
// f32 sum, which only residual_out rounds.
//
// A NaN or infinity makes its row NaN or zero and affects no other row. Squares
// are summed in f32, and again in double where that sum exceeds 3.4e38: a row
// of finite elements, however large, is normalised. A row of zeros stays zero,
// or becomes NaN if eps is 0. Where eps is 0, squares below 2^-126 lose bits,
// and a row below 2^-75 becomes infinite or NaN.

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
enum class NormSum : uint8_t { kRounded, kExact };

struct RmsNormSpec {
  int64_t hidden = 0;  // elements of a row, >= 1
  float eps = 1e-6f;   // finite, >= 0
  NormWeight weight = NormWeight::kPlain;
  float shift = 1.0f;               // of kOnePlus; finite
  NormSum sum = NormSum::kRounded;  // of ExecuteAdd
  int64_t span = 0;                 // in [1, hidden]; 0 means hidden
  // Each dtype is f32 or bf16; or x and residual are f16, and weight and out
  // are each f16 or f32. With kExact, x, residual and out have one dtype, which
  // weight has too unless it is f32.
  DType x_dtype = DType::kF32;
  DType weight_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  DType residual_dtype = DType::kF32;  // residual and residual_out
  // How Execute and ExecuteAdd store out; residual_out is never streamed. kAuto
  // streams in Execute when x and out together exceed the last-level cache.
  Stores stores = Stores::kAuto;

  // Number of columns whose squares are summed.
  int64_t SpanColumns() const { return span == 0 ? hidden : span; }
};

// Arguments of ExecuteAdd. x, out, residual and residual_out are [rows,
// hidden]; weight is [hidden] (kNone: ignored).
struct RmsNormArgs {
  AnyTensorView x;
  AnyTensorView weight;
  AnyTensorView out;
  AnyTensorView residual;
  AnyTensorView residual_out;
};

class RmsNormPlan {
 public:
  // InvalidArgument unless 1 <= hidden < 2^59, if span is out of range, if eps
  // is negative, infinite or NaN, or shift is not finite. Unimplemented for
  // other dtypes.
  static absl::StatusOr<RmsNormPlan> Create(const RmsNormSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const RmsNormSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks dtypes, shapes,
  // strides, memory and aliasing. x and out are [rows, hidden], or [tokens,
  // heads, hidden] with any token and head strides; weight is [hidden] (kNone:
  // ignored). InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& weight,
                         const AnyTensorView& out) const;
  // Whether ExecuteAdd may be called with these arguments. InvalidArgument
  // names the argument.
  absl::Status CheckAddArgs(const RmsNormArgs& args) const;

  // Writes the rows of out and nothing between them. Rows may have any stride.
  // out may be x itself if their dtypes agree, and must not overlap weight.
  // rows = 0 does nothing. Allocates nothing; safe to call concurrently.
  // Workers share the rows, or the tokens of a tensor of rank 3. One worker
  // computes a whole row, in an order that depends on hidden alone.
  void Execute(const AnyTensorView& x, const AnyTensorView& weight,
               const AnyTensorView& out, Executor& executor) const noexcept;

  // Writes residual_out, then out. Each may be x or residual itself if their
  // dtypes agree; they must overlap neither each other nor weight. Everything
  // else is as for Execute.
  void ExecuteAdd(const RmsNormArgs& args, Executor& executor) const noexcept;

 private:
  explicit RmsNormPlan(const RmsNormSpec& spec);
  RmsNormScale ScaleOf(const AnyTensorView& weight, int64_t rows,
                       bool may_stream) const;
  void Normalise(const AnyTensorView& x, const AnyTensorView& out,
                 RmsNormScale scale, int64_t begin, int64_t end) const;
  void AddExact(const RmsNormArgs& args, Executor& executor) const;

  RmsNormSpec spec_;
  RmsNormKernels kernels_;
  int64_t stream_from_bytes_;
};

}  // namespace quern

#endif  // QUERN_OPS_NORM_RMS_NORM_H_
