#include "quern/c/model/gguf_source.h"

#include <cstdint>
#include <limits>
#include <string>

#include "absl/types/span.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace c_abi {

absl::StatusOr<GgufFile> OpenGguf(absl::string_view function, const char* path,
                                  const void* bytes, size_t num_bytes) {
  if ((path == nullptr) == (bytes == nullptr)) {
    return InvalidArgument(function,
                           path == nullptr ? "path and bytes are null"
                                           : "path and bytes are both given",
                           "; need one of them");
  }
  if (path != nullptr) {
    if (num_bytes == 0) return GgufFile::Open(path);
    return InvalidArgument(function, "num_bytes=", num_bytes,
                           "; need 0, as the file has a path");
  }
  constexpr auto kMost =
      static_cast<size_t>(std::numeric_limits<int64_t>::max());
  if (num_bytes > kMost) {
    return InvalidArgument(function, "num_bytes=", num_bytes,
                           "; need less than 2^63");
  }
  return GgufFile::Parse(
      absl::MakeConstSpan(static_cast<const uint8_t*>(bytes), num_bytes));
}

}  // namespace c_abi
}  // namespace quern
