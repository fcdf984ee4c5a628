#ifndef QUERN_OPS_REGISTRY_BOUND_ROWS_H_
#define QUERN_OPS_REGISTRY_BOUND_ROWS_H_

// Building blocks of the operators on rows: [..., n] viewed as [rows, n], and a
// scalar view of a row.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/quant/scalar_convert.h"

namespace quern {

// Views [..., n] as [rows, n]. A view whose leading dimensions have no common
// stride, or that has 2^63 rows or more, is returned unchanged, and most plans
// then refuse its rank.
inline AnyTensorView AsRows(const AnyTensorView& v) {
  if (v.rank() < 1 || v.rank() == 2 || v.rank() > AnyTensorView::kMaxRank) {
    return v;
  }
  const int last = v.rank() - 1;
  // The stride of a dimension of extent 1 is meaningless and is skipped.
  int64_t rows = 1, row_stride = v.extent(last), want_stride = 0;
  for (int d = last; d-- > 0;) {
    const int64_t extent = v.extent(d);
    if (extent < 0) return v;
    if (extent > 1) {
      if (rows == 1) row_stride = v.stride(d);
      if (rows > 1 && v.stride(d) != want_stride) return v;
      if (!CheckedMul(v.stride(d), extent, &want_stride)) return v;
    }
    if (!CheckedMul(rows, extent, &rows)) return v;
  }
  const AnyTensorView::Dims extents{rows, v.extent(last)};
  const AnyTensorView::Dims strides{row_stride, v.stride(last)};
  if (v.writable()) {
    return AnyTensorView(v.dtype(), v.mutable_data(), 2, extents, strides);
  }
  return AnyTensorView(v.dtype(), v.data(), 2, extents, strides);
}

// Whether two views show the same elements of one memory in the same way.
inline bool SameView(const AnyTensorView& a, const AnyTensorView& b) {
  if (a.rank() != b.rank() || a.data() != b.data()) return false;
  for (int d = 0; d < a.rank(); ++d) {
    if (a.extent(d) != b.extent(d) || a.stride(d) != b.stride(d)) return false;
  }
  return a.rank() == 0 || a.dtype() == b.dtype();
}

inline absl::Status CheckTensorCount(absl::string_view op,
                                     absl::Span<const AnyTensorView> tensors,
                                     size_t want) {
  return CheckEqual(op, "tensors", static_cast<int64_t>(tensors.size()),
                    static_cast<int64_t>(want), "the schema has");
}

// Returns the dtype that `text` names, or `fallback` if text is empty.
inline absl::StatusOr<DType> DTypeOr(absl::string_view op,
                                     absl::string_view field,
                                     const std::string& text, DType fallback) {
  if (text.empty()) return fallback;
  const auto dtype = ParseDType(text);
  if (dtype.ok()) return *dtype;
  return InvalidArgument(op, field, ": ", dtype.status().message());
}

// InvalidArgument unless the tensor, of ids, positions or row numbers, is i32
// or i64.
inline absl::Status CheckIndexView(absl::string_view op,
                                   absl::string_view field,
                                   const AnyTensorView& v,
                                   absl::Span<const int64_t> want) {
  return CheckInput(op, field, v,
                    v.dtype() == DType::kI64 ? DType::kI64 : DType::kI32, want);
}
// Views the first `count` elements of a dense tensor of i32 or i64 as a vector.
inline IndexView IndicesOf(const AnyTensorView& v, int64_t count) {
  if (v.dtype() == DType::kI64) {
    return DenseVector(static_cast<const int64_t*>(v.data()), count);
  }
  return DenseVector(static_cast<const int32_t*>(v.data()), count);
}
// Views the first `rows` rows of `columns` elements of a dense tensor as one
// vector. The vector is empty where it would have 2^63 elements or more,
// because operators view a tensor before they refuse its shape.
inline IndexView IndicesOf(const AnyTensorView& v, int64_t rows,
                           int64_t columns) {
  int64_t size = 0;
  return IndicesOf(v, CheckedMul(rows, columns, &size) ? size : 0);
}
// Views all elements of a dense tensor as one vector, like the function above.
inline IndexView IndicesOf(const AnyTensorView& v) {
  int64_t size = 1;
  for (int d = 0; d < v.rank(); ++d) {
    if (!CheckedMul(size, v.extent(d), &size)) return IndicesOf(v, 0);
  }
  return IndicesOf(v, size);
}

// A row whose elements are read as f32, and rounded to its dtype when written:
// f32, bf16, f16, i8 (whole numbers in its range) or e4m3 (numbers up to 448,
// or NaN).
class ScalarRow {
 public:
  // Row i of [..., n], counted over all dimensions but the last.
  ScalarRow(const AnyTensorView& rows, int64_t i) : dtype_(rows.dtype()) {
    int64_t step = 0;
    for (int d = rows.rank() - 1; d-- > 0;) {
      // The stride of a dimension of extent 1 is meaningless and is skipped.
      if (rows.extent(d) <= 1) continue;
      step += i % rows.extent(d) * rows.stride(d);
      i /= rows.extent(d);
    }
    data_ = static_cast<char*>(const_cast<void*>(rows.data()));
    if (data_ != nullptr) data_ += step * static_cast<int64_t>(SizeOf(dtype_));
  }
  bool null() const { return data_ == nullptr; }
  float operator[](int64_t i) const {
    if (dtype_ == DType::kBF16) return ToF32(At<BFloat16>(i));
    if (dtype_ == DType::kF16) return ToF32(At<Float16>(i));
    if (dtype_ == DType::kI8) return static_cast<float>(At<int8_t>(i));
    if (dtype_ == DType::kF8E4M3) return ToF32(At<Float8E4M3>(i));
    return At<float>(i);
  }
  void Set(int64_t i, float v) const {
    if (dtype_ == DType::kBF16) {
      At<BFloat16>(i) = FromF32<BFloat16>(v);
    } else if (dtype_ == DType::kF16) {
      At<Float16>(i) = FromF32<Float16>(v);
    } else if (dtype_ == DType::kI8) {
      At<int8_t>(i) = static_cast<int8_t>(v);
    } else if (dtype_ == DType::kF8E4M3) {
      At<Float8E4M3>(i) = FromF32<Float8E4M3>(v);
    } else {
      At<float>(i) = v;
    }
  }

 private:
  template <typename T>
  T& At(int64_t i) const {
    return reinterpret_cast<T*>(data_)[i];
  }
  char* data_;
  DType dtype_;
};

// The rows of [..., n]: all dimensions but the last, multiplied.
inline int64_t RowsOf(const AnyTensorView& v) {
  int64_t rows = 1;
  for (int d = 0; d + 1 < v.rank(); ++d) rows *= v.extent(d);
  return rows;
}

// Returns the number of rows of [..., n]; InvalidArgument for 2^63 or more.
inline absl::StatusOr<int64_t> LeadingRows(absl::string_view op,
                                           absl::string_view field,
                                           const TensorMeta& meta) {
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < meta.extents.size(); ++d) {
    if (meta.extents[d] == 0) return 0;
  }
  for (size_t d = 0; d + 1 < meta.extents.size(); ++d) {
    if (!CheckedMul(rows, meta.extents[d], &rows)) {
      return InvalidArgument(op, field, " has 2^63 rows or more");
    }
  }
  return rows;
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_BOUND_ROWS_H_
