#ifndef QUERN_OPS_PARALLEL_PARALLEL_LM_HEAD_H_
#define QUERN_OPS_PARALLEL_PARALLEL_LM_HEAD_H_

// The last layer of a model whose vocabulary is divided over the ranks by
// ops/parallel/vocab_shard.h. Computes logits, or the token with the largest
// logit.
//
//   l[i, v] = round(bias[v] + sum over d of hidden[i, d] * weight[v, d])
//   l = what ops/logits/logits.h makes of it, with soft_cap and scale
//
// for the original ids v. A rank computes, caps and scales the logits of its
// own ids, then sends them to the other ranks, or to rank 0 alone. Padding and
// added ids are never computed. The logits have the same bits for any number of
// ranks.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/ops/logits/logits.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/vocab_shard.h"

namespace quern {

struct ParallelLmHeadSpec {
  VocabSpec vocab;
  int64_t hidden = 0;  // columns of the hidden states
  DType hidden_dtype = DType::kBF16;
  DType weight_dtype = DType::kBF16;
  DType logits_dtype = DType::kF32;  // f32, bf16 or f16
  float soft_cap = 0.0f;             // finite, >= 0; 0 disables the cap
  float scale = 1.0f;                // finite
  // kFull: weight[original, hidden] and bias[original]. kShard:
  // VocabShard::rows() rows of each, the rank's. With tied embeddings, these
  // are the rows of the embedding's table.
  WeightPart part = WeightPart::kFull;
  std::string kernels = {};  // see LinearSpec::kernels
};

class ParallelLmHeadPlan {
 public:
  // bias is f32, bf16 or f16, or of rank 0 for none. Weights and bias are
  // copied. Refuses what VocabShard::Create, LinearPlan::Create and
  // LogitsPlan::Create refuse.
  static absl::StatusOr<ParallelLmHeadPlan> Create(
      const ParallelLmHeadSpec& spec, const AnyTensorView& weight,
      const AnyTensorView& bias, const Communicator& communicator,
      Executor& executor);

  const ParallelLmHeadSpec& spec() const { return spec_; }
  const VocabShard& shard() const { return shard_; }
  // The rank's linear layer; null on a rank without original ids.
  const LinearPlan* linear() const { return linear_ ? &*linear_ : nullptr; }
  // Like ReplicatedLinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int max_workers) const;

  // Whether Execute, or ExecuteToRoot on rank 0, may be called with these
  // arguments.
  absl::Status CheckArgs(const AnyTensorView& hidden,
                         const AnyTensorView& logits) const;

  // hidden[n, hidden] -> logits[n, vocab.original] on every rank. Collective,
  // with the communicator given to Create or one of the same rank and size.
  // Writes logits and nothing else; logits must not overlap hidden; n = 0 does
  // nothing. Allocates nothing, except in oneDNN.
  void Execute(const AnyTensorView& hidden, const AnyTensorView& logits,
               Workspace workspace, Communicator& communicator,
               Executor& executor) const noexcept;

  // Like Execute, but only rank 0 gets logits. Other ranks' `logits` is
  // ignored.
  void ExecuteToRoot(const AnyTensorView& hidden, const AnyTensorView& logits,
                     Workspace workspace, Communicator& communicator,
                     Executor& executor) const noexcept;

  // Sets tokens[i], on every rank, to the first id whose logit of row i is the
  // largest. NaN counts as larger than all numbers. Ranks exchange one logit
  // and its id for each row. CheckArgMaxArgs also returns InvalidArgument if
  // scale <= 0.
  absl::Status CheckArgMaxArgs(const AnyTensorView& hidden,
                               VectorView<int64_t> tokens) const;
  void ArgMax(const AnyTensorView& hidden, VectorView<int64_t> tokens,
              Workspace workspace, Communicator& communicator,
              Executor& executor) const noexcept;

 private:
  ParallelLmHeadPlan(const ParallelLmHeadSpec& spec, const VocabShard& shard,
                     LogitsPlan process, int rank, int size)
      : spec_(spec),
        shard_(shard),
        process_(std::move(process)),
        rank_(rank),
        size_(size) {}
  absl::Status CheckHidden(const AnyTensorView& hidden) const;
  ColumnShards Columns() const;
  // Bytes of workspace for one row: its candidates and this rank's logits.
  int64_t row_bytes() const;
  // View of memory at `data` as this rank's logits of `rows` rows.
  AnyTensorView LogitsAt(void* data, int64_t rows) const noexcept;
  void OwnLogits(const AnyTensorView& hidden, const AnyTensorView& logits,
                 const Workspace& workspace, Executor& executor) const noexcept;

  ParallelLmHeadSpec spec_;
  VocabShard shard_;
  LogitsPlan process_;
  int rank_;
  int size_;
  std::optional<LinearPlan> linear_;
};

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_PARALLEL_LM_HEAD_H_
