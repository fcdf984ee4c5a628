// The keys of models/architectures/architecture.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/ops/moe/router_spec.h"

namespace quern {
namespace {

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

constexpr ModelParts kAny;
using C = DecoderConfig;
using P = ModelPart;
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
    {"attention.key_length_mla", &C::head_dim, nullptr, P::kSplitKvB, Required,
     MaxDim},
    {"attention.value_length_mla", &C::value_dim, nullptr, P::kSplitKvB,
     Required, MaxDim},
    {"attention.kv_lora_rank", &C::kv_lora, nullptr, P::kLatent, Required,
     MaxDim},
    {"attention.q_lora_rank", &C::q_lora, nullptr, P::kQueryLora, Required,
     MaxDim},
    {"rope.dimension_count", &C::rope_dim, nullptr, kAny, SameHeadDim,
     MaxHeadDim},
    {"rope.freq_base", nullptr, &C::rope_base, kAny, RopeBase, nullptr},
    {"rope.freq_base_swa", nullptr, &C::local_rope_base, P::kLocalRope,
     RopeBase, nullptr},
    {"attention.layer_norm_rms_epsilon", nullptr, &C::norm_eps, kAny, Required,
     nullptr},
    {"attn_logit_softcapping", nullptr, &C::attention_cap, P::kSoftCaps,
     Required, nullptr},
    {"final_logit_softcapping", nullptr, &C::logit_cap, P::kSoftCaps, Required,
     nullptr},
    {"attention.sliding_window", &C::window, nullptr, P::kLocalLayers, Required,
     MaxDim},
    {"expert_count", &C::experts, nullptr, P::kExperts, Required, MaxExperts},
    {"expert_used_count", &C::experts_used, nullptr, P::kExperts, Required,
     MaxExpertsUsed},
    {"expert_feed_forward_length", &C::expert_ffn, nullptr, P::kExperts, Ffn,
     MaxDim},
    {"leading_dense_block_count", &C::leading_dense, nullptr, P::kRouting,
     Required, MaxLeadingDense, 0},
    {"expert_shared_count", &C::shared_experts, nullptr,
     P::kRouting | P::kSharedExpert, Required, MaxDim},
    {"expert_gating_func", &C::gating, nullptr, P::kRouting, One, MaxGating},
    {"expert_weights_scale", nullptr, &C::expert_scale, P::kRouting, One,
     nullptr},
    {"rope.scaling.factor", nullptr, &C::rope_divisor, P::kLinearRope, Required,
     nullptr},
    {"rope.scaling.factor", nullptr, &C::yarn_factor, P::kYarn, Required,
     nullptr},
    {"rope.scaling.original_context_length", &C::yarn_original, nullptr,
     P::kYarn, Required, MaxDim, 2},
    {"rope.scaling.yarn_log_multiplier", nullptr, &C::yarn_log_mul,
     P::kYarn | P::kLatent, Required, nullptr},
    {"shortconv.l_cache", &C::conv_width, nullptr, P::kShortConv, Required,
     MaxConvWidth, kMinConvWidth},
    {"full_attention_interval", &C::attention_interval, nullptr, P::kDeltaNet,
     EveryFourth, MaxLayers},
    {"ssm.conv_kernel", &C::conv_width, nullptr, P::kStates, Required,
     MaxConvWidth, kMinConvWidth},
    {"ssm.inner_size", &C::ssm_inner, nullptr, P::kStates, Required, MaxDim},
    {"ssm.time_step_rank", &C::ssm_heads, nullptr, P::kStates, Required,
     MaxSsmHeads},
    {"ssm.group_count", &C::ssm_groups, nullptr, P::kStates, One, MaxSsmGroups},
    {"ssm.state_size", &C::ssm_state, nullptr, P::kStates, Required,
     MaxSsmState},
    {"embedding_scale", nullptr, &C::embedding_scale, P::kMultipliers, One,
     nullptr},
    {"residual_scale", nullptr, &C::residual_scale, P::kMultipliers, One,
     nullptr},
    {"attention.scale", nullptr, &C::attention_scale, P::kMultipliers,
     AttentionScale, nullptr},
    {"logit_scale", nullptr, &C::logit_divisor, P::kMultipliers, One, nullptr},
    {"expert_shared_feed_forward_length", &C::shared_ffn, nullptr,
     P::kSharedExpert, Required, MaxDim},
    {"vocab_size", &C::vocab, nullptr, kAny, Vocab, MaxDim},
};

// The value that a file has for an integer key. Where each head has its own
// matrices, key_length and value_length are those of the one head that all
// query heads share.
int64_t ValueOf(const ModelKey& key, const DecoderConfig& c) {
  if (c.Has(ModelPart::kSplitKvB) && key.needs.empty()) {
    if (key.integer == &C::head_dim) return c.kv_lora + c.rope_dim;
    if (key.integer == &C::value_dim) return c.kv_lora;
  }
  return c.*key.integer;
}

}  // namespace

absl::Span<const ModelKey> ModelKeys() { return kKeys; }

void WriteModelKeys(
    const DecoderConfig& config,
    absl::FunctionRef<void(const std::string& name, int64_t value)> int_key,
    absl::FunctionRef<void(const std::string& name, float value)> float_key,
    absl::FunctionRef<void(const std::string& name, bool value)> bool_key,
    absl::FunctionRef<void(const std::string& name,
                           const std::vector<int32_t>& values)>
        ints_key) {
  if (config.Has(ModelPart::kMultipliers)) {
    bool_key(absl::StrCat(config.architecture, ".", kRopeKey), config.rope);
  }
  if (config.Has(ModelPart::kRouting)) {
    bool_key(absl::StrCat(config.architecture, ".", kExpertsNormKey),
             config.experts_sum_to_one);
  }
  for (const ModelKey& key : kKeys) {
    if (!config.parts.HasAll(key.needs)) continue;
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

}  // namespace quern
