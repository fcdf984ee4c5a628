#include "quern/models/architecture.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/epilogue.h"
#include "quern/models/decoder_config.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

constexpr uint32_t kAny = 0;
constexpr uint32_t kQkvBias = Bit(ModelPart::kQkvBias);
constexpr uint32_t kHeadNorms = Bit(ModelPart::kHeadNorms);
constexpr uint32_t kPostNorms = Bit(ModelPart::kPostNorms);
constexpr uint32_t kSoftCaps = Bit(ModelPart::kSoftCaps);
constexpr uint32_t kLocalLayers = Bit(ModelPart::kLocalLayers);
constexpr uint32_t kOutput = Bit(ModelPart::kOutputMatrix);
constexpr uint32_t kRopeFactors = Bit(ModelPart::kRopeFactors);
constexpr uint32_t kExperts = Bit(ModelPart::kExperts);
constexpr uint32_t kDense = Bit(ModelPart::kDense);

constexpr Architecture kArchitectures[] = {
    {"llama", kAny, kOutput | kRopeFactors | kExperts, RotaryStyle::kPairs,
     LinearActivation::kSiluAndMul, false},
    {"qwen2", kQkvBias, kOutput, RotaryStyle::kHalves,
     LinearActivation::kSiluAndMul, false},
    {"qwen3", kHeadNorms, kOutput, RotaryStyle::kHalves,
     LinearActivation::kSiluAndMul, false},
    {"qwen3moe", kHeadNorms | kExperts, kOutput, RotaryStyle::kHalves,
     LinearActivation::kSiluAndMul, false},
    {"gemma2", kPostNorms | kSoftCaps | kLocalLayers, kAny,
     RotaryStyle::kHalves, LinearActivation::kGeluTanhAndMul, true},
};

// Upper bound far above any model, low enough that products of two dimensions
// fit in int64.
int64_t MaxDim(const DecoderConfig&) { return DecoderConfig::kMaxDim; }
int64_t MaxLayers(const DecoderConfig&) { return 4096; }
int64_t MaxHeadDim(const DecoderConfig& c) { return c.head_dim; }

double Required(const DecoderConfig&) { return 0; }
double KvHeads(const DecoderConfig& c) {
  return static_cast<double>(c.q_heads);
}
double HeadDim(const DecoderConfig& c) {
  return static_cast<double>(c.hidden / c.q_heads);
}
double SameHeadDim(const DecoderConfig& c) {
  return static_cast<double>(c.head_dim);
}
double Vocab(const DecoderConfig& c) { return static_cast<double>(c.vocab); }
double RopeBase(const DecoderConfig&) { return 10000; }
double Ffn(const DecoderConfig& c) { return static_cast<double>(c.ffn); }
int64_t MaxExperts(const DecoderConfig&) { return RouterSpec::kMaxExperts; }
int64_t MaxExpertsUsed(const DecoderConfig& c) {
  return std::min(c.experts, RouterSpec::kMaxTopK);
}

using C = DecoderConfig;
constexpr ModelKey kKeys[] = {
    {"context_length", &C::context, nullptr, kAny, Required, MaxDim},
    {"embedding_length", &C::hidden, nullptr, kAny, Required, MaxDim},
    {"block_count", &C::layers, nullptr, kAny, Required, MaxLayers},
    {"feed_forward_length", &C::ffn, nullptr, kAny, Required, MaxDim},
    {"attention.head_count", &C::q_heads, nullptr, kAny, Required, MaxDim},
    {"attention.head_count_kv", &C::kv_heads, nullptr, kAny, KvHeads, MaxDim},
    {"attention.key_length", &C::head_dim, nullptr, kAny, HeadDim, MaxDim},
    {"attention.value_length", &C::value_dim, nullptr, kAny, SameHeadDim,
     MaxDim},
    {"rope.dimension_count", &C::rope_dim, nullptr, kAny, SameHeadDim,
     MaxHeadDim},
    {"rope.freq_base", nullptr, &C::rope_base, kAny, RopeBase, nullptr},
    {"attention.layer_norm_rms_epsilon", nullptr, &C::norm_eps, kAny, Required,
     nullptr},
    {"attn_logit_softcapping", nullptr, &C::attention_cap, kSoftCaps, Required,
     nullptr},
    {"final_logit_softcapping", nullptr, &C::logit_cap, kSoftCaps, Required,
     nullptr},
    {"attention.sliding_window", &C::window, nullptr, kLocalLayers, Required,
     MaxDim},
    {"expert_count", &C::experts, nullptr, kExperts, Required, MaxExperts},
    {"expert_used_count", &C::experts_used, nullptr, kExperts, Required,
     MaxExpertsUsed},
    {"expert_feed_forward_length", &C::expert_ffn, nullptr, kExperts, Ffn,
     MaxDim},
    {"vocab_size", &C::vocab, nullptr, kAny, Vocab, MaxDim},
};

