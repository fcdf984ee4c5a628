#ifndef QUERN_EXAMPLES_GENERATE_RANK_GROUP_H_
#define QUERN_EXAMPLES_GENERATE_RANK_GROUP_H_

// What the ranks of a program settle among themselves between the steps of a
// model: whether all of them may go on, and what the leader alone knows.
//
// Agree, Share and Gather are collective: every rank makes the same calls in
// the same order. A rank that fails calls Agree with its status and returns
// what Agree returns, as the others do, so no rank waits for one that has gone.
// A rank that is killed by a signal makes no call any more: over MPI the
// launcher (mpirun) ends the other ranks, and ranks that are threads of one
// process end with it.

#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "quern/core/communicator.h"

namespace quern {

class RankGroup {
 public:
  // `communicator` is borrowed; null stands for a group of one rank. The rank
  // `leader` is the one that reads the prompt and prints.
  explicit RankGroup(Communicator* communicator, int leader = 0)
      : communicator_(communicator), leader_(leader) {}

  int rank() const {
    return communicator_ == nullptr ? 0 : communicator_->rank();
  }
  int size() const {
    return communicator_ == nullptr ? 1 : communicator_->size();
  }
  int leader() const { return leader_; }
  bool leads() const { return rank() == leader_; }

  // Returns OK if `own` is OK on every rank. Otherwise every rank gets the
  // status of the first rank that failed. Its message begins with
  // "rank 1 of 4: " unless that rank leads or all ranks failed.
  absl::Status Agree(const absl::Status& own);

  // Copies the leader's value to every rank.
  template <typename T>
  void Share(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (size() > 1) communicator_->Broadcast(&value, sizeof(T), leader_);
  }
  // Copies the leader's values to every rank's, of which there are as many.
  template <typename T>
  void Share(absl::Span<T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (size() > 1 && !values.empty()) {
      communicator_->Broadcast(values.data(),
                               static_cast<int64_t>(values.size() * sizeof(T)),
                               leader_);
    }
  }
  template <typename T>
  void Share(std::vector<T>& values) {
    auto count = static_cast<uint64_t>(values.size());
    Share(count);
    values.resize(count);
    Share(absl::MakeSpan(values));
  }

  // Returns every rank's value, in the order of ranks, on every rank.
  template <typename T>
  std::vector<T> Gather(const T& own) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(size()), own);
    if (size() > 1) communicator_->AllGather(&own, all.data(), sizeof(T));
    return all;
  }

 private:
  Communicator* communicator_;
  int leader_;
};

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_RANK_GROUP_H_
