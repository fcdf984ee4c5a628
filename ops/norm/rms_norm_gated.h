#ifndef QUERN_OPS_NORM_RMS_NORM_GATED_H_
#define QUERN_OPS_NORM_RMS_NORM_GATED_H_

// Root-mean-square normalisation of groups, with a gate before or after it: the
// output norm of gated delta nets and of state space models.
//
//   out[t, i] = round(h[t, i] / rms[t, g] * weight[i] * after[t, i])
//   rms[t, g] = sqrt(mean of h[t, :]^2 over the group + eps),  g = i / group
//
//   kNormFirst   h = x             after = act(z)
//   kGateFirst   h = x * act(z)    after = 1
//   kNone        h = x             after = 1
//
//   kSilu     act(z) = z / (1 + e^-z)      kSigmoid   act(z) = 1 / (1 + e^-z)
//
// Arithmetic is in f32, and the result is rounded once, to nearest even. A NaN
// or an infinity makes its group NaN or zero and affects no other group.
// Squares are summed in f32, and again in double where that sum exceeds 3.4e38.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/rms_norm_gated_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

enum class GateWhen : uint8_t { kNone, kNormFirst, kGateFirst };

struct RmsNormGatedSpec {
  int64_t hidden = 0;  // elements of a row, >= 1
  int64_t group = 0;   // divides hidden; 0 means hidden
  float eps = 1e-5f;   // finite, >= 0
  GateWhen gate = GateWhen::kGateFirst;
  NormGate activation = NormGate::kSilu;
  DType dtype = DType::kF32;         // of x, z and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // f32, bf16 or f16
};

class RmsNormGatedPlan {
 public:
  // InvalidArgument unless 1 <= hidden < 2^59, if group does not divide hidden,
  // or if eps is negative, infinite or NaN. Unimplemented for other dtypes.
  static absl::StatusOr<RmsNormGatedPlan> Create(const RmsNormGatedSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const RmsNormGatedSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: x[rows, hidden],
  // z[rows, hidden] (kNone: ignored), weight[hidden], out[rows, hidden].
  // InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& z,
                         const AnyTensorView& weight,
                         const AnyTensorView& out) const;

  // Writes out, which may be x or z itself. Rows may have any stride; rows = 0
  // does nothing. Allocates nothing; safe to call concurrently. One worker
  // computes a whole row, in an order that depends on group alone.
  void Execute(const AnyTensorView& x, const AnyTensorView& z,
               const AnyTensorView& weight, const AnyTensorView& out,
               Executor& executor) const noexcept;

 private:
  explicit RmsNormGatedPlan(const RmsNormGatedSpec& spec);

  RmsNormGatedSpec spec_;
  RmsNormGatedKernels kernels_;
  RowBlockKernels blocks_;
  RowBlockKernels weight_blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_NORM_RMS_NORM_GATED_H_
