// The tensors of models/architectures/architecture.h.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"

namespace quern {
namespace {

constexpr ModelParts kAny;
using P = ModelPart;
using E = Extent;
using R = TensorRole;
constexpr TensorEntry kTensors[] = {
    {TensorId::kEmbedding, "token_embd.weight", false, R::kEmbedding,
     E::kHidden, E::kVocab, kAny},
    {TensorId::kAttnNorm, "attn_norm.weight", true, R::kNorm, E::kHidden,
     E::kOne, P::kAttnNorm},
    {TensorId::kAttnQ, "attn_q.weight", true, R::kMatrix, E::kHidden,
     E::kQueryRows, P::kAttention | P::kOwnQkv, E::kOne, E::kQueryGroups},
    {TensorId::kAttnK, "attn_k.weight", true, R::kMatrix, E::kHidden,
     E::kKeyCols, P::kAttention | P::kOwnQkv},
    {TensorId::kAttnV, "attn_v.weight", true, R::kMatrix, E::kHidden,
     E::kKeyCols, P::kAttention | P::kOwnQkv},
    {TensorId::kAttnQkv, "attn_qkv.weight", true, R::kMatrix, E::kHidden,
     E::kQkvRows, P::kAttention | P::kJoinedQkv},
    {TensorId::kAttnQBias, "attn_q.bias", true, R::kBias, E::kQueryCols,
     E::kOne, P::kQkvBias},
    {TensorId::kAttnKBias, "attn_k.bias", true, R::kBias, E::kKeyCols, E::kOne,
     P::kQkvBias},
    {TensorId::kAttnVBias, "attn_v.bias", true, R::kBias, E::kKeyCols, E::kOne,
     P::kQkvBias},
    {TensorId::kAttnQNorm, "attn_q_norm.weight", true, R::kNorm, E::kHeadDim,
     E::kOne, P::kHeadNorms | P::kAttention},
    {TensorId::kAttnKNorm, "attn_k_norm.weight", true, R::kNorm, E::kHeadDim,
     E::kOne, P::kHeadNorms | P::kAttention},
    {TensorId::kAttnWholeQNorm, "attn_q_norm.weight", true, R::kNorm,
     E::kQueryCols, E::kOne, P::kWholeNorms | P::kAttention},
    {TensorId::kAttnWholeKNorm, "attn_k_norm.weight", true, R::kNorm,
     E::kKeyCols, E::kOne, P::kWholeNorms | P::kAttention},
    {TensorId::kAttnOutput, "attn_output.weight", true, R::kMatrixIntoStream,
     E::kQueryCols, E::kHidden, P::kAttention},
    {TensorId::kAttnOutputBias, "attn_output.bias", true, R::kBias, E::kHidden,
     E::kOne, P::kAttention | P::kOutputBias},
    {TensorId::kAttnSinks, "attn_sinks.weight", true, R::kBias, E::kQueryHeads,
     E::kOne, P::kAttention | P::kSinks},
    {TensorId::kLatentQ, "attn_q.weight", true, R::kMatrix, E::kHidden,
     E::kQueryCols, P::kPlainQuery},
    {TensorId::kLatentQA, "attn_q_a.weight", true, R::kMatrix, E::kHidden,
     E::kQueryLora, P::kQueryLora},
    {TensorId::kLatentQANorm, "attn_q_a_norm.weight", true, R::kNorm,
     E::kQueryLora, E::kOne, P::kQueryLora},
    {TensorId::kLatentQB, "attn_q_b.weight", true, R::kMatrix, E::kQueryLora,
     E::kQueryCols, P::kQueryLora},
    {TensorId::kLatentKvA, "attn_kv_a_mqa.weight", true, R::kMatrix, E::kHidden,
     E::kLatentRow, P::kLatent},
    {TensorId::kLatentKvANorm, "attn_kv_a_norm.weight", true, R::kNorm,
     E::kLatent, E::kOne, P::kLatent},
    {TensorId::kLatentKvB, "attn_kv_b.weight", true, R::kMatrix, E::kLatent,
     E::kKvBRows, P::kJoinedKvB},
    {TensorId::kLatentKB, "attn_k_b.weight", true, R::kMatrix, E::kNope,
     E::kLatent, P::kSplitKvB, E::kLatentHeads},
    {TensorId::kLatentVB, "attn_v_b.weight", true, R::kMatrix, E::kLatent,
     E::kValueDim, P::kSplitKvB, E::kLatentHeads},
    {TensorId::kLatentOutput, "attn_output.weight", true, R::kMatrixIntoStream,
     E::kValueCols, E::kHidden, P::kLatent},
    {TensorId::kShortConv, "shortconv.conv.weight", true, R::kConvolution,
     E::kConvWidth, E::kConvChannels, P::kShortConv},
    {TensorId::kShortConvIn, "shortconv.in_proj.weight", true, R::kMatrix,
     E::kHidden, E::kShortConvCols, P::kShortConv},
    {TensorId::kShortConvOut, "shortconv.out_proj.weight", true,
     R::kMatrixIntoStream, E::kConvChannels, E::kHidden, P::kShortConv},
    {TensorId::kSsmIn, "ssm_in.weight", true, R::kMatrix, E::kHidden,
     E::kSsmProjected, P::kMamba2},
    {TensorId::kSsmConv, "ssm_conv1d.weight", true, R::kConvolution,
     E::kConvWidth, E::kConvChannels, P::kStates},
    {TensorId::kSsmConvBias, "ssm_conv1d.bias", true, R::kBias,
     E::kConvChannels, E::kOne, P::kMamba2},
    {TensorId::kSsmDtBias, "ssm_dt.bias", true, R::kBias, E::kSsmHeads, E::kOne,
     P::kStates},
    {TensorId::kSsmA, "ssm_a", true, R::kDecay, E::kOne, E::kSsmHeads,
     P::kMamba2},
    {TensorId::kSsmD, "ssm_d", true, R::kNorm, E::kOne, E::kSsmHeads,
     P::kMamba2},
    {TensorId::kSsmNorm, "ssm_norm.weight", true, R::kNorm, E::kSsmGroupCols,
     E::kSsmGroups, P::kMamba2},
    {TensorId::kSsmOut, "ssm_out.weight", true, R::kMatrixIntoStream,
     E::kSsmInner, E::kHidden, P::kStates},
    {TensorId::kDeltaQkv, "attn_qkv.weight", true, R::kMatrix, E::kHidden,
     E::kConvChannels, P::kDeltaNet},
    {TensorId::kDeltaGate, "attn_gate.weight", true, R::kMatrix, E::kHidden,
     E::kSsmInner, P::kDeltaNet},
    {TensorId::kDeltaBetaAlpha, "ssm_ba.weight", true, R::kMatrix, E::kHidden,
     E::kSsmGates, P::kDeltaNet, E::kOne, E::kSsmGroups},
    {TensorId::kDeltaA, "ssm_a", true, R::kDecay, E::kSsmHeads, E::kOne,
     P::kDeltaNet},
    {TensorId::kDeltaNorm, "ssm_norm.weight", true, R::kNorm, E::kSsmHeadCols,
     E::kOne, P::kDeltaNet},
    {TensorId::kPostAttnNorm, "post_attention_norm.weight", true, R::kNorm,
     E::kHidden, E::kOne, P::kPostNorms},
    {TensorId::kPostFfnNorm, "post_ffw_norm.weight", true, R::kNorm, E::kHidden,
     E::kOne, P::kPostNorms},
    {TensorId::kFfnNorm, "ffn_norm.weight", true, R::kNorm, E::kHidden, E::kOne,
     P::kFfnNorm},
    {TensorId::kPostMixNorm, "post_attention_norm.weight", true, R::kNorm,
     E::kHidden, E::kOne, P::kPostMixNorm},
    {TensorId::kFfnGate, "ffn_gate.weight", true, R::kMatrix, E::kHidden,
     E::kFfn, P::kDense | P::kOwnGateUp},
    {TensorId::kFfnUp, "ffn_up.weight", true, R::kMatrix, E::kHidden, E::kFfn,
     P::kDense | P::kOwnGateUp},
    {TensorId::kFfnGateUp, "ffn_up.weight", true, R::kMatrix, E::kHidden,
     E::kGateUpRows, P::kDense | P::kJoinedGateUp},
    {TensorId::kFfnDown, "ffn_down.weight", true, R::kMatrixIntoStream, E::kFfn,
     E::kHidden, P::kDense},
    {TensorId::kRouter, "ffn_gate_inp.weight", true, R::kRouter, E::kHidden,
     E::kExperts, P::kExperts},
    {TensorId::kRouterBias, "exp_probs_b.bias", true, R::kBias, E::kExperts,
     E::kOne, P::kRouterBias},
    {TensorId::kRouterLogitBias, "ffn_gate_inp.bias", true, R::kBias,
     E::kExperts, E::kOne, P::kExperts | P::kMixtureBias},
    {TensorId::kExpertGate, "ffn_gate_exps.weight", true, R::kMatrix,
     E::kHidden, E::kExpertFfn, P::kExperts, E::kExperts},
    {TensorId::kExpertUp, "ffn_up_exps.weight", true, R::kMatrix, E::kHidden,
     E::kExpertFfn, P::kExperts, E::kExperts},
    {TensorId::kExpertDown, "ffn_down_exps.weight", true, R::kMatrixIntoStream,
     E::kExpertFfn, E::kHidden, P::kExperts, E::kExperts},
    {TensorId::kExpertGateBias, "ffn_gate_exps.bias", true, R::kBias,
     E::kExpertFfn, E::kOne, P::kExperts | P::kMixtureBias, E::kExperts},
    {TensorId::kExpertUpBias, "ffn_up_exps.bias", true, R::kBias, E::kExpertFfn,
     E::kOne, P::kExperts | P::kMixtureBias, E::kExperts},
    {TensorId::kExpertDownBias, "ffn_down_exps.bias", true, R::kBias,
     E::kHidden, E::kOne, P::kExperts | P::kMixtureBias, E::kExperts},
    {TensorId::kSharedGate, "ffn_gate_shexp.weight", true, R::kMatrix,
     E::kHidden, E::kSharedFfn, P::kSharedExpert},
    {TensorId::kSharedUp, "ffn_up_shexp.weight", true, R::kMatrix, E::kHidden,
     E::kSharedFfn, P::kSharedExpert},
    {TensorId::kSharedDown, "ffn_down_shexp.weight", true, R::kMatrixIntoStream,
     E::kSharedFfn, E::kHidden, P::kSharedExpert},
    {TensorId::kSharedRouter, "ffn_gate_inp_shexp.weight", true, R::kRouter,
     E::kHidden, E::kOne, P::kSharedExpert | P::kSharedGate},
    {TensorId::kOutputNorm, "output_norm.weight", false, R::kNorm, E::kHidden,
     E::kOne, P::kOutputNorm},
    {TensorId::kEmbdNorm, "token_embd_norm.weight", false, R::kNorm, E::kHidden,
     E::kOne, P::kEmbdNorm},
    {TensorId::kOutput, "output.weight", false, R::kMatrix, E::kHidden,
     E::kVocab, P::kOutputMatrix},
    {TensorId::kRopeFactors, "rope_freqs.weight", false, R::kRopeFactors,
     E::kRopePairs, E::kOne, P::kRopeFactors},
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
    case Extent::kSharedFfn:
      return c.shared_ffn;
    case Extent::kQueryLora:
      return c.q_lora;
    case Extent::kLatent:
      return c.kv_lora;
    case Extent::kLatentRow:
      return c.kv_lora + c.rope_dim;
    case Extent::kLatentHeads:
      return c.q_heads;
    case Extent::kNope:
      return c.nope();
    case Extent::kValueDim:
      return c.value_dim;
    case Extent::kKvBRows:
      return c.q_heads * (c.nope() + c.value_dim);
    case Extent::kValueCols:
      return c.q_heads * c.value_dim;
    case Extent::kConvWidth:
      return c.conv_width;
    case Extent::kConvChannels:
      return c.conv_channels();
    case Extent::kShortConvCols:
      return 3 * c.conv_channels();
    case Extent::kSsmInner:
      return c.ssm_inner;
    case Extent::kSsmHeads:
      return c.ssm_heads;
    case Extent::kSsmGroups:
      return c.ssm_groups;
    case Extent::kSsmGroupCols:
      return c.ssm_groups == 0 ? 0 : c.ssm_inner / c.ssm_groups;
    case Extent::kSsmProjected:
      return c.ssm_inner + c.conv_channels() + c.ssm_heads;
    case Extent::kQueryRows:
      return c.query_rows();
    case Extent::kQkvRows:
      return c.query_rows() + 2 * c.kv_cols();
    case Extent::kGateUpRows:
      return 2 * c.ffn;
    case Extent::kQueryHeads:
      return c.q_heads;
    case Extent::kQueryGroups:
      return c.Has(ModelPart::kAttnGate) ? c.q_heads : 1;
    case Extent::kSsmHeadCols:
      return c.ssm_heads == 0 ? 0 : c.ssm_inner / c.ssm_heads;
    case Extent::kSsmGates:
      return 2 * c.ssm_heads;
  }
  return 0;
}

const TensorEntry& TensorOf(TensorId id) {
  return kTensors[static_cast<size_t>(id)];
}

TensorPlace PlaceOf(TensorId id, const DecoderConfig& c) {
  if (c.Has(ModelPart::kJoinedQkv)) {
    const int64_t k = c.query_rows(), v = k + c.kv_cols();
    if (id == TensorId::kAttnQ) return {TensorId::kAttnQkv, 0};
    if (id == TensorId::kAttnK) return {TensorId::kAttnQkv, k};
    if (id == TensorId::kAttnV) return {TensorId::kAttnQkv, v};
  }
  if (c.Has(ModelPart::kJoinedGateUp)) {
    if (id == TensorId::kFfnGate) return {TensorId::kFfnGateUp, 0};
    if (id == TensorId::kFfnUp) return {TensorId::kFfnGateUp, c.ffn};
  }
  return {id, 0};
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
    const ModelParts parts = in_layer ? config.PartsIn(layer) : config.parts;
    for (size_t i = begin; i < std::size(kTensors); ++i) {
      if (kTensors[i].in_layer != in_layer) break;
      if (!parts.HasAll(kTensors[i].needs)) continue;
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

}  // namespace quern
