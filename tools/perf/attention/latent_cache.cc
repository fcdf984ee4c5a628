#include "quern/tools/perf/attention/latent_cache.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/write_kv.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {

Key LatentCacheKey() {
  return {"cache", "same",
          "same: of dtype; fp8: f8e4m3 with a ue8m0 scale for each 128"};
}

absl::Status ParseLatentCache(const Args& args, KvLayoutSpec& spec) {
  constexpr absl::string_view kChoices[] = {"same", "fp8"};
  QUERN_ASSIGN_OR_RETURN(const std::string cache,
                         args.Choice("cache", kChoices));
  if (cache == kChoices[0]) return absl::OkStatus();
  spec.dtype = DType::kF8E4M3;
  spec.scaling = KvScaling::kPerBlock;
  return absl::OkStatus();
}

absl::Status FillLatentBlocks(const KvLayout& layout, Executor& executor,
                              SetBuffer& sets) {
  WriteKvSpec spec;
  spec.kv = layout;
  QUERN_ASSIGN_OR_RETURN(const WriteKvPlan write, WriteKvPlan::Create(spec));
  // Rows are windows into one pool, a prime number of elements apart.
  constexpr int64_t kTokens = 256, kStride = 1021, kStarts = 65537;
  const int64_t latent = layout.v_head_dim();
  SetBuffer pool;
  QUERN_RETURN_IF_ERROR(
      pool.Create(1, (kStarts + kTokens * kStride + layout.head_dim()) *
                         static_cast<int64_t>(sizeof(float))));
  FillReals<float>(-1, 1, pool);
  const int64_t pages = sets.bytes() / layout.page_bytes();
  const int64_t slots = pages * layout.page_size();
  int64_t start = 0;
  for (int64_t set = 0; set < sets.sets(); ++set) {
    for (int64_t slot = 0; slot < slots; slot += kTokens) {
      std::vector<int64_t> to(
          static_cast<size_t>(std::min(kTokens, slots - slot)));
      std::iota(to.begin(), to.end(), slot);
      const auto count = static_cast<int64_t>(to.size());
      const float* from = pool.at<float>(0) + start;
      start = (start + 7919) % kStarts;
      WriteKvArgs args;
      args.k = TensorView<const float, 3>(from, {count, 1, latent},
                                          {kStride, latent, 1});
      args.v = TensorView<const float, 3>(
          from + latent, {count, 1, layout.head_dim() - latent},
          {kStride, latent, 1});
      args.slots = to;
      args.cache = KvCacheView(layout, pages, sets.at(set));
      QUERN_RETURN_IF_ERROR(write.CheckArgs(args));
      write.Execute(args, executor);
    }
  }
  return absl::OkStatus();
}

}  // namespace quern
