#ifndef QUERN_MODELS_DECODER_OPERATORS_H_
#define QUERN_MODELS_DECODER_OPERATORS_H_

// Private: the operators between a decoder's matrices. They come by name from
// a dispatcher, so that a policy or an embedder's override reaches a real
// model. The embedding, the matrices and attention are made by the decoder
// itself.

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/decoder_config.h"
#include "quern/models/model_shard.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/rope/rotary_scaling.h"

namespace quern {

class DecoderOperators {
 public:
  // `rows`: the type of what matrices multiply. `context`: positions. The
  // dispatcher is used here alone.
  static absl::StatusOr<DecoderOperators> Create(const OpDispatcher& ops,
                                                 const DecoderConfig& config,
                                                 const ModelShard& shard,
                                                 DType rows, int64_t context);

  // Bytes of the workspace of any of them.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;
  const char* target() const { return norm_->target(); }
  bool has_head_norms() const { return q_norm_ != nullptr; }

  // rows = rms_norm(x, weight)
  void Norm(const AnyTensorView& x, const AnyTensorView& weight,
            const AnyTensorView& rows, Workspace workspace,
            Executor& executor) const noexcept {
    Run(*norm_, {x, weight, rows}, workspace, executor);
  }
  // stream += x; rows = rms_norm(stream, weight)
  void AddNorm(const AnyTensorView& x, const AnyTensorView& stream,
               const AnyTensorView& weight, const AnyTensorView& rows,
               Workspace workspace, Executor& executor) const noexcept {
    Run(*add_norm_, {x, stream, weight, rows}, workspace, executor);
  }
  // x = rms_norm(x, weight), with kPostNorms
  void PostNorm(const AnyTensorView& x, const AnyTensorView& weight,
                Workspace workspace, Executor& executor) const noexcept {
    Run(*post_norm_, {x, weight, x}, workspace, executor);
  }
  // q and k [tokens, heads, head_dim]: each head = rms_norm(head), with
  // kHeadNorms
  void HeadNorms(const AnyTensorView& q, const AnyTensorView& q_weight,
                 const AnyTensorView& k, const AnyTensorView& k_weight,
                 Workspace workspace, Executor& executor) const noexcept {
    Run(*q_norm_, {q, q_weight, q}, workspace, executor);
    Run(*k_norm_, {k, k_weight, k}, workspace, executor);
  }
  // Turns each head of q and k.
  void Rotate(const AnyTensorView& positions, const AnyTensorView& q,
              const AnyTensorView& k, Workspace workspace,
              Executor& executor) const noexcept {
    Run(*rope_, {positions, q, k}, workspace, executor);
  }
  // out = the rows of x that `indices` name
  void Gather(const AnyTensorView& x, const AnyTensorView& indices,
              const AnyTensorView& out, Workspace workspace,
              Executor& executor) const noexcept {
    Run(*gather_, {x, indices, out}, workspace, executor);
  }
  // Caps logits.
  void Finish(const AnyTensorView& logits, Workspace workspace,
              Executor& executor) const noexcept {
    Run(*logits_, {logits}, workspace, executor);
  }

 private:
  using Op = std::unique_ptr<BoundOp>;
  static void Run(const BoundOp& op,
                  std::initializer_list<AnyTensorView> tensors,
                  Workspace workspace, Executor& executor) noexcept {
    op.Execute(absl::MakeConstSpan(tensors.begin(), tensors.size()), workspace,
               executor);
  }

  DecoderOperators() = default;

  std::unique_ptr<const RotaryScaling> scaling_;  // what rope_ borrows
  Op norm_, add_norm_, post_norm_, q_norm_, k_norm_, rope_, gather_, logits_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_OPERATORS_H_
