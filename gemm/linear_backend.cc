#include "gemm/linear_backend.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace quern {

// Defined in gemm/onednn/backend.cc. A weak reference, rather than a table that
// backends enter before main: it needs no order of initialisation and no state
// that changes, and its value is known when the program is linked.
const LinearBackend* LinkedOneDnnBackend() __attribute__((weak));

const LinearBackend* OneDnnBackend() {
  return LinkedOneDnnBackend == nullptr ? nullptr : LinkedOneDnnBackend();
}

absl::StatusOr<const LinearBackend*> RequireOneDnn(const char* op) {
  const LinearBackend* const backend = OneDnnBackend();
  if (backend != nullptr) return backend;
  return absl::FailedPreconditionError(
      absl::StrCat(op,
                   ": impl=onednn, but this program does not link oneDNN; need "
                   "@quern//gemm/onednn in its deps"));
}

}  // namespace quern
