#ifndef QUERN_CACHE_KV_CACHE_VIEW_H_
#define QUERN_CACHE_KV_CACHE_VIEW_H_

// A KV cache as [pages, kv_heads] of blocks, each laid out as its KvLayout
// says: one layer of a model.

#include <cstddef>
#include <cstdint>

#include "quern/cache/kv_layout.h"
#include "quern/core/check.h"

namespace quern {

// The scales of the keys, or of the values, of a cache; as many as the layout's
// scaling() asks for:
//
//   kNone          no data
//   kPerBlock      no data: scales lie among the keys, see KvLayout
//   kPerTensor     data[0]
//   kPerHead       data[head * head_stride]
//   kPerTokenHead  data[page * page_stride + head * head_stride + token],
//                  token < page_size; written by write_kv with the token
//
// An element x is stored as the one nearest to x / scale, saturating, and means
// stored * scale.
struct KvScales {
  // Scales are finite and no smaller, so that 1 / scale is finite too. (A NaN
  // that write_kv writes says that the row held one.)
  static constexpr float kMin = 0x1p-125f;

  float* data = nullptr;
  int64_t page_stride = 0;  // elements
  int64_t head_stride = 0;
};

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
  // A view without scales: see set_scales. In the latent form v is ignored.
  KvCacheView(const KvLayout& layout, int64_t num_pages, const Blocks& k,
              const Blocks& v)
      : layout_(layout),
        num_pages_(num_pages),
        k_(k),
        v_(layout.form() == KvForm::kLatent ? k : v) {}

  // num_pages * layout.page_bytes() bytes at `memory`, one page after another;
  // null if that is none. Scales of kPerTokenHead lie in the pages.
  KvCacheView(const KvLayout& layout, int64_t num_pages, void* memory)
      : layout_(layout), num_pages_(num_pages) {
    const auto at = [memory](int64_t offset) {
      auto* bytes = static_cast<uint8_t*>(memory);
      return bytes == nullptr ? nullptr : bytes + offset;
    };
    const int64_t page = layout.page_bytes(), head = layout.head_bytes();
    const int64_t v = layout.k_block_bytes();
    k_ = {at(0), page, head};
    v_ = {at(layout.form() == KvForm::kLatent ? 0 : v), page, head};
    if (layout.scale_block_bytes() == 0) return;
    constexpr auto kElement = static_cast<int64_t>(sizeof(float));
    const int64_t scales = v + layout.v_block_bytes();
    // Blocks start at multiples of 64 bytes.
    k_scales_ = {reinterpret_cast<float*>(at(scales)), page / kElement,
                 head / kElement};
    v_scales_ = k_scales_;
    v_scales_.data =
        reinterpret_cast<float*>(at(scales + layout.scale_block_bytes()));
  }

  const KvLayout& layout() const { return layout_; }
  int64_t num_pages() const { return num_pages_; }
  const Blocks& k() const { return k_; }
  const Blocks& v() const { return v_; }
  const KvScales& k_scales() const { return k_scales_; }
  const KvScales& v_scales() const { return v_scales_; }

  void set_scales(const KvScales& k, const KvScales& v) {
    k_scales_ = k;
    v_scales_ = v;
  }

  // The keys of one head in one page: layout().KOffset() of layout().dtype().
  uint8_t* K(int64_t page, int64_t head) const { return At(k_, page, head); }
  // The values: layout().VOffset().
  uint8_t* V(int64_t page, int64_t head) const { return At(v_, page, head); }

  // The scales of these blocks: of its page_size tokens where the scaling is
  // kPerTokenHead, one otherwise. Null for kNone and kPerBlock.
  float* KScales(int64_t page, int64_t head) const {
    return At(k_scales_, page, head);
  }
  float* VScales(int64_t page, int64_t head) const {
    return At(v_scales_, page, head);
  }

 private:
  void CheckBlock(int64_t page, int64_t head) const {
    QUERN_DCHECK(0 <= page && page < num_pages_);
    QUERN_DCHECK(0 <= head && head < layout_.kv_heads());
  }
  uint8_t* At(const Blocks& blocks, int64_t page, int64_t head) const {
    CheckBlock(page, head);
    return blocks.data + page * blocks.page_stride_bytes +
           head * blocks.head_stride_bytes;
  }
  float* At(const KvScales& scales, int64_t page, int64_t head) const {
    CheckBlock(page, head);
    switch (layout_.scaling()) {
      case KvScaling::kNone:
      case KvScaling::kPerBlock:
        return nullptr;
      case KvScaling::kPerTensor:
        return scales.data;
      case KvScaling::kPerHead:
        return scales.data + head * scales.head_stride;
      case KvScaling::kPerTokenHead:
        return scales.data + page * scales.page_stride +
               head * scales.head_stride;
    }
    return nullptr;
  }

  KvLayout layout_;
  int64_t num_pages_ = 0;
  Blocks k_;
  Blocks v_;
  KvScales k_scales_;
  KvScales v_scales_;
};

}  // namespace quern

#endif  // QUERN_CACHE_KV_CACHE_VIEW_H_
