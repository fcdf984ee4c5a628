#ifndef QUERN_MODELS_ARCHITECTURES_FIXED_KEYS_H_
#define QUERN_MODELS_ARCHITECTURES_FIXED_KEYS_H_

// Private: keys of files that change what a model computes, in ways that this
// library does not compute.

#include "absl/status/status.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

// Unimplemented if the file has such a key with another value than the one by
// which models of `architecture` with `parts` compute; the message says why.
absl::Status CheckFixedKeys(const GgufFile& file,
                            const Architecture& architecture,
                            const ModelParts& parts);

}  // namespace quern

#endif  // QUERN_MODELS_ARCHITECTURES_FIXED_KEYS_H_
