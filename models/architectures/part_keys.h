#ifndef QUERN_MODELS_ARCHITECTURES_PART_KEYS_H_
#define QUERN_MODELS_ARCHITECTURES_PART_KEYS_H_

// Private: keys of parts that are more than a number of the tables in
// models/architectures/architecture.h, and the checks of the parts' shapes.
// `architecture` is the name before a key's first dot.

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

// The parts that `architecture` may have and that keys tell: some of
// kQueryLora, kSplitKvB and kYarn.
absl::StatusOr<ModelParts> PartsOfKeys(const GgufFile& file,
                                       const Architecture& architecture);

// With kRouting: reads whether the weights of a token's experts are normalised.
// Unimplemented for groups of experts, and for more experts than
// DeepSeek-V2-Lite has in a file that does not say whether they are in groups.
// Unimplemented where routers have biases and no key says how experts are
// scored: softmax is right for DeepSeek-V2, which has no biases.
absl::Status ReadRoutingKeys(const GgufFile& file,
                             absl::string_view architecture, DecoderConfig& c);

// Whether routers add a bias: where scores are sigmoids, as DeepSeek-V3's are,
// and where a layer has the tensor. A layer that lacks it is then refused.
bool HasRouterBias(const GgufFile& file, const DecoderConfig& c);

// Checks the numbers of YaRN, if the model has it. `prefix` is put before each
// key's name.
absl::Status CheckYarn(const DecoderConfig& c, absl::string_view prefix);

// Checks the sizes of attention over latents, and bounds products of sizes.
// `prefix` as above.
absl::Status CheckLatentShape(const DecoderConfig& c, absl::string_view prefix);

// With kMultipliers: checks that each is near 1. `prefix` as above.
absl::Status CheckMultipliers(const DecoderConfig& c, absl::string_view prefix);

}  // namespace quern

#endif  // QUERN_MODELS_ARCHITECTURES_PART_KEYS_H_
