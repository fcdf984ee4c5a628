#include "models/llama_matrix.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/aligned_buffer.h"
#include "core/check.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gemm/int4_linear.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/scaled_linear.h"
#include "models/gguf.h"
#include "ops/activation/act_and_mul.h"
#include "ops/activation/activation_spec.h"
#include "quant/int8_quantize.h"

namespace quern {
namespace {

// Makes `buffer` at least so large; its contents are lost if it grows.
absl::Status Grow(int64_t bytes, AlignedBuffer& buffer) {
  if (static_cast<int64_t>(buffer.bytes()) >= bytes) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(buffer, AlignedBuffer::Create(bytes));
  return absl::OkStatus();
}

// What becomes of the sums of a matrix in blocks, whose product has no
// epilogue. None for kNone.
absl::StatusOr<std::optional<Activation>> GateOf(LinearActivation activation) {
  switch (activation) {
    case LinearActivation::kNone:
      return std::nullopt;
    case LinearActivation::kSiluAndMul:
      return Activation::kSilu;
    case LinearActivation::kGeluAndMul:
      return Activation::kGelu;
    case LinearActivation::kGeluTanhAndMul:
      return Activation::kGeluTanh;
    default:
      return Unimplemented("llama", "a matrix in Q8_0 with activation ",
                           LinearActivationName(activation),
                           "; need none or a gated one");
  }
}

}  // namespace

absl::StatusOr<LlamaMatrix> LlamaMatrix::Create(const AnyTensorView& w,
                                                const AnyTensorView& bias,
                                                DType x_dtype, const Output& y,
                                                Executor& executor) {
  LinearSpec spec;
  spec.n = w.extent(0);
  spec.k = w.extent(1);
  spec.a = x_dtype;
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

absl::StatusOr<LlamaMatrix> LlamaMatrix::CreateQ8_0(
    MatrixView<const uint8_t> blocks, const AnyTensorView& bias, DType x_dtype,
    const Output& y, Executor& executor) {
  Int4LinearSpec spec;
  spec.format = Int4Format::kQ8_0;
  spec.group_size = GgufFile::kQ8Block;
  spec.n = blocks.extent(0);
  spec.k = blocks.extent(1) / GgufFile::kQ8BlockBytes * GgufFile::kQ8Block;
  spec.a = x_dtype;
  QUERN_ASSIGN_OR_RETURN(const std::optional<Activation> gate,
                         GateOf(y.activation));
  spec.c = gate.has_value() ? DType::kF32 : y.dtype;
  Int4Weights weights;
  weights.codes = blocks;
  QUERN_ASSIGN_OR_RETURN(Int4LinearPlan linear,
                         Int4LinearPlan::Create(spec, weights, bias, executor));
  std::optional<ActAndMulPlan> activation;
  if (gate.has_value()) {
    ActAndMulSpec act;
    act.activation = *gate;
    act.d = spec.n / 2;
    act.out_dtype = y.dtype;
    QUERN_ASSIGN_OR_RETURN(activation, ActAndMulPlan::Create(act));
  }
  return LlamaMatrix(Blocks{std::move(linear), std::move(activation)});
}

int64_t LlamaMatrix::packed_bytes() const {
  if (const auto* blocks = std::get_if<Blocks>(&plan_)) {
    return static_cast<int64_t>(blocks->linear.packed_bytes());
  }
  if (const auto* scaled = std::get_if<ScaledLinearPlan>(&plan_)) {
    return static_cast<int64_t>(scaled->packed_bytes());
  }
  return static_cast<int64_t>(std::get_if<LinearPlan>(&plan_)->packed_bytes());
}

std::string LlamaMatrix::Explain(int64_t m) const {
  if (const auto* blocks = std::get_if<Blocks>(&plan_)) {
    return blocks->linear.Explain(m);
  }
  if (const auto* scaled = std::get_if<ScaledLinearPlan>(&plan_)) {
    return scaled->Explain(m);
  }
  return std::get_if<LinearPlan>(&plan_)->Explain(m);
}

absl::Status LlamaMatrix::Reserve(int64_t max_m, const Executor& executor,
                                  LlamaScratch& scratch) const {
  if (const auto* blocks = std::get_if<Blocks>(&plan_)) {
    QUERN_RETURN_IF_ERROR(
        Grow(blocks->linear.WorkspaceBytes(max_m, executor.num_workers()),
             scratch.blocks));
    if (!blocks->activation.has_value()) return absl::OkStatus();
    return Grow(max_m * blocks->linear.spec().n * 4, scratch.sums);
  }
  if (const auto* scaled = std::get_if<ScaledLinearPlan>(&plan_)) {
    return scratch.linear.Reserve(*scaled, max_m, executor);
  }
  return scratch.linear.Reserve(*std::get_if<LinearPlan>(&plan_), max_m,
                                executor);
}

void LlamaMatrix::ExecuteAdd(const AnyTensorView& x, const AnyTensorView& y,
                             const AnyTensorView& residual,
                             LlamaScratch& scratch,
                             Executor& executor) const noexcept {
  if (const auto* linear = std::get_if<LinearPlan>(&plan_)) {
    linear->Execute(x, y, residual, scratch.linear, executor);
  } else if (const auto* scaled = std::get_if<ScaledLinearPlan>(&plan_)) {
    scaled->Execute({x, {}, {}, y, residual}, scratch.linear, executor);
  } else {
    QUERN_DCHECK(residual.rank() == 0);
    const auto& blocks = *std::get_if<Blocks>(&plan_);
    if (!blocks.activation.has_value()) {
      blocks.linear.Execute(x, y, Workspace(scratch.blocks), executor);
      return;
    }
    const auto sums = DenseMatrix(scratch.sums.data<float>(), x.extent(0),
                                  blocks.linear.spec().n);
    blocks.linear.Execute(x, sums, Workspace(scratch.blocks), executor);
    blocks.activation->Execute(sums, y, executor);
  }
}

}  // namespace quern