using E = Extent;
using R = TensorRole;
constexpr TensorEntry kTensors[] = {
    {TensorId::kEmbedding, "token_embd.weight", false, R::kEmbedding,
     E::kHidden, E::kVocab, kAny},
    {TensorId::kAttnNorm, "attn_norm.weight", true, R::kNorm, E::kHidden,
     E::kOne, kAny},
    {TensorId::kAttnQ, "attn_q.weight", true, R::kMatrix, E::kHidden,
     E::kQueryCols, kAny},
    {TensorId::kAttnK, "attn_k.weight", true, R::kMatrix, E::kHidden,
     E::kKeyCols, kAny},
    {TensorId::kAttnV, "attn_v.weight", true, R::kMatrix, E::kHidden,
     E::kKeyCols, kAny},
    {TensorId::kAttnQBias, "attn_q.bias", true, R::kBias, E::kQueryCols,
     E::kOne, kQkvBias},
    {TensorId::kAttnKBias, "attn_k.bias", true, R::kBias, E::kKeyCols, E::kOne,
     kQkvBias},
    {TensorId::kAttnVBias, "attn_v.bias", true, R::kBias, E::kKeyCols, E::kOne,
     kQkvBias},
    {TensorId::kAttnQNorm, "attn_q_norm.weight", true, R::kNorm, E::kHeadDim,
     E::kOne, kHeadNorms},
    {TensorId::kAttnKNorm, "attn_k_norm.weight", true, R::kNorm, E::kHeadDim,
     E::kOne, kHeadNorms},
    {TensorId::kAttnOutput, "attn_output.weight", true, R::kMatrixIntoStream,
     E::kQueryCols, E::kHidden, kAny},
    {TensorId::kPostAttnNorm, "post_attention_norm.weight", true, R::kNorm,
     E::kHidden, E::kOne, kPostNorms},
    {TensorId::kPostFfnNorm, "post_ffw_norm.weight", true, R::kNorm, E::kHidden,
     E::kOne, kPostNorms},
    {TensorId::kFfnNorm, "ffn_norm.weight", true, R::kNorm, E::kHidden, E::kOne,
     kAny},
    {TensorId::kFfnGate, "ffn_gate.weight", true, R::kMatrix, E::kHidden,
     E::kFfn, kDense},
    {TensorId::kFfnUp, "ffn_up.weight", true, R::kMatrix, E::kHidden, E::kFfn,
     kDense},
    {TensorId::kFfnDown, "ffn_down.weight", true, R::kMatrixIntoStream, E::kFfn,
     E::kHidden, kDense},
    {TensorId::kRouter, "ffn_gate_inp.weight", true, R::kRouter, E::kHidden,
     E::kExperts, kExperts},
    {TensorId::kExpertGate, "ffn_gate_exps.weight", true, R::kMatrix,
     E::kHidden, E::kExpertFfn, kExperts, E::kExperts},
    {TensorId::kExpertUp, "ffn_up_exps.weight", true, R::kMatrix, E::kHidden,
     E::kExpertFfn, kExperts, E::kExperts},
    {TensorId::kExpertDown, "ffn_down_exps.weight", true, R::kMatrixIntoStream,
     E::kExpertFfn, E::kHidden, kExperts, E::kExperts},
    {TensorId::kOutputNorm, "output_norm.weight", false, R::kNorm, E::kHidden,
     E::kOne, kAny},
    {TensorId::kOutput, "output.weight", false, R::kMatrix, E::kHidden,
     E::kVocab, kOutput},
    {TensorId::kRopeFactors, "rope_freqs.weight", false, R::kRopeFactors,
     E::kRopePairs, E::kOne, kRopeFactors},
};

// Whether each TensorId is the index of its entry, and the tensors of a layer
// follow one another.
constexpr bool InOrder() {
  int changes = 0;
  for (size_t i = 0; i < std::size(kTensors); ++i) {
    if (static_cast<size_t>(kTensors[i].id) != i) return false;
    if (i > 0 && kTensors[i].in_layer != kTensors[i - 1].in_layer) ++changes;
  }
  return changes == 2;
}
static_assert(InOrder());

}  // namespace

absl::Span<const Architecture> Architectures() { return kArchitectures; }

