#ifndef QUERN_OPS_RECURRENT_SEQUENCE_BATCH_H_
#define QUERN_OPS_RECURRENT_SEQUENCE_BATCH_H_

// Which tokens of a step belong to which sequence, and where the state of each
// sequence is kept. Every operator of this folder takes one:
//
//   sequence s has the tokens [query_start_loc[s], query_start_loc[s + 1])
//   and the state in slot state_indices[s]
//
// Without query_start_loc every token is a sequence of its own: a decode step.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"

namespace quern {

struct SequenceBatch {
  IndexView state_indices;    // [sequences]
  IndexView query_start_loc;  // [sequences + 1], or empty
  // One byte a sequence. Zero: the sequence begins with a state of zeros, and
  // what its slot held is not read. Empty: every sequence goes on from its
  // slot.
  absl::Span<const uint8_t> has_initial_state;
  // What refusals call state_indices.
  const char* indices_name = "state_indices";

  int64_t sequences() const { return state_indices.size(); }
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
// - has_initial_state is empty or has one byte for each sequence.
//
// Allocates nothing where it accepts. Cost: a few passes over the indices where
// they lie within 2^15 of the smallest, two more for each further 2^15 slots
// that have any.
absl::Status CheckSequences(absl::string_view op, const SequenceBatch& batch,
                            int64_t tokens, int64_t slots, int64_t null_slot);

// InvalidArgument names the list of `batch` that shares memory with `view`,
// which the operator calls `field` and writes: lists are checked once and read
// again while the operator writes.
absl::Status CheckBatchApart(absl::string_view op, const SequenceBatch& batch,
                             absl::string_view field,
                             const AnyTensorView& view);

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_SEQUENCE_BATCH_H_
