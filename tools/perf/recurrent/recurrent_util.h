#ifndef QUERN_TOOLS_PERF_RECURRENT_RECURRENT_UTIL_H_
#define QUERN_TOOLS_PERF_RECURRENT_RECURRENT_UTIL_H_

// What the operators on pools of states share: sequences of equal length in
// slots of no order, dense tensors, and which units of work a check looks at.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/sequence_batch.h"

namespace quern {

// Where the tokens of a sequence leave their states: all in its slot; the last
// in its slot and the others nowhere; each in a slot of its own.
enum class DraftStates : uint8_t { kInPlace, kLast, kEach };

// `batch` sequences of `len` tokens, each with slots of its own.
class EqualSequences {
 public:
  EqualSequences(int64_t batch, int64_t len,
                 DraftStates drafts = DraftStates::kInPlace)
      : batch_(batch), len_(len), drafts_(drafts) {
    for (int64_t s = 0; s < slots(); ++s) slots_.push_back(s);
    uint64_t state = 1;
    for (size_t i = slots_.size(); i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(slots_[i - 1], slots_[(state >> 33) % i]);
    }
    for (int64_t s = 0; s <= batch; ++s) starts_.push_back(s * len);
    accepted_.assign(static_cast<size_t>(batch), len);
  }
  int64_t batch() const { return batch_; }
  int64_t len() const { return len_; }
  int64_t tokens() const { return batch_ * len_; }
  DraftStates drafts() const { return drafts_; }
  // Slots in all, and how many of them a sequence has.
  int64_t slots() const { return batch_ * columns(); }
  int64_t columns() const { return drafts_ == DraftStates::kEach ? len_ : 1; }
  // Where sequence s begins, and where it leaves its last state.
  int64_t slot(int64_t s) const {
    return slots_[static_cast<size_t>((s + 1) * columns() - 1)];
  }

  SequenceBatch View() const {
    SequenceBatch view;
    view.state_indices = DenseVector(slots_.data(), slots());
    view.columns = columns();
    if (drafts_ == DraftStates::kEach) {
      view.num_accepted_tokens = DenseVector(accepted_.data(), batch_);
    } else if (drafts_ == DraftStates::kLast) {
      view.destination_indices = view.state_indices;
      view.destination_columns = 1;
    }
    if (len_ > 1) {
      view.query_start_loc = DenseVector(starts_.data(), batch_ + 1);
    }
    return view;
  }

 private:
  int64_t batch_, len_;
  DraftStates drafts_;
  std::vector<int64_t> slots_, starts_, accepted_;
};

template <size_t kRank>
AnyTensorView DenseView(DType dtype, void* data,
                        const std::array<int64_t, kRank>& extents) {
  AnyTensorView::Dims all{}, strides{};
  int64_t stride = 1;
  for (size_t d = kRank; d-- > 0;) {
    all[d] = extents[d];
    strides[d] = stride;
    stride *= extents[d];
  }
  return AnyTensorView(dtype, data, static_cast<int>(kRank), all, strides);
}

// Sum of n (n + 1) / 2 over the chunks of a sequence, n tokens in each: how
// many pairs of a token with itself or an earlier one of its chunk there are.
inline double PairsOfChunks(int64_t len, int64_t chunk) {
  const auto pairs = [](int64_t n) {
    return static_cast<double>(n) * static_cast<double>(n + 1) / 2;
  };
  return static_cast<double>(len / chunk) * pairs(chunk) + pairs(len % chunk);
}

// Every how many units a check looks, so that all of them do at most 2^28 steps
// of `steps` a unit: an oracle in double is slow.
inline int64_t CheckEvery(int64_t units, int64_t steps) {
  return std::max<int64_t>(1, units * steps / (int64_t{1} << 28));
}

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_RECURRENT_RECURRENT_UTIL_H_
