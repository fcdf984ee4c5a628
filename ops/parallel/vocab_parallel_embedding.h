#ifndef QUERN_OPS_PARALLEL_VOCAB_PARALLEL_EMBEDDING_H_
#define QUERN_OPS_PARALLEL_VOCAB_PARALLEL_EMBEDDING_H_

// Gathers the rows of a table that token ids name, where the table is divided
// over the ranks by ops/parallel/vocab_shard.h:
//
//   out[t, i] = round(scale * weight_of_owner[row of ids[t], i])  on every rank
//
// Each rank gathers the rows that it has, and the ranks' parts are summed. The
// result is exact, including the sign of zero, because a rank fills rows that
// it does not have with -0, and -0 + x = x for every x. An id outside the
// vocabulary, which CheckArgs refuses, gives zeros.
//
// Added ids are found for any number of ranks. (vLLM reads padding for them
// with one rank, if `original` is not a multiple of `padding`.)

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/embedding/vocab_embedding.h"
#include "quern/ops/index_view.h"
#include "quern/ops/parallel/vocab_shard.h"

namespace quern {

struct VocabParallelEmbeddingSpec {
  VocabSpec vocab;
  int64_t hidden = 0;                // columns, >= 1
  DType weight_dtype = DType::kF32;  // f32, bf16 or f16
  DType out_dtype = DType::kF32;     // f32, bf16 or f16; any pair is legal
  float scale = 1;                   // finite
};

class VocabParallelEmbeddingPlan {
 public:
  // Refuses what VocabShard::Create and VocabEmbeddingPlan::Create refuse.
  static absl::StatusOr<VocabParallelEmbeddingPlan> Create(
      const VocabParallelEmbeddingSpec& spec, const Communicator& communicator);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return gather_.target(); }
  const VocabParallelEmbeddingSpec& spec() const { return spec_; }
  const VocabShard& shard() const { return shard_; }

  // Whether Execute may be called with these arguments: checks dtypes, shapes,
  // strides, memory and aliasing, and that each id is in [0, vocab.ids()).
  // O(tokens).
  absl::Status CheckArgs(IndexView ids, const AnyTensorView& weight,
                         const AnyTensorView& out) const;

  // ids[tokens], the same on all ranks, and weight[shard().rows(), hidden], as
  // LoadVocabShard fills it, -> out[tokens, hidden]. Collective. Rows may have
  // any stride; out must not overlap weight. tokens = 0 does nothing. Allocates
  // nothing. Several threads of a rank may call it at once, each with its own
  // communicator.
  void Execute(IndexView ids, const AnyTensorView& weight,
               const AnyTensorView& out, Communicator& communicator,
               Executor& executor) const noexcept;

 private:
  VocabParallelEmbeddingPlan(const VocabParallelEmbeddingSpec& spec,
                             const VocabShard& shard,
                             const VocabEmbeddingPlan& gather, int size)
      : spec_(spec), shard_(shard), gather_(gather), size_(size) {}
  void Gather(IndexView ids, const AnyTensorView& weight,
              const AnyTensorView& out, int64_t begin,
              int64_t end) const noexcept;

  VocabParallelEmbeddingSpec spec_;
  VocabShard shard_;
  VocabEmbeddingPlan gather_;
  int size_;
};

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_VOCAB_PARALLEL_EMBEDDING_H_
