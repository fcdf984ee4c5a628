#ifndef QUERN_MODELS_ARCHITECTURES_FIXED_KEYS_H_
#define QUERN_MODELS_ARCHITECTURES_FIXED_KEYS_H_

// Private: keys of files that change what a model computes, in ways that this
// library does not compute.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

// Unimplemented if the file has such a key with another value than the one by
// which models of `architecture` with `parts` (bits of ModelPart) compute; the
// message says why. `architecture` is the name before a key's first dot.
absl::Status CheckFixedKeys(const GgufFile& file,
                            absl::string_view architecture, uint32_t parts);

}  // namespace quern

#endif  // QUERN_MODELS_ARCHITECTURES_FIXED_KEYS_H_
