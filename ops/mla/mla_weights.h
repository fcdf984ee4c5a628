#ifndef QUERN_OPS_MLA_MLA_WEIGHTS_H_
#define QUERN_OPS_MLA_MLA_WEIGHTS_H_

// The matrices of a layer of multi-head latent attention, in any format of
// gemm/linear_weights.h:
//
//   MlaWeights weights;
//   weights.q = ...; weights.kv_a = ...; weights.out = ...;
//   QUERN_RETURN_IF_ERROR(PackKvB(shape, kv_b, executor, weights));
//   const MlaSpec spec = MlaSpecOf(weights, cache_layout);

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mla/mla_spec.h"

namespace quern {

// [n, k] of each, as a linear layer's weights are given. W_kvb has, for each
// head, nope rows that make a key and then v_head_dim rows that make a value:
// W_uk[nope, kv_lora] and W_uv[v_head_dim, kv_lora].
struct MlaWeights {
  std::optional<LinearWeights> q_a;  // W_qa [q_lora, hidden]
  // W_q [heads * (nope + rope), hidden], or with q_a
  // W_qb [heads * (nope + rope), q_lora].
  LinearWeights q;
  LinearWeights kv_a;  // W_kva [kv_lora + rope, hidden]
  // One matrix for each head, all of one format and without a bias.
  std::vector<LinearWeights> q_absorb;  // W_uk' [kv_lora, nope]
  std::vector<LinearWeights> v_up;      // W_uv [v_head_dim, kv_lora]
  // W_kvb [heads * (nope + v_head_dim), kv_lora], without a bias. Only the
  // direct form reads it: without it all sequences take the absorbed form.
  std::optional<LinearWeights> kv_b;
  LinearWeights out;  // W_o [hidden, heads * v_head_dim]
};

// Packs q_absorb, v_up and kv_b from W_kvb [heads * (nope + v_head_dim),
// kv_lora], f32, bf16 or f16 with any row stride, in the format of its dtype.
// Reads nope, v_head_dim and heads of `spec`, and nothing else. Uses `executor`
// to pack.
//
// InvalidArgument: heads, nope or v_head_dim below 1, or a matrix of another
// shape. Unimplemented: another dtype. ResourceExhausted: no memory.
absl::Status PackKvB(const MlaSpec& spec, const AnyTensorView& kv_b,
                     Executor& executor, MlaWeights& weights);

// The spec that these weights and a cache have; scale, eps, dtypes and kernels
// are the defaults. The form is kAbsorbed without kv_b. Sizes of weights that
// do not fit together are refused where the spec is used.
MlaSpec MlaSpecOf(const MlaWeights& weights, const KvLayout& cache);

}  // namespace quern

#endif  // QUERN_OPS_MLA_MLA_WEIGHTS_H_
