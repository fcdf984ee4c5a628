#ifndef QUERN_OPS_RECURRENT_SEQUENCE_BATCH_H_
#define QUERN_OPS_RECURRENT_SEQUENCE_BATCH_H_

// Which tokens of a step belong to which sequence, and where the state of each
// sequence is kept. Every operator of this folder takes one:
//
//   sequence s has the tokens [query_start_loc[s], query_start_loc[s + 1])
//   and the state in slot state_indices[s]
//
// Without query_start_loc every token is a sequence of its own: a decode step.
//
// Speculation needs the state after each of several draft tokens, because the
// next step goes on from the last token that was accepted. Slots then come by
// rows, and a rollback is the choice of a slot:
//
//   the sequence begins from   state_indices[s, max(accepted, 1) - 1]
//   token i leaves its state   in destination_indices[s, i]
//
// where accepted = num_accepted_tokens[s], or 1 without them. Destinations are
// state_indices themselves unless they are given. A row of destinations with a
// single slot takes the state after the last token. A destination null_slot
// keeps no state: a step that repeats the accepted tokens of the one before and
// names a slot after the last of them alone writes one state, whatever the
// number of its drafts.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"

namespace quern {

struct SequenceBatch {
  IndexView state_indices;    // [sequences], or [sequences, columns]
  IndexView query_start_loc;  // [sequences + 1], or empty
  // One byte a sequence. Zero: the sequence begins with a state of zeros, and
  // what its slot held is not read. Empty: every sequence goes on from its
  // slot.
  absl::Span<const uint8_t> has_initial_state;
  // The name of state_indices in refusals.
  const char* indices_name = "state_indices";

  int64_t columns = 1;  // slots of a sequence in state_indices
  // [sequences, destination_columns], or empty.
  IndexView destination_indices;
  int64_t destination_columns = 0;
  IndexView num_accepted_tokens;  // [sequences], or empty
  // The name of destination_indices in refusals.
  const char* destinations_name = "destination_indices";

  int64_t sequences() const { return state_indices.size() / columns; }
  // Whether states go elsewhere than to where they came from. Otherwise a
  // sequence is token by token in its slot, or goes by chunks.
  bool drafts() const { return columns > 1 || destination_indices.size() > 0; }
  int64_t accepted(int64_t s) const {
    return num_accepted_tokens.size() == 0 ? 1 : num_accepted_tokens[s];
  }
  // The slot that sequence s begins from.
  int64_t source(int64_t s) const {
    if (columns == 1) return state_indices[s];
    const int64_t kept = accepted(s);
    return state_indices[s * columns + (kept > 1 ? kept - 1 : 0)];
  }
  // The slot of the state after token i of sequence s, or null_slot. There are
  // drafts, and destinations for the token.
  int64_t destination(int64_t s, int64_t i, int64_t null_slot) const {
    if (destination_indices.size() == 0) return state_indices[s * columns + i];
    if (destination_columns > 1) {
      return destination_indices[s * destination_columns + i];
    }
    return begin(s) + i + 1 == end(s) ? destination_indices[s] : null_slot;
  }
  int64_t begin(int64_t s) const {
    return query_start_loc.size() == 0 ? s : query_start_loc[s];
  }
  int64_t end(int64_t s) const {
    return query_start_loc.size() == 0 ? s + 1 : query_start_loc[s + 1];
  }
  bool fresh(int64_t s) const {
    return !has_initial_state.empty() &&
           has_initial_state[static_cast<size_t>(s)] == 0;
  }
};

// InvalidArgument names the operator `op` and the index, which it calls as
// batch.indices_name says, unless
//
// - each state index is in [0, slots) or is null_slot,
// - no slot is named twice, but for null_slot,
// - query_start_loc is empty and there is a sequence for each of the tokens, or
//   it does not decrease, begins at 0 or above and ends at `tokens` or below;
//   the tokens outside of all sequences are padding,
// - has_initial_state is empty or has one byte for each sequence,
// - num_accepted_tokens is empty or has a number for each sequence, from 0 to
//   `places`, which is the number of slots in a row of state_indices unless
//   the operator keeps several states in a slot,
// - every list of numbers that is not empty has memory.
//
// Where there are drafts, slots are those that the batch takes: of each
// sequence that has tokens, the slot that it begins from and, if that is not
// null_slot, the destinations of its tokens. Then
//
// - each sequence has a destination for each token, or one for the last,
// - no slot but null_slot is a destination twice, or is a destination of one
//   sequence and where another begins; several may begin from the same slot.
//
// Allocates nothing where it accepts. Cost: a few passes over the indices where
// they lie within 2^15 of the smallest, two more for each further 2^15 slots
// that have any.
absl::Status CheckSequences(absl::string_view op, const SequenceBatch& batch,
                            int64_t tokens, int64_t slots, int64_t null_slot,
                            int64_t places = 0);

// InvalidArgument names the list of `batch` that shares memory with `view`,
// which the operator calls `field` and writes: lists are checked once and read
// again while the operator writes.
absl::Status CheckBatchApart(absl::string_view op, const SequenceBatch& batch,
                             absl::string_view field,
                             const AnyTensorView& view);

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_SEQUENCE_BATCH_H_
