#ifndef QUERN_OPS_SPECULATION_DRAFT_SLOTS_H_
#define QUERN_OPS_SPECULATION_DRAFT_SLOTS_H_

// Slots and tokens of requests that draft, as SGLang keeps them: row q of
// req_to_token, i32 [rows, pool_len], has the slots of one request's tokens in
// their order, and request b has row req_pool_indices[b]. Lengths, offsets and
// rows are i32 or i64. Slots outside req_to_token are i64.
//
// Each plan refuses rows that req_to_token does not have, and ranges of tokens
// that end behind pool_len or before they begin.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/loop_plan.h"

namespace quern {

// Copies slots between rows and a vector, in which the requests follow one
// another: request b has end[b] - start[b] of them.
//
//   kToRows     req_to_token[row of b, start[b] .. end[b]) <- slots
//   kFromRows   slots <- req_to_token[row of b, start[b] .. end[b])
//
// The vector may be longer; what follows in it is left as it is. Requests are
// processed in order, so the last write to an element stays. Refused with
// kToRows: slots that are negative or that i32 does not hold.
enum class SlotCopy : uint8_t { kToRows, kFromRows };
struct CopySlotsSpec {
  int64_t pool_len = 0;
  SlotCopy to = SlotCopy::kToRows;
};
struct CopySlotsArgs {
  AnyTensorView req_pool_indices, req_to_token;  // kToRows writes the latter
  AnyTensorView start_offset, end_offset;
  AnyTensorView out_cache_loc;  // kFromRows writes it
};
using CopySlotsPlan = LoopPlan<CopySlotsSpec, CopySlotsArgs>;

absl::Status Check(const CopySlotsSpec& spec);
absl::Status Check(const CopySlotsSpec& spec, const CopySlotsArgs& args);
void Run(const CopySlotsSpec& spec, const CopySlotsArgs& args);

// Behind the seq_lens[b] slots of the tokens of request b, its row has topk *
// num_steps slots for drafts: those of the first of topk candidates, of the
// second and so on.
//
// DraftSlots: out_cache_loc[requests * topk * num_steps] gets these slots, in
// the order of the requests.
// DraftRows: row b * topk + c of out, i32 [requests * topk, pool_len], gets the
// slots of request b's tokens, and then those of candidate c; the elements that
// follow are left as they are.
struct DraftSlotsSpec {
  int64_t pool_len = 0, topk = 0, num_steps = 0;
};
struct DraftSlotsArgs {
  AnyTensorView req_pool_indices, req_to_token, seq_lens;
  AnyTensorView out_cache_loc;  // written
};
struct DraftRowsSpec : DraftSlotsSpec {};
struct DraftRowsArgs {
  AnyTensorView req_to_token, req_pool_indices, seq_lens;
  AnyTensorView out;  // written
};
using DraftSlotsPlan = LoopPlan<DraftSlotsSpec, DraftSlotsArgs>;
using DraftRowsPlan = LoopPlan<DraftRowsSpec, DraftRowsArgs>;

absl::Status Check(const DraftSlotsSpec& spec);
absl::Status Check(const DraftSlotsSpec& spec, const DraftSlotsArgs& args);
void Run(const DraftSlotsSpec& spec, const DraftSlotsArgs& args);
absl::Status Check(const DraftRowsSpec& spec);
absl::Status Check(const DraftRowsSpec& spec, const DraftRowsArgs& args);
void Run(const DraftRowsSpec& spec, const DraftRowsArgs& args);

// bonus_tokens[b] = accept_tokens[b, accept_lens[b] - 1]. bonus_tokens[b] is
// left as it is where accept_lens[b] is 0. accept_tokens is [requests, stride];
// tokens and lengths are i32 or i64, both tokens the same. Refused: lengths
// that are negative or more than stride.
struct BonusTokensSpec {
  int64_t stride = 0;
};
struct BonusTokensArgs {
  AnyTensorView accept_tokens, accept_lens;
  AnyTensorView bonus_tokens;  // written
};
using BonusTokensPlan = LoopPlan<BonusTokensSpec, BonusTokensArgs>;

absl::Status Check(const BonusTokensSpec& spec);
absl::Status Check(const BonusTokensSpec& spec, const BonusTokensArgs& args);
void Run(const BonusTokensSpec& spec, const BonusTokensArgs& args);

// accept_out_cache_loc gets out_cache_loc[accept_index[i]] for each i, in
// order, whose accept_index is not -1, one behind the other; what follows is
// left as it is. accept_index is [n] or [requests, steps], i32 or i64; the
// slots are i64, and there is room for all of accept_index. Refused: indices
// that out_cache_loc does not have.
struct AcceptedSlotsSpec {};
struct AcceptedSlotsArgs {
  AnyTensorView accept_index, out_cache_loc;
  AnyTensorView accept_out_cache_loc;  // written
};
using AcceptedSlotsPlan = LoopPlan<AcceptedSlotsSpec, AcceptedSlotsArgs>;

absl::Status Check(const AcceptedSlotsSpec& spec);
absl::Status Check(const AcceptedSlotsSpec& spec,
                   const AcceptedSlotsArgs& args);
void Run(const AcceptedSlotsSpec& spec, const AcceptedSlotsArgs& args);

// Moves the tokens extend_start_loc[b] + 1 .. + extend_seq_lens[b] of input_ids
// one place to the left, and writes topk_index[b] behind them, or to place
// select_index[b] of input_ids. Requests are processed in order; one without
// tokens writes nothing. Token ids and select_index are i64, topk_index
// [requests] or [requests, 1]. Refused: tokens and places that input_ids does
// not have.
struct RotateTokensSpec {};
struct RotateTokensArgs {
  AnyTensorView input_ids;  // written
  AnyTensorView extend_start_loc, extend_seq_lens, topk_index;
  AnyTensorView select_index;  // or no view
};
using RotateTokensPlan = LoopPlan<RotateTokensSpec, RotateTokensArgs>;

absl::Status Check(const RotateTokensSpec& spec);
absl::Status Check(const RotateTokensSpec& spec, const RotateTokensArgs& args);
void Run(const RotateTokensSpec& spec, const RotateTokensArgs& args);

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_DRAFT_SLOTS_H_
