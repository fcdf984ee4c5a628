#ifndef QUERN_OPS_REGISTRY_SGLANG_PACKING_PACKED_H_
#define QUERN_OPS_REGISTRY_SGLANG_PACKING_PACKED_H_

// Private: where a weight lies in SGLang's packed form, one at a time.

#include <cstdint>
#include <cstring>

#include "quern/core/dtype.h"
#include "quern/ops/registry/sglang/packing/layout.h"

namespace quern {

// The first byte of w[n, k] from the start of the packed matrix. The layout is
// not that of u8.
inline int64_t SglangByte(const SglangLayout& layout, int64_t n, int64_t k) {
  const int64_t block = n / SglangLayout::kBlockCols;
  const int64_t c = n % SglangLayout::kBlockCols;
  const int64_t v = layout.dtype() == DType::kI8 ? 4 : 2;
  const int64_t element = (k / v * layout.cols(block) + c) * v + k % v;
  return layout.block_offset(block) +
         element * static_cast<int64_t>(SizeOf(layout.dtype()));
}

// Copies between plain[n, k], rows of `row_bytes`, and packed, element by
// element. The layout is not that of u8, and compensation is not touched.
inline void CopyToSglang(const SglangLayout& layout, const uint8_t* plain,
                         int64_t row_bytes, uint8_t* packed) {
  const size_t size = SizeOf(layout.dtype());
  for (int64_t n = 0; n < layout.n(); ++n) {
    for (int64_t k = 0; k < layout.k(); ++k) {
      std::memcpy(packed + SglangByte(layout, n, k),
                  plain + n * row_bytes + k * static_cast<int64_t>(size), size);
    }
  }
}
inline void CopyFromSglang(const SglangLayout& layout, const uint8_t* packed,
                           uint8_t* plain, int64_t row_bytes) {
  const size_t size = SizeOf(layout.dtype());
  for (int64_t n = 0; n < layout.n(); ++n) {
    for (int64_t k = 0; k < layout.k(); ++k) {
      std::memcpy(plain + n * row_bytes + k * static_cast<int64_t>(size),
                  packed + SglangByte(layout, n, k), size);
    }
  }
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PACKING_PACKED_H_
