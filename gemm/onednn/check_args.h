#ifndef QUERN_GEMM_ONEDNN_CHECK_ARGS_H_
#define QUERN_GEMM_ONEDNN_CHECK_ARGS_H_

// Refusals that the plans of this folder share.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {

// oneDNN's kernels hold strides as 32-bit numbers of bytes.
constexpr int64_t kMaxOneDnnExtent = (int64_t{1} << 29) - 1;

// The elements of the last dimension `d` follow each other, at multiples of
// their size.
inline absl::Status CheckElements(absl::string_view op, absl::string_view field,
                                  const AnyTensorView& view, int d) {
  if (view.extent(d) > 1) {
    QUERN_RETURN_IF_ERROR(
        CheckEqual(op, absl::StrCat(field, ".stride(", d, ")"), view.stride(d),
                   1, "elements follow each other"));
  }
  if (reinterpret_cast<uintptr_t>(view.data()) % SizeOf(view.dtype()) != 0) {
    return InvalidArgument(op, field, " is not aligned to its elements of ",
                           SizeOf(view.dtype()), " bytes");
  }
  return absl::OkStatus();
}

// `field` is a vector of `size` elements of `dtype`.
inline absl::Status CheckVector(absl::string_view op, absl::string_view field,
                                const AnyTensorView& view, DType dtype,
                                int64_t size, absl::string_view wanted_by) {
  if (view.rank() != 1) {
    return InvalidArgument(op, field, " has rank ", view.rank(), "; need 1");
  }
  QUERN_RETURN_IF_ERROR(CheckDType(op, field, view.dtype(), dtype));
  QUERN_RETURN_IF_ERROR(CheckEqual(op, absl::StrCat(field, ".extent(0)"),
                                   view.extent(0), size, wanted_by));
  if (view.data() == nullptr && size > 0) {
    return InvalidArgument(op, field, " has no data");
  }
  return CheckElements(op, field, view, 0);
}

// `field` is a matrix of `cols` columns with a stride that oneDNN can hold.
inline absl::Status CheckMatrix(absl::string_view op, absl::string_view field,
                                const AnyTensorView& view, int64_t cols) {
  if (view.rank() != 2) {
    return InvalidArgument(op, field, " has rank ", view.rank(), "; need 2");
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(op, absl::StrCat(field, ".extent(1)"),
                                   view.extent(1), cols, "the spec has it"));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(op, absl::StrCat(field, ".extent(0)"), view.extent(0), 0));
  // The stride of a single row is never used.
  if (view.extent(0) > 1) {
    QUERN_RETURN_IF_ERROR(CheckRange(op, absl::StrCat(field, ".stride(0)"),
                                     view.stride(0), cols, kMaxOneDnnExtent));
  }
  if (view.data() == nullptr && view.extent(0) > 0) {
    return InvalidArgument(op, field, " has no data");
  }
  return CheckElements(op, field, view, 1);
}

// `weights` is [n, k] (by_rows) or [k, n].
inline absl::Status CheckWeights(absl::string_view op,
                                 const AnyTensorView& weights, int64_t n,
                                 int64_t k, bool by_rows) {
  QUERN_RETURN_IF_ERROR(CheckMatrix(op, "weights", weights, by_rows ? k : n));
  return CheckEqual(op, "weights.extent(0)", weights.extent(0), by_rows ? n : k,
                    "the spec has it");
}

// `c` is [rows of a, n], writable, and does not touch a.
inline absl::Status CheckResult(absl::string_view op, const AnyTensorView& a,
                                const AnyTensorView& c, int64_t n) {
  QUERN_RETURN_IF_ERROR(CheckMatrix(op, "c", c, n));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(op, "c.extent(0)", c.extent(0), a.extent(0), "a has it"));
  if (c.extent(0) > 0 && !c.writable()) {
    return InvalidArgument(op, "c is read-only");
  }
  return CheckApart(op, "c", c, "a", a);
}

// `bias` is f32[n], or of rank 0 for none.
inline absl::Status CheckBias(absl::string_view op, const AnyTensorView& bias,
                              int64_t n) {
  if (bias.rank() == 0) return absl::OkStatus();
  if (bias.rank() != 1) {
    return InvalidArgument(op, "bias has rank ", bias.rank(),
                           "; need 1, or 0 for none");
  }
  return CheckVector(op, "bias", bias, DType::kF32, n, "the spec has n");
}

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_CHECK_ARGS_H_
