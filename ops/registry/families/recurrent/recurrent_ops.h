#ifndef QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Recurrent layers over pools of states; equations are in ops/recurrent. State
// indices and starts are i32 or i64; null_slot is the index of a sequence to
// skip, whose outputs are zeros. The names are vLLM's and SGLang's, but for
// gated_delta_rule_update, which theirs fuse with the gates.
//
// Sequences have any length, by query_start_loc [sequences + 1]; without it
// every token is a sequence. Where a line names two operators, the first also
// takes has_initial_state u8[sequences]. With query_start_loc there may be more
// state indices than sequences, as an engine has that pads its batch; those
// beyond are not read. Providers: simd, and reference, which computes in
// double, token by token, and rounds where simd rounds when it goes token by
// token. What is returned may be x, v or z itself, as the headers of
// ops/recurrent say; states lie apart from all else. WorkspaceBytes takes the
// tokens of a step for max_rows, whatever the first tensor is.

// Slots are [sequences], or for drafts [sequences, columns], dense, with
// num_accepted_tokens [sequences]; destinations are [sequences] or [sequences,
// columns]. See SequenceBatch. There may be more rows than sequences.
//
// chunk_gated_delta_rule, gated_delta_rule_update: ops/recurrent/delta_rule.h.
// g is [tokens, value_heads], or [tokens, value_heads, dk] for KDA. g and beta
// are each f32, bf16 or f16. The state may have another dtype than q.
// chunk_gated_delta_rule goes by chunks of tokens where the plan does.
absl::Status RegisterDeltaRuleOps(OpRegistry& registry);

// causal_conv1d_fn, causal_conv1d_update: ops/recurrent/causal_conv1d.h.
// conv_states are [slots, width - 1 or more, channels], or where only that fits
// [slots, channels, width - 1 or more].
//
// selective_state_update: ops/recurrent/state_update.h, with query_start_loc
// where sequences have several tokens. a is [heads, head_dim, d_state]
// (Mamba-1), where dt, d and dt_bias have a number for each row of a head, or
// [heads] (Mamba-2), whose prompts go by chunks of tokens. Mamba-1 may come
// without the dimension of heads: state[slots, channels, d_state], x, dt and z
// [tokens, channels], a[channels, d_state], b and c [tokens, d_state], d and
// dt_bias [channels]. b and c have x's dtype or another of f32, bf16 and f16.
absl::Status RegisterRecurrentOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_OPS_H_
