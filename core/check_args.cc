#include "quern/core/check_args.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

std::string ShapeOf(const AnyTensorView& v) {
  std::string shape = "[";
  for (int d = 0; d < v.rank(); ++d) {
    absl::StrAppend(&shape, d > 0 ? ", " : "", v.extent(d));
  }
  return shape + "]";
}

std::string ShapeOf(absl::Span<const int64_t> want) {
  return absl::StrCat("[",
                      absl::StrJoin(want, ", ",
                                    [](std::string* out, int64_t extent) {
                                      if (extent == kAnyExtent) {
                                        out->append("any");
                                      } else {
                                        absl::StrAppend(out, extent);
                                      }
                                    }),
                      "]");
}

// *bytes = from the first element to the end of the last one, over the
// dimensions from `first` on and at index 0 of those before it. A stride that
// is never stepped over does not count. False if that is 2^63 or more.
bool SpanBytes(const AnyTensorView& v, int first, int64_t* bytes) {
  int64_t elements = 1;
  for (int d = first; d < v.rank(); ++d) {
    int64_t last = 0;
    if (v.extent(d) > 1 && !(CheckedMul(v.extent(d) - 1, v.stride(d), &last) &&
                             CheckedAdd(elements, last, &elements))) {
      return false;
    }
  }
  return CheckedMul(elements, static_cast<int64_t>(SizeOf(v.dtype())), bytes);
}

// [*begin, *end): the bytes of all elements, counted from data(). *begin is
// negative where a stride is. False unless both are within (-2^63, 2^63).
bool ByteRange(const AnyTensorView& v, int64_t* begin, int64_t* end) {
  int64_t low = 0, high = 1;
  for (int d = 0; d < v.rank(); ++d) {
    const int64_t extent = v.extent(d);
    if (extent <= 1) continue;
    int64_t last = 0;
    if (!CheckedMul(extent - 1, v.stride(d), &last)) return false;
    if (!(last < 0 ? CheckedAdd(low, last, &low)
                   : CheckedAdd(high, last, &high))) {
      return false;
    }
  }
  const auto size = static_cast<int64_t>(SizeOf(v.dtype()));
  return CheckedMul(low, size, begin) && CheckedMul(high, size, end) &&
         *begin > std::numeric_limits<int64_t>::min();
}

bool HasNegativeStride(const AnyTensorView& v) {
  for (int d = 0; d < v.rank(); ++d) {
    if (v.extent(d) > 1 && v.stride(d) < 0) return true;
  }
  return false;
}

// Sets the bytes from a's data to b's; false where they are more than 63 bits
// count, between the ends of the address space.
bool Distance(const AnyTensorView& a, const AnyTensorView& b, int64_t* bytes) {
  return CheckedAdd(reinterpret_cast<intptr_t>(b.data()),
                    -reinterpret_cast<intptr_t>(a.data()), bytes);
}

// Whether the byte ranges of the views are known and have nothing in common.
// Views without elements or memory may have any.
bool RangesApart(const AnyTensorView& a, const AnyTensorView& b) {
  int64_t a_begin = 0, a_end = 0, b_begin = 0, b_end = 0;
  if (!ByteRange(a, &a_begin, &a_end) || !ByteRange(b, &b_begin, &b_end)) {
    return false;
  }
  int64_t delta = 0, steps = 0;
  if (!Distance(a, b, &delta)) return false;
  return (CheckedAdd(a_end, -b_begin, &steps) && delta >= steps) ||
         (CheckedAdd(b_end, -a_begin, &steps) && -delta >= steps);
}

// Whether the views have a byte in common, as far as dimensions d and those
// inside them go, where b begins `delta` bytes after a. No stride is negative.
//
// Where both have one byte stride s in dimension d, and what is inside takes at
// most s bytes in either, indices i of a and j of b are delta + (j - i) s bytes
// apart: only the two differences whose magnitude is below s can meet.
bool MayMeet(const AnyTensorView& a, const AnyTensorView& b, int d,
             int64_t delta) {
  int64_t a_bytes = 0, b_bytes = 0;
  if (!SpanBytes(a, d, &a_bytes) || !SpanBytes(b, d, &b_bytes)) return true;
  if (delta >= a_bytes || delta <= -b_bytes) return false;
  if (d >= a.rank() || d >= b.rank()) return true;
  if (a.extent(d) <= 1 && b.extent(d) <= 1) return MayMeet(a, b, d + 1, delta);
  // The stride of a dimension of extent 1 is meaningless.
  int64_t a_stride = 0, b_stride = 0;
  const auto stride_of = [d](const AnyTensorView& v, int64_t* bytes) {
    return v.extent(d) <= 1 ||
           CheckedMul(v.stride(d), static_cast<int64_t>(SizeOf(v.dtype())),
                      bytes);
  };
  if (!stride_of(a, &a_stride) || !stride_of(b, &b_stride)) return true;
  if (a.extent(d) > 1 && b.extent(d) > 1 && a_stride != b_stride) return true;
  const int64_t stride = std::max(a_stride, b_stride);
  if (!SpanBytes(a, d + 1, &a_bytes) || !SpanBytes(b, d + 1, &b_bytes)) {
    return true;
  }
  if (stride < std::max(a_bytes, b_bytes)) return true;
  const int64_t rest = delta % stride;
  const int64_t at = rest < 0 ? rest + stride : rest;
  return MayMeet(a, b, d + 1, at) || MayMeet(a, b, d + 1, at - stride);
}

