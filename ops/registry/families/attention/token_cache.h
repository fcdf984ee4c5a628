#ifndef QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_TOKEN_CACHE_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_TOKEN_CACHE_H_

// Private: tensors of keys and values as a cache, and those of
// [tokens, kv_heads, head_dim] as one whose pages are single tokens.

#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {

inline absl::StatusOr<KvLayout> TokenLayout(DType dtype, int64_t kv_heads,
                                            int64_t head_dim,
                                            int64_t v_head_dim) {
  KvLayoutSpec spec;
  spec.dtype = dtype;
  spec.kv_heads = kv_heads;
  spec.head_dim = head_dim;
  spec.v_head_dim = v_head_dim;
  spec.page_size = 1;
  spec.form = KvForm::kPlain;
  return KvLayout::Create(spec);
}

// The blocks of a tensor [pages, kv_heads, ...] of keys or values.
inline KvCacheView::Blocks BlocksOf(const AnyTensorView& x) {
  // A stride that is not used may be any number.
  const auto stride = [&](int d) {
    return (x.extent(d) > 1 ? x.stride(d) : 0) *
           static_cast<int64_t>(SizeOf(x.dtype()));
  };
  // The const_cast is safe because attention only reads the cache, and who
  // writes to it was given views that may be written.
  return {static_cast<uint8_t*>(const_cast<void*>(x.data())), stride(0),
          stride(1)};
}

// The views must have the heads and dims of the layout.
inline KvCacheView TokenCache(const KvLayout& layout, const AnyTensorView& k,
                              const AnyTensorView& v) {
  return KvCacheView(layout, k.extent(0), BlocksOf(k), BlocksOf(v));
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_TOKEN_CACHE_H_
