#include "quern/models/architectures/decoder_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/fixed_keys.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/architectures/part_keys.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

// Reads the keys of one architecture.
class Keys {
 public:
  Keys(const GgufFile& file, absl::string_view architecture)
      : file_(file), prefix_(absl::StrCat(architecture, ".")) {}

  std::string Name(absl::string_view key) const {
    return absl::StrCat(prefix_, key);
  }
  bool Has(absl::string_view key) const { return file_.Has(Name(key)); }

  absl::Status Read(const ModelKey& key, DecoderConfig& c) const {
    const double fallback = key.fallback(c);
    const bool absent = fallback > 0 && !Has(key.name);
    if (key.integer != nullptr) {
      int64_t value = static_cast<int64_t>(fallback);
      if (!absent) {
        QUERN_ASSIGN_OR_RETURN(value, file_.GetInt(Name(key.name)));
        QUERN_RETURN_IF_ERROR(
            CheckRange(kOp, Name(key.name), value, key.min, key.max(c)));
      }
      c.*key.integer = value;
      return absl::OkStatus();
    }
    auto value = static_cast<float>(fallback);
    if (!absent) {
      QUERN_ASSIGN_OR_RETURN(value, file_.GetF32(Name(key.name)));
      if (!std::isfinite(value) || value <= 0) {
        return InvalidArgument(kOp, Name(key.name), "=", value,
                               "; need a number > 0");
      }
    }
    c.*key.real = value;
    return absl::OkStatus();
  }

  // Reads an array with a number for each layer, which is 0 for the recurrent
  // layers and the same for all others.
  absl::Status ReadKvHeads(const ModelKey& key, DecoderConfig& c) const {
    const std::string name = Name(key.name);
    QUERN_ASSIGN_OR_RETURN(std::vector<int32_t> heads, file_.GetI32s(name));
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, absl::StrCat("numbers in ", name),
                                     static_cast<int64_t>(heads.size()),
                                     c.layers + c.predicting_layers,
                                     "there are layers"));
    // Layers that predict are not read.
    heads.resize(static_cast<size_t>(c.layers));
    c.kv_heads = *std::max_element(heads.begin(), heads.end());
    for (size_t layer = 0; layer < heads.size(); ++layer) {
      const std::string at = absl::StrCat(name, "[", layer, "]");
      QUERN_RETURN_IF_ERROR(CheckRange(kOp, at, heads[layer], 0, key.max(c)));
      if (heads[layer] != 0 && heads[layer] != c.kv_heads) {
        return Unimplemented(kOp, at, "=", heads[layer],
                             "; need 0, or the same number for all layers "
                             "that attend, such as ",
                             c.kv_heads);
      }
      c.recurrent.push_back(heads[layer] == 0 ? 1 : 0);
    }
    if (c.kv_heads > 0) return absl::OkStatus();
    return Unimplemented(kOp, name, " is 0 for all of ", c.layers,
                         " layers; need a layer that attends");
  }

  // Takes the layers that predict more tokens at once off c.layers.
  absl::Status LeavePredictingLayers(DecoderConfig& c) const {
    constexpr char kKey[] = "nextn_predict_layers";
    if (!Has(kKey)) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(c.predicting_layers, file_.GetInt(Name(kKey)));
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, Name(kKey), c.predicting_layers, 0, c.layers - 1));
    c.layers -= c.predicting_layers;
    return absl::OkStatus();
  }

  // Unimplemented if the file has scaling of rotary positions that the
  // architecture has not.
  absl::Status CheckRopeScaling(const Architecture& architecture) const {
    if (const char* key = kRopeScalingKey; Has(key)) {
      QUERN_ASSIGN_OR_RETURN(const absl::string_view scaling,
                             file_.GetString(Name(key)));
      if (scaling == "none") return absl::OkStatus();
      if (scaling == kYarnScaling && architecture.may.Has(ModelPart::kYarn)) {
        return absl::OkStatus();
      }
      if (scaling == kLinearScaling &&
          architecture.may.Has(ModelPart::kLinearRope)) {
        return absl::OkStatus();
      }
      return Unimplemented(
          kOp, Name(key), " is '", absl::CHexEscape(scaling.substr(0, 64)),
          architecture.may.Has(ModelPart::kYarn) ? "'; need 'none' or 'yarn'"
                                                 : "'; need 'none'");
    }
    // A factor without a type means linear scaling.
    for (const char* key : {"rope.scaling.factor", "rope.scale_linear"}) {
      if (!Has(key)) continue;
      QUERN_ASSIGN_OR_RETURN(const float factor, file_.GetF32(Name(key)));
      if (factor != 1.0f && factor != 0.0f) {  // 0 means none too
        return Unimplemented(kOp, Name(key), "=", factor, "; need 1");
      }
    }
    return absl::OkStatus();
  }

  // Whether there is a shared expert besides the others.
  absl::StatusOr<bool> HasSharedExpert(const Architecture& architecture) const {
    const bool counted = architecture.always.Has(ModelPart::kRouting);
    const char* key =
        counted ? "expert_shared_count" : "expert_shared_feed_forward_length";
    if (!architecture.may.Has(ModelPart::kSharedExpert) || !Has(key)) {
      return false;
    }
    QUERN_ASSIGN_OR_RETURN(const int64_t columns, file_.GetInt(Name(key)));
    return columns != 0;
  }

  // Whether attention has rotary positions.
  absl::StatusOr<bool> HasRope(const DecoderConfig& c) const {
    if (!c.Has(ModelPart::kMultipliers) || !Has(kRopeKey)) return true;
    return file_.GetBool(Name(kRopeKey));
  }

  // Whether there are experts. Unimplemented if the architecture has none.
  absl::StatusOr<bool> HasExperts(const Architecture& architecture) const {
    if (architecture.always.Has(ModelPart::kExperts)) return true;
    if (!Has("expert_count")) return false;
    QUERN_ASSIGN_OR_RETURN(const int64_t experts,
                           file_.GetInt(Name("expert_count")));
    if (experts == 0) return false;
    if (architecture.may.Has(ModelPart::kExperts)) return true;
    return Unimplemented(kOp, Name("expert_count"), "=", experts, "; need 0");
  }

 private:
  const GgufFile& file_;
  std::string prefix_;
};

