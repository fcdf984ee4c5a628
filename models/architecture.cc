#include "quern/models/architecture.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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
constexpr uint32_t kOutputNorm = Bit(ModelPart::kOutputNorm);
constexpr uint32_t kEmbdNorm = Bit(ModelPart::kEmbdNorm);
constexpr uint32_t kShortConv = Bit(ModelPart::kShortConv);
constexpr uint32_t kMamba2 = Bit(ModelPart::kMamba2);
constexpr uint32_t kSharedExpert = Bit(ModelPart::kSharedExpert);
constexpr uint32_t kMultipliers = Bit(ModelPart::kMultipliers);

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
    {"lfm2", kHeadNorms | kShortConv | kEmbdNorm, kOutput, RotaryStyle::kHalves,
     LinearActivation::kSiluAndMul, false},
    {"granitehybrid", kMamba2 | kMultipliers,
     kOutput | kExperts | kSharedExpert, RotaryStyle::kPairs,
     LinearActivation::kSiluAndMul, false},
};

// Upper bound far above any model, low enough that products of two dimensions
// fit in int64.
int64_t MaxDim(const DecoderConfig&) { return DecoderConfig::kMaxDim; }
int64_t MaxLayers(const DecoderConfig&) { return 4096; }
int64_t MaxHeadDim(const DecoderConfig& c) { return c.head_dim; }

// What ops/recurrent/causal_conv1d.h takes.
int64_t MaxConvWidth(const DecoderConfig&) { return 4; }
// What ops/recurrent/state_update.h takes.
int64_t MaxSsmState(const DecoderConfig&) { return 1024; }
int64_t MaxSsmHeads(const DecoderConfig& c) { return c.ssm_inner; }
int64_t MaxSsmGroups(const DecoderConfig& c) { return c.ssm_heads; }
double One(const DecoderConfig&) { return 1; }
double AttentionScale(const DecoderConfig& c) {
  return 1 / std::sqrt(static_cast<double>(c.head_dim));
}

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
    {"shortconv.l_cache", &C::conv_width, nullptr, kShortConv, Required,
     MaxConvWidth},
    {"ssm.conv_kernel", &C::conv_width, nullptr, kMamba2, Required,
     MaxConvWidth},
    {"ssm.inner_size", &C::ssm_inner, nullptr, kMamba2, Required, MaxDim},
    {"ssm.time_step_rank", &C::ssm_heads, nullptr, kMamba2, Required,
     MaxSsmHeads},
    {"ssm.group_count", &C::ssm_groups, nullptr, kMamba2, One, MaxSsmGroups},
    {"ssm.state_size", &C::ssm_state, nullptr, kMamba2, Required, MaxSsmState},
    {"embedding_scale", nullptr, &C::embedding_scale, kMultipliers, One,
     nullptr},
    {"residual_scale", nullptr, &C::residual_scale, kMultipliers, One, nullptr},
    {"attention.scale", nullptr, &C::attention_scale, kMultipliers,
     AttentionScale, nullptr},
    {"logit_scale", nullptr, &C::logit_divisor, kMultipliers, One, nullptr},
    {"expert_shared_feed_forward_length", &C::shared_ffn, nullptr,
     kSharedExpert, Required, MaxDim},
    {"vocab_size", &C::vocab, nullptr, kAny, Vocab, MaxDim},
};

}  // namespace

absl::Span<const Architecture> Architectures() { return kArchitectures; }

const Architecture* FindArchitecture(absl::string_view name) {
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.name == name) return &architecture;
  }
  return nullptr;
}

absl::Span<const ModelKey> ModelKeys() { return kKeys; }

void WriteModelKeys(
    const DecoderConfig& config,
    absl::FunctionRef<void(const std::string& name, int64_t value)> int_key,
    absl::FunctionRef<void(const std::string& name, float value)> float_key,
    absl::FunctionRef<void(const std::string& name, bool value)> bool_key,
    absl::FunctionRef<void(const std::string& name,
                           const std::vector<int32_t>& values)>
        ints_key) {
  if (config.Has(ModelPart::kMamba2)) {
    bool_key(absl::StrCat(config.architecture, ".", kRopeKey), config.rope);
  }
  for (const ModelKey& key : kKeys) {
    if (!config.HasAll(key.needs)) continue;
    const std::string name = absl::StrCat(config.architecture, ".", key.name);
    if (key.integer == &C::kv_heads && config.HasRecurrent()) {
      std::vector<int32_t> heads;
      for (int64_t layer = 0; layer < config.layers; ++layer) {
        heads.push_back(config.IsRecurrent(layer)
                            ? 0
                            : static_cast<int32_t>(config.kv_heads));
      }
      ints_key(name, heads);
    } else if (key.integer != nullptr) {
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
  for (const ModelPart part :
       {ModelPart::kOutputMatrix, ModelPart::kRopeFactors, ModelPart::kExperts,
        ModelPart::kSharedExpert}) {
    if ((architecture.may & Bit(part)) != 0 && has(part)) c.parts |= Bit(part);
  }
  if (!c.Has(ModelPart::kExperts)) {
    c.parts |= kDense;
    c.experts = c.experts_used = c.expert_ffn = 0;
    c.parts &= ~kSharedExpert;
  }
  if (!c.Has(ModelPart::kSharedExpert)) c.shared_ffn = 0;
  if (!c.Has(ModelPart::kEmbdNorm)) c.parts |= kOutputNorm;
  if (!c.HasRecurrent()) {
    c.recurrent.clear();
    c.conv_width = 0;
  }
  if (!c.Has(ModelPart::kMamba2)) {
    c.ssm_inner = c.ssm_heads = c.ssm_groups = c.ssm_state = 0;
    c.rope = true;
  }
  c.rope_style = architecture.rope_style;
  c.activation = architecture.activation;
  if (!c.Has(ModelPart::kMultipliers)) {
    c.embedding_scale =
        architecture.scales_embedding
            ? static_cast<float>(std::sqrt(static_cast<double>(c.hidden)))
            : 1.0f;
    c.residual_scale = c.logit_divisor = 1;
    c.attention_scale = 0;
  }
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
