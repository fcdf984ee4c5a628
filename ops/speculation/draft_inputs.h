#ifndef QUERN_OPS_SPECULATION_DRAFT_INPUTS_H_
#define QUERN_OPS_SPECULATION_DRAFT_INPUTS_H_

// What a draft model is given between steps, as vLLM prepares it: the slots of
// its tokens in a cache of blocks, the tokens of the next draft, and how many
// of the last were rejected. Numbers are i32 or i64 unless it says otherwise,
// flags u8. Vectors that are written may be longer than they need be; what
// follows is left as it is.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/loop_plan.h"

namespace quern {

// The slots of tokens. Token t of request r, query_start_loc[r] <= t <
// query_start_loc[r + 1], is at p = positions[t]:
//
//   slot_mapping[t] = block_table[r, p / block_size] * block_size
//                     + p % block_size
//
// slot_mapping is i64, block_table [requests or more, blocks]. Refused: starts
// that decrease or exceed tokens, negative positions and blocks, positions
// behind the table.
struct SlotMappingSpec {
  int64_t block_size = 0;  // 1 <= block_size < 2^31
};
struct SlotMappingArgs {
  AnyTensorView query_start_loc, positions, block_table;
  AnyTensorView slot_mapping;  // written
};
using SlotMappingPlan = LoopPlan<SlotMappingSpec, SlotMappingArgs>;

absl::Status Check(const SlotMappingSpec& spec);
absl::Status Check(const SlotMappingSpec& spec, const SlotMappingArgs& args);
void Run(const SlotMappingSpec& spec, const SlotMappingArgs& args);

// The token of each request that the next draft follows. Request r < requests
// had d = cu_num_draft_tokens[r] - cu_num_draft_tokens[r - 1] drafts:
//
//   num_rejected_tokens[r]     = d + 1 - valid_sampled_tokens_count[r], and 0
//                                if d = 0
//   token_indices_to_sample[r] = query_start_loc[r + 1] - 1
//                                - num_rejected_tokens[r]
//
// No valid token at all (a request that is discarded) is legal; the index is
// then that of the token before the request's, and -1 at the beginning.
// Refused: counts beyond d + 1, more rejected tokens than query_start_loc[r +
// 1].
struct PaddedInputsSpec {
  int64_t requests = 0;
};
struct PaddedInputsArgs {
  AnyTensorView cu_num_draft_tokens, valid_sampled_tokens_count,
      query_start_loc;
  AnyTensorView token_indices_to_sample, num_rejected_tokens;  // written
};
using PaddedInputsPlan = LoopPlan<PaddedInputsSpec, PaddedInputsArgs>;

absl::Status Check(const PaddedInputsSpec& spec);
absl::Status Check(const PaddedInputsSpec& spec, const PaddedInputsArgs& args);
void Run(const PaddedInputsSpec& spec, const PaddedInputsArgs& args);

// The last sampled token of each request r < requests, and how many there are.
// A sampled token counts if it is in [0, vocab); -1 stands for none.
//
//   valid_sampled_tokens_count[r]   how many of sampled_token_ids[r, 0 ..
//                                   sampled) count; 0 for a request that is
//                                   discarded
//   next_token_ids[r]               the last that counts, or, where none does,
//                                   backup_next_token_ids[r]
//
// All token ids have one type.
struct NextTokensSpec {
  int64_t vocab = 0, sampled = 0, requests = 0;
};
struct NextTokensArgs {
  AnyTensorView sampled_token_ids, discard_request_mask, backup_next_token_ids;
  AnyTensorView next_token_ids, valid_sampled_tokens_count;  // written
};
using NextTokensPlan = LoopPlan<NextTokensSpec, NextTokensArgs>;

absl::Status Check(const NextTokensSpec& spec);
absl::Status Check(const NextTokensSpec& spec, const NextTokensArgs& args);
void Run(const NextTokensSpec& spec, const NextTokensArgs& args);

// Advances each request by a token. With p = positions[r] + 1:
//
//   p < max_model_len    out_clamped_positions[r] = p, its slot as above, where
//                        a position behind the table takes the last block,
//                        seq_lens[r] = min(seq_lens[r] + 1, max_model_len)
//   else                 0, pad_id and 1
//
// out_slot_mapping, i64, may have more elements than there are requests: all of
// these become pad_id. Refused: negative positions, lengths and blocks, a table
// without blocks.
struct NextSlotsSpec {
  int64_t block_size = 0;     // 1 <= block_size < 2^31
  int64_t max_model_len = 0;  // 1 <= max_model_len < 2^31
  int64_t pad_id = -1;
};
struct NextSlotsArgs {
  AnyTensorView positions, block_table;
  AnyTensorView seq_lens, out_clamped_positions, out_slot_mapping;  // written
};
using NextSlotsPlan = LoopPlan<NextSlotsSpec, NextSlotsArgs>;

absl::Status Check(const NextSlotsSpec& spec);
absl::Status Check(const NextSlotsSpec& spec, const NextSlotsArgs& args);
void Run(const NextSlotsSpec& spec, const NextSlotsArgs& args);

// Makes room for the drafts of each request behind its tokens. Request r has
// the tokens query_start_loc[r] .. query_start_loc[r + 1], of which
// query_end_loc[r] is the last that was not rejected. With s = 1 for shift and
// 0 else, its tokens in the outputs begin at query_start_loc[r] + r * (slots -
// s) and are
//
//   tokens that are kept   query_end_loc[r] - query_start_loc[r] + 1 - s of
//                          target_token_ids, the first s left out
//   1 new token            next_token_ids[r]
//   slots - 1 more         drafting_token, marked in out_is_masked_token_mask
//   one for each rejected  padding_token, marked in out_is_rejected_token_mask
//
// Positions count from target_positions[query_start_loc[r]], and are 0 for
// rejected tokens. out_new_token_indices[r * slots ..] are the places of the
// new tokens. With shift, out_hidden_state_mapping[query_start_loc[r] + j] is
// the place of the request's token j. Ids of tokens have one type, positions
// one. Refused: outputs that are too short, ends outside a request's tokens,
// numbers that their types do not hold.
struct ExpandInputsSpec {
  int64_t padding_token = 0, drafting_token = 0;
  int64_t input_tokens = 0;  // of target_token_ids
  int64_t slots = 0;         // >= 1
  bool shift = false;
};
struct ExpandInputsArgs {
  AnyTensorView target_token_ids, target_positions, next_token_ids;
  AnyTensorView out_input_ids, out_positions, out_is_rejected_token_mask,
      out_is_masked_token_mask, out_new_token_indices,
      out_hidden_state_mapping;  // written
  AnyTensorView query_start_loc, query_end_loc;
};
using ExpandInputsPlan = LoopPlan<ExpandInputsSpec, ExpandInputsArgs>;

absl::Status Check(const ExpandInputsSpec& spec);
absl::Status Check(const ExpandInputsSpec& spec, const ExpandInputsArgs& args);
void Run(const ExpandInputsSpec& spec, const ExpandInputsArgs& args);

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_DRAFT_INPUTS_H_
