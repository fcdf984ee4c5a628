#ifndef QUERN_OPS_MLA_MLA_H_
#define QUERN_OPS_MLA_MLA_H_

// Multi-head latent attention (DeepSeek-V2 and after), a layer over a paged
// cache of latents. For the row x of a token at position p:
//
//   q            = W_q x,  or W_qb rms_norm(W_qa x)
//   [c, r]       = W_kva x;  c = rms_norm(c)
//   [qn, qr][h]  = q of head h: nope and rope elements
//   qr, r        = rope(qr, p), rope(r, p);  all heads share r
//   cache row    = [c, r]
//   o[h]         = sum over t of softmax_t(scale * logit[h, t]) * W_uv[h] c[t]
//   logit[h, t]  = qn[h] . W_uk[h] c[t] + qr[h] . r[t],  t of the sequence <= p
//   out          = residual + W_o [o[0], o[1], ...]
//
// The plan of the rotation says which elements are a pair
// (ops/rope/rotary_embedding.h). DeepSeek's checkpoints have kPairs, elements
// 2j and 2j + 1 (interleaved, is_neox_style=False). A file whose rope rows of
// W_q and W_kva were reordered for kHalves, elements j and j + rope / 2 (neox),
// needs kHalves. The layer cannot tell the two apart, and the wrong one gives
// wrong numbers without a refusal.
//
// Two forms give o. They are equal but for rounding:
//
//   direct     k[t, h] = [W_uk[h] c[t], r[t]];  v[t, h] = W_uv[h] c[t]
//              attention of every head over its own keys and values
//   absorbed   q'[h] = [W_uk[h]' qn[h], qr[h]]
//              attention of all heads over one latent: keys [c, r], values c
//              o[h] = W_uv[h] (what attention gives)
//
// The absorbed form reads the cache and serves every sequence; the direct form
// needs fewer operations for a prompt. UsesDirectForm (ops/mla/mla_spec.h)
// chooses for each sequence, so with packed kernels neither the other sequences
// nor the number of workers change a bit (oneDNN's: gemm/linear.h). How a
// prompt is cut into steps does, where the parts take different forms.
//
// The result of each step, q, [c, r], both norms, the rotation, W_uk c, W_uv c,
// q', the output of attention and o, is rounded to the dtype of x. out is
// rounded once, to its own dtype, after the residual has been added. The cache
// may have another dtype, f8e4m3 with a scale for each block of c among them
// (KvScaling::kPerBlock of cache/kv_layout.h); the direct form does not read
// it.

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule_bound.h"
#include "quern/attention/varlen_attention.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/write_kv.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/grouped_linear.h"
#include "quern/gemm/linear.h"
#include "quern/ops/index_view.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/rope/rotary_embedding.h"

namespace quern {

// Everything is borrowed for the time of one Execute. tokens: those of the
// schedule.
struct MlaArgs {
  AnyTensorView x;        // [tokens, hidden], any row stride
  IndexView positions;    // [tokens]
  AnyTensorView q_norm;   // [q_lora]; no view where q_lora is 0
  AnyTensorView kv_norm;  // [kv_lora]
  // head_dim and rot_dim are the spec's `rope`, the dtype is that of x. One
  // plan serves all layers, because its table is large.
  const RotaryEmbeddingPlan* rope = nullptr;
  KvCacheView cache;     // earlier latents, and room for the new ones
  MlaSchedule schedule;  // built with the plan's spec
  AnyTensorView out;     // [tokens, hidden], any row stride
  // Added to the result where the spec allows it: of out's dtype and shape, out
  // itself or memory that does not overlap out. Rank 0 adds nothing.
  AnyTensorView residual = {};
};

struct MlaScratch;  // ops/mla/mla_scratch.h

class MlaPlan {
 public:
  // `weights` may be dropped afterwards as LinearPlan::Create allows; bytes
  // that they adopted may not.
  //
  // InvalidArgument: what CheckMlaSpec refuses; weights of another shape than
  // the spec's; q_a where q_lora is 0; a bias in q_absorb, v_up or kv_b; no
  // kv_b where the form is not kAbsorbed; what the plans of the steps refuse.
  // Unimplemented: other dtypes.
  static absl::StatusOr<MlaPlan> Create(const MlaSpec& spec,
                                        const MlaWeights& weights,
                                        Executor& executor);

