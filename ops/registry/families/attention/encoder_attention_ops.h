#ifndef QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_ENCODER_ATTENTION_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_ENCODER_ATTENTION_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// mm_encoder_attn: attention of an encoder, every query to every key of its
// sequence, by attention/varlen_attention.h, whose equations and roundings it
// has.
//
// query[batch, tokens, num_heads * head_size] or [batch, tokens, num_heads,
// head_size]; key and value the same with num_kv_heads, which divides num_heads
// (0: num_heads). f32, bf16 or f16, all three of one dtype; the result has the
// dtype and the extents of query. Rows may have any strides if batch and tokens
// have a common one, so parts of one projection are accepted. scale 0 means 1 /
// sqrt(head_size).
//
// Without cu_seqlens, each of the batch is one sequence. With cu_seqlens
// i32[sequences + 1], from 0 on to `tokens`, each of the batch is cut into
// sequences [cu_seqlens[i], cu_seqlens[i + 1]), which do not see one another.
// max_seqlen is accepted and has no effect.
//
// Prepare builds the schedule for the workers of its executor from the extents
// and from cu_seqlens, the only tensor whose values it reads: once for each
// batch, before CheckArgs and Execute of the operator in every layer. It is not
// what Execute does, because it may allocate and may refuse. CheckArgs compares
// both with what Prepare was given. WorkspaceBytes is that of the batch that
// was prepared last.
//
// Providers: simd, and reference, which runs plain loops with sums in double on
// the calling thread.
absl::Status RegisterEncoderAttentionOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_ENCODER_ATTENTION_OPS_H_
