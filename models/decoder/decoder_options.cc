#include "quern/models/decoder/decoder_options.h"

#include "absl/strings/string_view.h"

namespace quern {

absl::string_view DecoderWeightsName(DecoderWeights weights) {
  switch (weights) {
    case DecoderWeights::kAsInFile:
      return "file";
    case DecoderWeights::kBF16:
      return "bf16";
    case DecoderWeights::kF32:
      return "f32";
    case DecoderWeights::kInt8:
      return "int8";
  }
  return "";
}

absl::string_view DecoderActivationsName(DecoderActivations activations) {
  return activations == DecoderActivations::kExact ? "exact" : "int8";
}

}  // namespace quern
