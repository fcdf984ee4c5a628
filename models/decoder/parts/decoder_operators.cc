#include "quern/models/decoder/parts/decoder_operators.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

// The rotary scaling by YaRN, or by the file's factors or divisor, if there is
// any.
RotaryScaling ScalingOf(const DecoderConfig& c) {
  RotaryScaling scaling;
  if (c.Has(ModelPart::kYarn)) {
    scaling.kind = RotaryScalingKind::kYarn;
    scaling.factor = static_cast<double>(c.yarn_factor);
    scaling.original = c.yarn_original;
    scaling.truncate = c.yarn_truncates;
    return scaling;
  }
  if (c.rope_divisor != 1) {
    scaling.kind = RotaryScalingKind::kLinear;
    scaling.factor = static_cast<double>(c.rope_divisor);
    return scaling;
  }
  if (c.rope_factors.empty()) return scaling;
  // Factors are applied as LongRoPE within the original context, which divides
  // the frequencies by the short factors and has magnitude 1.
  scaling.kind = RotaryScalingKind::kLongRope;
  scaling.original = scaling.target = 2;
  scaling.short_factors = scaling.long_factors = c.rope_factors;
  return scaling;
}

// What a rank's part of the embedding is looked up with.
NamedArgs EmbeddingArgs(const DecoderConfig& c, const ModelShard& shard,
                        DType dtype, Communicator& ranks) {
  NamedArgs args = {
      {"ids", TensorMeta{DType::kI32, {1}}},
      {"weight", TensorMeta{dtype, {shard.vocab().width, c.hidden}}},
      {"scale", c.embedding_scale / c.residual_scale},
      {"out_dtype", DTypeName(DType::kF32)}};
  if (ranks.size() == 1) return args;
  args.insert(
      args.end(),
      {{"ranks", &ranks}, {"vocab", c.vocab}, {"padding", ranks.size()}});
  return args;
}

}  // namespace

absl::StatusOr<DecoderOperators> DecoderOperators::Create(
    const OpDispatcher& ops, const DecoderConfig& c, const ModelShard& shard,
    Types types, int64_t context, Communicator& ranks) {
  DecoderOperators o;
  const auto make = [&ops](Op& to, absl::string_view name,
                           const NamedArgs& args) {
    QUERN_ASSIGN_OR_RETURN(MadeOp made, ops.Make(name, args));
    to = std::move(made.op);
    return absl::OkStatus();
  };
  // Operators are made with one row; they take any number of rows.
  const std::string rows(DTypeName(types.rows));
  QUERN_RETURN_IF_ERROR(make(o.embed_, "vocab_parallel_embedding",
                             EmbeddingArgs(c, shard, types.embedding, ranks)));
  const TensorMeta x = {DType::kF32, {1, c.hidden}};
  const TensorMeta weight = {DType::kF32, {c.hidden}};
  const float stream_eps = c.norm_eps / (c.residual_scale * c.residual_scale);
  QUERN_RETURN_IF_ERROR(make(o.norm_, "rms_norm",
                             {{"x", x},
                              {"weight", weight},
                              {"eps", stream_eps},
                              {"out_dtype", rows}}));
  if (NeedsBranch(c, shard)) {
    QUERN_RETURN_IF_ERROR(make(o.add_norm_, "add_rms_norm",
                               {{"x", x},
                                {"residual", x},
                                {"weight", weight},
                                {"eps", stream_eps},
                                {"out_dtype", rows}}));
  }
  if (c.Has(ModelPart::kBareInputs)) {
    ConvertSpec copy;
    copy.from = DType::kF32;
    copy.to = types.rows;
    QUERN_ASSIGN_OR_RETURN(o.copy_, ConvertPlan::Create(copy));
  }
  if (c.Has(ModelPart::kPostNorms)) {
    QUERN_RETURN_IF_ERROR(
        make(o.post_norm_, "rms_norm",
             {{"x", x}, {"weight", weight}, {"eps", c.norm_eps}}));
  }
  const TensorMeta q = {DType::kF32, {1, shard.q_heads(), c.head_dim}};
  const TensorMeta k = {DType::kF32, {1, shard.kv_heads(), c.head_dim}};
  const auto make_norm = [&](Op& to, const TensorMeta& pieces) {
    return make(to, "rms_norm",
                {{"x", pieces},
                 {"weight", TensorMeta{DType::kF32, {pieces.extents.back()}}},
                 {"eps", c.norm_eps}});
  };
  if (c.Has(ModelPart::kHeadNorms)) {
    QUERN_RETURN_IF_ERROR(make_norm(o.q_norm_, q));
    QUERN_RETURN_IF_ERROR(make_norm(o.k_norm_, k));
  }
  if (c.Has(ModelPart::kWholeNorms)) {
    QUERN_RETURN_IF_ERROR(
        make_norm(o.q_norm_, {DType::kF32, {1, 1, c.q_cols()}}));
    QUERN_RETURN_IF_ERROR(
        make_norm(o.k_norm_, {DType::kF32, {1, 1, c.kv_cols()}}));
  }
  if (c.Has(ModelPart::kAttnGate)) {
    const TensorMeta attended = {DType::kF32,
                                 {1, shard.q_heads() * c.head_dim}};
    QUERN_RETURN_IF_ERROR(
        make(o.gate_, "sigmoid_mul",
             {{"x", attended}, {"gate", attended}, {"out_dtype", rows}}));
  }
  // Layers over latents rotate by a plan of their own.
  if (c.rope && !c.Has(ModelPart::kLatent)) {
    o.scaling_ = std::make_unique<const RotaryScaling>(ScalingOf(c));
    const auto make_rope = [&](Op& to, const RotaryScaling* scaling,
                               float base) {
      return make(to, "rotary_embedding",
                  {{"positions", TensorMeta{DType::kI64, {1}}},
                   {"query", q},
                   {"key", k},
                   {"scaling", scaling},
                   {"max_position", context},
                   {"rot_dim", c.rope_dim},
                   {"base", base},
                   {"is_neox", c.rope_style == RotaryStyle::kHalves}});
    };
    QUERN_RETURN_IF_ERROR(make_rope(o.rope_, o.scaling_.get(), c.rope_base));
    if (c.Has(ModelPart::kLocalRope)) {
      o.local_scaling_ = std::make_unique<const RotaryScaling>();
      QUERN_RETURN_IF_ERROR(
          make_rope(o.local_rope_, o.local_scaling_.get(), c.local_rope_base));
    }
  }
  QUERN_RETURN_IF_ERROR(make(o.gather_, "gather_rows",
                             {{"x", TensorMeta{types.rows, {1, c.hidden}}},
                              {"rows", TensorMeta{DType::kI64, {1}}}}));
  QUERN_RETURN_IF_ERROR(make(o.logits_, "logits_processor",
                             {{"logits", TensorMeta{DType::kF32, {1, c.vocab}}},
                              {"soft_cap", c.logit_cap},
                              {"scale", 1 / c.logit_divisor}}));
  return o;
}

absl::StatusOr<int64_t> DecoderOperators::WorkspaceBytes(
    int64_t max_tokens, int max_workers) const {
  int64_t most = 0;
  for (const Op* op :
       {&embed_, &norm_, &add_norm_, &post_norm_, &q_norm_, &k_norm_, &rope_,
        &local_rope_, &gate_, &gather_, &logits_}) {
    if (*op == nullptr) continue;
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           (*op)->WorkspaceBytes(max_tokens, max_workers));
    most = std::max(most, bytes);
  }
  return most;
}

}  // namespace quern
