#ifndef QUERN_OPS_DENSE_VIEW_H_
#define QUERN_OPS_DENSE_VIEW_H_

// Views without gaps, for what moves elements as one block.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {

// Whether the elements of all dimensions from `first` on lie side by side. The
// product of their extents must be a number.
inline bool IsDense(const AnyTensorView& view, int first = 0) {
  int64_t want = 1;
  for (int d = view.rank(); d-- > first;) {
    if (view.extent(d) > 1 && view.stride(d) != want) return false;
    want *= view.extent(d);
  }
  return true;
}

// InvalidArgument unless `view` is empty or dense. CheckInput has accepted it.
inline absl::Status CheckDense(absl::string_view op, absl::string_view field,
                               const AnyTensorView& view) {
  if (IsEmpty(view) || IsDense(view)) return absl::OkStatus();
  return InvalidArgument(op, field, " has gaps; need a dense tensor");
}

}  // namespace quern

#endif  // QUERN_OPS_DENSE_VIEW_H_
