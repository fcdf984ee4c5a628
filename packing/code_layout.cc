#include "quern/packing/code_layout.h"

#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {

absl::StatusOr<CodeLayout> CodeLayout::Create(int64_t bits, int64_t k,
                                              int64_t n) {
  constexpr char kOp[] = "code_layout";
  if (bits != 4 && bits != 8) {
    return InvalidArgument(kOp, "bits=", bits, "; need 4 or 8");
  }
  if (k < 1 || n < 1) {
    return InvalidArgument(kOp, "k=", k, ", n=", n, "; need 1 or more");
  }
  const CodeLayout layout(bits, k, n);
  int64_t bytes = 0;
  if (!CheckedMul(layout.lines(), kLineBytes, &bytes) ||
      !CheckedMul(layout.panels(), bytes, &bytes)) {
    return InvalidArgument(kOp, "k=", k, ", n=", n,
                           "; the packed weights have more than 2^63 bytes");
  }
  return layout;
}

}  // namespace quern