// Whether index [i, j, ...] lies equally far from the first element in both
// views, and no other index of either view lies there. Views of one shape have
// the latter from whichever of them is written, as CheckOutput asks.
bool SameIndexing(const AnyTensorView& a, const AnyTensorView& b) {
  if (a.rank() != b.rank() || SizeOf(a.dtype()) != SizeOf(b.dtype())) {
    return false;
  }
  bool same_shape = true, apart = true;
  int64_t inner = 1;  // elements from the first to the last of the dimensions
  for (int d = a.rank(); d-- > 0;) {
    const int64_t extent = std::max(a.extent(d), b.extent(d));
    same_shape = same_shape && a.extent(d) == b.extent(d);
    if (extent <= 1) continue;
    // The stride of a dimension of extent 1 is meaningless.
    const int64_t stride = (a.extent(d) > 1 ? a : b).stride(d);
    if (a.extent(d) > 1 && b.extent(d) > 1 && stride != b.stride(d)) {
      return false;
    }
    int64_t last = 0;
    apart = apart && stride >= inner && CheckedMul(extent - 1, stride, &last) &&
            CheckedAdd(inner, last, &inner);
  }
  return same_shape || apart;
}

// Whether CheckInput accepts a view with elements, in one pass. It accepts
// views without elements, too, which have a no here.
bool IsPlainInput(const AnyTensorView& view, DType dtype,
                  absl::Span<const int64_t> want) {
  const int rank = view.rank();
  if (view.dtype() != dtype || rank != static_cast<int>(want.size()) ||
      rank < 1 || rank > AnyTensorView::kMaxRank || view.data() == nullptr) {
    return false;
  }
  int64_t elements = 1;
  for (int d = 0; d < rank; ++d) {
    const int64_t extent = view.extent(d), stride = view.stride(d);
    const int64_t wanted = want[static_cast<size_t>(d)];
    if (extent < 1 || (wanted != kAnyExtent && wanted != extent)) return false;
    if (extent == 1) continue;
    int64_t last = 0;
    if (stride < 0 || !CheckedMul(extent - 1, stride, &last) ||
        !CheckedAdd(elements, last, &elements)) {
      return false;
    }
  }
  const bool last_is_dense =
      view.extent(rank - 1) == 1 || view.stride(rank - 1) == 1;
  const size_t size = SizeOf(dtype);
  int64_t bytes = 0;
  return last_is_dense &&
         CheckedMul(elements, static_cast<int64_t>(size), &bytes) &&
         (reinterpret_cast<uintptr_t>(view.data()) & (size - 1)) == 0;
}

}  // namespace

bool IsEmpty(const AnyTensorView& view) {
  for (int d = 0; d < view.rank(); ++d) {
    if (view.extent(d) == 0) return true;
  }
  return view.rank() == 0;
}

absl::Status CheckDTypeIn(absl::string_view op, absl::string_view field,
                          DType dtype, absl::Span<const DType> choices) {
  for (const DType choice : choices) {
    if (dtype == choice) return absl::OkStatus();
  }
  return Unimplemented(
      op, field, " is ", DTypeName(dtype), "; need ",
      absl::StrJoin(choices, " or ", [](std::string* out, DType choice) {
        absl::StrAppend(out, DTypeName(choice));
      }));
}

absl::Status CheckFinite(absl::string_view op, absl::string_view field,
                         double value, absl::string_view need) {
  if (std::isfinite(value)) return absl::OkStatus();
  return InvalidArgument(op, field, "=", value, "; need ", need);
}

absl::Status CheckPositive(absl::string_view op, absl::string_view field,
                           double value, absl::string_view need) {
  if (value > 0 && std::isfinite(value)) return absl::OkStatus();
  return InvalidArgument(op, field, "=", value, "; need ", need, " > 0");
}

absl::Status CheckNotNegative(absl::string_view op, absl::string_view field,
                              double value, absl::string_view need) {
  if (value >= 0 && std::isfinite(value)) return absl::OkStatus();
  return InvalidArgument(op, field, "=", value, "; need ", need, " >= 0");
}

