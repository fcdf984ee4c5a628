#include "quern/models/architectures/architecture.h"

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
#include "quern/models/architectures/decoder_config.h"
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
constexpr uint32_t kLatent = Bit(ModelPart::kLatent);
constexpr uint32_t kQueryLora = Bit(ModelPart::kQueryLora);
constexpr uint32_t kSplitKvB = Bit(ModelPart::kSplitKvB);
constexpr uint32_t kYarn = Bit(ModelPart::kYarn);
constexpr uint32_t kRouting = Bit(ModelPart::kRouting);
constexpr uint32_t kRouterBias = Bit(ModelPart::kRouterBias);
constexpr uint32_t kDeltaNet = Bit(ModelPart::kDeltaNet);
constexpr uint32_t kStates = Bit(ModelPart::kStates);
constexpr uint32_t kAttnGate = Bit(ModelPart::kAttnGate);
constexpr uint32_t kSharedGate = Bit(ModelPart::kSharedGate);
constexpr uint32_t kPostMixNorm = Bit(ModelPart::kPostMixNorm);

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
    {"granitehybrid", kMamba2 | kStates | kMultipliers,
     kOutput | kExperts | kSharedExpert, RotaryStyle::kPairs,
     LinearActivation::kSiluAndMul, false},
    {"deepseek2", kLatent | kRouting | kExperts,
     kOutput | kSharedExpert | kQueryLora | kSplitKvB | kYarn | kRouterBias,
     RotaryStyle::kPairs, LinearActivation::kSiluAndMul, false},
    {"qwen3next",
     kHeadNorms | kExperts | kDeltaNet | kStates | kAttnGate | kSharedGate |
         kPostMixNorm,
     kOutput | kSharedExpert, RotaryStyle::kHalves,
     LinearActivation::kSiluAndMul, false},
};

// Upper bound far above any model, low enough that products of two dimensions
// fit in int64.
int64_t MaxDim(const DecoderConfig&) { return DecoderConfig::kMaxDim; }
int64_t MaxLayers(const DecoderConfig&) { return DecoderConfig::kMaxLayers; }
int64_t MaxHeadDim(const DecoderConfig& c) { return c.head_dim; }

// What ops/recurrent/causal_conv1d.h takes.
constexpr int64_t kMinConvWidth = 2;
int64_t MaxConvWidth(const DecoderConfig&) { return 4; }
// What ops/recurrent/state_update.h takes, and delta_rule.h.
int64_t MaxSsmState(const DecoderConfig&) { return 1024; }
int64_t MaxSsmHeads(const DecoderConfig& c) { return c.ssm_inner; }
int64_t MaxSsmGroups(const DecoderConfig& c) { return c.ssm_heads; }
double One(const DecoderConfig&) { return 1; }
double EveryFourth(const DecoderConfig&) { return 4; }
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
int64_t MaxLeadingDense(const DecoderConfig& c) { return c.layers - 1; }
int64_t MaxGating(const DecoderConfig&) { return DecoderConfig::kSigmoid; }
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
    {"attention.key_length_mla", &C::head_dim, nullptr, kSplitKvB, Required,
     MaxDim},
    {"attention.value_length_mla", &C::value_dim, nullptr, kSplitKvB, Required,
     MaxDim},
    {"attention.kv_lora_rank", &C::kv_lora, nullptr, kLatent, Required, MaxDim},
    {"attention.q_lora_rank", &C::q_lora, nullptr, kQueryLora, Required,
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
    {"leading_dense_block_count", &C::leading_dense, nullptr, kRouting,
     Required, MaxLeadingDense, 0},
    {"expert_shared_count", &C::shared_experts, nullptr,
     kRouting | kSharedExpert, Required, MaxDim},
    {"expert_gating_func", &C::gating, nullptr, kRouting, One, MaxGating},
    {"expert_weights_scale", nullptr, &C::expert_scale, kRouting, One, nullptr},
    {"rope.scaling.factor", nullptr, &C::yarn_factor, kYarn, Required, nullptr},
    {"rope.scaling.original_context_length", &C::yarn_original, nullptr, kYarn,
     Required, MaxDim, 2},
    {"rope.scaling.yarn_log_multiplier", nullptr, &C::yarn_log_mul, kYarn,
     Required, nullptr},
    {"shortconv.l_cache", &C::conv_width, nullptr, kShortConv, Required,
     MaxConvWidth, kMinConvWidth},
    {"full_attention_interval", &C::attention_interval, nullptr, kDeltaNet,
     EveryFourth, MaxLayers},
    {"ssm.conv_kernel", &C::conv_width, nullptr, kStates, Required,
     MaxConvWidth, kMinConvWidth},
    {"ssm.inner_size", &C::ssm_inner, nullptr, kStates, Required, MaxDim},
    {"ssm.time_step_rank", &C::ssm_heads, nullptr, kStates, Required,
     MaxSsmHeads},
    {"ssm.group_count", &C::ssm_groups, nullptr, kStates, One, MaxSsmGroups},
    {"ssm.state_size", &C::ssm_state, nullptr, kStates, Required, MaxSsmState},
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

// The value that a file has for an integer key. Where each head has its own
// matrices, key_length and value_length are those of the one head that all
// query heads share.
int64_t ValueOf(const ModelKey& key, const DecoderConfig& c) {
  if (c.Has(ModelPart::kSplitKvB) && key.needs == kAny) {
    if (key.integer == &C::head_dim) return c.kv_lora + c.rope_dim;
    if (key.integer == &C::value_dim) return c.kv_lora;
  }
  return c.*key.integer;
}

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
  if (config.Has(ModelPart::kRouting)) {
    bool_key(absl::StrCat(config.architecture, ".", kExpertsNormKey),
             config.experts_sum_to_one);
  }
  for (const ModelKey& key : kKeys) {
    if (!config.HasAll(key.needs)) continue;
    // It follows from the number of shared experts.
    if (config.Has(ModelPart::kRouting) && key.integer == &C::shared_ffn) {
      continue;
    }
    const std::string name = absl::StrCat(config.architecture, ".", key.name);
    if (key.integer == &C::kv_heads && config.ListsLayers()) {
      std::vector<int32_t> heads;
      for (int64_t layer = 0; layer < config.layers; ++layer) {
        heads.push_back(config.IsRecurrent(layer)
                            ? 0
                            : static_cast<int32_t>(config.kv_heads));
      }
      ints_key(name, heads);
    } else if (key.integer != nullptr) {
      int_key(name, ValueOf(key, config));
    } else {
      float_key(name, config.*key.real);
    }
  }
}

