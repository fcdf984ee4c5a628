#ifndef QUERN_OPS_RECURRENT_STATE_VIEW_H_
#define QUERN_OPS_RECURRENT_STATE_VIEW_H_

// Addresses in views of four dimensions or fewer whose dtype is a value.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/scalar_convert.h"

namespace quern {

// Element [i, j, k, l]; dimensions that the view lacks are 0. The stride of a
// dimension of extent 1 may be any number, and its only index is 0.
inline char* ElementAt(const AnyTensorView& v, int64_t i, int64_t j = 0,
                       int64_t k = 0, int64_t l = 0) {
  const int64_t at[] = {i, j, k, l};
  int64_t offset = 0;
  for (int d = 0; d < v.rank() && d < 4; ++d) {
    if (at[d] != 0) offset += at[d] * v.stride(d);
  }
  return static_cast<char*>(const_cast<void*>(v.data())) +
         offset * static_cast<int64_t>(SizeOf(v.dtype()));
}

// Element [i, j] of a view of f32, bf16 or f16, in f32.
inline float NumberAt(const AnyTensorView& v, int64_t i, int64_t j) {
  const char* const at = ElementAt(v, i, j);
  if (v.dtype() == DType::kBF16) {
    return ToF32(*reinterpret_cast<const BFloat16*>(at));
  }
  if (v.dtype() == DType::kF16) {
    return ToF32(*reinterpret_cast<const Float16*>(at));
  }
  return *reinterpret_cast<const float*>(at);
}

// Row stride of the last two dimensions, in elements.
inline int64_t RowStride(const AnyTensorView& v) {
  return v.extent(v.rank() - 2) > 1 ? v.stride(v.rank() - 2) : 0;
}

// Zeros in `rows` rows of `row_bytes`, which begin stride_bytes apart. A zero
// of every dtype is zero bytes.
inline void ZeroRows(char* first, int64_t rows, int64_t row_bytes,
                     int64_t stride_bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memset(first + r * stride_bytes, 0, static_cast<size_t>(row_bytes));
  }
}

// Whether rows that begin at `first`, `stride` elements apart, can be written
// past the caches: f32, each row aligned to 64 bytes.
inline bool StreamsRows(const void* first, size_t stride, DType dtype) {
  return dtype == DType::kF32 &&
         (reinterpret_cast<uintptr_t>(first) | (stride * sizeof(float))) % 64 ==
             0;
}

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_STATE_VIEW_H_
