#include "quern/ops/registry/all_ops.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/registry/families/attention/attention_ops.h"
#include "quern/ops/registry/families/attention/encoder_attention_ops.h"
#include "quern/ops/registry/families/attention/merge_states_ops.h"
#include "quern/ops/registry/families/attention/mla_ops.h"
#include "quern/ops/registry/families/attention/varlen_attention_ops.h"
#include "quern/ops/registry/families/linear/conv_ops.h"
#include "quern/ops/registry/families/linear/experts_ops.h"
#include "quern/ops/registry/families/linear/linear_ops.h"
#include "quern/ops/registry/families/linear/linear_weights_ops.h"
#include "quern/ops/registry/families/linear/moe_ops.h"
#include "quern/ops/registry/families/recurrent/mixer_ops.h"
#include "quern/ops/registry/families/recurrent/recurrent_ops.h"
#include "quern/ops/registry/families/rows/activation_ops.h"
#include "quern/ops/registry/families/rows/embedding_ops.h"
#include "quern/ops/registry/families/rows/gate_ops.h"
#include "quern/ops/registry/families/rows/gated_norm_ops.h"
#include "quern/ops/registry/families/rows/logits_ops.h"
#include "quern/ops/registry/families/rows/norm_ops.h"
#include "quern/ops/registry/families/rows/quant_ops.h"
#include "quern/ops/registry/families/rows/rope_ops.h"
#include "quern/ops/registry/families/rows/rope_variant_ops.h"
#include "quern/ops/registry/families/rows/sampling_ops.h"
#include "quern/ops/registry/families/rows/speculation_ops.h"
#include "quern/ops/registry/sglang/products/product_ops.h"
#include "quern/ops/registry/sglang/recurrent_ops.h"
#include "quern/ops/registry/sglang/rows_ops.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/ops/registry/vllm/attention_ops.h"
#include "quern/ops/registry/vllm/collective_ops.h"
#include "quern/ops/registry/vllm/experts/experts_ops.h"
#include "quern/ops/registry/vllm/linear_ops.h"
#include "quern/ops/registry/vllm/merge_states_ops.h"
#include "quern/ops/registry/vllm/recurrent_ops.h"
#include "quern/ops/registry/vllm/rows_ops.h"
#include "quern/ops/registry/vllm/speculation_ops.h"

namespace quern {
namespace {

// Providers that can make the operator's example, found by trying each.
absl::StatusOr<std::vector<std::string>> ProvidersOf(const OpDefinition& op,
                                                     DType dtype) {
  std::vector<std::string> providers;
  if (op.example == nullptr) return providers;
  QUERN_ASSIGN_OR_RETURN(const std::vector<OpArg> args,
                         ArrangeArgs(op.schema, op.example(dtype)));
  for (const OpImplementation& implementation : op.implementations) {
    const auto made = implementation.factory(args);
    if (made.ok()) {
      providers.push_back(implementation.provider);
    } else if (!absl::IsUnimplemented(made.status())) {
      return made.status();
    }
  }
  return providers;
}

}  // namespace

absl::Status RegisterAllOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterActivationOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterNormOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterGatedNormOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterMixer2NormOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterNormQuantOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterQuantOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterEmbeddingOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterLinearOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterLinearWeightsOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterAttentionOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterEncoderAttentionOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVarlenAttentionOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterMergeStatesOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmMergeStatesOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterLogitsOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSamplingOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterMixerOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterMlaOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmAttentionOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmLinearOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmRowsOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmExpertsOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmRecurrentOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmCollectiveOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangActivationOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangNormOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangRouterOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangRopeOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangCopyOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangPackOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangQuantOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangLinearOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangProductOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangLatentOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangEmbedOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangPack4Ops(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangAttentionOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangDeltaRuleOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangConvOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterMoeOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterExpertsOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterRopeVariantOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterConvOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterGateOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterDeltaRuleOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterRecurrentOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSpeculationOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmSpeculationOps(registry));
  QUERN_RETURN_IF_ERROR(RegisterSglangSpeculationOps(registry));
  return RegisterRopeOps(registry);
}

absl::StatusOr<std::string> ListOps(const OpRegistry& registry) {
  std::string table = "| operator |";
  for (const DType dtype : kFloatDTypes) {
    absl::StrAppend(&table, " ", DTypeName(dtype), " |");
  }
  table += "\n|---|---|---|---|\n";
  for (const std::string& name : registry.Names()) {
    const OpDefinition& op = *registry.Find(name);
    absl::StrAppend(&table, "| `", op.schema.Print(), "` |");
    bool any = false;
    for (const DType dtype : kFloatDTypes) {
      QUERN_ASSIGN_OR_RETURN(const auto providers, ProvidersOf(op, dtype));
      any = any || !providers.empty();
      absl::StrAppend(&table, " ",
                      providers.empty() ? "-" : absl::StrJoin(providers, ", "),
                      " |");
    }
    if (!any) {
      return absl::InternalError(
          absl::StrCat("op registry: ", name, " takes none of its examples"));
    }
    table += "\n";
  }
  return table;
}

}  // namespace quern