// The end of a refusal of a tensor.
std::string FileAndSupported(const GgufFile& file) {
  return absl::StrCat("; the file is ", file.Describe(), "; supported are ",
                      ArchitectureNames("and"),
                      " in F32, F16, BF16, Q2_K to Q8_0, IQ4_NL, "
                      "IQ4_XS, TQ2_0 and MXFP4");
}

absl::StatusOr<const GgufTensor*> FindTensor(const GgufFile& file,
                                             absl::string_view name) {
  if (file.HasTensor(name)) return file.FindTensor(name);
  return InvalidArgument(kOp, "no tensor '", name, "'", FileAndSupported(file));
}

// Some writers keep trailing dimensions of 1, and others do not.
std::vector<int64_t> WithoutTrailingOnes(std::vector<int64_t> dims) {
  while (dims.size() > 1 && dims.back() == 1) dims.pop_back();
  return dims;
}

// Whether a tensor belongs to a layer that predicts more tokens.
bool IsOfPredictingLayer(absl::string_view name, const DecoderConfig& c) {
  int64_t layer;
  return c.predicting_layers > 0 && absl::ConsumePrefix(&name, "blk.") &&
         absl::SimpleAtoi(name.substr(0, name.find('.')), &layer) &&
         layer >= c.layers && layer < c.layers + c.predicting_layers;
}

