#ifndef QUERN_MODELS_DECODER_PARTS_DECODER_OPERATORS_H_
#define QUERN_MODELS_DECODER_PARTS_DECODER_OPERATORS_H_

// Private: the operators between a decoder's matrices. They come by name from
// a dispatcher, so that a policy or an embedder's override reaches a real
// model, as its matrices (decoder_loader.h) and attention (page_pool.h) do.

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/quant/convert.h"

namespace quern {

// The residual stream holds x / residual_scale, because then a contribution is
// added as it is:
//
//   x' = x / scale;  x' += contribution
//   rms_norm(x, eps) = rms_norm(x', eps / scale^2)
//
class DecoderOperators {
 public:
  struct Types {
    DType rows;       // what matrices multiply
    DType embedding;  // the table's
  };
  // `context`: positions. `ranks` outlive this.
  static absl::StatusOr<DecoderOperators> Create(const OpDispatcher& ops,
                                                 const DecoderConfig& config,
                                                 const ModelShard& shard,
                                                 Types types, int64_t context,
                                                 Communicator& ranks);

  // Bytes of a workspace that is large enough for each of the operators.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;
  const char* target() const { return norm_->target(); }
  bool has_head_norms() const { return q_norm_ != nullptr; }
  bool has_gate() const { return gate_ != nullptr; }

  // x = the rows of the table that `ids` name, scaled; over ranks, `table` is
  // this rank's part.
  void Embed(const AnyTensorView& ids, const AnyTensorView& table,
             const AnyTensorView& x, Workspace workspace,
             Executor& executor) const noexcept {
    embed_->Execute({ids, table, x}, workspace, executor);
  }
  // rows = rms_norm(x, weight)
  void Norm(const AnyTensorView& x, const AnyTensorView& weight,
            const AnyTensorView& rows, Workspace workspace,
            Executor& executor) const noexcept {
    norm_->Execute({x, weight, rows}, workspace, executor);
  }
  // stream += x; rows = rms_norm(stream, weight)
  void AddNorm(const AnyTensorView& x, const AnyTensorView& stream,
               const AnyTensorView& weight, const AnyTensorView& rows,
               Workspace workspace, Executor& executor) const noexcept {
    add_norm_->Execute({x, stream, weight, rows}, workspace, executor);
  }
  // x = rms_norm(x, weight), with kPostNorms
  void PostNorm(const AnyTensorView& x, const AnyTensorView& weight,
                Workspace workspace, Executor& executor) const noexcept {
    post_norm_->Execute({x, weight, x}, workspace, executor);
  }
  // rows = x, with kBareInputs
  void Copy(const AnyTensorView& x, const AnyTensorView& rows,
            Executor& executor) const noexcept {
    copy_->Execute(x, rows, executor);
  }
  // Applies rms_norm to each head of q and k [tokens, heads, head_dim], with
  // kHeadNorms; with kWholeNorms to q and k [tokens, 1, columns].
  void HeadNorms(const AnyTensorView& q, const AnyTensorView& q_weight,
                 const AnyTensorView& k, const AnyTensorView& k_weight,
                 Workspace workspace, Executor& executor) const noexcept {
    q_norm_->Execute({q, q_weight, q}, workspace, executor);
    k_norm_->Execute({k, k_weight, k}, workspace, executor);
  }
  // Applies the rotary embedding to each head of q and k, unless the config has
  // none.
  void Rotate(bool local_layer, const AnyTensorView& positions,
              const AnyTensorView& q, const AnyTensorView& k,
              Workspace workspace, Executor& executor) const noexcept {
    const Op& rope =
        local_layer && local_rope_ != nullptr ? local_rope_ : rope_;
    rope->Execute({positions, q, k}, workspace, executor);
  }
  // out = x * sigmoid(gate): f32[tokens, q_cols] twice -> rows of the type that
  // matrices multiply; if has_gate.
  void Gate(const AnyTensorView& x, const AnyTensorView& gate,
            const AnyTensorView& out, Workspace workspace,
            Executor& executor) const noexcept {
    gate_->Execute({x, gate, out}, workspace, executor);
  }
  // out[i] = row indices[i] of x.
  void Gather(const AnyTensorView& x, const AnyTensorView& indices,
              const AnyTensorView& out, Workspace workspace,
              Executor& executor) const noexcept {
    gather_->Execute({x, indices, out}, workspace, executor);
  }
  // Caps and scales the logits in place.
  void Finish(const AnyTensorView& logits, Workspace workspace,
              Executor& executor) const noexcept {
    logits_->Execute({logits}, workspace, executor);
  }

 private:
  using Op = std::unique_ptr<BoundOp>;
  DecoderOperators() = default;

  std::optional<ConvertPlan> copy_;
  // Borrowed by rope_ and local_rope_.
  std::unique_ptr<const RotaryScaling> scaling_, local_scaling_;
  Op embed_, norm_, add_norm_, post_norm_, q_norm_, k_norm_, rope_, local_rope_,
      gate_, gather_, logits_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_PARTS_DECODER_OPERATORS_H_
