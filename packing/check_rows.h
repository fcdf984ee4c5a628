#ifndef QUERN_PACKING_CHECK_ROWS_H_
#define QUERN_PACKING_CHECK_ROWS_H_

// Private to the plans that pack rows into lines of 64 bytes.

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/status_macros.h"

namespace quern {

// InvalidArgument unless there are `n` rows, none of them null, and the packed
// memory is aligned to a cache line. `n_of` says whose n it is.
inline absl::Status CheckRowsToPack(absl::string_view op,
                                    absl::Span<const uint8_t* const> rows,
                                    int64_t n, absl::string_view n_of,
                                    const uint8_t* packed) {
  constexpr uintptr_t kLineBytes = 64;
  QUERN_RETURN_IF_ERROR(
      CheckEqual(op, "rows", static_cast<int64_t>(rows.size()), n, n_of));
  if (std::find(rows.begin(), rows.end(), nullptr) != rows.end()) {
    return InvalidArgument(op, "a row is null");
  }
  const uintptr_t past = reinterpret_cast<uintptr_t>(packed) % kLineBytes;
  if (packed != nullptr && past == 0) return absl::OkStatus();
  return InvalidArgument(op, "packed is null or ", past,
                         " bytes past a cache line; need alignment ",
                         kLineBytes);
}

}  // namespace quern

#endif  // QUERN_PACKING_CHECK_ROWS_H_
