#include "quern/ops/parallel/thread_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hwy/cache_control.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/parallel/rank_sum_kernels.h"

namespace quern {
namespace {

// Chunks begin at multiples of this many elements, so that in a dense matrix no
// two ranks write to one cache line.
constexpr int64_t kChunkUnit = 64;

// Rounds of 64 pauses before a waiting rank yields its core. One round takes a
// microsecond or a few, so a barrier among running ranks ends before. Next to a
// process that keeps one of two cores busy, yielding makes a barrier of two
// ranks take 33 us in place of 210 us (Zen 4, 2026).
constexpr int kRoundsBeforeYield = 8;

// Calls fn(row, column, elements) for the pieces of rows that make up the
// elements [begin, end) of a matrix, counted row by row.
template <typename Fn>
void ForEachPiece(int64_t begin, int64_t end, int64_t cols, const Fn& fn) {
  while (begin < end) {
    const int64_t col = begin % cols;
    const int64_t count = std::min(cols - col, end - begin);
    fn(begin / cols, col, count);
    begin += count;
  }
}

}  // namespace

struct ThreadCommunicator::Group {
  explicit Group(int size) : ranks(size), may_spin(size <= AvailableCpus()) {}

  // What one rank publishes to the others between two barriers.
  struct alignas(64) Slot {
    const char* data = nullptr;
    int64_t row_bytes = 0;
  };

  const int ranks;
  const bool may_spin;  // otherwise yield at once: cores are too few
  std::array<Slot, kMaxRanks> slots;
  AlignedBuffer small;  // [2, ranks, kSmallBytes]

  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
  std::mutex mutex;  // held while phase changes
  std::condition_variable next_phase;

  char* Small(int parity, int rank) {
    return small.data<char>() + (parity * ranks + rank) * kSmallBytes;
  }

  void Wait() {
    // The phase cannot end before this rank has arrived.
    const uint32_t now = phase.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks) {
      arrived.store(0, std::memory_order_relaxed);
      {
        const std::lock_guard<std::mutex> lock(mutex);
        phase.store(now + 1, std::memory_order_release);
      }
      next_phase.notify_all();
      return;
    }
    const auto over = [this, now] {
      return phase.load(std::memory_order_acquire) != now;
    };
    const auto end = std::chrono::steady_clock::now() + kSpin;
    for (int round = 0; round == 0 || std::chrono::steady_clock::now() < end;
         ++round) {
      for (int i = 0; i < 64; ++i) {
        if (over()) return;
        if (may_spin) hwy::Pause();
      }
      // The rank that is late may be waiting for this core.
      if (!may_spin || round >= kRoundsBeforeYield) std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex);
    next_phase.wait(lock, over);
  }
};

absl::StatusOr<std::vector<std::unique_ptr<ThreadCommunicator>>>
ThreadCommunicator::CreateGroup(int ranks) {
  QUERN_RETURN_IF_ERROR(
      CheckRange("thread_communicator", "ranks", ranks, 1, kMaxRanks));
  const auto group = std::make_shared<Group>(ranks);
  QUERN_ASSIGN_OR_RETURN(group->small,
                         AlignedBuffer::Create(2 * ranks * kSmallBytes));
  std::vector<std::unique_ptr<ThreadCommunicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank) {
    communicators.push_back(
        absl::WrapUnique(new ThreadCommunicator(group, rank)));
  }
  return communicators;
}

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<Group> group, int rank)
    : group_(std::move(group)), rank_(rank), kernels_(GetRankSumKernels()) {}

ThreadCommunicator::~ThreadCommunicator() = default;

int ThreadCommunicator::size() const { return group_->ranks; }

void ThreadCommunicator::Barrier() noexcept { group_->Wait(); }

void ThreadCommunicator::Publish(const AnyTensorView& x) noexcept {
  Group::Slot& slot = group_->slots[static_cast<size_t>(rank_)];
  slot.data = static_cast<const char*>(x.data());
  slot.row_bytes = x.RowStride() * static_cast<int64_t>(SizeOf(x.dtype()));
}

