#ifndef QUERN_C_MODEL_GGUF_SOURCE_H_
#define QUERN_C_MODEL_GGUF_SOURCE_H_

// Private to c/. The file that options name by a path or by its bytes.

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace c_abi {

// InvalidArgument unless exactly one of path and bytes is given; else what
// GgufFile::Open and Parse refuse. `bytes` must outlive the result.
absl::StatusOr<GgufFile> OpenGguf(absl::string_view function, const char* path,
                                  const void* bytes, size_t num_bytes);

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_MODEL_GGUF_SOURCE_H_
