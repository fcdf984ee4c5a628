#ifndef QUERN_OPS_REGISTRY_EMBEDDING_OPS_H_
#define QUERN_OPS_REGISTRY_EMBEDDING_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

//   vocab_parallel_embedding   out[t] = scale * weight[ids[t]]
//   gather_rows                out[t] = x[rows[t]]
//   logits_processor           logits = cap and scale of them, in place
//
// Without ranks vocab_parallel_embedding has the whole table; with them, each
// rank its shard of `vocab` original and `added` ids, each padded to multiples
// of `padding`, as ops/parallel/vocab_parallel_embedding.h says.
//
// ids and rows are i32 or i64. Tables and logits are f32, bf16 or f16, x is of
// any dtype; out_dtype is the table's if it is empty. Providers: simd and
// reference, which agree to the bit in 16 bits, as ops/logits/logits.h rounds
// each step of logits_processor.
//
// logits_processor is vLLM's with logits_as_input: logits come in, and all
// their columns are processed, where vLLM's own first makes them by a linear
// layer, gathers them from the ranks and cuts off their padding. Those are the
// linear operators', or in one plan ops/parallel/parallel_lm_head.h's, which
// makes no padding.
absl::Status RegisterEmbeddingOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_EMBEDDING_OPS_H_