// Writing to this half of the memory is safe: it was last read two calls ago,
// and every rank has passed the barrier of the last call since.
void ThreadCommunicator::SmallSum(const AnyTensorView& x) noexcept {
  const auto size = static_cast<int64_t>(SizeOf(x.dtype()));
  const int64_t row_bytes = x.extent(1) * size;
  char* data = static_cast<char*>(x.mutable_data());
  char* mine = group_->Small(parity_, rank_);
  for (int64_t i = 0; i < x.extent(0); ++i) {
    std::memcpy(mine + i * row_bytes, data + i * x.stride(0) * size,
                static_cast<size_t>(row_bytes));
  }
  group_->Wait();
  const RankSum sum = kernels_.For(x.dtype());
  std::array<const void*, kMaxRanks> in;
  for (int64_t i = 0; i < x.extent(0); ++i) {
    for (int r = 0; r < group_->ranks; ++r) {
      in[static_cast<size_t>(r)] = group_->Small(parity_, r) + i * row_bytes;
    }
    sum(in.data(), static_cast<size_t>(group_->ranks),
        data + i * x.stride(0) * size, static_cast<size_t>(x.extent(1)));
  }
  parity_ = 1 - parity_;
}

void ThreadCommunicator::AllReduceSum(const AnyTensorView& x) noexcept {
  QUERN_DCHECK(x.rank() == 2 && (x.writable() || x.extent(0) == 0));
  QUERN_DCHECK(x.dtype() == DType::kF32 || x.dtype() == DType::kBF16 ||
               x.dtype() == DType::kF16);
  const int ranks = group_->ranks;
  const int64_t cols = x.extent(1);
  const int64_t total = x.extent(0) * cols;
  const auto size = static_cast<int64_t>(SizeOf(x.dtype()));
  if (ranks == 1 || total == 0) return;
  if (total * size <= kSmallBytes) return SmallSum(x);

  Publish(x);
  group_->Wait();
  // Rank r computes the elements [r * chunk, (r + 1) * chunk) of the sum in its
  // own x, which no other rank reads or writes in that range meanwhile.
  const int64_t chunk = RoundUp(DivCeil(total, int64_t{ranks}), kChunkUnit);
  const auto begin = [&](int r) { return std::min(r * chunk, total); };
  const auto at = [&](int r, int64_t row, int64_t col) {
    const Group::Slot& slot = group_->slots[static_cast<size_t>(r)];
    return slot.data + row * slot.row_bytes + col * size;
  };
  char* data = static_cast<char*>(x.mutable_data());
  const auto mine = [&](int64_t row, int64_t col) {
    return data + (row * x.stride(0) + col) * size;
  };
  const RankSum sum = kernels_.For(x.dtype());
  ForEachPiece(begin(rank_), begin(rank_ + 1), cols,
               [&](int64_t row, int64_t col, int64_t count) {
                 std::array<const void*, kMaxRanks> in;
                 for (int r = 0; r < ranks; ++r) {
                   in[static_cast<size_t>(r)] = at(r, row, col);
                 }
                 sum(in.data(), static_cast<size_t>(ranks), mine(row, col),
                     static_cast<size_t>(count));
               });
  group_->Wait();
  for (int r = 0; r < ranks; ++r) {
    if (r == rank_) continue;
    ForEachPiece(begin(r), begin(r + 1), cols,
                 [&](int64_t row, int64_t col, int64_t count) {
                   std::memcpy(mine(row, col), at(r, row, col),
                               static_cast<size_t>(count * size));
                 });
  }
  group_->Wait();
}

void ThreadCommunicator::Broadcast(void* data, int64_t bytes,
                                   int root) noexcept {
  QUERN_DCHECK(0 <= root && root < group_->ranks);
  if (group_->ranks == 1 || bytes == 0) return;
  if (rank_ == root) {
    group_->slots[static_cast<size_t>(rank_)].data =
        static_cast<const char*>(data);
  }
  group_->Wait();
  if (rank_ != root) {
    std::memcpy(data, group_->slots[static_cast<size_t>(root)].data,
                static_cast<size_t>(bytes));
  }
  group_->Wait();
}

void ThreadCommunicator::GatherColumns(const AnyTensorView& shard,
                                       const AnyTensorView& out,
                                       const ColumnShards& shards,
                                       int receiver) noexcept {
  const bool receives = receiver == kEveryRank || receiver == rank_;
  const int64_t rows = shard.extent(0);
  const auto size = static_cast<int64_t>(SizeOf(shard.dtype()));
  Publish(shard);
  group_->Wait();
  for (int r = 0; receives && r < group_->ranks; ++r) {
    const auto bytes = static_cast<size_t>(shards.Count(r) * size);
    const Group::Slot& slot = group_->slots[static_cast<size_t>(r)];
    char* to = static_cast<char*>(out.mutable_data()) + shards.Begin(r) * size;
    if (bytes == 0 || to == slot.data) continue;
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + i * out.stride(0) * size, slot.data + i * slot.row_bytes,
                  bytes);
    }
  }
  group_->Wait();
}

}  // namespace quern
