#ifndef QUERN_CACHE_HEAD_ROWS_H_
#define QUERN_CACHE_HEAD_ROWS_H_

// Queries, keys, values and outputs as a plan's caller passes them: a view
// [tokens, heads, head_dim] of any token and head strides, whose rows are
// contiguous.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/dtype.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"

namespace quern {

// InvalidArgument names what of `view` is not as asked for.
inline absl::Status CheckHeadRows(absl::string_view op, absl::string_view name,
                                  const AnyTensorView& view, DType dtype,
                                  int64_t tokens, int64_t heads,
                                  int64_t head_dim) {
  QUERN_RETURN_IF_ERROR(CheckDType(op, name, view.dtype(), dtype));
  QUERN_RETURN_IF_ERROR(CheckEqual(op, absl::StrCat(name, ".rank"), view.rank(),
                                   3, "[tokens, heads, dim]"));
  const int64_t wanted[] = {tokens, heads, head_dim};
  const char* const kWhat[] = {"the number of tokens", "the number of heads",
                               "the head dim"};
  for (int d = 0; d < 3; ++d) {
    QUERN_RETURN_IF_ERROR(CheckEqual(op, absl::StrCat(name, ".extent(", d, ")"),
                                     view.extent(d), wanted[d], kWhat[d]));
  }
  return CheckEqual(op, absl::StrCat(name, ".stride(2)"), view.stride(2), 1,
                    "rows are contiguous");
}

// From data() to row [token, head].
inline int64_t HeadRowOffsetBytes(const AnyTensorView& view, int64_t token,
                                  int64_t head) {
  return (token * view.stride(0) + head * view.stride(1)) *
         static_cast<int64_t>(SizeOf(view.dtype()));
}

}  // namespace quern

#endif  // QUERN_CACHE_HEAD_ROWS_H_
