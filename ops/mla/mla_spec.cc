#include "quern/ops/mla/mla_spec.h"

#include <cmath>
#include <cstdint>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear_weights.h"

namespace quern {
namespace {

constexpr char kOp[] = "multi_head_latent_attention";
// Numbers of which a product with 2^31 tokens, and a few such sums, fit 63
// bits.
constexpr int64_t kMost = int64_t{1} << 24;

}  // namespace

absl::Status CheckMlaSpec(const MlaSpec& s) {
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", s.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "out_dtype", s.dtype_of_out(), kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "norm_dtype", s.norm_dtype, kFloatDTypes));
  const struct {
    const char* name;
    int64_t value, least;
  } sizes[] = {{"hidden", s.hidden, 1},
               {"heads", s.heads, 1},
               {"q_lora", s.q_lora, 0},
               {"kv_lora", s.kv_lora, 1},
               {"nope", s.nope, 1},
               {"rope", s.rope, 2},
               {"v_head_dim", s.v_head_dim, 1}};
  for (const auto& size : sizes) {
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, size.name, size.value, size.least, kMost));
  }
  if (s.rope % 2 != 0) {
    return InvalidArgument(kOp, "rope=", s.rope, "; need an even number");
  }
  const int64_t head = s.head_dim(), most = LinearWeights::kMaxExtent;
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "heads * (nope + rope)", s.heads * head, 1, most));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "heads * (nope + v_head_dim)",
                                   s.heads * (s.nope + s.v_head_dim), 1, most));
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "scale", s.scale));
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "eps", s.eps, "finite eps"));
  if (s.cache.form() != KvForm::kLatent) {
    return InvalidArgument(kOp, "the cache's form is ",
                           KvFormName(s.cache.form()), "; need latent");
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "heads of the cache",
                                   s.cache.kv_heads(), 1,
                                   "all heads share a latent"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "head_dim of the cache",
                                   s.cache.head_dim(), s.latent_row(),
                                   "kv_lora + rope is"));
  return CheckEqual(kOp, "v_head_dim of the cache", s.cache.v_head_dim(),
                    s.kv_lora, "kv_lora is");
}

bool UsesDirectForm(const MlaSpec& spec, int64_t q_len, int64_t kv_len) {
  if (spec.form == MlaForm::kAbsorbed || q_len == 0 || q_len != kv_len) {
    return false;
  }
  if (spec.form == MlaForm::kDirect) return true;
  // Both counts are divided by q_len / 2.
  const int64_t saved =
      (q_len + 1) * (2 * spec.kv_lora - spec.nope - spec.v_head_dim);
  return saved >
         2 * kMlaMovedElement * (spec.nope + spec.rope + spec.v_head_dim);
}

float MlaScale(int64_t head_dim, const RotaryScaling& scaling) {
  double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  if (scaling.kind == RotaryScalingKind::kYarn && scaling.factor > 1) {
    const double m = 0.1 * scaling.mscale_all_dim * std::log(scaling.factor);
    scale *= (m + 1) * (m + 1);
  }
  return static_cast<float>(scale);
}

AttentionSpec AbsorbedAttention(const MlaSpec& spec) {
  AttentionSpec attention;
  attention.kv = spec.cache;
  attention.q_heads = spec.heads;
  attention.q_dtype = attention.out_dtype = spec.dtype;
  attention.scale = DirectAttention(spec).scale;
  return attention;
}

VarlenAttentionSpec DirectAttention(const MlaSpec& spec) {
  VarlenAttentionSpec attention;
  attention.q_heads = attention.kv_heads = spec.heads;
  attention.head_dim = spec.head_dim();
  attention.v_head_dim = spec.v_head_dim;
  attention.dtype = attention.out_dtype = spec.dtype;
  // Keys of the absorbed form are longer, so their default scale would differ.
  attention.scale =
      spec.scale != 0.0f ? spec.scale : MlaScale(spec.head_dim(), {});
  return attention;
}

}  // namespace quern
