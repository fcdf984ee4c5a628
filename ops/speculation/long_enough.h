#ifndef QUERN_OPS_SPECULATION_LONG_ENOUGH_H_
#define QUERN_OPS_SPECULATION_LONG_ENOUGH_H_

// Checks of vectors that may be longer than an operator needs.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/index_table.h"

namespace quern {

// A vector that has been checked to be one has `least` elements or more.
inline absl::Status CheckLongEnough(const char* op, const char* field,
                                    const AnyTensorView& view, int64_t least) {
  if (view.extent(0) >= least) return absl::OkStatus();
  return InvalidArgument(op, field, " has ", view.extent(0),
                         " elements; need at least ", least);
}

// `view` is a vector of i32 or i64 of `least` elements or more, that is read.
inline absl::Status CheckIn(const char* op, const char* field,
                            const AnyTensorView& view, int64_t least) {
  QUERN_RETURN_IF_ERROR(CheckIndexInput(op, field, view, {kAnyExtent}));
  return CheckLongEnough(op, field, view, least);
}

// Like CheckIn, for a vector that is written.
inline absl::Status CheckOut(const char* op, const char* field,
                             const AnyTensorView& view, int64_t least) {
  QUERN_RETURN_IF_ERROR(CheckIndexOutput(op, field, view, {kAnyExtent}));
  return CheckLongEnough(op, field, view, least);
}
inline absl::Status CheckOut(const char* op, const char* field,
                             const AnyTensorView& view, DType dtype,
                             int64_t least) {
  QUERN_RETURN_IF_ERROR(CheckOutput(op, field, view, dtype, {kAnyExtent}));
  return CheckLongEnough(op, field, view, least);
}

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_LONG_ENOUGH_H_
