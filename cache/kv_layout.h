#ifndef QUERN_CACHE_KV_LAYOUT_H_
#define QUERN_CACHE_KV_LAYOUT_H_

// Where the keys and values of a token lie inside a page: a value that travels
// with the cache. The same on every instruction set.
//
//   page[head] = { K block, V block },  each padded to 64 bytes
//   K block    = k[token][dim],  token < page_size, dim < head_dim
//   V block    = v[token][dim],  token < page_size, dim < v_head_dim

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/dtype.h"

namespace quern {

struct KvLayoutSpec {
  DType dtype = DType::kBF16;  // kF32, kBF16 or kF16
  int64_t kv_heads = 0;        // >= 1
  int64_t head_dim = 0;        // of a key, >= 1
  int64_t v_head_dim = 0;      // of a value; 0: as head_dim
  int64_t page_size = 0;       // tokens, >= 1
};

class KvLayout {
 public:
  // Describes nothing: every extent is 0.
  KvLayout() = default;

  // InvalidArgument names the field that is out of range, or says that a page
  // is larger than kMaxPageBytes. Unimplemented for other dtypes.
  static absl::StatusOr<KvLayout> Create(const KvLayoutSpec& spec);
  static constexpr int64_t kMaxPageBytes = int64_t{1} << 40;

  DType dtype() const { return dtype_; }
  int64_t kv_heads() const { return kv_heads_; }
  int64_t head_dim() const { return head_dim_; }
  int64_t v_head_dim() const { return v_head_dim_; }
  int64_t page_size() const { return page_size_; }

  // Of one head of one page, padding included.
  int64_t k_block_bytes() const { return k_block_bytes_; }
  int64_t v_block_bytes() const { return v_block_bytes_; }
  // Of one page, all heads.
  int64_t page_bytes() const {
    return kv_heads_ * (k_block_bytes_ + v_block_bytes_);
  }

  friend bool operator==(const KvLayout& a, const KvLayout& b) {
    return a.dtype_ == b.dtype_ && a.kv_heads_ == b.kv_heads_ &&
           a.head_dim_ == b.head_dim_ && a.v_head_dim_ == b.v_head_dim_ &&
           a.page_size_ == b.page_size_;
  }
  friend bool operator!=(const KvLayout& a, const KvLayout& b) {
    return !(a == b);
  }

 private:
  DType dtype_ = DType::kF32;
  int64_t kv_heads_ = 0;
  int64_t head_dim_ = 0;
  int64_t v_head_dim_ = 0;
  int64_t page_size_ = 0;
  int64_t k_block_bytes_ = 0;
  int64_t v_block_bytes_ = 0;
};

}  // namespace quern

#endif  // QUERN_CACHE_KV_LAYOUT_H_
