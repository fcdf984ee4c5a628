#ifndef QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_VARLEN_ATTENTION_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_VARLEN_ATTENTION_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// varlen_attention: attention over keys and values that are in no cache, of
// sequences that lie one after another, by attention/varlen_attention.h, whose
// equations and roundings it has.
//
// query[tokens, q_heads, head_dim], key[kv_tokens, kv_heads, head_dim],
// value[kv_tokens, kv_heads, v_head_dim], with any strides of tokens and heads:
// f32, bf16 or f16, all three of one dtype, which the result[tokens, q_heads,
// v_head_dim] has, too. Sequence s has the queries [cu_seqlens_q[s],
// cu_seqlens_q[s + 1]) and the keys of cu_seqlens_k, i32[sequences + 1] from 0
// on to all tokens. With `causal` the last query stands where the last key
// does, and a sequence has no more queries than keys, unless it has no keys.
// scale 0 means 1 / sqrt(head_dim).
//
// Prepare builds the schedule for the workers of its executor from
// cu_seqlens_q and cu_seqlens_k, the only tensors whose values it reads: once
// for each batch, before CheckArgs and Execute of the operator in every layer.
// It is not what Execute does, because it may allocate and may refuse.
// CheckArgs compares both with what Prepare was given. WorkspaceBytes is that
// of the batch that was prepared last.
//
// flash_attn_varlen_func is SGLang's name for it, with its arguments: q, k and
// v in place of query, key and value, and the scale 1 / sqrt(head_dim). Query i
// of a causal sequence sees its first i + 1 keys there, so `causal` needs
// cu_seqlens_k to be cu_seqlens_q. max_seqlen_q and max_seqlen_k have no
// effect.
//
// Providers: simd, and reference, which runs plain loops with sums in double on
// the calling thread.
absl::Status RegisterVarlenAttentionOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_VARLEN_ATTENTION_OPS_H_
