#ifndef QUERN_OPS_RECURRENT_TESTING_SEQUENCES_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_TESTING_SEQUENCES_TESTUTIL_H_

#include <cstdint>
#include <vector>

#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/sequence_batch.h"

namespace quern {

using Doubles = std::vector<double>;

// Sequences as an engine has them.
struct Sequences {
  std::vector<int64_t> slots;
  std::vector<int32_t> starts;  // empty: decode
  std::vector<uint8_t> has_initial_state;
  // Drafts, as SequenceBatch has them.
  int64_t columns = 1;
  std::vector<int64_t> destinations = {};
  int64_t destination_columns = 0;
  std::vector<int32_t> accepted = {};

  SequenceBatch batch() const {
    SequenceBatch b;
    b.state_indices =
        DenseVector(slots.data(), static_cast<int64_t>(slots.size()));
    if (!starts.empty()) {
      b.query_start_loc =
          DenseVector(starts.data(), static_cast<int64_t>(starts.size()));
    }
    b.has_initial_state = has_initial_state;
    b.columns = columns;
    if (!destinations.empty()) {
      b.destination_indices = DenseVector(
          destinations.data(), static_cast<int64_t>(destinations.size()));
      b.destination_columns = destination_columns;
    }
    if (!accepted.empty()) {
      b.num_accepted_tokens =
          DenseVector(accepted.data(), static_cast<int64_t>(accepted.size()));
    }
    return b;
  }
};

// One sequence of all tokens, in slot 0.
inline Sequences Prompt(int64_t tokens) {
  return {{0}, {0, static_cast<int32_t>(tokens)}, {}};
}

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_TESTING_SEQUENCES_TESTUTIL_H_
