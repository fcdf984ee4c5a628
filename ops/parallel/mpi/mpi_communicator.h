#ifndef QUERN_OPS_PARALLEL_MPI_MPI_COMMUNICATOR_H_
#define QUERN_OPS_PARALLEL_MPI_MPI_COMMUNICATOR_H_

// Ranks as processes, on one machine or many, over MPI.
//
//   MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
//   QUERN_ASSIGN_OR_RETURN(auto communicator,
//                          MpiCommunicator::Create(MPI_COMM_WORLD));
//   plan.Execute(x, y, scratch, *communicator, executor);
//
// MPI moves bytes; sums are made here, in the order of ranks, because MPI's own
// promise no order. An all-reduce exchanges shares, sums the own one and
// gathers the sums; of a small one everyone gets everything and sums it all.
// Matrices go through the communicator's scratch in pieces. Errors of MPI end
// the process.

#include <mpi.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/parallel/rank_sum_kernels.h"

namespace quern {

class MpiCommunicator final : public Communicator {
 public:
  // As ThreadCommunicator's.
  static constexpr int kMaxRanks = 1024;
  static constexpr int64_t kMinScratchBytes = 4096;
  static constexpr int64_t kMaxScratchBytes = int64_t{1} << 30;
  // A piece of at most so many bytes is summed by everyone.
  static constexpr int64_t kSmallBytes = 4096;

  // Called by all processes of `parent`, which is duplicated, with the same
  // scratch_bytes: of each of two buffers; at least 64 for each rank.
  // InvalidArgument: MPI is not initialised, more than kMaxRanks processes,
  // scratch_bytes out of range. ResourceExhausted if the memory cannot be had.
  static absl::StatusOr<std::unique_ptr<MpiCommunicator>> Create(
      MPI_Comm parent, int64_t scratch_bytes = int64_t{1} << 20);

  // Called by all processes, before MPI_Finalize.
  ~MpiCommunicator() override;

  // Instruction set of the sums, chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void Barrier() noexcept override;
  void AllReduceSum(const AnyTensorView& x) noexcept override;
  void Broadcast(void* data, int64_t bytes, int root) noexcept override;

 private:
  MpiCommunicator(MPI_Comm comm, int rank, int size, AlignedBuffer a,
                  AlignedBuffer b);
  void GatherColumns(const AnyTensorView& shard, const AnyTensorView& out,
                     const ColumnShards& shards,
                     int receiver) noexcept override;
  const char* SumPiece(int64_t count, int64_t size, RankSum sum) noexcept;

  MPI_Comm comm_;
  int rank_;
  int size_;
  RankSumKernels kernels_;
  AlignedBuffer own_;  // what this rank sends
  AlignedBuffer all_;  // what it gets; of equal size
};

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_MPI_MPI_COMMUNICATOR_H_