absl::Status CheckInput(absl::string_view op, absl::string_view field,
                        const AnyTensorView& view, DType dtype,
                        absl::Span<const int64_t> want) {
  if (IsPlainInput(view, dtype, want)) return absl::OkStatus();
  if (view.rank() < 0 || view.rank() > AnyTensorView::kMaxRank) {
    return InvalidArgument(op, field, " has rank ", view.rank(),
                           "; need 1 <= rank <= ", AnyTensorView::kMaxRank);
  }
  QUERN_RETURN_IF_ERROR(CheckDType(op, field, view.dtype(), dtype));
  bool fits = view.rank() == static_cast<int>(want.size());
  for (int d = 0; fits && d < view.rank(); ++d) {
    const int64_t extent = want[static_cast<size_t>(d)];
    fits = view.extent(d) >= 0 &&
           (extent == kAnyExtent || extent == view.extent(d));
  }
  if (!fits) {
    return InvalidArgument(op, field, " is ", ShapeOf(view), "; need ",
                           ShapeOf(want));
  }
  for (int d = 0; d < view.rank(); ++d) {
    const bool last = d + 1 == view.rank();
    if (view.extent(d) > 1 && (last ? view.stride(d) != 1 : view.stride(d) < 0))
      return InvalidArgument(op, field, " has stride ", view.stride(d),
                             " in dimension ", d, "; need ",
                             last ? "1" : "0 or more");
  }
  if (IsEmpty(view)) return absl::OkStatus();
  if (int64_t bytes = 0; !SpanBytes(view, 0, &bytes)) {
    return InvalidArgument(op, field, " is ", ShapeOf(view), " with stride ",
                           view.stride(0),
                           " in dimension 0; need fewer than 2^63 bytes from "
                           "its first element to its last");
  }
  if (view.data() == nullptr) {
    return InvalidArgument(op, field, " is null; need ", ShapeOf(want));
  }
  if (reinterpret_cast<uintptr_t>(view.data()) % SizeOf(dtype) != 0) {
    return InvalidArgument(op, field, " is not aligned to its elements of ",
                           SizeOf(dtype), " bytes");
  }
  return absl::OkStatus();
}

absl::Status CheckElementsApart(absl::string_view op, absl::string_view field,
                                const AnyTensorView& view, int first) {
  if (IsEmpty(view)) return absl::OkStatus();
  int64_t inner = 1;
  for (int d = view.rank(); d-- > first;) {
    if (view.extent(d) > 1) {
      if (view.stride(d) < inner) {
        return InvalidArgument(op, field, " has stride ", view.stride(d),
                               " in dimension ", d, "; need ", inner,
                               " or more, as its elements must not overlap");
      }
      inner += (view.extent(d) - 1) * view.stride(d);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOutput(absl::string_view op, absl::string_view field,
                         const AnyTensorView& view, DType dtype,
                         absl::Span<const int64_t> want) {
  QUERN_RETURN_IF_ERROR(CheckInput(op, field, view, dtype, want));
  if (IsEmpty(view)) return absl::OkStatus();
  if (!view.writable()) {
    return InvalidArgument(op, field, " is read-only; need a writable view");
  }
  return CheckElementsApart(op, field, view);
}

// The strides may be any numbers, because the registry asks before an operator
// has looked at its tensors. A null view touches nothing.
bool MayOverlap(const AnyTensorView& a, const AnyTensorView& b) {
  if (RangesApart(a, b) || IsEmpty(a) || IsEmpty(b)) return false;
  if (a.data() == nullptr || b.data() == nullptr) return false;
  // MayMeet says yes of a range that is not known.
  if (HasNegativeStride(a) || HasNegativeStride(b)) return true;
  int64_t delta = 0;
  return !Distance(a, b, &delta) || MayMeet(a, b, 0, delta);
}

bool SameElements(const AnyTensorView& a, const AnyTensorView& b) {
  return a.data() == b.data() && SameIndexing(a, b);
}

absl::Status CheckInPlaceOrApart(absl::string_view op,
                                 absl::string_view in_field,
                                 const AnyTensorView& in,
                                 absl::string_view out_field,
                                 const AnyTensorView& out) {
  if (SameElements(in, out) || !MayOverlap(in, out)) return absl::OkStatus();
  return InvalidArgument(op, out_field, " overlaps ", in_field,
                         "; need the same elements or none in common");
}

absl::Status CheckApart(absl::string_view op, absl::string_view a_field,
                        const AnyTensorView& a, absl::string_view b_field,
                        const AnyTensorView& b) {
  if (!MayOverlap(a, b)) return absl::OkStatus();
  return InvalidArgument(op, b_field, " overlaps ", a_field,
                         "; need no element in common");
}

}  // namespace quern
