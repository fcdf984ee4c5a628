#include "quern/ops/parallel/mpi/mpi_communicator.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/parallel/rank_sum_kernels.h"

namespace quern {
namespace {

constexpr char kOp[] = "mpi_communicator";

// Copies `count` elements of a matrix, counted row by row from element `begin`,
// to or from dense memory.
enum class Direction { kPack, kUnpack };
void MovePiece(const AnyTensorView& x, int64_t begin, int64_t count,
               char* dense, Direction direction) {
  const auto size = static_cast<int64_t>(SizeOf(x.dtype()));
  const int64_t cols = x.extent(1);
  char* data = static_cast<char*>(x.mutable_data());
  while (count > 0) {
    const int64_t row = begin / cols, col = begin % cols;
    const int64_t n = std::min(cols - col, count);
    char* at = data + (row * x.stride(0) + col) * size;
    const auto bytes = static_cast<size_t>(n * size);
    if (direction == Direction::kPack) {
      std::memcpy(dense, at, bytes);
    } else {
      std::memcpy(at, dense, bytes);
    }
    dense += n * size;
    begin += n;
    count -= n;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<MpiCommunicator>> MpiCommunicator::Create(
    MPI_Comm parent, int64_t scratch_bytes) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) {
    return InvalidArgument(kOp, "MPI is not initialised; call MPI_Init_thread");
  }
  int rank = 0, size = 0;
  MPI_Comm_rank(parent, &rank);
  MPI_Comm_size(parent, &size);
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "ranks", size, 1, kMaxRanks));
  QUERN_RETURN_IF_ERROR(CheckRange(
      kOp, "scratch_bytes", scratch_bytes,
      std::max(kMinScratchBytes, int64_t{64} * size), kMaxScratchBytes));
  // Both buffers start as zeros, because padding elements are sent and summed
  // without having been written and must be valid numbers.
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer own,
                         AlignedBuffer::Create(scratch_bytes));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer all,
                         AlignedBuffer::Create(scratch_bytes));
  std::memset(own.data(), 0, own.bytes());
  std::memset(all.data(), 0, all.bytes());
  MPI_Comm comm;
  MPI_Comm_dup(parent, &comm);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_ARE_FATAL);
  return absl::WrapUnique(
      new MpiCommunicator(comm, rank, size, std::move(own), std::move(all)));
}

MpiCommunicator::MpiCommunicator(MPI_Comm comm, int rank, int size,
                                 AlignedBuffer own, AlignedBuffer all)
    : comm_(comm),
      rank_(rank),
      size_(size),
      kernels_(GetRankSumKernels()),
      own_(std::move(own)),
      all_(std::move(all)) {}

MpiCommunicator::~MpiCommunicator() { MPI_Comm_free(&comm_); }

void MpiCommunicator::Barrier() noexcept { MPI_Barrier(comm_); }

// Sums the `count` elements that each rank has in own_, and returns where the
// sum lies: in own_ or in all_.
const char* MpiCommunicator::SumPiece(int64_t count, int64_t size,
                                      RankSum sum) noexcept {
  std::array<const void*, kMaxRanks> in;
  char* own = own_.data<char>();
  const char* all = all_.data<char>();
  const auto sum_all = [&](int64_t elements, char* out) {
    for (int r = 0; r < size_; ++r) {
      in[static_cast<size_t>(r)] = all + r * elements * size;
    }
    sum(in.data(), static_cast<size_t>(size_), out,
        static_cast<size_t>(elements));
  };
  if (count * size <= kSmallBytes &&
      count * size * size_ <= static_cast<int64_t>(all_.bytes())) {
    const int bytes = static_cast<int>(count * size);
    MPI_Allgather(own, bytes, MPI_BYTE, all_.data(), bytes, MPI_BYTE, comm_);
    sum_all(count, own);
    return own;
  }
  const int64_t share = DivCeil(count, int64_t{size_});
  const int bytes = static_cast<int>(share * size);
  MPI_Alltoall(own, bytes, MPI_BYTE, all_.data(), bytes, MPI_BYTE, comm_);
  sum_all(share, own);
  MPI_Allgather(own, bytes, MPI_BYTE, all_.data(), bytes, MPI_BYTE, comm_);
  return all;
}

