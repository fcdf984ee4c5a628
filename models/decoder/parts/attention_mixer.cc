#include "quern/models/decoder/parts/attention_mixer.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/models/decoder/memory/page_pool.h"
#include "quern/models/decoder/parts/decoder_operators.h"
#include "quern/models/decoder/parts/layer.h"

namespace quern {
AttentionMixer::AttentionMixer(std::vector<Matrix> qkv, Matrix out)
    : qkv_(std::move(qkv)), out_(std::move(out)) {}

absl::StatusOr<std::unique_ptr<Mixer>> AttentionMixer::Create(
    DecoderLoader& loader, const DecoderConfig& config, const ModelShard& shard,
    const DecoderOperators& operators, int64_t layer, int64_t pool,
    int64_t pool_layer) {
  std::vector<Matrix> qkv;
  for (const MatrixParts& parts : loader.QkvParts(layer)) {
    QUERN_ASSIGN_OR_RETURN(Matrix matrix, loader.MakeMatrix(parts));
    qkv.push_back(std::move(matrix));
  }
  QUERN_ASSIGN_OR_RETURN(Matrix out,
                         loader.MakeMatrix(loader.AttnOutParts(layer)));
  std::unique_ptr<AttentionMixer> m(
      new AttentionMixer(std::move(qkv), std::move(out)));
  m->operators_ = &operators;
  m->pool_ = pool;
  m->pool_layer_ = pool_layer;
  m->q_heads_ = shard.q_heads();
  m->kv_heads_ = shard.kv_heads();
  m->head_dim_ = config.head_dim;
  m->rotates_ = config.Rotates(layer);
  m->local_ = config.IsLocal(layer);
  if (operators.has_head_norms()) {
    m->whole_norms_ = config.Has(ModelPart::kWholeNorms);
    m->late_norms_ = config.Has(ModelPart::kLateHeadNorms);
    const auto q =
        m->whole_norms_ ? TensorId::kAttnWholeQNorm : TensorId::kAttnQNorm;
    const auto k =
        m->whole_norms_ ? TensorId::kAttnWholeKNorm : TensorId::kAttnKNorm;
    QUERN_ASSIGN_OR_RETURN(m->q_norm_, loader.Norm(q, layer));
    QUERN_ASSIGN_OR_RETURN(m->k_norm_, loader.Norm(k, layer));
  }
  if (config.Has(ModelPart::kSinks)) {
    QUERN_ASSIGN_OR_RETURN(m->sinks_,
                           loader.Vector(TensorId::kAttnSinks, layer));
  }
  return std::unique_ptr<Mixer>(std::move(m));
}

template <typename Allocator>
AttentionMixer::Scratch AttentionMixer::LayOut(Allocator& a,
                                               int64_t tokens) const {
  const int64_t cols = q_cols() + gate_cols() + 2 * kv_heads_ * head_dim_;
  const auto row_bytes = static_cast<int64_t>(SizeOf(out_.rows()));
  Scratch s;
  s.qkv = a.template Allocate<float>("qkv", tokens * cols);
  // Two bytes per element are enough, because queries are converted to at most
  // 16 bits.
  s.queries = a.template Allocate<uint8_t>("queries", 2 * tokens * q_cols());
  s.ungated = a.template Allocate<float>("ungated", tokens * gate_cols());
  s.attended =
      a.template Allocate<uint8_t>("attended", tokens * q_cols() * row_bytes);
  return s;
}

absl::StatusOr<int64_t> AttentionMixer::ScratchBytes(int64_t max_tokens,
                                                     int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(const int64_t out,
                         out_.WorkspaceBytes(max_tokens, max_workers));
  QUERN_ASSIGN_OR_RETURN(const int64_t op,
                         operators_->WorkspaceBytes(max_tokens, max_workers));
  int64_t most = std::max(out, op);
  for (const Matrix& matrix : qkv_) {
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           matrix.WorkspaceBytes(max_tokens, max_workers));
    most = std::max(most, bytes);
  }
  WorkspaceLayout counted;
  LayOut(counted, max_tokens);
  counted.Allocate<uint8_t>("matrix or operator", most);
  if (counted.overflow()) {
    return absl::ResourceExhaustedError(
        "decoder: attention's scratch needs more than 2^63 bytes");
  }
  return counted.bytes();
}

void AttentionMixer::Execute(const LayerStep& step, const MixerMemory& memory,
                             const LayerTarget& target) const noexcept {
  Executor& executor = *step.executor;
  PagePool& pool = memory.pages[static_cast<size_t>(pool_)];
  const int64_t t = step.rows.extent(0);
  Workspace scratch = step.scratch;
  const Scratch s = LayOut(scratch, t);
  const int64_t q_cols = q_heads_ * head_dim_, kv_cols = kv_heads_ * head_dim_;
  const int64_t k_at = q_cols + gate_cols();
  const int64_t cols = k_at + 2 * kv_cols;
  float* columns = s.qkv;
  for (const Matrix& matrix : qkv_) {
    matrix.Execute(step.rows,
                   MatrixView<float>(columns, {t, matrix.n()}, {cols, 1}), {},
                   scratch, executor);
    columns += matrix.n();
  }
  const auto heads = [&](int64_t column, int64_t count) {
    return TensorView<float, 3>(s.qkv + column, {t, count, head_dim_},
                                {cols, head_dim_, 1});
  };
  const auto q = heads(0, q_heads_), k = heads(k_at, kv_heads_),
             v = heads(k_at + kv_cols, kv_heads_);
  const auto normalise = [&] {
    // What is normalised together, [tokens, pieces, elements].
    const auto pieces = [&](int64_t column, int64_t width) {
      const int64_t dim = whole_norms_ ? width : head_dim_;
      return TensorView<float, 3>(s.qkv + column, {t, width / dim, dim},
                                  {cols, dim, 1});
    };
    const auto q_pieces = pieces(0, q_cols), k_pieces = pieces(k_at, kv_cols);
    operators_->HeadNorms(
        q_pieces,
        DenseVector<const float>(q_norm_.data<float>(), q_pieces.extent(2)),
        k_pieces,
        DenseVector<const float>(k_norm_.data<float>(), k_pieces.extent(2)),
        scratch, executor);
  };
  const bool norms = operators_->has_head_norms();
  if (norms && !late_norms_) normalise();
  if (rotates_) {
    operators_->Rotate(local_, step.positions, q, k, scratch, executor);
  }
  if (norms && late_norms_) normalise();
  pool.Write(pool_layer_, k, v, executor);
  const bool gated = operators_->has_gate();
  const AnyTensorView attended = DenseAny(out_.rows(), s.attended, t, q_cols);
  const AnyTensorView to =
      gated ? DenseMatrix<float>(s.ungated, t, q_cols) : attended;
  const AnyTensorView sinks =
      sinks_.bytes() == 0
          ? AnyTensorView()
          : DenseVector<const float>(sinks_.data<float>(), q_heads_);
  pool.Attend(pool_layer_, q, s.queries, sinks,
              AnyTensorView(to.dtype(), to.mutable_data(), 3,
                            {t, q_heads_, head_dim_}, {q_cols, head_dim_, 1}),
              executor);
  if (gated) {
    operators_->Gate(
        to, MatrixView<const float>(s.qkv + q_cols, {t, q_cols}, {cols, 1}),
        attended, scratch, executor);
  }
  out_.Execute(attended, target.y, target.residual, scratch, executor);
}

}  // namespace quern
