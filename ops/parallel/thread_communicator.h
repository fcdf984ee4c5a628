#ifndef QUERN_OPS_PARALLEL_THREAD_COMMUNICATOR_H_
#define QUERN_OPS_PARALLEL_THREAD_COMMUNICATOR_H_

// Ranks as threads of one process.
//
//   QUERN_ASSIGN_OR_RETURN(auto group, ThreadCommunicator::CreateGroup(4));
//   // On thread r, and on no other:
//   plan.Execute(x, y, scratch, *group[r], executor_of_rank_r);
//
// Ranks read each other's memory in place, between two barriers. Small messages
// are copied through memory of the group, which takes one barrier. A waiting
// rank spins and soon yields its core between looks. After kSpin, which exceeds
// the usual difference between ranks with equal shares, it sleeps in the
// kernel. If the group has more ranks than this process has cores, it yields at
// once.

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/core/communicator.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/parallel/rank_sum_kernels.h"

namespace quern {

class ThreadCommunicator final : public Communicator {
 public:
  static constexpr int kMaxRanks = 64;
  static constexpr std::chrono::microseconds kSpin{100};
  // An all-reduce of at most this many bytes goes through memory of the group.
  // Larger ones work in place, which needs two more barriers but moves fewer
  // cache lines between cores: 2.7 us against 4.4 us for 8 KiB (2 ranks, Zen 4,
  // 2026).
  static constexpr int64_t kSmallBytes = 1024;

  // Creates one communicator for each rank, in order. They share memory that
  // the last of them frees. InvalidArgument unless 1 <= ranks <= kMaxRanks;
  // ResourceExhausted if the memory cannot be allocated.
  static absl::StatusOr<std::vector<std::unique_ptr<ThreadCommunicator>>>
  CreateGroup(int ranks);

  ~ThreadCommunicator() override;

  // Instruction set of the sums, chosen at CreateGroup, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  int rank() const override { return rank_; }
  int size() const override;
  void Barrier() noexcept override;
  void AllReduceSum(const AnyTensorView& x) noexcept override;
  void Broadcast(void* data, int64_t bytes, int root) noexcept override;

 private:
  struct Group;
  ThreadCommunicator(std::shared_ptr<Group> group, int rank);
  void GatherColumns(const AnyTensorView& shard, const AnyTensorView& out,
                     const ColumnShards& shards,
                     int receiver) noexcept override;
  void Publish(const AnyTensorView& x) noexcept;
  void SmallSum(const AnyTensorView& x) noexcept;

  std::shared_ptr<Group> group_;
  int rank_;
  RankSumKernels kernels_;
  int parity_ = 0;  // half of the group's memory to use next
};

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_THREAD_COMMUNICATOR_H_
