#include "ops/activation/silu_and_mul.h"

#include <cstddef>

#include "core/check_args.h"
#include "core/status_macros.h"
#include "ops/parallel_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "silu_and_mul";

// Columns [begin, begin + count) of a matrix.
AnyTensorView Columns(const AnyTensorView& v, int64_t begin, int64_t count) {
  AnyTensorView::Dims extents{v.extent(0), count};
  AnyTensorView::Dims strides{v.stride(0), 1};
  const int64_t offset = begin * static_cast<int64_t>(SizeOf(v.dtype()));
  const char* data = static_cast<const char*>(v.data());
  return AnyTensorView(
      v.dtype(),
      static_cast<const void*>(data == nullptr ? nullptr : data + offset), 2,
      extents, strides);
}

}  // namespace

absl::StatusOr<SiluAndMulPlan> SiluAndMulPlan::Create(
    const SiluAndMulSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "d", spec.d, 1, (int64_t{1} << 62) - 1));
  constexpr DType kChoices[] = {DType::kF32, DType::kBF16};
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "x_dtype", spec.x_dtype, kChoices));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "out_dtype", spec.out_dtype, kChoices));
  return SiluAndMulPlan(spec,
                        GetSiluAndMulKernels(spec.x_dtype, spec.out_dtype));
}

absl::Status SiluAndMulPlan::CheckArgs(const AnyTensorView& x,
                                       const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", x, spec_.x_dtype, {kAnyExtent, 2 * spec_.d}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", out, spec_.out_dtype, {x.extent(0), spec_.d}));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(
      kOp, "the gate half of x", Columns(x, 0, spec_.d), "out", out));
  return CheckInPlaceOrApart(kOp, "the up half of x",
                             Columns(x, spec_.d, spec_.d), "out", out);
}

absl::Status SiluAndMulPlan::CheckSplitArgs(const AnyTensorView& gate,
                                            const AnyTensorView& up,
                                            const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "gate", gate, spec_.x_dtype, {kAnyExtent, spec_.d}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "up", up, spec_.x_dtype, {gate.extent(0), spec_.d}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", out, spec_.out_dtype, {gate.extent(0), spec_.d}));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "gate", gate, "out", out));
  return CheckInPlaceOrApart(kOp, "up", up, "out", out);
}

void SiluAndMulPlan::Execute(const AnyTensorView& x, const AnyTensorView& out,
                             Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, out));
  ExecuteSplit(Columns(x, 0, spec_.d), Columns(x, spec_.d, spec_.d), out,
               executor);
}

void SiluAndMulPlan::ExecuteSplit(const AnyTensorView& gate,
                                  const AnyTensorView& up,
                                  const AnyTensorView& out,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckSplitArgs(gate, up, out));
  const int64_t x_size = static_cast<int64_t>(SizeOf(spec_.x_dtype));
  const int64_t out_size = static_cast<int64_t>(SizeOf(spec_.out_dtype));
  const char* gate_data = static_cast<const char*>(gate.data());
  const char* up_data = static_cast<const char*>(up.data());
  char* out_data = static_cast<char*>(out.mutable_data());
  const size_t n = static_cast<size_t>(spec_.d);
  ParallelRows(executor, gate.extent(0), 3 * spec_.d,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   kernels_.row(gate_data + i * gate.stride(0) * x_size,
                                up_data + i * up.stride(0) * x_size,
                                out_data + i * out.stride(0) * out_size, n);
                 }
               });
}

}  // namespace quern
