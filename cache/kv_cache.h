#ifndef QUERN_CACHE_KV_CACHE_H_
#define QUERN_CACHE_KV_CACHE_H_

// Owns the memory of a paged KV cache: `num_layers` times `num_pages` pages, in
// huge pages where the system gives them.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/aligned_buffer.h"

namespace quern {

class KvCache {
 public:
  // No layers.
  KvCache() = default;

  // InvalidArgument if layout is empty, num_pages < 0, num_layers < 0 or the
  // bytes overflow; ResourceExhausted if the memory cannot be had. What the
  // pages contain is unspecified: nothing reads a slot before it was written.
  static absl::StatusOr<KvCache> Create(const KvLayout& layout,
                                        int64_t num_pages, int64_t num_layers);

  const KvLayout& layout() const { return layout_; }
  int64_t num_pages() const { return num_pages_; }
  int64_t num_layers() const { return num_layers_; }

  // 0 <= layer < num_layers(). Valid as long as this cache, moves included.
  KvCacheView Layer(int64_t layer);

  size_t bytes() const { return memory_.bytes(); }
  // How many of the bytes lie in huge pages now; see
  // AlignedBuffer::HugePageBytes.
  size_t HugePageBytes() const { return memory_.HugePageBytes(); }

 private:
  KvCache(const KvLayout& layout, int64_t num_pages, int64_t num_layers,
          AlignedBuffer memory)
      : layout_(layout),
        num_pages_(num_pages),
        num_layers_(num_layers),
        memory_(std::move(memory)) {}

  KvLayout layout_;
  int64_t num_pages_ = 0;
  int64_t num_layers_ = 0;
  AlignedBuffer memory_;
};

}  // namespace quern

#endif  // QUERN_CACHE_KV_CACHE_H_
