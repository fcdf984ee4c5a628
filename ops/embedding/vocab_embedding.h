#ifndef QUERN_OPS_EMBEDDING_VOCAB_EMBEDDING_H_
#define QUERN_OPS_EMBEDDING_VOCAB_EMBEDDING_H_

// The first layer of a model: gathers the rows of a table that the token ids
// name.
//
//   out[t, i] = round(scale * weight[ids[t], i])   0, if ids[t] is padding_id
//
// The product is computed in f32 and rounded to nearest even, to out_dtype.
// With a scale of 1, widening is exact and equal dtypes are copied bit by bit.
// f16 results beyond 65504 become infinite; NaN stays NaN.

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/embedding/vocab_embedding_kernels.h"
#include "quern/ops/index_view.h"

namespace quern {

struct VocabEmbeddingSpec {
  int64_t vocab = 0;                 // rows of weight, >= 1
  int64_t hidden = 0;                // columns, >= 1
  DType weight_dtype = DType::kF32;  // f32, bf16 or f16
  DType out_dtype = DType::kF32;     // f32, bf16 or f16; any pair is legal
  float scale = 1;                   // finite
  // Tokens with this id get zeros. It need not be a row of the table: -1 is a
  // common choice.
  std::optional<int64_t> padding_id;
};

class VocabEmbeddingPlan {
 public:
  // InvalidArgument if vocab < 1, hidden < 1, hidden >= 2^59, or scale is not
  // finite. Unimplemented for other dtypes.
  static absl::StatusOr<VocabEmbeddingPlan> Create(
      const VocabEmbeddingSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const VocabEmbeddingSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: checks dtypes, shapes,
  // strides, memory and aliasing, and that each id is in [0, vocab) or is
  // padding_id. The message names the token. O(tokens).
  absl::Status CheckArgs(IndexView ids, const AnyTensorView& weight,
                         const AnyTensorView& out) const;

  // ids[tokens], weight[vocab, hidden] -> out[tokens, hidden]. Rows may have
  // any stride; out must not overlap weight. An id outside the table reads
  // outside the table, so ids from outside the program must pass CheckArgs
  // first. tokens = 0 does nothing. Allocates nothing; safe to call
  // concurrently. Workers share the tokens, and the result does not depend on
  // their number. Cost: one pass over the named rows, at the bandwidth of
  // memory.
  void Execute(IndexView ids, const AnyTensorView& weight,
               const AnyTensorView& out, Executor& executor) const noexcept;

 private:
  VocabEmbeddingPlan(const VocabEmbeddingSpec& spec,
                     const VocabEmbeddingKernels& kernels)
      : spec_(spec), kernels_(kernels) {}

  VocabEmbeddingSpec spec_;
  VocabEmbeddingKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_EMBEDDING_VOCAB_EMBEDDING_H_
