#ifndef QUERN_OPS_PARALLEL_MPI_MPI_COMMUNICATOR_H_
#define QUERN_OPS_PARALLEL_MPI_MPI_COMMUNICATOR_H_

// Ranks as processes, on one machine or many, over MPI.
//
//   MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
//   QUERN_ASSIGN_OR_RETURN(auto communicator,
//                          MpiCommunicator::Create(MPI_COMM_WORLD));
//   plan.Execute(x, y, scratch, *communicator, executor);
//
// MPI only moves bytes. Sums are computed here, in the order of ranks, because
// MPI's own reductions promise no order. In a large all-reduce each rank sums
// one share and the sums are gathered; in a small one every rank receives
// everything and sums it all. Matrices pass through the communicator's scratch
// in pieces. An MPI error ends the process.

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
  // Same limit as ThreadCommunicator's.
  static constexpr int kMaxRanks = 1024;
  static constexpr int64_t kMinScratchBytes = 4096;
  static constexpr int64_t kMaxScratchBytes = int64_t{1} << 30;
  // Pieces of at most this many bytes are summed by every rank.
  static constexpr int64_t kSmallBytes = 4096;

  // Collective over `parent`, which is duplicated. All processes give the same
  // scratch_bytes, the size of each of two buffers; at least 64 for each rank.
  // InvalidArgument if MPI is not initialised, there are more than kMaxRanks
  // processes, or scratch_bytes is out of range. ResourceExhausted if the
  // memory cannot be allocated.
  static absl::StatusOr<std::unique_ptr<MpiCommunicator>> Create(
      MPI_Comm parent, int64_t scratch_bytes = int64_t{1} << 20);

  // Collective; must run before MPI_Finalize.
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
  AlignedBuffer all_;  // what this rank receives
};

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_MPI_MPI_COMMUNICATOR_H_
