#ifndef QUERN_CORE_LIMITS_LIMITS_H_
#define QUERN_CORE_LIMITS_LIMITS_H_

// What this machine can do, measured: the upper bounds that tools/perf and
// examples/generate hold times against. Each is the best of several ways. It is
// sampled beside what is timed, because it drifts: DRAM flips between two
// speeds within minutes, the clock follows heat and neighbours.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/limits/limit_kinds.h"
#include "quern/core/limits/limits_kernels.h"
#include "quern/core/machine/cpu_info.h"

namespace quern {

// What one timed sample says: rate = amount / seconds.
struct LimitSample {
  double seconds = 0;
  double amount = 0;  // bytes, operations or cycles
  double rate() const { return amount / seconds; }
};

enum class LimitPages {
  kHuge,   // 2 MiB, where the kernel gives them
  kSmall,  // 4 KiB
};

class Limits {
 public:
  // Owns a buffer of 8x the last-level cache (256 MiB at least; 32 MiB under
  // ThreadSanitizer).
  // ResourceExhausted if there is no room.
  static absl::StatusOr<Limits> Create(const CpuInfo& cpu,
                                       LimitPages pages = LimitPages::kHuge);

  // Chooses the fastest way of a memory loop with these workers, by the median
  // of `rounds` rounds over all ways. Without it, that kind of loop runs in the
  // plainest way, which is no upper bound.
  void Calibrate(DramKind kind, int64_t rounds, Executor& executor);

  // The next quarter of the buffer: short, so that few samples are disturbed,
  // and long out of the caches. An untimed pass over the quarter before it
  // leaves the caches as a timed pass does: what others wrote is written back,
  // and what the loop itself leaves unwritten at its end it met at its start.
  LimitSample Dram(DramKind kind, Executor& executor);
  // Each worker reads its own bytes_per_worker, or its share of the buffer if
  // that is less, again and again.
  LimitSample CacheRead(int64_t bytes_per_worker, Executor& executor) const;
  // About a millisecond of dot products on every worker: the sum of the rates
  // of all workers, each by its own clock and the best of four parts, so that a
  // worker which starts late or loses its CPU does not lower the limit.
  LimitSample Peak(PeakKind kind, Executor& executor);
  // Cycles of the calling thread, by a chain of additions that take one each.
  static LimitSample Clock();

  // Bytes per worker that stay in its L2, and in its share of the L3; 0 if
  // there is no L3.
  int64_t l2_set_bytes() const { return l2_set_bytes_; }
  int64_t l3_set_bytes(int workers) const;

  // The way behind a limit, e.g. "nt stores, 4 streams, prefetch 2048 B".
  std::string Variant(DramKind kind) const;
  // The instructions behind a limit, e.g. "maddubs, madd, add".
  const char* Sequence(PeakKind kind) const { return Kernel(kind).sequence; }
  // "2M", "4K", or "mixed": where the buffer lies.
  absl::string_view pages() const { return pages_; }
  const char* target() const { return peaks_.target; }

 private:
  // The best way of one kind.
  struct Way {
    DramKind kind;
    StreamWay way;
  };

  Limits() = default;
  const PeakKernel& Kernel(PeakKind kind) const;
  StreamWay WayOf(DramKind kind) const;
  LimitSample Dram(DramKind kind, StreamWay way, Executor& executor);

  StreamKernels streams_ = {};
  PeakKernels peaks_ = {};
  AlignedBuffer buffer_;
  std::array<size_t, 4> steps_ = {};  // of Peak; 0: not yet calibrated
  int64_t l2_set_bytes_ = 0;
  int64_t l3_bytes_ = 0;
  size_t next_part_ = 0;  // of Dram
  std::vector<Way> ways_;
  std::string pages_;
};

// "2M", "4K" or "mixed", by the share of a filled buffer in huge pages.
absl::string_view PagesName(const AlignedBuffer& buffer);

}  // namespace quern

#endif  // QUERN_CORE_LIMITS_LIMITS_H_
