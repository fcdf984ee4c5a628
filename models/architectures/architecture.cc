#include "quern/models/architectures/architecture.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/models/architectures/architecture_list.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"

namespace quern {
namespace {

#define QUERN_ADDRESS(name) &name,
constexpr const Architecture* kArchitectures[] = {
    QUERN_ARCHITECTURES(QUERN_ADDRESS)};
#undef QUERN_ADDRESS

}  // namespace

absl::Span<const Architecture* const> Architectures() { return kArchitectures; }

const Architecture* FindArchitecture(absl::string_view name) {
  for (const Architecture* architecture : kArchitectures) {
    if (architecture->name == name) return architecture;
  }
  return nullptr;
}

std::string ArchitectureNames(absl::string_view last) {
  std::vector<std::string> names;
  for (const Architecture* architecture : kArchitectures) {
    names.push_back(absl::StrCat("'", architecture->name, "'"));
  }
  const std::string end = names.back();
  names.pop_back();
  return absl::StrCat(absl::StrJoin(names, ", "), " ", last, " ", end);
}

namespace {

// What the parts say of experts.
void SetRouting(DecoderConfig& c) {
  if (!c.Has(ModelPart::kRouting)) {
    c.leading_dense = c.shared_experts = 0;
    c.gating = DecoderConfig::kSoftmax;
    c.experts_sum_to_one = true;
    c.expert_scale = 1;
  } else {
    if (!c.Has(ModelPart::kSharedExpert)) c.shared_experts = 0;
    c.shared_ffn = c.shared_cols();
    if (c.leading_dense > 0) c.parts.Add(ModelPart::kDense);
  }
  if (!c.Has(ModelPart::kSharedExpert)) c.shared_ffn = 0;
}

// What the parts say of attention over latents, and of YaRN.
void SetLatent(DecoderConfig& c) {
  if (!c.Has(ModelPart::kYarn)) {
    c.yarn_factor = c.yarn_log_mul = 0;
    c.yarn_original = 0;
  }
  if (!c.Has(ModelPart::kQueryLora)) c.q_lora = 0;
  if (!c.Has(ModelPart::kLatent)) {
    c.kv_lora = 0;
    c.yarn_log_mul = 0;
    return;
  }
  const bool lora = c.Has(ModelPart::kQueryLora);
  const bool split = c.Has(ModelPart::kSplitKvB);
  if (!lora) c.parts.Add(ModelPart::kPlainQuery);
  if (!split) c.parts.Add(ModelPart::kJoinedKvB);
}

}  // namespace

void SetArchitecture(const Architecture& architecture,
                     absl::FunctionRef<bool(ModelPart part)> has,
                     DecoderConfig& c) {
  c.architecture = std::string(architecture.name);
  c.parts = architecture.always;
  for (size_t i = 0; i < kNumModelParts; ++i) {
    const auto part = static_cast<ModelPart>(i);
    if (architecture.may.Has(part) && has(part)) c.parts.Add(part);
  }
  if (!c.Has(ModelPart::kExperts)) {
    c.parts.Add(ModelPart::kDense);
    c.experts = c.experts_used = c.expert_ffn = 0;
    c.parts.Remove(ModelPart::kSharedExpert);
  }
  SetRouting(c);
  SetLatent(c);
  if (!c.Has(ModelPart::kEmbdNorm)) c.parts.Add(ModelPart::kOutputNorm);
  if (!c.Has(ModelPart::kBareInputs)) {
    c.parts.Add(ModelPart::kAttnNorm);
    if (!c.Has(ModelPart::kPostMixNorm)) c.parts.Add(ModelPart::kFfnNorm);
  }
  if (!c.HasRecurrent()) {
    c.recurrent.clear();
    c.conv_width = 0;
  }
  if (!c.Has(ModelPart::kJoinedQkv)) c.parts.Add(ModelPart::kOwnQkv);
  if (!c.Has(ModelPart::kJoinedGateUp)) c.parts.Add(ModelPart::kOwnGateUp);
  if (!c.Has(ModelPart::kLocalLayers)) c.window = 0;
  if (!c.Has(ModelPart::kLinearRope)) c.rope_divisor = 1;
  if (!c.Has(ModelPart::kStates)) {
    c.ssm_inner = c.ssm_heads = c.ssm_groups = c.ssm_state = 0;
  }
  if (!c.Has(ModelPart::kMultipliers)) c.rope = true;
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
    c.embedding_scale = c.residual_scale = c.logit_divisor = 1;
    c.attention_scale = 0;
  }
  if (architecture.adjust != nullptr) architecture.adjust(c);
}

}  // namespace quern
