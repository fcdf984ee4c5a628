#ifndef QUERN_OPS_PARALLEL_PARALLEL_LM_HEAD_H_
#define QUERN_OPS_PARALLEL_PARALLEL_LM_HEAD_H_

// The last layer of a model whose vocabulary is divided over the ranks, as
// ops/parallel/vocab_shard.h says: logits, or the token with the largest one.
//
//   l[i, v] = round(bias[v] + sum over d of hidden[i, d] * weight[v, d])
//   l = what ops/logits/logits.h makes of it, with soft_cap and scale
//
// for the original ids v. A rank computes those that it has, caps and scales
// them, and hands them to the others, or to rank 0 alone; padding and added ids
// are never computed. So the logits have the same bits for any number of ranks.

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
  float soft_cap = 0.0f;             // finite, >= 0; 0: none
  float scale = 1.0f;                // finite
  // kFull: weight[original, hidden], bias[original]. kShard: of the rank's
  // VocabShard, rows() of them. The same rows as an embedding's, if tied.
  WeightPart part = WeightPart::kFull;
  std::string kernels = {};  // see LinearSpec::kernels
};

class ParallelLmHeadPlan {
 public:
  // bias is f32, bf16 or f16, or of rank 0 for none. Weights and bias are
  // copied. What VocabShard::Create, LinearPlan::Create and LogitsPlan::Create
  // refuse.
  static absl::StatusOr<ParallelLmHeadPlan> Create(
      const ParallelLmHeadSpec& spec, const AnyTensorView& weight,
      const AnyTensorView& bias, const Communicator& communicator,
      Executor& executor);

  const ParallelLmHeadSpec& spec() const { return spec_; }
  const VocabShard& shard() const { return shard_; }
  // Null on a rank that has no original id.
  const LinearPlan* linear() const { return linear_ ? &*linear_ : nullptr; }
  // Like ReplicatedLinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int max_workers) const;

  // Whether Execute may be called with these, or ExecuteToRoot on rank 0.
  absl::Status CheckArgs(const AnyTensorView& hidden,
                         const AnyTensorView& logits) const;

  // hidden[n, hidden] -> logits[n, vocab.original] on every rank. All ranks
  // call it, with the communicator given to Create or one like it. Writes
  // logits and nothing else; they do not overlap hidden; n = 0 does nothing.
  // Allocates nothing but what oneDNN does.
  void Execute(const AnyTensorView& hidden, const AnyTensorView& logits,
               Workspace workspace, Communicator& communicator,
               Executor& executor) const noexcept;

  // The same, but only rank 0 gets logits; the others' is not used.
  void ExecuteToRoot(const AnyTensorView& hidden, const AnyTensorView& logits,
                     Workspace workspace, Communicator& communicator,
                     Executor& executor) const noexcept;

  // tokens[i] = the first id whose logit of row i is the largest, on every
  // rank. NaN is larger than all others. Ranks exchange one logit and its id
  // for each row. CheckArgMaxArgs: InvalidArgument also if scale <= 0.
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
  // Workspace of one row: its candidates and this rank's logits.
  int64_t row_bytes() const;
  // This rank's logits of `rows` rows, which lie at `data`.
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