const Architecture* FindArchitecture(absl::string_view name) {
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.name == name) return &architecture;
  }
  return nullptr;
}

absl::Span<const ModelKey> ModelKeys() { return kKeys; }

int64_t ExtentOf(Extent extent, const DecoderConfig& c) {
  switch (extent) {
    case Extent::kOne:
      return 1;
    case Extent::kHidden:
      return c.hidden;
    case Extent::kVocab:
      return c.vocab;
    case Extent::kQueryCols:
      return c.q_cols();
    case Extent::kKeyCols:
      return c.kv_cols();
    case Extent::kFfn:
      return c.ffn;
    case Extent::kHeadDim:
      return c.head_dim;
    case Extent::kRopePairs:
      return c.rope_dim / 2;
    case Extent::kExperts:
      return c.experts;
    case Extent::kExpertFfn:
      return c.expert_ffn;
  }
  return 0;
}

const TensorEntry& TensorOf(TensorId id) {
  return kTensors[static_cast<size_t>(id)];
}

std::string TensorName(TensorId id, int64_t layer) {
  const TensorEntry& entry = TensorOf(id);
  if (!entry.in_layer) return entry.name;
  return absl::StrCat("blk.", layer, ".", entry.name);
}

absl::Status ForEachTensor(
    const DecoderConfig& config,
    absl::FunctionRef<absl::Status(const TensorEntry& entry, int64_t layer)>
        visit) {
  const auto visit_from = [&](size_t begin, bool in_layer, int64_t layer) {
    for (size_t i = begin; i < std::size(kTensors); ++i) {
      if (kTensors[i].in_layer != in_layer) break;
      if (!config.HasAll(kTensors[i].needs)) continue;
      QUERN_RETURN_IF_ERROR(visit(kTensors[i], layer));
    }
    return absl::OkStatus();
  };
  constexpr auto kFirst = static_cast<size_t>(TensorId::kAttnNorm);
  constexpr auto kBehind = static_cast<size_t>(TensorId::kOutputNorm);
  QUERN_RETURN_IF_ERROR(visit_from(0, false, 0));
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    QUERN_RETURN_IF_ERROR(visit_from(kFirst, true, layer));
  }
  return visit_from(kBehind, false, 0);
}

std::vector<int64_t> TensorDims(const TensorEntry& entry,
                                const DecoderConfig& config) {
  std::vector<int64_t> dims = {ExtentOf(entry.cols, config)};
  if (entry.is_matrix()) dims.push_back(ExtentOf(entry.rows, config));
  if (entry.matrices != Extent::kOne) {
    dims.push_back(ExtentOf(entry.matrices, config));
  }
  return dims;
}

void WriteModelKeys(
    const DecoderConfig& config,
    absl::FunctionRef<void(const std::string& name, int64_t value)> int_key,
    absl::FunctionRef<void(const std::string& name, float value)> float_key) {
  for (const ModelKey& key : kKeys) {
    if (!config.HasAll(key.needs)) continue;
    const std::string name = absl::StrCat(config.architecture, ".", key.name);
    if (key.integer != nullptr) {
      int_key(name, config.*key.integer);
    } else {
      float_key(name, config.*key.real);
    }
  }
}

void SetArchitecture(const Architecture& architecture,
                     absl::FunctionRef<bool(ModelPart part)> has,
                     DecoderConfig& c) {
  c.architecture = std::string(architecture.name);
  c.parts = architecture.always;
  for (const ModelPart part : {ModelPart::kOutputMatrix,
                               ModelPart::kRopeFactors, ModelPart::kExperts}) {
    if ((architecture.may & Bit(part)) != 0 && has(part)) c.parts |= Bit(part);
  }
  if (!c.Has(ModelPart::kExperts)) {
    c.parts |= kDense;
    c.experts = c.experts_used = c.expert_ffn = 0;
  }
  c.rope_style = architecture.rope_style;
  c.activation = architecture.activation;
  c.embedding_scale =
      architecture.scales_embedding
          ? static_cast<float>(std::sqrt(static_cast<double>(c.hidden)))
          : 1.0f;
  // The file does not give Gemma-2's divisor of queries. It is head_dim, except
  // for the model of 27 billion weights, which is recognised by its number of
  // layers.
  constexpr int64_t kLayersOf27B = 46;
  if (c.architecture == "gemma2" && c.layers == kLayersOf27B) {
    c.attention_scale = static_cast<float>(std::sqrt(
        static_cast<double>(c.q_heads) / static_cast<double>(c.hidden)));
  }
}

}  // namespace quern