absl::Status CheckTensors(const GgufFile& file, const DecoderConfig& c) {
  // Collects the tensors' names. The first missing tensor is refused at once,
  // so that a file which claims thousands of layers without having them costs
  // nothing.
  std::vector<std::string> names;
  QUERN_RETURN_IF_ERROR(
      ForEachTensor(c, [&](const TensorEntry& entry, int64_t layer) {
        names.push_back(TensorName(entry.id, layer));
        const std::string older = TensorName(TensorId::kSsmIn, layer);
        if (entry.id == TensorId::kDeltaQkv && !file.HasTensor(names.back()) &&
            file.HasTensor(older)) {
          return Unimplemented(kOp, "tensor '", older, "' has an older ",
                               "layout; need '", names.back(),
                               "': convert the model again");
        }
        QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor,
                               FindTensor(file, names.back()));
        const std::vector<int64_t> dims = TensorDims(entry, c);
        if (WithoutTrailingOnes(tensor->dims) == WithoutTrailingOnes(dims)) {
          return absl::OkStatus();
        }
        return InvalidArgument(kOp, names.back(), " has dimensions [",
                               absl::StrJoin(tensor->dims, ", "), "]; need [",
                               absl::StrJoin(dims, ", "), "]");
      }));
  if (file.tensors().size() == names.size()) return absl::OkStatus();
  // The names are distinct, so if there are more tensors than wanted, one of
  // them is not wanted.
  std::sort(names.begin(), names.end());
  for (const GgufTensor& tensor : file.tensors()) {
    if (!std::binary_search(names.begin(), names.end(), tensor.name) &&
        !IsOfPredictingLayer(tensor.name, c)) {
      return Unimplemented(kOp, "tensor '", absl::CHexEscape(tensor.name),
                           "' is not part of a plain ", c.architecture, " of ",
                           c.layers, " layers", FileAndSupported(file));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadRopeFactors(const GgufFile& file, DecoderConfig& c) {
  if (!c.Has(ModelPart::kRopeFactors)) return absl::OkStatus();
  const std::string name = TensorName(TensorId::kRopeFactors);
  QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor, file.FindTensor(name));
  if (tensor->type != GgufTensorType::kF32) {
    return InvalidArgument(kOp, name, " has type ",
                           GgufTensorTypeName(tensor->type), "; need F32");
  }
  std::vector<float> factors(static_cast<size_t>(tensor->elements));
  QUERN_RETURN_IF_ERROR(file.ReadRows(*tensor, 0, absl::MakeSpan(factors)));
  for (size_t j = 0; j < factors.size(); ++j) {
    if (!std::isfinite(factors[j]) || factors[j] <= 0) {
      return InvalidArgument(kOp, name, "[", j, "]=", factors[j],
                             "; need a finite number > 0");
    }
  }
  c.rope_factors.assign(factors.begin(), factors.end());
  return absl::OkStatus();
}

absl::Status CheckShape(const Keys& keys, const DecoderConfig& c) {
  if (c.q_heads % c.kv_heads != 0) {
    return InvalidArgument(kOp, keys.Name("attention.head_count="), c.q_heads,
                           "; need a multiple of head_count_kv=", c.kv_heads);
  }
  // The product is bounded so that no size of a step overflows.
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, keys.Name("attention.head_count * key_length"),
                 c.q_cols(), 1, DecoderConfig::kMaxDim));
  QUERN_RETURN_IF_ERROR(CheckYarn(c, keys.Name("")));
  if (c.Has(ModelPart::kLatent)) {
    QUERN_RETURN_IF_ERROR(CheckLatentShape(c, keys.Name("")));
  } else {
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, keys.Name("attention.value_length"),
                                     c.value_dim, c.head_dim, "the keys have"));
  }
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, keys.Name("expert_feed_forward_length * shared experts"),
                 c.shared_ffn, 0, DecoderConfig::kMaxDim));
  if (c.Has(ModelPart::kStates)) {
    const int64_t heads = c.ssm_heads;
    if (c.ssm_inner % heads != 0 || heads % c.ssm_groups != 0) {
      return InvalidArgument(kOp, keys.Name("ssm.inner_size="), c.ssm_inner,
                             ", time_step_rank=", heads,
                             ", group_count=", c.ssm_groups,
                             "; need each to be a multiple of the next");
    }
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, keys.Name("ssm.group_count * state_size"),
                   c.ssm_groups * c.ssm_state, 1, DecoderConfig::kMaxDim));
  }
  if (c.Has(ModelPart::kDeltaNet) && c.attention_interval > c.layers) {
    return Unimplemented(kOp, keys.Name("full_attention_interval="),
                         c.attention_interval, "; need one of ", c.layers,
                         " layers that attends");
  }
  if (c.rope_dim % 2 != 0) {
    return InvalidArgument(kOp, keys.Name("rope.dimension_count="), c.rope_dim,
                           "; need an even number");
  }
  return CheckMultipliers(c, keys.Name(""));
}

absl::Status ReadVocab(const GgufFile& file, const Keys& keys,
                       const ModelKey& key, DecoderConfig& c) {
  QUERN_ASSIGN_OR_RETURN(const GgufTensor* embedding,
                         FindTensor(file, TensorName(TensorId::kEmbedding)));
  c.vocab = embedding->rows();
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "vocabulary", c.vocab, 1, DecoderConfig::kMaxDim));
  QUERN_RETURN_IF_ERROR(keys.Read(key, c));
  return CheckEqual(kOp, keys.Name(key.name), c.vocab, embedding->rows(),
                    "token_embd.weight has rows");
}

