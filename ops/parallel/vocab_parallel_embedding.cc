#include "quern/ops/parallel/vocab_parallel_embedding.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/float_type.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/check_indices.h"
#include "quern/ops/embedding/vocab_embedding.h"
#include "quern/ops/index_view.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/ops/parallel_rows.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

constexpr char kOp[] = "vocab_parallel_embedding";

// Number of tokens whose rows are looked up at once.
constexpr int64_t kBlock = 256;

// Fills a row that this rank does not have with -0, the neutral element of
// addition.
void FillWithMinusZero(const AnyTensorView& out, int64_t row) {
  WithFloatType(out.dtype(), [&](auto type) {
    using T = decltype(type);
    T* to = static_cast<T*>(out.mutable_data()) + row * out.stride(0);
    std::fill_n(to, out.extent(1), FromF32<T>(-0.0f));
    return 0;
  });
}

}  // namespace

absl::StatusOr<VocabParallelEmbeddingPlan> VocabParallelEmbeddingPlan::Create(
    const VocabParallelEmbeddingSpec& spec, const Communicator& communicator) {
  QUERN_ASSIGN_OR_RETURN(
      const VocabShard shard,
      VocabShard::Create(spec.vocab, communicator.rank(), communicator.size()));
  VocabEmbeddingSpec gather;
  gather.vocab = shard.rows();
  gather.hidden = spec.hidden;
  gather.weight_dtype = spec.weight_dtype;
  gather.out_dtype = spec.out_dtype;
  gather.scale = spec.scale;
  gather.padding_id = VocabShard::kNotHere;
  QUERN_ASSIGN_OR_RETURN(const VocabEmbeddingPlan gather_plan,
                         VocabEmbeddingPlan::Create(gather));
  return VocabParallelEmbeddingPlan(spec, shard, gather_plan,
                                    communicator.size());
}

absl::Status VocabParallelEmbeddingPlan::CheckArgs(
    IndexView ids, const AnyTensorView& weight,
    const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "weight", weight, spec_.weight_dtype,
                                   {shard_.rows(), spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", out, spec_.out_dtype,
                                    {ids.size(), spec_.hidden}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weight", weight, "out", out));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "ids", ids.tensor(), "out", out));
  return CheckIndices(kOp, "ids", "id", ids, spec_.vocab.ids());
}

void VocabParallelEmbeddingPlan::Gather(IndexView ids,
                                        const AnyTensorView& weight,
                                        const AnyTensorView& out, int64_t begin,
                                        int64_t end) const noexcept {
  std::array<int64_t, kBlock> rows;
  for (int64_t t = begin; t < end; ++t) {
    rows[static_cast<size_t>(t - begin)] = shard_.RowOf(ids[t]);
  }
  InlineExecutor self;
  gather_.Execute(DenseVector<const int64_t>(rows.data(), end - begin), weight,
                  RowSlice(out, begin, end - begin), self);
  if (size_ == 1) return;
  for (int64_t t = begin; t < end; ++t) {
    const bool elsewhere =
        rows[static_cast<size_t>(t - begin)] == VocabShard::kNotHere &&
        0 <= ids[t] && ids[t] < spec_.vocab.ids();
    if (elsewhere) FillWithMinusZero(out, t);
  }
}

void VocabParallelEmbeddingPlan::Execute(IndexView ids,
                                         const AnyTensorView& weight,
                                         const AnyTensorView& out,
                                         Communicator& communicator,
                                         Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(ids, weight, out));
  QUERN_DCHECK(communicator.size() == size_);
  ParallelRows(
      executor, ids.size(), 2 * spec_.hidden, [&](int64_t begin, int64_t end) {
        for (; begin < end; begin += kBlock) {
          Gather(ids, weight, out, begin, std::min(begin + kBlock, end));
        }
      });
  communicator.AllReduceSum(out);
}

}  // namespace quern
