#ifndef QUERN_OPS_ROWS_OF_H_
#define QUERN_OPS_ROWS_OF_H_

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {

// Where row i of a matrix begins.
class RowsOf {
 public:
  explicit RowsOf(const AnyTensorView& v)
      : data_(static_cast<char*>(const_cast<void*>(v.data()))),
        // The stride of a lone row may be any number.
        row_bytes_(v.extent(0) > 1
                       ? v.stride(0) * static_cast<int64_t>(SizeOf(v.dtype()))
                       : 0) {}
  char* operator[](int64_t i) const { return data_ + i * row_bytes_; }

 private:
  char* data_;
  int64_t row_bytes_;
};

}  // namespace quern

#endif  // QUERN_OPS_ROWS_OF_H_
