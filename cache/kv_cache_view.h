#ifndef QUERN_CACHE_KV_CACHE_VIEW_H_
#define QUERN_CACHE_KV_CACHE_VIEW_H_

// A KV cache as [pages, kv_heads] of blocks, each laid out as its KvLayout
// says: one layer of a model.

#include <cstddef>
#include <cstdint>

#include "cache/kv_layout.h"
#include "core/check.h"

namespace quern {

// Borrowed memory with its layout. Keys and values have strides of their own,
// so that two separate tensors k[pages, kv_heads, page_size, head_dim] and v
// are a view as well as the interleaved pages of KvCache.
class KvCacheView {
 public:
  struct Blocks {
    uint8_t* data = nullptr;  // the block of page 0, head 0
    int64_t page_stride_bytes = 0;
    int64_t head_stride_bytes = 0;
  };

  // No pages.
  KvCacheView() = default;
  KvCacheView(const KvLayout& layout, int64_t num_pages, const Blocks& k,
              const Blocks& v)
      : layout_(layout), num_pages_(num_pages), k_(k), v_(v) {}

  // num_pages * layout.page_bytes() bytes at `memory`, one page after another;
  // null if that is none.
  KvCacheView(const KvLayout& layout, int64_t num_pages, void* memory)
      : layout_(layout), num_pages_(num_pages) {
    const int64_t head_bytes = layout.k_block_bytes() + layout.v_block_bytes();
    auto* k = static_cast<uint8_t*>(memory);
    uint8_t* v = k == nullptr ? nullptr : k + layout.k_block_bytes();
    k_ = {k, layout.page_bytes(), head_bytes};
    v_ = {v, layout.page_bytes(), head_bytes};
  }

  const KvLayout& layout() const { return layout_; }
  int64_t num_pages() const { return num_pages_; }
  const Blocks& k() const { return k_; }
  const Blocks& v() const { return v_; }

  // The keys of one head in one page, [page_size][head_dim] elements of
  // layout().dtype().
  uint8_t* K(int64_t page, int64_t head) const { return At(k_, page, head); }
  // The values, [page_size][v_head_dim].
  uint8_t* V(int64_t page, int64_t head) const { return At(v_, page, head); }

 private:
  uint8_t* At(const Blocks& blocks, int64_t page, int64_t head) const {
    QUERN_DCHECK(0 <= page && page < num_pages_);
    QUERN_DCHECK(0 <= head && head < layout_.kv_heads());
    return blocks.data + page * blocks.page_stride_bytes +
           head * blocks.head_stride_bytes;
  }

  KvLayout layout_;
  int64_t num_pages_ = 0;
  Blocks k_;
  Blocks v_;
};

}  // namespace quern

#endif  // QUERN_CACHE_KV_CACHE_VIEW_H_
