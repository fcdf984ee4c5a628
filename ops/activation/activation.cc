#include "quern/ops/activation/activation.h"

#include <cstddef>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_blocks.h"

namespace quern {
namespace {

absl::string_view OpName(const ActivationSpec& spec) {
  return ActivationName(spec.activation);
}

}  // namespace

ActivationPlan::ActivationPlan(const ActivationSpec& spec)
    : spec_(spec),
      kernels_(GetActivationKernels(spec.activation)),
      blocks_(GetRowBlockKernels(spec.x_dtype, spec.out_dtype)),
      stream_from_bytes_(StreamFrom(spec.stores)) {}

absl::StatusOr<ActivationPlan> ActivationPlan::Create(
    const ActivationSpec& spec) {
  const absl::string_view op = OpName(spec);
  if (spec.activation == Activation::kSwigluOai) {
    return InvalidArgument(op, "has two inputs; need ActAndMulPlan");
  }
  QUERN_RETURN_IF_ERROR(
      CheckRange(op, "hidden", spec.hidden, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(
      CheckActivationParams(op, spec.activation, spec.params));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(op, "x_dtype", spec.x_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(op, "out_dtype", spec.out_dtype, kFloatDTypes));
  return ActivationPlan(spec);
}

absl::Status ActivationPlan::CheckArgs(const AnyTensorView& x,
                                       const AnyTensorView& out) const {
  const absl::string_view op = OpName(spec_);
  QUERN_RETURN_IF_ERROR(
      CheckInput(op, "x", x, spec_.x_dtype, {kAnyExtent, spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckOutput(op, "out", out, spec_.out_dtype,
                                    {x.extent(0), spec_.hidden}));
  return CheckInPlaceOrApart(op, "x", x, "out", out);
}

void ActivationPlan::Execute(const AnyTensorView& x, const AnyTensorView& out,
                             Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, out));
  const RowsOf xs(x), outs(out);
  const size_t n = static_cast<size_t>(spec_.hidden);
  const size_t x_size = SizeOf(spec_.x_dtype);
  const size_t out_size = SizeOf(spec_.out_dtype);
  const int64_t bytes = static_cast<int64_t>(x_size + out_size) * spec_.hidden;
  const bool stream =
      bytes >= kMinStreamRowBytes && x.extent(0) * bytes >= stream_from_bytes_;
  ParallelRows(
      executor, x.extent(0), 2 * spec_.hidden, [&](int64_t begin, int64_t end) {
        alignas(64) float block[kRowBlock];
        for (int64_t t = begin; t < end; ++t) {
          const char* const from = xs[t];
          char* const to = outs[t];
          ForEachBlock(n, to, out_size, stream,
                       [&](size_t i, size_t count, bool stream_block) {
                         blocks_.load(from + i * x_size, count, block);
                         kernels_.apply(spec_.params, count, block, nullptr);
                         blocks_.store(block, count, stream_block,
                                       to + i * out_size);
                       });
        }
        if (stream) blocks_.flush();
      });
}

}  // namespace quern
