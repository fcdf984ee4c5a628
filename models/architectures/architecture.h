#ifndef QUERN_MODELS_ARCHITECTURES_ARCHITECTURE_H_
#define QUERN_MODELS_ARCHITECTURES_ARCHITECTURE_H_

// Architectures as data: which keys and tensors a GGUF file of each
// architecture has. The check of a file, the loader, the generator of random
// files and the tests read these tables.
//
// A new architecture is a file beside this one and a line of
// architecture_list.h. That is all if it is made of parts that exist. A new
// part is a line of ModelPart, with its keys in architecture_keys.cc and its
// tensors in architecture_tensors.cc, and the code that computes it.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/gemm/epilogue.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

// A key, "<architecture>.<name>", that changes what a model computes in a way
// that this library does not compute. Files that have it with another value
// than `need` are refused.
struct FixedKey {
  enum class Kind : uint8_t { kInteger, kReal, kTrue };

  const char* name;
  Kind kind;
  int64_t need;           // ignored for kTrue
  const char* why = "";   // the end of a refusal
  ModelParts needs = {};  // parts of models in which the key is looked at
};

// One architecture, as its file in this folder defines it.
struct Architecture {
  absl::string_view name;  // general.architecture
  ModelParts always;       // what every file has
  ModelParts may;          // what a file may have besides
  RotaryStyle rope_style;
  LinearActivation activation = LinearActivation::kSiluAndMul;
  // Keys of this architecture alone; those of parts are in fixed_keys.cc.
  absl::Span<const FixedKey> fixed_keys = {};
  // Sets the fields of a config that follow from its other fields in this
  // architecture alone. It is called last; null if there are none.
  void (*adjust)(DecoderConfig& config) = nullptr;
};

// All architectures, in the order of architecture_list.h.
absl::Span<const Architecture* const> Architectures();
// Null for an unknown name.
const Architecture* FindArchitecture(absl::string_view name);
// Lists all names, such as "'llama', 'qwen2' and 'gemma2'", with `last` before
// the last one.
std::string ArchitectureNames(absl::string_view last);

// A key of the model's shape, "<architecture>.<name>": an integer in [min,
// max(config)], or a finite float above 0. In a model that lists its layers
// (DecoderConfig::ListsLayers), attention.head_count_kv is an array with an
// integer for each layer, which is 0 for the recurrent ones.
struct ModelKey {
  const char* name;
  // Exactly one of `integer` and `real` is set.
  int64_t DecoderConfig::*integer;
  float DecoderConfig::*real;
  ModelParts needs;  // what models with this key have
  // The value if the file lacks the key; 0 or less means that the key is
  // required.
  double (*fallback)(const DecoderConfig& config);
  int64_t (*max)(const DecoderConfig& config);
  int64_t min = 1;  // of an integer
};

// The keys in the order of reading, because a fallback or a bound may use keys
// above it. The vocabulary comes last, because without its key the embedding
// tells it.
absl::Span<const ModelKey> ModelKeys();

// What determines a dimension of a tensor.
enum class Extent : uint8_t {
  kOne,  // rows of a vector
  kHidden,
  kVocab,
  kQueryCols,
  kKeyCols,  // columns of keys, and of values
  kFfn,
  kHeadDim,
  kRopePairs,
  kExperts,
  kExpertFfn,
  kConvWidth,
  kConvChannels,
  kShortConvCols,  // three times the channels
  kSsmInner,
  kSsmHeads,
  kSsmGroups,
  kSsmGroupCols,  // channels of a group
  kSsmProjected,
  kSharedFfn,
  kQueryLora,
  kLatent,       // elements of a latent
  kLatentRow,    // and of the rotated part of a key
  kLatentHeads,  // query heads of layers over latents
  kNope,
  kValueDim,
  kKvBRows,      // keys without their rotated part, and values, of all heads
  kValueCols,    // values of all heads
  kQueryRows,    // of attn_q: queries, and their gates if there are any
  kQueryGroups,  // heads, if attn_q has queries and gates by turns; else 1
  kSsmHeadCols,  // channels of a head
  kSsmGates,     // two for each head
  kQkvRows,      // of q, k and v together
  kGateUpRows,   // of gate and up together
  kQueryHeads,
};
constexpr size_t kNumExtents = 34;
int64_t ExtentOf(Extent extent, const DecoderConfig& config);

enum class TensorRole : uint8_t {
  kEmbedding,
  kMatrix,
  kMatrixIntoStream,  // its product is added to the residual stream
  kRouter,            // a matrix whose product chooses or weighs experts
  kNorm,
  kBias,
  kRopeFactors,
  kConvolution,  // small and f32, read as it is; no product's matrix
  kDecay,        // of the states: a number below 0 for each head
};

