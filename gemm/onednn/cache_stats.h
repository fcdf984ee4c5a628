#ifndef QUERN_GEMM_ONEDNN_CACHE_STATS_H_
#define QUERN_GEMM_ONEDNN_CACHE_STATS_H_

#include <cstdint>

namespace quern {

// Look-ups of a plan's generated kernels since Create. A miss generates code,
// unless oneDNN still has it from another plan of the same shape.
struct OneDnnCacheStats {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t evictions = 0;  // kernels dropped to keep the cache bounded
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_CACHE_STATS_H_
