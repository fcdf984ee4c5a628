#include "quern/core/dtype.h"

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace quern {
namespace {

// In the order of the enumerators.
constexpr absl::string_view kNames[] = {
    "f32", "bf16", "f16", "f8e4m3", "f8e5m2", "i32", "i8", "u8", "i64"};

}  // namespace

absl::string_view DTypeName(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  return i < std::size(kNames) ? kNames[i] : "invalid dtype";
}

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<DType>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat("dtype '", name,
                                                 "' is unknown; need one of ",
                                                 absl::StrJoin(kNames, ", ")));
}

}  // namespace quern
