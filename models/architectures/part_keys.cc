#include "quern/models/architectures/part_keys.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

std::string NameOf(absl::string_view architecture, absl::string_view key) {
  return absl::StrCat(architecture, ".", key);
}

}  // namespace

absl::StatusOr<ModelParts> PartsOfKeys(const GgufFile& file,
                                       const Architecture& architecture) {
  ModelParts parts;
  const auto add = [&](ModelPart part) {
    if (architecture.may.Has(part)) parts.Add(part);
  };
  const std::string lora = NameOf(architecture.name, "attention.q_lora_rank");
  if (file.Has(lora)) {
    QUERN_ASSIGN_OR_RETURN(const int64_t rank, file.GetInt(lora));
    if (rank != 0) add(ModelPart::kQueryLora);
  }
  if (file.Has(NameOf(architecture.name, "attention.key_length_mla"))) {
    add(ModelPart::kSplitKvB);
  }
  const std::string window =
      NameOf(architecture.name, "attention.sliding_window");
  if (file.Has(window)) {
    QUERN_ASSIGN_OR_RETURN(const int64_t tokens, file.GetInt(window));
    if (tokens != 0) add(ModelPart::kLocalLayers);
  }
  const std::string scaling = NameOf(architecture.name, kRopeScalingKey);
  if (file.Has(scaling)) {
    QUERN_ASSIGN_OR_RETURN(const absl::string_view kind,
                           file.GetString(scaling));
    if (kind == kYarnScaling) add(ModelPart::kYarn);
    if (kind == kLinearScaling) add(ModelPart::kLinearRope);
  }
  return parts;
}

bool HasRouterBias(const GgufFile& file, const DecoderConfig& c) {
  bool has = c.gating == DecoderConfig::kSigmoid;
  for (int64_t layer = c.leading_dense; layer < c.layers && !has; ++layer) {
    has = file.HasTensor(TensorName(TensorId::kRouterBias, layer));
  }
  return has;
}

absl::Status ReadRoutingKeys(const GgufFile& file,
                             absl::string_view architecture, DecoderConfig& c) {
  if (!c.Has(ModelPart::kRouting)) return absl::OkStatus();
  const std::string norm = NameOf(architecture, kExpertsNormKey);
  c.experts_sum_to_one = false;
  if (file.Has(norm)) {
    QUERN_ASSIGN_OR_RETURN(c.experts_sum_to_one, file.GetBool(norm));
  }
  // Files of GLM-4.7-Flash that were written before the key existed lack it.
  // Their experts have biases, and their scores are sigmoids.
  const std::string gating = NameOf(architecture, "expert_gating_func");
  if (!file.Has(gating) && HasRouterBias(file, c)) {
    return Unimplemented(kOp, "no key '", gating,
                         "'; need 1 (softmax) or 2 (sigmoid), because experts "
                         "have biases (exp_probs_b)");
  }
  // DeepSeek-V2 (160 experts) and V3 (256) choose among 3 or 4 of 8 groups.
  // Files that were written before the key existed do not say so.
  constexpr int64_t kMaxUngrouped = 64;
  const std::string groups = NameOf(architecture, "expert_group_count");
  if (!file.Has(groups)) {
    if (!c.Has(ModelPart::kLatent) || c.experts <= kMaxUngrouped) {
      return absl::OkStatus();
    }
    return Unimplemented(kOp, NameOf(architecture, "expert_count"), "=",
                         c.experts, " without ", groups, "; need ", groups,
                         "=1, or at most ", kMaxUngrouped,
                         " experts, because larger models choose among groups "
                         "of experts");
  }
  QUERN_ASSIGN_OR_RETURN(const int64_t count, file.GetInt(groups));
  if (count == 0 || count == 1) return absl::OkStatus();
  return Unimplemented(kOp, groups, "=", count, "; need 1");
}

absl::Status CheckYarn(const DecoderConfig& c, absl::string_view prefix) {
  if (!c.Has(ModelPart::kYarn)) return absl::OkStatus();
  // DeepSeek has 40 and 0.0707. Far beyond these, the scale of scores would not
  // fit in f32; below 1, positions would go faster.
  constexpr float kMaxFactor = 1e6f, kMaxLogMul = 1;
  if (c.yarn_factor < 1 || c.yarn_factor > kMaxFactor) {
    return InvalidArgument(kOp, prefix, "rope.scaling.factor=", c.yarn_factor,
                           "; need 1 <= factor <= ", kMaxFactor);
  }
  if (c.yarn_log_mul > kMaxLogMul) {
    return InvalidArgument(kOp, prefix,
                           "rope.scaling.yarn_log_multiplier=", c.yarn_log_mul,
                           "; need at most ", kMaxLogMul);
  }
  return absl::OkStatus();
}

absl::Status CheckLatentShape(const DecoderConfig& c,
                              absl::string_view prefix) {
  if (c.nope() < 1) {
    return InvalidArgument(kOp, prefix, "rope.dimension_count=", c.rope_dim,
                           "; need less than the ", c.head_dim,
                           " elements of a key");
  }
  if (c.kv_lora % 4 != 0) {
    return Unimplemented(kOp, prefix, "attention.kv_lora_rank=", c.kv_lora,
                         "; need a multiple of 4");
  }
  return CheckRange(kOp,
                    absl::StrCat(prefix,
                                 "attention.head_count * (key_length + "
                                 "value_length)"),
                    c.q_heads * (c.head_dim + c.value_dim), 1,
                    DecoderConfig::kMaxDim);
}

// Multipliers are near 1. The stream holds x / residual_scale, whose norm has
// the eps norm_eps / residual_scale^2; far from 1 these overflow f32, or
// vanish, and logits are wrong without a sign of it.
absl::Status CheckMultipliers(const DecoderConfig& c,
                              absl::string_view prefix) {
  if (!c.Has(ModelPart::kMultipliers)) return absl::OkStatus();
  constexpr float kLeast = 0x1p-20f, kMost = 0x1p20f;
  const struct {
    const char* key;
    float value;
  } multipliers[] = {{"embedding_scale", c.embedding_scale},
                     {"residual_scale", c.residual_scale},
                     {"attention.scale", c.attention_scale},
                     {"logit_scale", c.logit_divisor}};
  for (const auto& m : multipliers) {
    if (kLeast <= m.value && m.value <= kMost) continue;
    return InvalidArgument(kOp, prefix, m.key, "=", m.value,
                           "; need a number from 2^-20 to 2^20");
  }
  return absl::OkStatus();
}

}  // namespace quern
