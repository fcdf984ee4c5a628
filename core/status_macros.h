#ifndef QUERN_CORE_STATUS_MACROS_H_
#define QUERN_CORE_STATUS_MACROS_H_

// What Create, Build and CheckArgs are made of: early return on error, and
// builders that give every refusal the same form: operator, values, bound.
//
//   QUERN_RETURN_IF_ERROR(CheckRange("int8_gemm", "k", k, 1, kMaxK));
//   QUERN_ASSIGN_OR_RETURN(const auto layout, Layout::Create(k, n));
//
//   "int8_gemm: k=131072; need 1 <= k <= 131071"
//
// And what Execute may do with CheckArgs, which its caller need not call:
//
//   QUERN_DCHECK_OK(CheckArgs(a, c));   // aborts with the refusal's words

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"

#define QUERN_RETURN_IF_ERROR(expr)                                 \
  do {                                                              \
    if (::absl::Status quern_status = (expr); !quern_status.ok()) { \
      return quern_status;                                          \
    }                                                               \
  } while (false)

#define QUERN_STATUS_CONCAT_(a, b) a##b
#define QUERN_STATUS_CONCAT(a, b) QUERN_STATUS_CONCAT_(a, b)
#define QUERN_ASSIGN_OR_RETURN_(result, lhs, expr) \
  auto result = (expr);                            \
  if (!result.ok()) return result.status();        \
  lhs = *std::move(result)
#define QUERN_ASSIGN_OR_RETURN(lhs, expr)                                    \
  QUERN_ASSIGN_OR_RETURN_(QUERN_STATUS_CONCAT(quern_result_, __LINE__), lhs, \
                          expr)

// QUERN_DCHECK(expr.ok()) that also prints the status.
#ifdef NDEBUG
#define QUERN_DCHECK_OK(expr) ((void)sizeof((expr).ok()))
#else
#define QUERN_DCHECK_OK(expr) \
  ::quern::CheckOk((expr), #expr, __FILE__, __LINE__)
#endif

namespace quern {

// Aborts, where `status` is an error, with where, what and why.
inline void CheckOk(const absl::Status& status, const char* expr,
                    const char* file, int line) {
  if (status.ok()) return;
  CheckFailed(absl::StrCat(expr, ": ", status.ToString()).c_str(), file, line);
}

// "op: message", the pieces joined as by absl::StrCat.
template <typename... Pieces>
absl::Status InvalidArgument(absl::string_view op, const Pieces&... pieces) {
  return absl::InvalidArgumentError(absl::StrCat(op, ": ", pieces...));
}
template <typename... Pieces>
absl::Status Unimplemented(absl::string_view op, const Pieces&... pieces) {
  return absl::UnimplementedError(absl::StrCat(op, ": ", pieces...));
}

// "op: field=value; need min <= field <= max"
inline absl::Status CheckRange(absl::string_view op, absl::string_view field,
                               int64_t value, int64_t min, int64_t max) {
  if (min <= value && value <= max) return absl::OkStatus();
  return InvalidArgument(op, field, "=", value, "; need ", min, " <= ", field,
                         " <= ", max);
}

// "op: field=value; need field >= min"
inline absl::Status CheckAtLeast(absl::string_view op, absl::string_view field,
                                 int64_t value, int64_t min) {
  if (value >= min) return absl::OkStatus();
  return InvalidArgument(op, field, "=", value, "; need ", field, " >= ", min);
}

// "op: field=value; need want, as wanted_by"
inline absl::Status CheckEqual(absl::string_view op, absl::string_view field,
                               int64_t value, int64_t want,
                               absl::string_view wanted_by) {
  if (value == want) return absl::OkStatus();
  return InvalidArgument(op, field, "=", value, "; need ", want, ", as ",
                         wanted_by);
}

// "op: field is bf16; need f32"
inline absl::Status CheckDType(absl::string_view op, absl::string_view field,
                               DType value, DType want) {
  if (value == want) return absl::OkStatus();
  return InvalidArgument(op, field, " is ", DTypeName(value), "; need ",
                         DTypeName(want));
}

}  // namespace quern

#endif  // QUERN_CORE_STATUS_MACROS_H_
