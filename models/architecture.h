#ifndef QUERN_MODELS_ARCHITECTURE_H_
#define QUERN_MODELS_ARCHITECTURE_H_

// Architectures as data: which keys and which tensors a GGUF file of each has.
// The check of a file, the loader, the generator of random files and the tests
// all read these tables, so that a new architecture is a line here and what it
// computes differently in decoder_config.h.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/gemm/epilogue.h"
#include "quern/models/decoder_config.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

struct Architecture {
  absl::string_view name;  // general.architecture
  uint32_t always;         // ModelPart bits that each file has
  uint32_t may;            // and those that a file may have
  RotaryStyle rope_style;
  LinearActivation activation;
  bool scales_embedding;  // by sqrt(hidden)
};

absl::Span<const Architecture> Architectures();
// Null: none of that name.
const Architecture* FindArchitecture(absl::string_view name);

// A key of the model's shape, "<architecture>.<name>": an integer in [1,
// max(config)] or a finite float above 0.
struct ModelKey {
  const char* name;
  // One of the two is set.
  int64_t DecoderConfig::*integer;
  float DecoderConfig::*real;
  uint32_t needs;  // ModelPart bits without which there is no such key
  // Where the file has no such key; 0 or less: it must have it.
  double (*fallback)(const DecoderConfig& config);
  int64_t (*max)(const DecoderConfig& config);
};

// In the order of reading: a fallback or a bound uses what is above it. The
// vocabulary is last: without its key it is what the embedding has.
absl::Span<const ModelKey> ModelKeys();

// The dimension of a tensor, by what it is.
enum class Extent : uint8_t {
  kOne,  // a vector has one row
  kHidden,
  kVocab,
  kQueryCols,
  kKeyCols,  // of keys, and of values
  kFfn,
  kHeadDim,
  kRopePairs,
};
constexpr size_t kNumExtents = 8;
int64_t ExtentOf(Extent extent, const DecoderConfig& config);

enum class TensorRole : uint8_t {
  kEmbedding,
  kMatrix,
  kMatrixIntoStream,  // its product is added to the residual stream
  kNorm,
  kBias,
  kRopeFactors,
};

// In the order of a file that this project writes.
enum class TensorId : uint8_t {
  kEmbedding,
  kAttnNorm,
  kAttnQ,
  kAttnK,
  kAttnV,
  kAttnQBias,
  kAttnKBias,
  kAttnVBias,
  kAttnQNorm,
  kAttnKNorm,
  kAttnOutput,
  kPostAttnNorm,
  kPostFfnNorm,
  kFfnNorm,
  kFfnGate,
  kFfnUp,
  kFfnDown,
  kOutputNorm,
  kOutput,
  kRopeFactors,
};

struct TensorEntry {
  TensorId id;
  const char* name;  // behind "blk.N." where each layer has one
  bool in_layer;
  TensorRole role;
  Extent cols, rows;
  uint32_t needs;  // ModelPart bits without which there is no such tensor

  bool is_matrix() const { return rows != Extent::kOne; }
};

const TensorEntry& TensorOf(TensorId id);
// "blk.3.attn_q.weight"; `layer` is not used where the model has one.
std::string TensorName(TensorId id, int64_t layer = 0);

// Calls `visit` for each tensor of a model, in the order of TensorId, layer
// after layer, until it fails.
absl::Status ForEachTensor(
    const DecoderConfig& config,
    absl::FunctionRef<absl::Status(const TensorEntry& entry, int64_t layer)>
        visit);

// Fastest first, as a file has them: [cols, rows], or [cols] of a vector.
std::vector<int64_t> TensorDims(const TensorEntry& entry,
                                const DecoderConfig& config);

// Calls int_key(name, value) or float_key(name, value) for each key that a
// file of this shape has, besides general.*.
void WriteModelKeys(
    const DecoderConfig& config,
    absl::FunctionRef<void(const std::string& name, int64_t value)> int_key,
    absl::FunctionRef<void(const std::string& name, float value)> float_key);

// Sets what follows from the architecture and the numbers in `config`: its
// parts, style, activation and scales. `has` says whether a part that a file
// may have is there.
void SetArchitecture(const Architecture& architecture,
                     absl::FunctionRef<bool(ModelPart part)> has,
                     DecoderConfig& config);

}  // namespace quern

#endif  // QUERN_MODELS_ARCHITECTURE_H_
