#include "quern/ops/activation/sigmoid_mul.h"

#include <algorithm>
#include <cstddef>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_blocks.h"

namespace quern {
namespace {

constexpr char kOp[] = "sigmoid_mul";
// Work of an element, in elements that are merely copied. The value is that of
// act_and_mul.cc.
constexpr int64_t kCost = 10;

}  // namespace

SigmoidMulPlan::SigmoidMulPlan(const SigmoidMulSpec& spec)
    : spec_(spec),
      kernels_(GetSigmoidMulKernels()),
      blocks_(GetRowBlockKernels(spec.x_dtype, spec.out_dtype)),
      gate_blocks_(GetRowBlockKernels(spec.gate_dtype, spec.out_dtype)) {}

absl::StatusOr<SigmoidMulPlan> SigmoidMulPlan::Create(
    const SigmoidMulSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "d", spec.d, 1, kMaxRowElements));
  if (spec.gate_cols != spec.d && spec.gate_cols != 1) {
    return InvalidArgument(kOp, "gate_cols=", spec.gate_cols,
                           "; need 1 or d=", spec.d);
  }
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "x_dtype", spec.x_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "gate_dtype", spec.gate_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "out_dtype", spec.out_dtype, kFloatDTypes));
  return SigmoidMulPlan(spec);
}

absl::Status SigmoidMulPlan::CheckArgs(const AnyTensorView& x,
                                       const AnyTensorView& gate,
                                       const AnyTensorView& out) const {
  if (x.rank() == 3) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "x", x, spec_.x_dtype,
                                     {kAnyExtent, kAnyExtent, spec_.d}));
    const int64_t tokens = x.extent(0), heads = x.extent(1);
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "gate", gate, spec_.gate_dtype,
                                     {tokens, heads, spec_.gate_cols}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", out, spec_.out_dtype,
                                      {tokens, heads, spec_.d}));
  } else {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "x", x, spec_.x_dtype, {kAnyExtent, spec_.d}));
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "gate", gate, spec_.gate_dtype,
                                     {x.extent(0), spec_.gate_cols}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out", out, spec_.out_dtype, {x.extent(0), spec_.d}));
  }
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "x", x, "out", out));
  return CheckApart(kOp, "gate", gate, "out", out);
}

void SigmoidMulPlan::Execute(const AnyTensorView& x, const AnyTensorView& gate,
                             const AnyTensorView& out,
                             Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, gate, out));
  if (IsEmpty(x)) return;
  const bool by_head = x.rank() == 3;
  const int64_t heads = by_head ? x.extent(1) : 1;
  ParallelRows(executor, x.extent(0), kCost * heads * spec_.d,
               [&](int64_t begin, int64_t end) {
                 if (!by_head) return Multiply(x, gate, out, begin, end);
                 for (int64_t t = begin; t < end; ++t) {
                   Multiply(HeadsOf(x, t), HeadsOf(gate, t), HeadsOf(out, t), 0,
                            heads);
                 }
               });
}

void SigmoidMulPlan::Multiply(const AnyTensorView& x, const AnyTensorView& gate,
                              const AnyTensorView& out, int64_t begin,
                              int64_t end) const {
  const RowsOf xs(x), gates(gate), outs(out);
  const auto n = static_cast<size_t>(spec_.d);
  const size_t x_size = SizeOf(spec_.x_dtype);
  const size_t gate_size = SizeOf(spec_.gate_dtype);
  const size_t out_size = SizeOf(spec_.out_dtype);
  const bool one_gate = spec_.gate_cols == 1;
  alignas(64) float g[kRowBlock];
  alignas(64) float v[kRowBlock];
  for (int64_t t = begin; t < end; ++t) {
    if (one_gate) {
      gate_blocks_.load(gates[t], 1, g);
      kernels_.sigmoid(1, g);
      std::fill_n(g, kRowBlock, g[0]);
    }
    for (size_t i = 0; i < n; i += kRowBlock) {
      const size_t count = std::min(kRowBlock, n - i);
      if (!one_gate) {
        gate_blocks_.load(gates[t] + i * gate_size, count, g);
        kernels_.sigmoid(count, g);
      }
      blocks_.load(xs[t] + i * x_size, count, v);
      blocks_.mul_store(v, g, count, /*stream=*/false, outs[t] + i * out_size);
    }
  }
}

}  // namespace quern
