#ifndef QUERN_GEMM_LINEAR_SPEC_H_
#define QUERN_GEMM_LINEAR_SPEC_H_

// What a caller asks of gemm/linear.h and gemm/scaled_linear.h, and what those
// two hand on to the implementation that they choose.

#include <cstdint>

#include "core/dtype.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "gemm/packed_scaled_linear.h"
#include "packing/vnni_pack.h"

namespace quern {

enum class LinearImpl : uint8_t {
  kAuto,    // the packed kernels, which every program has
  kPacked,  // our kernels
  kOneDnn,  // refused where the program does not link //gemm/onednn
};

struct LinearSpec {
  int64_t n = 0;  // columns of b, and of c unless the activation is gated
  int64_t k = 0;  // columns of a
  DType a = DType::kBF16;
  DType b = DType::kBF16;
  DType c = DType::kBF16;
  // kNK: weights[n, k], as models store them; kKN: weights[k, n].
  WeightOrder order = WeightOrder::kNK;
  LinearActivation activation = LinearActivation::kNone;
  LinearImpl impl = LinearImpl::kAuto;
};

struct ScaledLinearSpec : PackedScaledLinearSpec {
  LinearImpl impl = LinearImpl::kAuto;
};

// Arguments of ScaledLinearPlan::Execute. Scales and zero points are given
// exactly where a is i8: see PackedScaledLinearPlan::CheckArgs.
struct ScaledLinearArgs {
  AnyTensorView a;              // [m, k]
  AnyTensorView a_scales;       // f32[m], or empty
  AnyTensorView a_zero_points;  // i32[m], or empty
  AnyTensorView c;              // [m, ColumnsOfC(activation, n)]
  AnyTensorView residual = {};  // like c, may be c; or of rank 0 for none
};

}  // namespace quern

#endif  // QUERN_GEMM_LINEAR_SPEC_H_
