#ifndef QUERN_GEMM_ONEDNN_MATMUL_CACHE_H_
#define QUERN_GEMM_ONEDNN_MATMUL_CACHE_H_

// The kernels that a plan has had generated: bounded, least recently used out
// first, for any number of threads at once.

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/functional/function_ref.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace quern {

// What oneDNN generates code for, beside what a plan has fixed.
struct MatmulKey {
  int64_t rows;
  int64_t cols;
  int64_t k;
  int64_t lda;
  int64_t ldc;

  bool operator==(const MatmulKey& o) const {
    return rows == o.rows && cols == o.cols && k == o.k && lda == o.lda &&
           ldc == o.ldc;
  }
};

struct MatmulKernel {
  dnnl::matmul primitive;
  dnnl::memory::desc a, b, c, scratch;
};

// Look-ups of a layer's generated kernels since Create. A miss generates code,
// unless oneDNN still has it from another layer of the same shape.
struct OneDnnCacheStats {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t evictions = 0;  // kernels dropped to keep the cache bounded
};

class MatmulCache {
 public:
  using Kernel = std::shared_ptr<const MatmulKernel>;

  explicit MatmulCache(size_t capacity) : capacity_(capacity) {}

  // The kernel of `key`, from `build` if it is not here. `build` runs without
  // the lock: who finds his kernel never waits for another one to be generated.
  // Two threads that miss the same key may both build; one result is kept.
  // Exceptions of `build` pass through and leave no entry.
  Kernel Find(const MatmulKey& key, absl::FunctionRef<Kernel()> build);

  OneDnnCacheStats stats() const;
  size_t size() const;

 private:
  // With the lock held: the kernel of `key`, now the newest, or null.
  Kernel Touch(const MatmulKey& key);

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::list<std::pair<MatmulKey, Kernel>> kernels_;  // newest first
  OneDnnCacheStats stats_;
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_MATMUL_CACHE_H_
