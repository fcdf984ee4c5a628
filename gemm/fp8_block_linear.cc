#include "gemm/fp8_block_linear.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/block_linear.h"
#include "gemm/block_linear_kernels.h"
#include "packing/code_layout.h"

namespace quern {

absl::StatusOr<Fp8BlockLinearPlan> Fp8BlockLinearPlan::Create(
    const Fp8BlockLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& scales, const AnyTensorView& bias,
    Executor& executor) {
  static constexpr char kOp[] = "fp8_block_linear";
  BlockLinearSpec block;
  block.op = kOp;
  block.n = spec.n;
  block.k = spec.k;
  block.codes = BlockCodes::kE4M3;
  block.block_k = spec.block_k;
  block.a = spec.a;
  block.c = spec.c;
  QUERN_RETURN_IF_ERROR(BlockLinear::CheckSpec(block));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "block_n", spec.block_n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "block_k", spec.block_k, 1, kMaxExtent));
  if (spec.block_k < spec.k && spec.block_k % 16 != 0) {
    return InvalidArgument(kOp, "block_k=", spec.block_k,
                           "; need a multiple of 16, or k=", spec.k,
                           " or more");
  }
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weights", weights, DType::kF8E4M3, {spec.n, spec.k}));
  QUERN_RETURN_IF_ERROR(CheckInput(
      kOp, "scales", scales, DType::kF32,
      {DivCeil(spec.n, spec.block_n), DivCeil(spec.k, spec.block_k)}));

  QUERN_ASSIGN_OR_RETURN(BlockLinear linear, BlockLinear::Create(block, bias));
  const auto* codes = static_cast<const uint8_t*>(weights.data());
  const int64_t stride = spec.n == 1 ? 0 : weights.stride(0);
  PackCodes(
      linear.layout(), ZeroByte(block.codes),
      [&](int64_t k, int64_t n) { return codes[n * stride + k]; },
      linear.codes(), executor);
  const auto* from = static_cast<const float*>(scales.data());
  const int64_t rows = scales.extent(0);
  const int64_t scales_stride = rows == 1 ? 0 : scales.stride(0);
  linear.SetScales(
      [&](int64_t g, int64_t n) {
        return from[n / spec.block_n * scales_stride + g];
      },
      executor);
  return Fp8BlockLinearPlan(spec, std::move(linear));
}

}  // namespace quern
