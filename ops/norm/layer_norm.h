#ifndef QUERN_OPS_NORM_LAYER_NORM_H_
#define QUERN_OPS_NORM_LAYER_NORM_H_

// Layer normalisation, alone or after a residual addition: BERT, GPT-2 and
// vision towers.
//
//   h[t, i] = x[t, i], or with a residual x[t, i] + residual[t, i]
//   residual_out[t, i] = round(h[t, i])
//   out[t, i] = round((h[t, i] - mean[t]) / deviation[t] * weight[i] + bias[i])
//
//   mean[t] = sum over i of h[t, i] / hidden
//   deviation[t] = sqrt(sum over i of (h[t, i] - mean[t])^2 / hidden + eps)
//
// Without a weight it is 1, and without a bias 0. Arithmetic is in f32, h is
// not rounded before its norm, and `round` is to the dtype of what is written,
// to nearest even. The squares are those of h - mean, where each 256 elements
// have a mean of their own, corrected by the sum of h - mean, and what these
// are apart is added in double: a mean that is large beside the deviation costs
// no digits.
//
// A NaN or an infinity makes its whole row NaN and affects no other row. A row
// is computed in double, one element at a time, if its sum or squares exceed
// 3.4e38 in f32, or if deviation^2 is below 2^-100, where squares underflow; an
// eps of 2^-100 or more excludes the latter. A row of finite elements, however
// large or small, is therefore normalised. A row of one number c becomes the
// bias within 2^-30 |c weight[i]| / sqrt(eps). Where eps is 0 its norm is
// 0 / 0, and what is written may be any number, infinite or NaN.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/layer_norm_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct LayerNormSpec {
  int64_t hidden = 0;                // elements of a row, >= 1
  float eps = 1e-5f;                 // finite, >= 0
  bool weight = true;                // whether there is a weight
  bool bias = true;                  // whether there is a bias
  bool residual = false;             // whether there is a residual
  DType dtype = DType::kF32;         // of x and residual: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // of weight and bias: f32, bf16 or f16
  DType out_dtype = DType::kF32;     // f32, bf16 or f16
};

// x, out, residual and residual_out are [rows, hidden]; weight and bias are
// [hidden]. What the Spec has not is ignored.
struct LayerNormArgs {
  AnyTensorView x;
  AnyTensorView weight;
  AnyTensorView bias;
  AnyTensorView out;
  AnyTensorView residual;
  AnyTensorView residual_out;
};

class LayerNormPlan {
 public:
  // InvalidArgument unless 1 <= hidden < 2^59, or if eps is negative, infinite
  // or NaN. Unimplemented for other dtypes.
  static absl::StatusOr<LayerNormPlan> Create(const LayerNormSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3".
  const char* target() const { return kernels_.target; }
  const LayerNormSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks dtypes, shapes,
  // strides, memory and aliasing. Without a residual, x and out may also be
  // [tokens, heads, hidden] with any token and head strides. InvalidArgument
  // names the argument.
  absl::Status CheckArgs(const LayerNormArgs& args) const;

  // Writes the rows of out, and of residual_out if there is one, and nothing
  // between them. Rows may have any stride. Each of the two may be x or
  // residual itself if their dtypes agree; they must overlap neither each other
  // nor weight nor bias. rows = 0 does nothing. Allocates nothing; safe to call
  // concurrently. Workers share the rows, or the tokens of a tensor of rank 3.
  // One worker computes a whole row, in an order that depends on hidden alone.
  // Reads a row twice, the second time from cache.
  void Execute(const LayerNormArgs& args, Executor& executor) const noexcept;

 private:
  // The memory of one row. residual and residual_out may be null.
  struct Row {
    const char* x;
    const char* residual;
    char* residual_out;
    char* out;
    const char* next;  // row of x to fetch meanwhile, or null
    bool stream;       // stores out past the caches
  };
  explicit LayerNormPlan(const LayerNormSpec& spec);
  void NormaliseRows(const AnyTensorView& x, const AnyTensorView& out,
                     const LayerNormArgs& args, int64_t begin, int64_t end,
                     bool stream) const;
  bool OneDType() const;
  bool Streams(const LayerNormArgs& args) const;
  void Normalise(const Row& row, const LayerNormArgs& args) const;
  void NormaliseInDouble(const Row& row, const LayerNormArgs& args) const;

  LayerNormSpec spec_;
  LayerNormKernels kernels_;          // of blocks of f32
  LayerNormKernels whole_;            // of rows of x
  RowBlockKernels x_blocks_;          // also stores residual_out
  RowBlockKernels parameter_blocks_;  // weight and bias; stores out
  int64_t stream_from_bytes_;
};

}  // namespace quern

#endif  // QUERN_OPS_NORM_LAYER_NORM_H_
