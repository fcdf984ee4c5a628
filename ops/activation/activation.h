#ifndef QUERN_OPS_ACTIVATION_ACTIVATION_H_
#define QUERN_OPS_ACTIVATION_ACTIVATION_H_

// One number in, one number out, for every element of a matrix:
//
//   out[t, i] = round(activation(x[t, i]))
//
// gelu_new and gelu_fast are two spellings of kGeluTanh. activation_spec.h
// states the functions and their error bounds. Arithmetic is in f32, and the
// result is rounded once, to nearest even, to out_dtype.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/activation_kernels.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct ActivationSpec {
  Activation activation = Activation::kSilu;  // any but kSwigluOai
  ActivationParams params;
  int64_t hidden = 0;             // columns, >= 1
  DType x_dtype = DType::kF32;    // f32, bf16 or f16
  DType out_dtype = DType::kF32;  // f32, bf16 or f16
  // kAuto is kCached, which measured best.
  Stores stores = Stores::kAuto;
};

class ActivationPlan {
 public:
  // InvalidArgument unless 1 <= hidden < 2^59, the parameters are in range and
  // the activation is a function of one number. Unimplemented for other dtypes.
  static absl::StatusOr<ActivationPlan> Create(const ActivationSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const ActivationSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks dtypes, shapes,
  // strides, memory and aliasing. InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& x,
                         const AnyTensorView& out) const;

  // x[rows, hidden] -> out[rows, hidden]. Rows may have any stride; out may be
  // x itself, where the dtypes agree. rows = 0 does nothing. Allocates nothing;
  // safe to call concurrently; the result does not depend on the number of
  // workers.
  void Execute(const AnyTensorView& x, const AnyTensorView& out,
               Executor& executor) const noexcept;

 private:
  explicit ActivationPlan(const ActivationSpec& spec);

  ActivationSpec spec_;
  ActivationKernels kernels_;
  RowBlockKernels blocks_;
  int64_t stream_from_bytes_;
};

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_ACTIVATION_H_
