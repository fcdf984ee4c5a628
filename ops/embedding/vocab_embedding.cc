#include "quern/ops/embedding/vocab_embedding.h"

#include <cstddef>
#include <cstring>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/check_indices.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rows_of.h"

namespace quern {
namespace {

constexpr char kOp[] = "vocab_embedding";

}  // namespace

absl::StatusOr<VocabEmbeddingPlan> VocabEmbeddingPlan::Create(
    const VocabEmbeddingSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "vocab", spec.vocab, 1));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "hidden", spec.hidden, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "weight_dtype", spec.weight_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "out_dtype", spec.out_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckFinite(kOp, "scale", spec.scale));
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
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "ids", ids.tensor(), "out", out));
  return CheckIndices(kOp, "ids", "id", ids, spec_.vocab, spec_.padding_id);
}

void VocabEmbeddingPlan::Execute(IndexView ids, const AnyTensorView& weight,
                                 const AnyTensorView& out,
                                 Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(ids, weight, out));
  const RowsOf table(weight), outs(out);
  const size_t out_size = SizeOf(spec_.out_dtype);
  const size_t n = static_cast<size_t>(spec_.hidden);
  const bool copies =
      spec_.weight_dtype == spec_.out_dtype && spec_.scale == 1.0f;
  ParallelRows(executor, ids.size(), 2 * spec_.hidden,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   char* const to = outs[t];
                   // padding_id is tested before the table is read, because it
                   // need not be a row.
                   if (ids[t] == spec_.padding_id) {
                     std::memset(to, 0, n * out_size);
                     continue;
                   }
                   const char* const from = table[ids[t]];
                   if (copies) {
                     std::memcpy(to, from, n * out_size);
                   } else {
                     kernels_.convert(from, spec_.scale, to, n);
                   }
                 }
               });
}

}  // namespace quern
