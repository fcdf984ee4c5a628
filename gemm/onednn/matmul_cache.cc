#include "quern/gemm/onednn/matmul_cache.h"

#include <algorithm>
#include <cstddef>
#include <mutex>

#include "absl/functional/function_ref.h"

namespace quern {

MatmulCache::Kernel MatmulCache::Touch(const MatmulKey& key) {
  const auto found =
      std::find_if(kernels_.begin(), kernels_.end(),
                   [&](const auto& entry) { return entry.first == key; });
  if (found == kernels_.end()) return nullptr;
  kernels_.splice(kernels_.begin(), kernels_, found);
  return found->second;
}

MatmulCache::Kernel MatmulCache::Find(const MatmulKey& key,
                                      absl::FunctionRef<Kernel()> build) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Kernel kernel = Touch(key)) {
      ++stats_.hits;
      return kernel;
    }
    ++stats_.misses;
  }
  Kernel built = build();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Kernel kernel = Touch(key)) return kernel;
  if (kernels_.size() == capacity_) {
    kernels_.pop_back();
    ++stats_.evictions;
  }
  kernels_.emplace_front(key, built);
  return built;
}

OneDnnCacheStats MatmulCache::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

size_t MatmulCache::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kernels_.size();
}

}  // namespace quern