  const MlaSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return attend_.target(); }
  // "bf16 dot" or "f32 fma": the arithmetic of the absorbed form's attention.
  const char* arithmetic() const { return attend_.arithmetic(); }
  // Bytes of all weights in the form that Execute reads.
  int64_t packed_bytes() const;

  // Bytes of workspace that Execute needs with this schedule, on up to
  // max_workers workers. ResourceExhausted if the size overflows. Each absorbed
  // token takes about 4 * heads * kv_lora elements, each direct one 4 * heads *
  // (nope + rope + v_head_dim).
  absl::StatusOr<int64_t> WorkspaceBytes(const MlaSchedule& schedule,
                                         int max_workers) const;
  // Enough for every schedule within `limits`, run by at most max_workers
  // workers and built for as many, or for up to limits.max_schedule_workers if
  // these are more. Refuses what AttentionBoundOf refuses; limits.prefix_groups
  // is not looked at.
  absl::StatusOr<int64_t> WorkspaceBytes(const AttentionLimits& limits,
                                         int max_workers) const;

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's, or a row stride of x or out that the implementation of their
  // product (gemm/linear.h) does not take; a rotation of other elements; a
  // position that it does not have; positions that touch out or the cache;
  // a schedule of other heads, or with tokens of the direct form where the plan
  // has no kv_b; a cache of another layout or with fewer pages than the
  // schedule's table; a residual where the spec allows none; out or the cache
  // where they touch another tensor, but for a residual that is out.
  absl::Status CheckArgs(const MlaArgs& args) const;

  // Writes the latents of all tokens into the cache, and out. Allocates nothing
  // (oneDNN allocates small blocks); safe to call concurrently on distinct
  // slots, each call with its own workspace. With less than WorkspaceBytes,
  // aborts. Cost: every matrix is read once, W_uk and W_uv as q_absorb and
  // v_up, or in kv_b, or in both where the batch has sequences of both forms;
  // of more than 256 rows once for each 256.
  void Execute(const MlaArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  struct Layers {
    std::optional<LinearPlan> q_a;
    LinearPlan q, kv_a, out;
    std::optional<LinearPlan> kv_b;
    GroupedLinearPlan q_absorb, v_up;
  };
  // How many tokens there are, and bytes that attention needs for them.
  struct Load {
    int64_t tokens, direct, absorbed;
    int64_t direct_bytes, absorbed_bytes;
  };

  MlaPlan(const MlaSpec& spec, Layers layers, const RmsNormPlan& q_norm,
          const RmsNormPlan& kv_norm, const WriteKvPlan& write,
          const PagedAttentionPlan& attend, const VarlenAttentionPlan& direct);

  absl::StatusOr<int64_t> WorkspaceBytes(const Load& load, int workers) const;
  absl::Status CheckRope(const MlaArgs& args) const;
  absl::Status CheckCaches(const MlaArgs& args) const;

  void Project(const MlaArgs& args, const MlaScratch& s,
               const Workspace& workspace, Executor& executor) const;
  void ExecuteDirect(const MlaArgs& args, const MlaScratch& s,
                     Workspace workspace, Executor& executor) const;
  void ExecuteAbsorbed(const MlaArgs& args, const MlaScratch& s,
                       Workspace workspace, Executor& executor) const;

  MlaSpec spec_;
  Layers layers_;
  RmsNormPlan q_norm_, kv_norm_;
  WriteKvPlan write_;
  PagedAttentionPlan attend_;
  VarlenAttentionPlan direct_;
};

}  // namespace quern

#endif  // QUERN_OPS_MLA_MLA_H_
