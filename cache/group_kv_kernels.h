#ifndef QUERN_CACHE_GROUP_KV_KERNELS_H_
#define QUERN_CACHE_GROUP_KV_KERNELS_H_

// Private seam between write_kv's plan and the SIMD translation unit: 16 rows
// of bf16 to codes of one byte and into the paired form of kv_layout.h, in one
// pass that keeps codes in registers. The codes are those of
// write_kv_kernels.h, which has any type and any number of rows.

#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"

namespace quern {

struct GroupKvKernels {
  // 16 rows of `count` elements, a multiple of kMultiple, each times its
  // inverse. On the way ahead[r], as long as rows[r], is fetched into L2.
  // Stores are streaming ones where `stream` and `to` is aligned to vectors:
  // end with PackKvKernels::flush.
  using Fn = void (*)(const uint8_t* const* rows, const uint8_t* const* ahead,
                      size_t count, const float* inverse, bool stream,
                      uint8_t* to);
  static constexpr size_t kMultiple = 16;

  Fn keys = nullptr;    // to[i / 2][r][i % 2]
  Fn values = nullptr;  // to[r / 2][i][r % 2]
};

// The kernels of the best instruction set this CPU supports; null for types
// other than bf16 to kI8 or kF8E4M3, and for instruction sets other than those
// of x86. own_scales: every |row[r][i] * inverse[r]| rounds to a finite code,
// or the codes of that row are unspecified.
GroupKvKernels GetGroupKvKernels(DType input, DType cache, bool own_scales);

}  // namespace quern

#endif  // QUERN_CACHE_GROUP_KV_KERNELS_H_
