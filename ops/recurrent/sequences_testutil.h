#ifndef QUERN_OPS_RECURRENT_SEQUENCES_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_SEQUENCES_TESTUTIL_H_

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

  SequenceBatch batch() const {
    SequenceBatch b;
    b.state_indices =
        DenseVector(slots.data(), static_cast<int64_t>(slots.size()));
    if (!starts.empty()) {
      b.query_start_loc =
          DenseVector(starts.data(), static_cast<int64_t>(starts.size()));
    }
    b.has_initial_state = has_initial_state;
    return b;
  }
};

// One sequence of all tokens, in slot 0.
inline Sequences Prompt(int64_t tokens) {
  return {{0}, {0, static_cast<int32_t>(tokens)}, {}};
}

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_SEQUENCES_TESTUTIL_H_
