#ifndef QUERN_TOOLS_PERF_ATTENTION_LATENT_CACHE_H_
#define QUERN_TOOLS_PERF_ATTENTION_LATENT_CACHE_H_

// The cache of the cases of latent attention: of floats, or f8e4m3 with a scale
// for each block of a latent.

#include "absl/status/status.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/executor.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op_util.h"

namespace quern {

// The key "cache".
Key LatentCacheKey();

// Sets the dtype and the scaling of `spec` where the key asks for fp8.
absl::Status ParseLatentCache(const Args& args, KvLayoutSpec& spec);

// Fills every set with pages of latents in [-1, 1). The layout has one head and
// KvScaling::kPerBlock.
absl::Status FillLatentBlocks(const KvLayout& layout, Executor& executor,
                              SetBuffer& sets);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ATTENTION_LATENT_CACHE_H_
