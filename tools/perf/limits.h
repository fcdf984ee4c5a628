#ifndef QUERN_TOOLS_PERF_LIMITS_H_
#define QUERN_TOOLS_PERF_LIMITS_H_

// What this machine can do, measured: the yardsticks of every figure that the
// driver prints. Sampled beside the case, because they drift: DRAM flips
// between two speeds within minutes, the clock follows heat and neighbours.

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/aligned_buffer.h"
#include "core/cpu_info.h"
#include "core/executor.h"
#include "tools/perf/limits_kernels.h"
#include "tools/perf/op.h"

namespace quern {

// What one timed sample says: rate = amount / seconds.
struct LimitSample {
  double seconds = 0;
  double amount = 0;  // bytes or operations
};

class Limits {
 public:
  // Owns a buffer of 8x the last-level cache (256 MiB at least), on huge pages
  // where the kernel gives them. ResourceExhausted if there is no room.
  static absl::StatusOr<Limits> Create(const CpuInfo& cpu);

  // Chooses the fastest variant of the read and the copy loop with these
  // workers, by the best of `rounds`. Before the first sample of kRead or
  // kCopy.
  void Calibrate(int64_t rounds, Executor& executor);

  // The next eighth of the buffer: short, so that few samples are disturbed,
  // and long out of the caches. Bytes of a copy: read plus written.
  LimitSample Dram(DramKind kind, Executor& executor);
  // Repeated reads, by each worker of its own bytes_per_worker.
  LimitSample CacheRead(int64_t bytes_per_worker, Executor& executor) const;
  // About a millisecond of dot products on every worker.
  LimitSample Peak(PeakKind kind, Executor& executor);

  // Bytes per worker that stay in its L2, and in its share of the L3; 0 if
  // there is no L3.
  int64_t l2_set_bytes() const { return l2_set_bytes_; }
  int64_t l3_set_bytes(int workers) const;

  // The loop behind a limit, e.g. "prefetch 2048 B ahead".
  std::string Variant(DramKind kind) const;
  // "2M", "4K", or "mixed": where the buffer lies.
  absl::string_view pages() const { return pages_; }
  const char* target() const { return kernels_.target; }

 private:
  Limits() = default;

  LimitKernels kernels_ = {};
  AlignedBuffer buffer_;
  AlignedBuffer operands_[3];
  int64_t steps_[3] = {0, 0, 0};  // of Peak; 0: not yet calibrated
  int64_t l2_set_bytes_ = 0;
  int64_t l3_bytes_ = 0;
  size_t next_part_ = 0;  // of Dram
  size_t read_prefetch_ = 0;
  size_t copy_prefetch_ = 0;
  std::string pages_;
};

// "2M", "4K" or "mixed", by the share of a filled buffer in huge pages.
absl::string_view PagesName(const AlignedBuffer& buffer);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LIMITS_H_
