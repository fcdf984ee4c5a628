#ifndef QUERN_OPS_SPECULATION_INDEX_TABLE_H_
#define QUERN_OPS_SPECULATION_INDEX_TABLE_H_

// Token ids, positions, slots and flags as callers have them: vectors and
// matrices of i32, i64 or u8 whose type is known at run time.

#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {

// Reads and writes the elements of a vector [rows] or a matrix [rows, cols].
class IndexTable {
 public:
  // `view` is of rank 1 or 2, or of rank 0 where an argument was left out.
  explicit IndexTable(const AnyTensorView& view)
      : data_(const_cast<void*>(view.data())),
        dtype_(view.dtype()),
        rows_(view.rank() == 0 ? 0 : view.extent(0)),
        cols_(view.rank() == 2 ? view.extent(1) : 1),
        stride_(view.rank() == 2 ? view.RowStride() : 1) {
    QUERN_DCHECK(view.rank() <= 2);
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  int64_t At(int64_t i, int64_t j = 0) const {
    const int64_t at = Place(i, j);
    if (dtype_ == DType::kI64) return static_cast<const int64_t*>(data_)[at];
    if (dtype_ == DType::kI32) return static_cast<const int32_t*>(data_)[at];
    return static_cast<const uint8_t*>(data_)[at];
  }
  // The element that is number i in row-major order.
  int64_t Flat(int64_t i) const { return At(i / cols_, i % cols_); }

  // CheckArgs has proved that the element's type holds the value.
  void Set(int64_t value, int64_t i, int64_t j = 0) const {
    const int64_t at = Place(i, j);
    if (dtype_ == DType::kI64) {
      static_cast<int64_t*>(data_)[at] = value;
    } else if (dtype_ == DType::kI32) {
      static_cast<int32_t*>(data_)[at] = static_cast<int32_t>(value);
    } else {
      static_cast<uint8_t*>(data_)[at] = static_cast<uint8_t>(value);
    }
  }

 private:
  int64_t Place(int64_t i, int64_t j) const {
    QUERN_DCHECK(0 <= i && i < rows_ && 0 <= j && j < cols_);
    return i * stride_ + j;
  }

  void* data_;
  DType dtype_;
  int64_t rows_, cols_, stride_;
};

// Whether a view is i32 or i64, which another dtype would be refused for.
inline DType IndexDTypeOf(const AnyTensorView& view) {
  return view.dtype() == DType::kI64 ? DType::kI64 : DType::kI32;
}
// The largest value of i32, or of i64.
inline int64_t MostOf(const AnyTensorView& view) {
  return view.dtype() == DType::kI64 ? std::numeric_limits<int64_t>::max()
                                     : std::numeric_limits<int32_t>::max();
}

// `view` is i32 or i64 and as CheckInput or CheckOutput wants it.
inline absl::Status CheckIndexInput(absl::string_view op,
                                    absl::string_view field,
                                    const AnyTensorView& view,
                                    absl::Span<const int64_t> want) {
  return CheckInput(op, field, view, IndexDTypeOf(view), want);
}
inline absl::Status CheckIndexOutput(absl::string_view op,
                                     absl::string_view field,
                                     const AnyTensorView& view,
                                     absl::Span<const int64_t> want) {
  return CheckOutput(op, field, view, IndexDTypeOf(view), want);
}
// [rows] or [rows, 1].
inline absl::Status CheckIndexColumn(absl::string_view op,
                                     absl::string_view field,
                                     const AnyTensorView& view, int64_t rows) {
  return view.rank() == 2 ? CheckIndexInput(op, field, view, {rows, 1})
                          : CheckIndexInput(op, field, view, {rows});
}

// A tensor and what refusals call it.
struct NamedView {
  const char* name;
  const AnyTensorView& view;
};

// No tensor that is written touches another one. Views of rank 0 are left out.
inline absl::Status CheckAllApart(absl::string_view op,
                                  absl::Span<const NamedView> written,
                                  absl::Span<const NamedView> read) {
  for (size_t w = 0; w < written.size(); ++w) {
    for (size_t o = 0; o < w; ++o) {
      QUERN_RETURN_IF_ERROR(CheckApart(op, written[o].name, written[o].view,
                                       written[w].name, written[w].view));
    }
    for (const NamedView& other : read) {
      QUERN_RETURN_IF_ERROR(CheckApart(op, other.name, other.view,
                                       written[w].name, written[w].view));
    }
  }
  return absl::OkStatus();
}

// "op: field[i]=value; need min <= field[i] <= max"
inline absl::Status CheckElement(absl::string_view op, absl::string_view field,
                                 int64_t i, int64_t value, int64_t min,
                                 int64_t max) {
  if (min <= value && value <= max) return absl::OkStatus();
  return InvalidArgument(op, field, "[", i, "]=", value, "; need ", min,
                         " <= ", field, "[i] <= ", max);
}
// Checks every element of a vector as CheckElement checks one.
inline absl::Status CheckElements(absl::string_view op, absl::string_view field,
                                  const IndexTable& table, int64_t min,
                                  int64_t max) {
  for (int64_t i = 0; i < table.rows(); ++i) {
    for (int64_t j = 0; j < table.cols(); ++j) {
      QUERN_RETURN_IF_ERROR(CheckElement(op, field, i * table.cols() + j,
                                         table.At(i, j), min, max));
    }
  }
  return absl::OkStatus();
}
// Ends of consecutive ranges, the first of which begins at 0: they do not
// decrease and are at most `most`.
inline absl::Status CheckEnds(absl::string_view op, absl::string_view field,
                              const IndexTable& ends, int64_t most) {
  int64_t begin = 0;
  for (int64_t i = 0; i < ends.rows(); ++i) {
    QUERN_RETURN_IF_ERROR(CheckElement(op, field, i, ends.At(i), begin, most));
    begin = ends.At(i);
  }
  return absl::OkStatus();
}

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_INDEX_TABLE_H_
