#ifndef QUERN_MODELS_LLAMA_MATRIX_H_
#define QUERN_MODELS_LLAMA_MATRIX_H_

// Private: one weight matrix of a model,
//
//   y[m, n] = bias[n] + sum over k of x[m, k] * w[n, k]
//
// with weights as they are or as int8 with a scale for each row of w; or that
// with an activation and a residual, gemm/epilogue.h.

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/scaled_linear.h"

namespace quern {

class LlamaMatrix {
 public:
  struct Output {
    DType dtype = DType::kF32;
    LinearActivation activation = LinearActivation::kNone;
  };

  // w[n, k] in the type of x, packed; bias f32[n], or of rank 0 for none.
  static absl::StatusOr<LlamaMatrix> Create(const AnyTensorView& w,
                                            const AnyTensorView& bias,
                                            const Output& y,
                                            Executor& executor);
  // w[n, k], f32, to int8: each row symmetric, by its largest magnitude. x is
  // `x_dtype`, and becomes int8 per token.
  static absl::StatusOr<LlamaMatrix> CreateInt8(MatrixView<const float> w,
                                                const AnyTensorView& bias,
                                                DType x_dtype, const Output& y,
                                                Executor& executor);

  int64_t packed_bytes() const;
  std::string Explain(int64_t m) const;
  absl::Status Reserve(int64_t max_m, const Executor& executor,
                       LinearScratch& scratch) const;
  void Execute(const AnyTensorView& x, const AnyTensorView& y,
               LinearScratch& scratch, Executor& executor) const noexcept {
    ExecuteAdd(x, y, AnyTensorView(), scratch, executor);
  }
  // The same plus residual, which may be y.
  void ExecuteAdd(const AnyTensorView& x, const AnyTensorView& y,
                  const AnyTensorView& residual, LinearScratch& scratch,
                  Executor& executor) const noexcept;

 private:
  using Plan = std::variant<LinearPlan, ScaledLinearPlan>;
  explicit LlamaMatrix(Plan plan) : plan_(std::move(plan)) {}

  Plan plan_;
};

}  // namespace quern

#endif  // QUERN_MODELS_LLAMA_MATRIX_H_