namespace {

// What the parts say of experts.
void SetRouting(C& c) {
  if (!c.Has(ModelPart::kRouting)) {
    c.leading_dense = c.shared_experts = 0;
    c.gating = C::kSoftmax;
    c.experts_sum_to_one = true;
    c.expert_scale = 1;
  } else {
    if (!c.Has(ModelPart::kSharedExpert)) c.shared_experts = 0;
    c.shared_ffn = c.shared_cols();
    if (c.leading_dense > 0) c.parts |= kDense;
  }
  if (!c.Has(ModelPart::kSharedExpert)) c.shared_ffn = 0;
}

// What the parts say of attention over latents, and of YaRN.
void SetLatent(C& c) {
  if (!c.Has(ModelPart::kYarn)) {
    c.yarn_factor = c.yarn_log_mul = 0;
    c.yarn_original = 0;
  }
  if (!c.Has(ModelPart::kQueryLora)) c.q_lora = 0;
  if (!c.Has(ModelPart::kLatent)) {
    c.kv_lora = 0;
    return;
  }
  const bool lora = c.Has(ModelPart::kQueryLora);
  const bool split = c.Has(ModelPart::kSplitKvB);
  if (!lora) c.parts |= Bit(ModelPart::kPlainQuery);
  if (!split) c.parts |= Bit(ModelPart::kJoinedKvB);
}

}  // namespace

void SetArchitecture(const Architecture& architecture,
                     absl::FunctionRef<bool(ModelPart part)> has,
                     DecoderConfig& c) {
  c.architecture = std::string(architecture.name);
  c.parts = architecture.always;
  for (const ModelPart part :
       {ModelPart::kOutputMatrix, ModelPart::kRopeFactors, ModelPart::kExperts,
        ModelPart::kSharedExpert, ModelPart::kQueryLora, ModelPart::kSplitKvB,
        ModelPart::kYarn, ModelPart::kRouterBias}) {
    if ((architecture.may & Bit(part)) != 0 && has(part)) c.parts |= Bit(part);
  }
  if (!c.Has(ModelPart::kExperts)) {
    c.parts |= kDense;
    c.experts = c.experts_used = c.expert_ffn = 0;
    c.parts &= ~kSharedExpert;
  }
  SetRouting(c);
  SetLatent(c);
  if (!c.Has(ModelPart::kEmbdNorm)) c.parts |= kOutputNorm;
  if (!c.Has(ModelPart::kPostMixNorm)) c.parts |= Bit(ModelPart::kFfnNorm);
  if (!c.HasRecurrent()) {
    c.recurrent.clear();
    c.conv_width = 0;
  }
  if (!c.Has(ModelPart::kStates)) {
    c.ssm_inner = c.ssm_heads = c.ssm_groups = c.ssm_state = 0;
  }
  if (!c.Has(ModelPart::kMamba2)) c.rope = true;
  if (c.Has(ModelPart::kDeltaNet)) {
    c.recurrent.clear();
    for (int64_t layer = 1; layer <= c.layers; ++layer) {
      c.recurrent.push_back(layer % c.attention_interval == 0 ? 0 : 1);
    }
  } else {
    c.attention_interval = 0;
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
