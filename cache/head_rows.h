#ifndef QUERN_CACHE_HEAD_ROWS_H_
#define QUERN_CACHE_HEAD_ROWS_H_

// Queries, keys, values and outputs as a plan's caller passes them: a view
// [tokens, heads, head_dim] of any token and head strides that are not
// negative, whose rows are contiguous. And the cache that they come from or go
// to. All refuse with InvalidArgument, which names what is not as it must be.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {

// `view` is as asked for, and has memory.
absl::Status CheckHeadRows(absl::string_view op, absl::string_view name,
                           const AnyTensorView& view, DType dtype,
                           int64_t tokens, int64_t heads, int64_t head_dim);

// Like CheckHeadRows, for a view that is written: no two rows overlap.
absl::Status CheckHeadRowsOut(absl::string_view op, absl::string_view name,
                              const AnyTensorView& view, DType dtype,
                              int64_t tokens, int64_t heads, int64_t head_dim);

// `cache` has memory for all its pages, at strides that are not negative, and
// the scales that its layout asks for: of the caller's, each in
// [KvScales::kMin, infinity). All of them, and the strides, at multiples of the
// element's size.
absl::Status CheckCache(absl::string_view op, const KvCacheView& cache);

// Like CheckCache, and no two of the blocks overlap: of keys, of values, and of
// the scales that are written with them. Keys and values may be interleaved in
// one buffer in whichever way. Cost: for two kinds whose address ranges meet,
// one step for each head where they have the same strides; one for each two
// heads where head strides differ; and those for each page where page strides
// do.
absl::Status CheckCacheOut(absl::string_view op, const KvCacheView& cache);

// `view` lies outside the bytes from the first to the last of the keys, and of
// the values, and of the scales written with them, of a cache as CheckCache
// accepts it.
absl::Status CheckApartFromCache(absl::string_view op, absl::string_view name,
                                 const AnyTensorView& view,
                                 const KvCacheView& cache);

// Bytes from data() to row [token, head].
inline int64_t HeadRowOffsetBytes(const AnyTensorView& view, int64_t token,
                                  int64_t head) {
  return (token * view.stride(0) + head * view.stride(1)) *
         static_cast<int64_t>(SizeOf(view.dtype()));
}

}  // namespace quern

#endif  // QUERN_CACHE_HEAD_ROWS_H_
