#ifndef QUERN_CORE_CHECK_ARGS_H_
#define QUERN_CORE_CHECK_ARGS_H_

// What the CheckArgs of every operator here are made of. Messages name the
// operator, the argument, what it is and what it must be.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {

// Stands for any extent in the `want` of CheckInput and CheckOutput.
inline constexpr int64_t kAnyExtent = -1;

// `dtype` is one of `choices`, else Unimplemented: "op: field is f16; need f32
// or bf16".
absl::Status CheckDTypeIn(absl::string_view op, absl::string_view field,
                          DType dtype, absl::Span<const DType> choices);

// `value` is finite, and above 0 or from 0 on, else InvalidArgument: "op:
// field=value; need a finite number >= 0". `need` replaces the three words.
absl::Status CheckFinite(absl::string_view op, absl::string_view field,
                         double value,
                         absl::string_view need = "a finite number");
absl::Status CheckPositive(absl::string_view op, absl::string_view field,
                           double value,
                           absl::string_view need = "a finite number");
absl::Status CheckNotNegative(absl::string_view op, absl::string_view field,
                              double value,
                              absl::string_view need = "a finite number");

// Whether the view has no elements: an extent is 0, or there is no view (rank
// 0).
bool IsEmpty(const AnyTensorView& view);

// `view` has this dtype, rank and extents, last stride 1, no negative stride,
// and, unless it is empty, memory: fewer than 2^63 bytes, at a multiple of the
// element's size. The stride of a dimension of extent 1 is not used and may be
// any number.
absl::Status CheckInput(absl::string_view op, absl::string_view field,
                        const AnyTensorView& view, DType dtype,
                        absl::Span<const int64_t> want);

// No two elements of `view` that agree in the dimensions before `first` lie in
// one place: each stride from `first` on steps over all that the dimensions
// inside it cover. Views that are written need that, and so do matrices of
// weights that are packed. CheckInput has accepted `view`.
absl::Status CheckElementsApart(absl::string_view op, absl::string_view field,
                                const AnyTensorView& view, int first = 0);

// Like CheckInput, for a view that is written: CheckElementsApart.
absl::Status CheckOutput(absl::string_view op, absl::string_view field,
                         const AnyTensorView& view, DType dtype,
                         absl::Span<const int64_t> want);

// Whether two views touch a common byte. A no is a no. A yes is exact where
// both are ranges of one tensor in one dimension, such as the columns of q and
// k in a joint projection, or keys and values that alternate from head to head.
// Some other views that lie apart have a yes, because address ranges decide.
bool MayOverlap(const AnyTensorView& a, const AnyTensorView& b);

// Whether element [i, j] of both lies at the same address, for all that the
// smaller of them has: the writer may then replace what it has read.
bool SameElements(const AnyTensorView& a, const AnyTensorView& b);

// `out` is where `in` is, element by element, or does not touch it.
absl::Status CheckInPlaceOrApart(absl::string_view op,
                                 absl::string_view in_field,
                                 const AnyTensorView& in,
                                 absl::string_view out_field,
                                 const AnyTensorView& out);

// `a` and `b` do not touch.
absl::Status CheckApart(absl::string_view op, absl::string_view a_field,
                        const AnyTensorView& a, absl::string_view b_field,
                        const AnyTensorView& b);

}  // namespace quern

#endif  // QUERN_CORE_CHECK_ARGS_H_
