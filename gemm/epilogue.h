#ifndef QUERN_GEMM_EPILOGUE_H_
#define QUERN_GEMM_EPILOGUE_H_

// What a linear layer does to its sums on the way to c, while they are in
// cache. With v[m, n] the f32 result of the layer, bias included:
//
//   c[m, j] = round_c(act(v[m, j]) + residual[m, j])              c is [m, n]
//   c[m, j] = round_c(act(v[m, j]) * up(v[m, d + j]) + residual[m, j])
//                                                     n = 2 d, c is [m, d]
//
// The second form is that of the ...AndMul activations, the gated feed-forward
// layer: the weights are one matrix of n = 2 d columns, gate first, as models
// store them fused. up(u) = u; only kSwigluOaiAndMul (GPT-OSS) has another,
// up(u) = min(max(u, -7), 7) + 1. Files of GPT-OSS alternate rows of gate and
// of up, which two strided sources of LinearWeights::Pack take apart. residual
// is optional and has c's dtype and shape.
//
// act is f32 arithmetic, core/activation-inl.h, whose bounds are these; one
// unit is 2^-24, relative, and each may be off by 140 * 2^-149 besides:
//
//   silu(v) = v / (1 + e^-v)                       10
//   gelu(v) = v * Phi(v), by erf                   16 + min(v^2 / 2, 110)
//   gelu_tanh(v) = v / 2 * (1 + tanh(w / 2)),      10 + 4 min(|w|, 110)
//       w = 2 sqrt(2 / pi) (v + 0.044715 v^3)
//   swigluoai(v) = g / (1 + e^-1.702g), g = min(v, 7)      12 + 1.3 min(|1.702
//   g|, 128)
//
// The product with up and the sum with residual are f32, fused where
// the CPU can; the result is rounded once to c. A NaN in v or residual makes
// that element NaN; -infinity gives -0 after an activation, the limit.
//
// residual may be c itself, element by element: then the layer adds to c.
// Otherwise it does not overlap c.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/tensor_view.h"

namespace quern {

enum class LinearActivation : uint8_t {
  kNone,
  kSilu,
  kGelu,
  kGeluTanh,
  kSiluAndMul,
  kGeluAndMul,
  kGeluTanhAndMul,
  kSwigluOaiAndMul,
};

// "silu_and_mul".
absl::string_view LinearActivationName(LinearActivation activation);

constexpr bool IsGated(LinearActivation activation) {
  return activation >= LinearActivation::kSiluAndMul;
}

// Columns of c for n columns of weights.
constexpr int64_t ColumnsOfC(LinearActivation activation, int64_t n) {
  return IsGated(activation) ? n / 2 : n;
}

// InvalidArgument if the activation is none of these, or is gated and n odd.
absl::Status CheckActivation(absl::string_view op, LinearActivation activation,
                             int64_t n);

// `residual` is of rank 0, for none, or has c's dtype and shape and is c or
// apart from it. `c` has been checked.
absl::Status CheckResidual(absl::string_view op, const AnyTensorView& residual,
                           const AnyTensorView& c);

}  // namespace quern

#endif  // QUERN_GEMM_EPILOGUE_H_
