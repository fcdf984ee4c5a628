#ifndef QUERN_OPS_NORM_L2_NORM_H_
#define QUERN_OPS_NORM_L2_NORM_H_

// Division of rows by their length: q and k of gated delta nets.
//
//   out[t, i] = round(x[t, i] / sqrt(sum over i of x[t, i]^2 + eps))
//
// eps is added to the sum, inside the root, as l2norm of
// flash-linear-attention (fla/modules/l2norm.py) does. Arithmetic is in f32:
// the squares are summed, x is multiplied by 1 / sqrt(sum + eps), and `round`
// is to the dtype of out, to nearest even.
//
// A NaN or infinity makes its row NaN or zero and affects no other row. Squares
// are summed again in double where their sum in f32 exceeds 3.4e38: a row of
// finite elements, however large, is normalised. The factor of a row that is
// longer than 2^126 is a denormal of fewer bits. A row of zeros stays zero.
// Where eps is 0, a row shorter than 2^-60 loses bits to denormal squares, one
// shorter than 2^-75 becomes infinite, and zeros there, as in a row of zeros,
// become NaN.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/rms_norm_kernels.h"

namespace quern {

struct L2NormSpec {
  int64_t hidden = 0;  // elements of a row, >= 1
  float eps = 1e-6f;   // finite, >= 0
  // Each is f32 or bf16; or x is f16, and out f16 or f32.
  DType x_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
};

// x and out are [rows, hidden], or [tokens, heads, hidden].
struct L2NormArgs {
  AnyTensorView x;
  AnyTensorView out;
};

class L2NormPlan {
 public:
  // InvalidArgument unless 1 <= hidden < 2^59, or if eps is negative, infinite
  // or NaN. Unimplemented for other dtypes.
  static absl::StatusOr<L2NormPlan> Create(const L2NormSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const L2NormSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks dtypes, shapes,
  // strides, memory and aliasing. InvalidArgument names the argument.
  absl::Status CheckArgs(const L2NormArgs& args) const;

  // Writes the rows of out and nothing between them. Rows, tokens and heads may
  // have any stride. out may be x itself if their dtypes agree. rows = 0 does
  // nothing. Allocates nothing; safe to call concurrently. Workers share the
  // rows, or the tokens of a tensor of rank 3. One worker computes a whole row,
  // in an order that depends on hidden alone. Reads x twice, the second time
  // from cache, and writes out once.
  void Execute(const L2NormArgs& args, Executor& executor) const noexcept;

 private:
  explicit L2NormPlan(const L2NormSpec& spec);
  // Normalises the rows [begin, end) of two matrices.
  void Normalise(const AnyTensorView& x, const AnyTensorView& out,
                 int64_t begin, int64_t end) const;

  L2NormSpec spec_;
  RmsNormKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_NORM_L2_NORM_H_
