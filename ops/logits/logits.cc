#include "ops/logits/logits.h"

#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/check_args.h"
#include "core/status_macros.h"
#include "ops/parallel_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "logits";

}  // namespace

absl::StatusOr<LogitsPlan> LogitsPlan::Create(const LogitsSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "vocab", spec.vocab, 1));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "hidden", spec.hidden, 1));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "hidden_dtype", spec.hidden_dtype,
                                     {DType::kF32, DType::kBF16}));
  if (!(spec.soft_cap >= 0.0f && std::isfinite(spec.soft_cap))) {
    return InvalidArgument(kOp, "soft_cap=", spec.soft_cap,
                           "; need finite soft_cap >= 0");
  }
  if (!std::isfinite(spec.scale)) {
    return InvalidArgument(kOp, "scale=", spec.scale, "; need a finite scale");
  }
  return LogitsPlan(spec, GetLogitsKernels());
}

absl::Status LogitsPlan::CheckSelectArgs(const AnyTensorView& hidden,
                                         IndexView rows,
                                         const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "hidden", hidden, spec_.hidden_dtype,
                                   {kAnyExtent, spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", out, spec_.hidden_dtype,
                                    {rows.size(), spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "hidden", hidden, "out", out));
  if (rows.null() && rows.size() > 0) {
    return InvalidArgument(kOp, "rows is null; need ", rows.size());
  }
  for (int64_t r = 0; r < rows.size(); ++r) {
    if (rows[r] < 0 || rows[r] >= hidden.extent(0)) {
      return InvalidArgument(kOp, "rows[", r, "]=", rows[r],
                             "; need 0 <= row < ", hidden.extent(0));
    }
  }
  return absl::OkStatus();
}

void LogitsPlan::SelectRows(const AnyTensorView& hidden, IndexView rows,
                            const AnyTensorView& out) const noexcept {
  QUERN_DCHECK_OK(CheckSelectArgs(hidden, rows, out));
  const int64_t size = static_cast<int64_t>(SizeOf(spec_.hidden_dtype));
  const char* from = static_cast<const char*>(hidden.data());
  char* to = static_cast<char*>(out.mutable_data());
  for (int64_t r = 0; r < rows.size(); ++r) {
    std::memcpy(to + r * out.stride(0) * size,
                from + rows[r] * hidden.stride(0) * size,
                static_cast<size_t>(spec_.hidden * size));
  }
}

absl::Status LogitsPlan::CheckArgs(MatrixView<float> logits) const {
  return CheckOutput(kOp, "logits", logits, DType::kF32,
                     {kAnyExtent, spec_.vocab});
}

void LogitsPlan::Execute(MatrixView<float> logits,
                         Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(logits));
  if (spec_.soft_cap == 0.0f && spec_.scale == 1.0f) return;
  const size_t n = static_cast<size_t>(spec_.vocab);
  ParallelRows(executor, logits.extent(0), 2 * spec_.vocab,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   if (spec_.soft_cap > 0.0f) {
                     kernels_.cap_and_scale(logits.Row(i), n, spec_.soft_cap,
                                            spec_.scale);
                   } else {
                     kernels_.scale(logits.Row(i), n, spec_.scale);
                   }
                 }
               });
}

}  // namespace quern
