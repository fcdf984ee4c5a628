#include "quern/ops/mla/mla_weights.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "multi_head_latent_attention";

// Packs [n, k] that lie as `layout` says.
absl::StatusOr<LinearWeights> Pack(const AnyTensorView& codes,
                                   WeightLayout layout, int64_t n, int64_t k,
                                   Executor& executor) {
  LinearWeightsSpec spec;
  spec.n = n;
  spec.k = k;
  spec.format = FormatOfFloats(codes.dtype());
  LinearSource source;
  source.layout = layout;
  source.codes = codes;
  return LinearWeights::Pack(spec, {source}, executor);
}

}  // namespace

absl::Status PackKvB(const MlaSpec& spec, const AnyTensorView& kv_b,
                     Executor& executor, MlaWeights& weights) {
  constexpr int64_t kMost = LinearWeights::kMaxExtent;
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "kv_b", kv_b.dtype(), kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "heads", spec.heads, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "nope", spec.nope, 1, kMost));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "v_head_dim", spec.v_head_dim, 1, kMost));
  const int64_t head_rows = spec.nope + spec.v_head_dim;
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "nope + v_head_dim", head_rows, 1, kMost / spec.heads));
  const int64_t rows = spec.heads * head_rows;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "kv_b", kv_b, kv_b.dtype(), {rows, kAnyExtent}));
  const int64_t kv_lora = kv_b.extent(1);
  std::vector<LinearWeights> q_absorb, v_up;
  for (int64_t h = 0; h < spec.heads; ++h) {
    // W_uk [nope, kv_lora] is b[k, n] of the transposed product.
    QUERN_ASSIGN_OR_RETURN(
        const LinearWeights absorb,
        Pack(RowSlice(kv_b, h * head_rows, spec.nope), WeightLayout::kKN,
             kv_lora, spec.nope, executor));
    QUERN_ASSIGN_OR_RETURN(
        const LinearWeights up,
        Pack(RowSlice(kv_b, h * head_rows + spec.nope, spec.v_head_dim),
             WeightLayout::kNK, spec.v_head_dim, kv_lora, executor));
    q_absorb.push_back(absorb);
    v_up.push_back(up);
  }
  QUERN_ASSIGN_OR_RETURN(
      weights.kv_b, Pack(kv_b, WeightLayout::kNK, rows, kv_lora, executor));
  weights.q_absorb = std::move(q_absorb);
  weights.v_up = std::move(v_up);
  return absl::OkStatus();
}

MlaSpec MlaSpecOf(const MlaWeights& weights, const KvLayout& cache) {
  MlaSpec spec;
  spec.hidden = weights.kv_a.spec().k;
  spec.heads = static_cast<int64_t>(weights.q_absorb.size());
  if (weights.q_a.has_value()) spec.q_lora = weights.q_a->spec().n;
  spec.kv_lora = cache.v_head_dim();
  spec.rope = cache.head_dim() - cache.v_head_dim();
  if (!weights.q_absorb.empty()) spec.nope = weights.q_absorb[0].spec().k;
  if (!weights.v_up.empty()) spec.v_head_dim = weights.v_up[0].spec().n;
  spec.cache = cache;
  if (!weights.kv_b.has_value()) spec.form = MlaForm::kAbsorbed;
  return spec;
}

}  // namespace quern
