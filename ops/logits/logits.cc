#include "quern/ops/logits/logits.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hwy/base.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/check_indices.h"
#include "quern/ops/index_view.h"
#include "quern/ops/logits/logits_kernels.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rows_of.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

constexpr char kOp[] = "logits";

}  // namespace

// The logit that each 16-bit code becomes. T is BFloat16 or Float16.
template <typename T>
std::shared_ptr<const LogitsPlan::Steps> LogitsPlan::StepsOf(
    const LogitsSpec& spec) {
  auto steps = std::make_shared<Steps>();
  const auto round = [](float x) { return ToF32(FromF32<T>(x)); };
  for (uint32_t code = 0; code < steps->size(); ++code) {
    float l = ToF32(T::FromBits(static_cast<uint16_t>(code)));
    if (spec.soft_cap > 0.0f) {
      l = round(l / spec.soft_cap);
      // tanh is computed in double, because float versions differ between
      // libraries.
      l = round(static_cast<float>(std::tanh(static_cast<double>(l))));
      l = round(l * spec.soft_cap);
    }
    if (spec.scale != 1.0f) l = round(l * spec.scale);
    (*steps)[code] = hwy::BitCastScalar<uint16_t>(FromF32<T>(l));
  }
  return steps;
}

absl::StatusOr<LogitsPlan> LogitsPlan::Create(const LogitsSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "vocab", spec.vocab, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "hidden", spec.hidden, 1));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "logits_dtype", spec.logits_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckNotNegative(kOp, "soft_cap", spec.soft_cap, "finite soft_cap"));
  QUERN_RETURN_IF_ERROR(
      CheckFinite(kOp, "scale", spec.scale, "a finite scale"));
  std::shared_ptr<const Steps> steps;
  if (spec.soft_cap > 0.0f || spec.scale != 1.0f) {
    if (spec.logits_dtype == DType::kBF16) steps = StepsOf<BFloat16>(spec);
    if (spec.logits_dtype == DType::kF16) steps = StepsOf<Float16>(spec);
  }
  return LogitsPlan(spec, GetLogitsKernels(), std::move(steps));
}

absl::Status LogitsPlan::CheckSelectArgs(const AnyTensorView& hidden,
                                         IndexView rows,
                                         const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "hidden", hidden, spec_.hidden_dtype,
                                   {kAnyExtent, spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", out, spec_.hidden_dtype,
                                    {rows.size(), spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "hidden", hidden, "out", out));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "rows", rows.tensor(), "out", out));
  return CheckIndices(kOp, "rows", "row", rows, hidden.extent(0));
}

void LogitsPlan::SelectRows(const AnyTensorView& hidden, IndexView rows,
                            const AnyTensorView& out) const noexcept {
  QUERN_DCHECK_OK(CheckSelectArgs(hidden, rows, out));
  const size_t bytes =
      static_cast<size_t>(spec_.hidden) * SizeOf(spec_.hidden_dtype);
  const RowsOf from(hidden), to(out);
  for (int64_t r = 0; r < rows.size(); ++r) {
    std::memcpy(to[r], from[rows[r]], bytes);
  }
}

absl::Status LogitsPlan::CheckArgs(const AnyTensorView& logits) const {
  return CheckOutput(kOp, "logits", logits, spec_.logits_dtype,
                     {kAnyExtent, spec_.vocab});
}

void LogitsPlan::Execute(const AnyTensorView& logits,
                         Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(logits));
  if (spec_.soft_cap == 0.0f && spec_.scale == 1.0f) return;
  const size_t n = static_cast<size_t>(spec_.vocab);
  const RowsOf all(logits);
  const auto process = [&](void* row) {
    if (steps_ != nullptr) {
      const Steps& steps = *steps_;
      auto* l = static_cast<uint16_t*>(row);
      for (size_t j = 0; j < n; ++j) l[j] = steps[l[j]];
    } else if (spec_.soft_cap > 0.0f) {
      kernels_.cap_and_scale(static_cast<float*>(row), n, spec_.soft_cap,
                             spec_.scale);
    } else {
      kernels_.scale(static_cast<float*>(row), n, spec_.scale);
    }
  };
  ParallelRows(executor, logits.extent(0), 2 * spec_.vocab,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   process(all[i]);
                 }
               });
}

}  // namespace quern
