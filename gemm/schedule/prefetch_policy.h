#ifndef QUERN_GEMM_SCHEDULE_PREFETCH_POLICY_H_
#define QUERN_GEMM_SCHEDULE_PREFETCH_POLICY_H_

// Private: how few rows read their weights, where a CPU core reads DRAM faster
// in one way than in another. No bit of a result depends on it.

#include <cstdint>

#include "quern/core/machine/cpu_core.h"
#include "quern/gemm/kernels/tile.h"

namespace quern {

// Has tiles of few rows read one panel at a time where the core reads DRAM
// fastest in one stream: Zen 4's two cores read 65 GB/s in one, 46 in two, 60
// in four and 55 in eight. From the caches one stream is slower, because the
// few sums wait for each other (1 MiB of bf16: 10 us in eight, 30 in one), so
// small layers keep theirs (2026).
inline void ReadInOneStream(CpuCore core, int64_t layer_bytes,
                            TileTable& table) {
  constexpr int64_t kSmall = 4 << 20;
  if (core != CpuCore::kZen4 || layer_bytes < kSmall) return;
  table.panels = table.panels_in_one_stream;
}

// How far tiles of so many rows that decode fetch ahead in the stream that they
// read.
//
// Zen 4's own prefetchers follow the stream of one row at nearly the speed of
// DRAM. They do not where a kernel fetches far ahead, because a core's fetches
// have no more than 24 buffers. Rows that compute for longer than DRAM takes
// (exact rows, IQ4 on AVX2) are alike with both distances. Four rows on Zen 4,
// and one row on Emerald Rapids, read faster with far fetches. Figures:
// docs/performance_notes.md, "How DRAM is read by few rows".
constexpr int64_t FusedAheadBytes(CpuCore core, int64_t rows) {
  return core == CpuCore::kZen4 && rows == 1 ? 512 : 8 << 10;
}

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_PREFETCH_POLICY_H_