void MpiCommunicator::AllReduceSum(const AnyTensorView& x) noexcept {
  QUERN_DCHECK(x.rank() == 2 && (x.writable() || x.extent(0) == 0));
  QUERN_DCHECK(x.dtype() == DType::kF32 || x.dtype() == DType::kBF16 ||
               x.dtype() == DType::kF16);
  const int64_t total = x.extent(0) * x.extent(1);
  if (size_ == 1 || total == 0) return;
  const auto size = static_cast<int64_t>(SizeOf(x.dtype()));
  // The size of a piece is a multiple of the number of ranks, so that the
  // ranks' shares fit in all_.
  const int64_t room = static_cast<int64_t>(all_.bytes()) / size;
  const int64_t piece = room / size_ * size_;
  for (int64_t begin = 0; begin < total; begin += piece) {
    const int64_t count = std::min(piece, total - begin);
    MovePiece(x, begin, count, own_.data<char>(), Direction::kPack);
    const char* sum = SumPiece(count, size, kernels_.For(x.dtype()));
    MovePiece(x, begin, count, const_cast<char*>(sum), Direction::kUnpack);
  }
}

void MpiCommunicator::Broadcast(void* data, int64_t bytes, int root) noexcept {
  QUERN_DCHECK(0 <= root && root < size_);
  char* at = static_cast<char*>(data);
  for (; bytes > 0; bytes -= kMaxScratchBytes, at += kMaxScratchBytes) {
    MPI_Bcast(at, static_cast<int>(std::min(bytes, kMaxScratchBytes)), MPI_BYTE,
              root, comm_);
  }
}

void MpiCommunicator::GatherColumns(const AnyTensorView& shard,
                                    const AnyTensorView& out,
                                    const ColumnShards& shards,
                                    int receiver) noexcept {
  const bool receives = receiver == kEveryRank || receiver == rank_;
  const int64_t rows = shard.extent(0);
  if (size_ == 1) return CopyColumns(shard, out);
  const auto size = static_cast<int64_t>(SizeOf(shard.dtype()));
  // Sends pieces of rows by columns, of a size for which all_ has room from
  // every rank.
  const int64_t room = static_cast<int64_t>(all_.bytes()) / size_ / size;
  const int64_t max_cols = std::min(room, shards.width);
  const int64_t max_rows = std::min(room / max_cols, rows);
  const auto* from = static_cast<const char*>(shard.data());
  char* to = static_cast<char*>(out.mutable_data());
  for (int64_t col = 0; col < shards.width; col += max_cols) {
    const int64_t cols = std::min(max_cols, shards.width - col);
    // Bytes of the columns [col, col + cols) that rank r has.
    const auto width = [&](int r) {
      return static_cast<size_t>(
          std::clamp<int64_t>(shards.Count(r) - col, 0, cols) * size);
    };
    for (int64_t row = 0; row < rows; row += max_rows) {
      const int64_t count = std::min(max_rows, rows - row);
      for (int64_t i = 0; i < count && width(rank_) > 0; ++i) {
        std::memcpy(own_.data<char>() + i * cols * size,
                    from + ((row + i) * shard.stride(0) + col) * size,
                    width(rank_));
      }
      const int bytes = static_cast<int>(count * cols * size);
      if (receiver == kEveryRank) {
        MPI_Allgather(own_.data(), bytes, MPI_BYTE, all_.data(), bytes,
                      MPI_BYTE, comm_);
      } else {
        MPI_Gather(own_.data(), bytes, MPI_BYTE, all_.data(), bytes, MPI_BYTE,
                   receiver, comm_);
      }
      for (int r = 0; receives && r < size_; ++r) {
        for (int64_t i = 0; i < count && width(r) > 0; ++i) {
          std::memcpy(
              to + ((row + i) * out.stride(0) + shards.Begin(r) + col) * size,
              all_.data<char>() + (r * count + i) * cols * size, width(r));
        }
      }
    }
  }
}

}  // namespace quern
