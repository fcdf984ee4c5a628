#include "ops/embedding/vocab_embedding.h"

#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/check_args.h"
#include "core/status_macros.h"
#include "ops/parallel_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "vocab_embedding";

}  // namespace

absl::StatusOr<VocabEmbeddingPlan> VocabEmbeddingPlan::Create(
    const VocabEmbeddingSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "vocab", spec.vocab, 1));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "hidden", spec.hidden, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "weight_dtype", spec.weight_dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "out_dtype", spec.out_dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  if (!std::isfinite(spec.scale)) {
    return InvalidArgument(kOp, "scale=", spec.scale, "; need a finite number");
  }
  return VocabEmbeddingPlan(
      spec, GetVocabEmbeddingKernels(spec.weight_dtype, spec.out_dtype));
}

absl::Status VocabEmbeddingPlan::CheckArgs(IndexView ids,
                                           const AnyTensorView& weight,
                                           const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "weight", weight, spec_.weight_dtype,
                                   {spec_.vocab, spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", out, spec_.out_dtype,
                                    {ids.size(), spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weight", weight, "out", out));
  if (ids.null() && ids.size() > 0) {
    return InvalidArgument(kOp, "ids is null; need ", ids.size());
  }
  for (int64_t t = 0; t < ids.size(); ++t) {
    if ((ids[t] < 0 || ids[t] >= spec_.vocab) && ids[t] != spec_.padding_id) {
      return InvalidArgument(kOp, "ids[", t, "]=", ids[t], "; need 0 <= id < ",
                             spec_.vocab);
    }
  }
  return absl::OkStatus();
}

void VocabEmbeddingPlan::Execute(IndexView ids, const AnyTensorView& weight,
                                 const AnyTensorView& out,
                                 Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(ids, weight, out));
  // The stride of a lone row may be any number.
  const auto row_bytes = [](const AnyTensorView& v) {
    return v.extent(0) > 1
               ? v.stride(0) * static_cast<int64_t>(SizeOf(v.dtype()))
               : 0;
  };
  const int64_t weight_row = row_bytes(weight);
  const size_t out_size = SizeOf(spec_.out_dtype);
  const int64_t out_row = row_bytes(out);
  const char* table = static_cast<const char*>(weight.data());
  char* out_data = static_cast<char*>(out.mutable_data());
  const size_t n = static_cast<size_t>(spec_.hidden);
  const bool copies =
      spec_.weight_dtype == spec_.out_dtype && spec_.scale == 1.0f;
  ParallelRows(executor, ids.size(), 2 * spec_.hidden,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   char* to = out_data + t * out_row;
                   // Before the table: padding_id need not be in it.
                   if (ids[t] == spec_.padding_id) {
                     std::memset(to, 0, n * out_size);
                     continue;
                   }
                   const char* from = table + ids[t] * weight_row;
                   if (copies) {
                     std::memcpy(to, from, n * out_size);
                   } else {
                     kernels_.convert(from, spec_.scale, to, n);
                   }
                 }
               });
}

}  // namespace quern
