#ifndef QUERN_C_OBJECTS_BY_NAME_H_
#define QUERN_C_OBJECTS_BY_NAME_H_

// Private to c/. Enumerators by the names that their headers give them.

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace c_abi {

// Finds the value among `all` that name_of calls `text`. A refusal lists names.
template <typename T, size_t kCount>
absl::StatusOr<T> ByName(absl::string_view function, absl::string_view field,
                         absl::string_view text, const T (&all)[kCount],
                         absl::string_view (*name_of)(T)) {
  std::string names;
  for (const T value : all) {
    if (text == name_of(value)) return value;
    absl::StrAppend(&names, names.empty() ? "" : ", ", name_of(value));
  }
  return InvalidArgument(function, field, "=\"", text, "\"; need one of ",
                         names);
}

// The dtype of a cache's elements, by its name.
inline absl::StatusOr<DType> CacheDTypeOf(absl::string_view function,
                                          absl::string_view field,
                                          absl::string_view text) {
  constexpr DType kAll[] = {DType::kF32, DType::kBF16,   DType::kF16,
                            DType::kI8,  DType::kF8E4M3, DType::kF8E5M2};
  return ByName(function, field, text, kAll, &DTypeName);
}

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OBJECTS_BY_NAME_H_
