#ifndef QUERN_OPS_CHECK_INDICES_H_
#define QUERN_OPS_CHECK_INDICES_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/ops/index_view.h"

namespace quern {

// InvalidArgument unless the view has memory and each index is in [0, end) or
// equals `other`. The message names the first bad index as `one`, an element of
// `field`: "op: ids[7]=9; need 0 <= id < 8". O(indices).
inline absl::Status CheckIndices(absl::string_view op, absl::string_view field,
                                 absl::string_view one, IndexView indices,
                                 int64_t end,
                                 std::optional<int64_t> other = std::nullopt) {
  if (indices.null() && indices.size() > 0) {
    return InvalidArgument(op, field, " is null; need ", indices.size());
  }
  for (int64_t i = 0; i < indices.size(); ++i) {
    if ((indices[i] < 0 || indices[i] >= end) && indices[i] != other) {
      return InvalidArgument(op, field, "[", i, "]=", indices[i],
                             "; need 0 <= ", one, " < ", end);
    }
  }
  return absl::OkStatus();
}

}  // namespace quern

#endif  // QUERN_OPS_CHECK_INDICES_H_