absl::Status ReadShape(const GgufFile& file, const Keys& keys,
                       DecoderConfig& c) {
  for (const ModelKey& key : ModelKeys()) {
    if (!c.parts.HasAll(key.needs)) continue;
    // Without the key for head_dim, the heads must divide the row evenly.
    if (key.integer == &DecoderConfig::head_dim && !keys.Has(key.name) &&
        c.hidden % c.q_heads != 0) {
      return InvalidArgument(kOp, keys.Name("embedding_length="), c.hidden,
                             "; need a multiple of head_count=", c.q_heads);
    }
    if (key.integer == &DecoderConfig::vocab) {
      // All other keys are checked before any tensor.
      QUERN_RETURN_IF_ERROR(CheckShape(keys, c));
      return ReadVocab(file, keys, key, c);
    }
    // It follows from the number of shared experts, whatever its key says.
    if (key.integer == &DecoderConfig::shared_ffn &&
        c.Has(ModelPart::kRouting)) {
      c.shared_ffn = c.shared_cols();
      continue;
    }
    QUERN_RETURN_IF_ERROR(key.integer == &DecoderConfig::kv_heads &&
                                  c.ListsLayers()
                              ? keys.ReadKvHeads(key, c)
                              : keys.Read(key, c));
    if (key.integer == &DecoderConfig::layers) {
      QUERN_RETURN_IF_ERROR(keys.LeavePredictingLayers(c));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DecoderConfig> DecoderConfig::Create(const GgufFile& file) {
  QUERN_ASSIGN_OR_RETURN(const absl::string_view architecture,
                         file.GetString("general.architecture"));
  const Architecture* form = FindArchitecture(architecture);
  if (form == nullptr) {
    return Unimplemented(kOp, "general.architecture is '",
                         absl::CHexEscape(architecture.substr(0, 64)),
                         "'; need ", ArchitectureNames("or"));
  }
  const Keys keys(file, architecture);
  QUERN_RETURN_IF_ERROR(keys.CheckRopeScaling(*form));
  QUERN_ASSIGN_OR_RETURN(const bool has_experts, keys.HasExperts(*form));

  DecoderConfig c;
  if (file.Has("general.name")) {
    QUERN_ASSIGN_OR_RETURN(const absl::string_view name,
                           file.GetString("general.name"));
    c.name = absl::CHexEscape(name.substr(0, 64));
  }
  c.parts = form->always;  // decides which keys exist
  QUERN_ASSIGN_OR_RETURN(const ModelParts of_keys, PartsOfKeys(file, *form));
  c.parts.Add(of_keys);
  QUERN_RETURN_IF_ERROR(CheckFixedKeys(file, *form, c.parts));
  // Without latents it would change the scale of cosines and sines.
  constexpr char kLogMul[] = "rope.scaling.yarn_log_multiplier";
  if (c.Has(ModelPart::kYarn) && !c.Has(ModelPart::kLatent) &&
      keys.Has(kLogMul)) {
    return Unimplemented(kOp, keys.Name(kLogMul), " is given; need none in ",
                         architecture);
  }
  if (has_experts) c.parts.Add(ModelPart::kExperts);
  bool has_shared = false;
  if (has_experts) {
    QUERN_ASSIGN_OR_RETURN(has_shared, keys.HasSharedExpert(*form));
  }
  if (has_shared) c.parts.Add(ModelPart::kSharedExpert);
  QUERN_ASSIGN_OR_RETURN(c.rope, keys.HasRope(c));
  QUERN_RETURN_IF_ERROR(ReadShape(file, keys, c));
  QUERN_RETURN_IF_ERROR(ReadRoutingKeys(file, architecture, c));
  const auto has = [&](ModelPart part) {
    if (part == ModelPart::kExperts) return has_experts;
    if (part == ModelPart::kSharedExpert) return has_shared;
    if (of_keys.Has(part)) return true;
    if (part == ModelPart::kRouterBias) return HasRouterBias(file, c);
    switch (part) {
      case ModelPart::kRopeFactors:
        return file.HasTensor(TensorName(TensorId::kRopeFactors));
      case ModelPart::kOutputMatrix:
        return file.HasTensor(TensorName(TensorId::kOutput));
      case ModelPart::kHeadNorms:
        return file.HasTensor(TensorName(TensorId::kAttnQNorm)) ||
               file.HasTensor(TensorName(TensorId::kAttnKNorm));
      case ModelPart::kQkvBias:
        return file.HasTensor(TensorName(TensorId::kAttnQBias)) ||
               file.HasTensor(TensorName(TensorId::kAttnKBias)) ||
               file.HasTensor(TensorName(TensorId::kAttnVBias));
      default:
        return false;
    }
  };
  SetArchitecture(*form, has, c);
  if (c.Has(ModelPart::kYarn) && c.Has(ModelPart::kRopeFactors)) {
    return Unimplemented(kOp, keys.Name(kRopeScalingKey), " is 'yarn' beside ",
                         TensorName(TensorId::kRopeFactors),
                         "; need one of them");
  }
  QUERN_RETURN_IF_ERROR(CheckTensors(file, c));
  QUERN_RETURN_IF_ERROR(ReadRopeFactors(file, c));
  return c;
}

}  // namespace quern
