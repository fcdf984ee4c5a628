#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_EMBEDDING_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_EMBEDDING_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

//   vocab_parallel_embedding   out[t] = scale * weight[ids[t]]
//   gather_rows                out[t] = x[rows[t]]
//   logits_processor           logits = cap and scale of them, in place
//
// Without ranks, vocab_parallel_embedding takes the whole table. With ranks,
// each rank gives its shard of `vocab` original and `added` ids, which are
// padded to multiples of `padding`, as ops/parallel/vocab_parallel_embedding.h
// says.
//
// ids and rows are i32 or i64. Tables and logits are f32, bf16 or f16; x may
// have any dtype; an empty out_dtype means the table's. Providers: simd and
// reference. Their 16-bit results are equal bit for bit, because
// logits_processor rounds each step as ops/logits/logits.h says.
//
// logits_processor is vLLM's with logits_as_input: it takes logits and
// processes all their columns. vLLM's default first computes the logits by a
// linear layer, gathers them from the ranks and cuts off their padding. The
// linear operators do that here, or parallel_lm_head
// (ops/parallel/parallel_lm_head.h), which makes no padding.
absl::Status RegisterEmbeddingOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_EMBEDDING_OPS_H_
