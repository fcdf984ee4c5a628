#include "models/llama_matrix.h"

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/scaled_linear.h"
#include "quant/int8_quantize.h"

namespace quern {

absl::StatusOr<LlamaMatrix> LlamaMatrix::Create(const AnyTensorView& w,
                                                const AnyTensorView& bias,
                                                const Output& y,
                                                Executor& executor) {
  LinearSpec spec;
  spec.n = w.extent(0);
  spec.k = w.extent(1);
  spec.a = w.dtype();
  spec.b = w.dtype();
  spec.c = y.dtype;
  spec.activation = y.activation;
  QUERN_ASSIGN_OR_RETURN(LinearPlan plan,
                         LinearPlan::Create(spec, w, bias, executor));
  return LlamaMatrix(std::move(plan));
}

absl::StatusOr<LlamaMatrix> LlamaMatrix::CreateInt8(MatrixView<const float> w,
                                                    const AnyTensorView& bias,
                                                    DType x_dtype,
                                                    const Output& y,
                                                    Executor& executor) {
  const int64_t n = w.extent(0), k = w.extent(1);
  Int8QuantizeSpec quantize_spec;
  quantize_spec.dtype = DType::kF32;
  QUERN_ASSIGN_OR_RETURN(const Int8QuantizePlan quantize,
                         Int8QuantizePlan::Create(quantize_spec));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer codes, AlignedBuffer::Create(n * k));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer scales, AlignedBuffer::Create(n * 4));
  const auto q = DenseMatrix(codes.data<int8_t>(), n, k);
  const auto s = DenseVector(scales.data<float>(), n);
  quantize.Execute(w, q, s, VectorView<int32_t>(), executor);

  ScaledLinearSpec spec;
  spec.n = n;
  spec.k = k;
  spec.a = x_dtype;
  spec.c = y.dtype;
  spec.activation = y.activation;
  QUERN_ASSIGN_OR_RETURN(ScaledLinearPlan plan,
                         ScaledLinearPlan::Create(spec, q, s, bias, executor));
  return LlamaMatrix(std::move(plan));
}

int64_t LlamaMatrix::packed_bytes() const {
  return std::visit(
      [](const auto& plan) {
        return static_cast<int64_t>(plan.packed_bytes());
      },
      plan_);
}

std::string LlamaMatrix::Explain(int64_t m) const {
  return std::visit([m](const auto& plan) { return plan.Explain(m); }, plan_);
}

absl::Status LlamaMatrix::Reserve(int64_t max_m, const Executor& executor,
                                  LinearScratch& scratch) const {
  return std::visit(
      [&](const auto& plan) { return scratch.Reserve(plan, max_m, executor); },
      plan_);
}

void LlamaMatrix::ExecuteAdd(const AnyTensorView& x, const AnyTensorView& y,
                             const AnyTensorView& residual,
                             LinearScratch& scratch,
                             Executor& executor) const noexcept {
  if (const auto* linear = std::get_if<LinearPlan>(&plan_)) {
    linear->Execute(x, y, residual, scratch, executor);
  } else {
    std::get_if<ScaledLinearPlan>(&plan_)->Execute({x, {}, {}, y, residual},
                                                   scratch, executor);
  }
}

}  // namespace quern
