#ifndef QUERN_OPS_REGISTRY_EMBEDDING_OPS_H_
#define QUERN_OPS_REGISTRY_EMBEDDING_OPS_H_

#include "absl/status/status.h"
#include "ops/registry/op_registry.h"

namespace quern {

// vocab_parallel_embedding (of one rank), gather_rows (the hidden states whose
// logits are wanted) and logits_processor (soft cap, then scale, of f32 logits
// in place). ids and rows are int32. Providers: simd, and reference, which
// rounds each step of the cap.
absl::Status RegisterEmbeddingOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_EMBEDDING_OPS_H_
