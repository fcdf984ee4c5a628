#ifndef QUERN_CORE_MATRIX_SLICE_H_
#define QUERN_CORE_MATRIX_SLICE_H_

// Views of some rows or columns of a matrix whose dtype is a value. A view of
// what may be written may be written too; null stays null.

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace matrix_slice_internal {

// The part with these extents that begins `offset` elements after x.
inline AnyTensorView Part(const AnyTensorView& x, int64_t offset,
                          const AnyTensorView::Dims& extents) {
  const auto bytes = offset * static_cast<int64_t>(SizeOf(x.dtype()));
  const AnyTensorView::Dims strides = {x.stride(0), x.stride(1)};
  const auto* data = static_cast<const char*>(x.data());
  if (data != nullptr) data += bytes;
  if (!x.writable()) {
    return AnyTensorView(x.dtype(), static_cast<const void*>(data), 2, extents,
                         strides);
  }
  return AnyTensorView(x.dtype(), static_cast<void*>(const_cast<char*>(data)),
                       2, extents, strides);
}

}  // namespace matrix_slice_internal

// Rows [begin, begin + count) of a matrix.
inline AnyTensorView RowSlice(const AnyTensorView& x, int64_t begin,
                              int64_t count) {
  return matrix_slice_internal::Part(x, begin * x.RowStride(),
                                     {count, x.extent(1)});
}

// Columns [begin, begin + count) of a matrix whose columns are contiguous.
inline AnyTensorView ColumnSlice(const AnyTensorView& x, int64_t begin,
                                 int64_t count) {
  return matrix_slice_internal::Part(x, begin, {x.extent(0), count});
}

}  // namespace quern

#endif  // QUERN_CORE_MATRIX_SLICE_H_