// The tensors, in the order of files that this project writes.
enum class TensorId : uint8_t {
  kEmbedding,
  kAttnNorm,
  kAttnQ,
  kAttnK,
  kAttnV,
  kAttnQkv,
  kAttnQBias,
  kAttnKBias,
  kAttnVBias,
  kAttnQNorm,
  kAttnKNorm,
  kAttnWholeQNorm,
  kAttnWholeKNorm,
  kAttnOutput,
  kAttnOutputBias,
  kAttnSinks,
  kLatentQ,
  kLatentQA,
  kLatentQANorm,
  kLatentQB,
  kLatentKvA,
  kLatentKvANorm,
  kLatentKvB,
  kLatentKB,
  kLatentVB,
  kLatentOutput,
  kShortConv,
  kShortConvIn,
  kShortConvOut,
  kSsmIn,
  kSsmConv,
  kSsmConvBias,
  kSsmDtBias,
  kSsmA,
  kSsmD,
  kSsmNorm,
  kSsmOut,
  kDeltaQkv,
  kDeltaGate,
  kDeltaBetaAlpha,
  kDeltaA,
  kDeltaNorm,
  kPostAttnNorm,
  kPostFfnNorm,
  kFfnNorm,
  kPostMixNorm,
  kFfnGate,
  kFfnUp,
  kFfnGateUp,
  kFfnDown,
  kRouter,
  kRouterBias,
  kRouterLogitBias,
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kExpertGateBias,
  kExpertUpBias,
  kExpertDownBias,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kSharedRouter,
  kOutputNorm,
  kEmbdNorm,
  kOutput,
  kRopeFactors,
};

struct TensorEntry {
  TensorId id;
  const char* name;  // after "blk.N." if each layer has one
  bool in_layer;
  TensorRole role;
  Extent cols, rows;
  // What models with this tensor have; if it is in layers, what a layer with it
  // has (DecoderConfig::PartsIn).
  ModelParts needs;
  // The number of such matrices, which lie one after the other in a third
  // dimension; kOne: the tensor is one matrix.
  Extent matrices = Extent::kOne;
  // The number of groups of rows. If it is more than 1, each group has two
  // halves, and the loader reads the first halves of all groups, and behind
  // them the second halves.
  Extent groups = Extent::kOne;

  bool is_matrix() const { return rows != Extent::kOne; }
  // Whether rows are multiplied by it, in the form that the options ask for.
  bool is_weight() const {
    return role == TensorRole::kEmbedding || role == TensorRole::kMatrix ||
           role == TensorRole::kMatrixIntoStream;
  }
};

const TensorEntry& TensorOf(TensorId id);
// Where a file has the rows of a matrix: from `row` on in the tensor `id`,
// which is another than the matrix where several are joined.
struct TensorPlace {
  TensorId id;
  int64_t row;
};
TensorPlace PlaceOf(TensorId matrix, const DecoderConfig& config);
// The tensor's name in files, such as "blk.3.attn_q.weight". `layer` is ignored
// for a tensor that the model has once.
std::string TensorName(TensorId id, int64_t layer = 0);

// Calls `visit` for each tensor of a model, in the order of TensorId, layer by
// layer. Stops at the first failure and returns it.
absl::Status ForEachTensor(
    const DecoderConfig& config,
    absl::FunctionRef<absl::Status(const TensorEntry& entry, int64_t layer)>
        visit);

// Dimensions as in a file, fastest first: [cols, rows, matrices], [cols, rows],
// or [cols] for a vector.
std::vector<int64_t> TensorDims(const TensorEntry& entry,
                                const DecoderConfig& config);

// Calls one of the functions for each key that a file of this shape has, other
// than general.*. ints_key is for a key with a number for each layer.
void WriteModelKeys(
    const DecoderConfig& config,
    absl::FunctionRef<void(const std::string& name, int64_t value)> int_key,
    absl::FunctionRef<void(const std::string& name, float value)> float_key,
    absl::FunctionRef<void(const std::string& name, bool value)> bool_key,
    absl::FunctionRef<void(const std::string& name,
                           const std::vector<int32_t>& values)>
        ints_key);
// The key, without its architecture, that says whether attention has rotary
// positions, in models with kMultipliers: a bool, true by default.
inline constexpr char kRopeKey[] = "rope.scaling.finetuned";
// The key, without its architecture, that says whether the weights of a token's
// experts sum to expert_scale, in models with kRouting: a bool, false by
// default.
inline constexpr char kExpertsNormKey[] = "expert_weights_norm";
// The key, without its architecture, of a string that names the scaling of
// rotary positions: kYarnScaling in models with kYarn, kLinearScaling in models
// with kLinearRope. WriteModelKeys leaves it to the caller.
inline constexpr char kRopeScalingKey[] = "rope.scaling.type";
inline constexpr char kYarnScaling[] = "yarn";
inline constexpr char kLinearScaling[] = "linear";

// Sets the fields of `config` that follow from the architecture and from its
// numbers: parts, style, activation and scales. `has` says whether the file has
// an optional part.
void SetArchitecture(const Architecture& architecture,
                     absl::FunctionRef<bool(ModelPart part)> has,
                     DecoderConfig& config);

}  // namespace quern

#endif  // QUERN_MODELS_ARCHITECTURES_ARCHITECTURE_H_
