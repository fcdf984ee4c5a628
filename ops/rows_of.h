#ifndef QUERN_OPS_ROWS_OF_H_
#define QUERN_OPS_ROWS_OF_H_

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {

// Maps a row index to the start of that row of a matrix.
class RowsOf {
 public:
  explicit RowsOf(const AnyTensorView& v)
      : data_(static_cast<char*>(const_cast<void*>(v.data()))),
        row_bytes_(v.RowStride() * static_cast<int64_t>(SizeOf(v.dtype()))) {}
  char* operator[](int64_t i) const { return data_ + i * row_bytes_; }

 private:
  char* data_;
  int64_t row_bytes_;
};

// Token t of v[tokens, heads, n], as a view heads[heads, n].
inline AnyTensorView HeadsOf(const AnyTensorView& v, int64_t t) {
  const int64_t at =
      t * v.RowStride() * static_cast<int64_t>(SizeOf(v.dtype()));
  const AnyTensorView::Dims extents{v.extent(1), v.extent(2)};
  const AnyTensorView::Dims strides{v.stride(1), v.stride(2)};
  if (v.writable()) {
    return AnyTensorView(
        v.dtype(),
        static_cast<void*>(static_cast<char*>(v.mutable_data()) + at), 2,
        extents, strides);
  }
  return AnyTensorView(
      v.dtype(),
      static_cast<const void*>(static_cast<const char*>(v.data()) + at), 2,
      extents, strides);
}

}  // namespace quern

#endif  // QUERN_OPS_ROWS_OF_H_
