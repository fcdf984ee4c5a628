#ifndef QUERN_MODELS_LLAMA_MATRIX_H_
#define QUERN_MODELS_LLAMA_MATRIX_H_

// Private: one weight matrix of a model,
//
//   y[m, n] = bias[n] + sum over k of x[m, k] * w[n, k]
//
// with weights as they are, as int8 with a scale for each row of w, or in the
// blocks of Q8_0; or that with an activation and, but for Q8_0, a residual,
// gemm/epilogue.h.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "gemm/int4_linear.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/scaled_linear.h"
#include "ops/activation/act_and_mul.h"

namespace quern {

// Scratch of Execute: one per thread that calls it, for any number of matrices.
struct LlamaScratch {
  LinearScratch linear;
  AlignedBuffer blocks;  // workspace of matrices in Q8_0
  AlignedBuffer sums;    // f32[max_m, n] of those with an activation

  int64_t bytes() const {
    return static_cast<int64_t>(linear.bytes() + blocks.bytes() + sums.bytes());
  }
};

class LlamaMatrix {
 public:
  struct Output {
    DType dtype = DType::kF32;
    LinearActivation activation = LinearActivation::kNone;
  };

  // w[n, k] in f32, bf16 or f16, packed as it is; x in x_dtype; bias f32[n], or
  // of rank 0 for none.
  static absl::StatusOr<LlamaMatrix> Create(const AnyTensorView& w,
                                            const AnyTensorView& bias,
                                            DType x_dtype, const Output& y,
                                            Executor& executor);
  // w[n, k], f32, to int8: each row symmetric, by its largest magnitude. x is
  // `x_dtype`, and becomes int8 per token.
  static absl::StatusOr<LlamaMatrix> CreateInt8(MatrixView<const float> w,
                                                const AnyTensorView& bias,
                                                DType x_dtype, const Output& y,
                                                Executor& executor);

  // blocks[n, k / 32 * 34], the rows of w in Q8_0 as a file has them.
  // Unimplemented: an activation that is not gated.
  static absl::StatusOr<LlamaMatrix> CreateQ8_0(
      MatrixView<const uint8_t> blocks, const AnyTensorView& bias,
      DType x_dtype, const Output& y, Executor& executor);

  int64_t packed_bytes() const;
  std::string Explain(int64_t m) const;
  absl::Status Reserve(int64_t max_m, const Executor& executor,
                       LlamaScratch& scratch) const;
  void Execute(const AnyTensorView& x, const AnyTensorView& y,
               LlamaScratch& scratch, Executor& executor) const noexcept {
    ExecuteAdd(x, y, AnyTensorView(), scratch, executor);
  }
  // Whether ExecuteAdd takes a residual.
  bool CanAdd() const { return !std::holds_alternative<Blocks>(plan_); }
  // Like Execute, plus residual, which may be y.
  void ExecuteAdd(const AnyTensorView& x, const AnyTensorView& y,
                  const AnyTensorView& residual, LlamaScratch& scratch,
                  Executor& executor) const noexcept;

 private:
  struct Blocks {
    Int4LinearPlan linear;
    std::optional<ActAndMulPlan> activation;  // none: linear writes y
  };
  using Plan = std::variant<LinearPlan, ScaledLinearPlan, Blocks>;
  explicit LlamaMatrix(Plan plan) : plan_(std::move(plan)) {}

  Plan plan_;
};

}  // namespace quern

#endif  // QUERN_MODELS_LLAMA_MATRIX_H_
