#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/decoder/decoder_impl.h"
#include "quern/models/decoder/decoder_state_impl.h"
#include "quern/models/decoder/decoder_work.h"
#include "quern/models/decoder/memory/page_pool.h"
#include "quern/models/decoder/parts/layer.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

// The rows of one step, in arrays [max_step_tokens, hidden]. Byte arrays hold
// the model's row type; float arrays hold f32.
struct Activations {
  uint8_t* rows;      // input of a layer's part
  uint8_t* selected;  // the rows whose logits are wanted
  float* x;           // the residual stream
  float* branch;      // a part's contribution, if kept apart from x
};

template <typename Allocator>
Activations LayOut(Allocator& a, const DecoderConfig& c, DType dtype,
                   bool branches, int64_t t) {
  const int64_t bytes = t * c.hidden * static_cast<int64_t>(SizeOf(dtype));
  Activations s;
  s.rows = a.template Allocate<uint8_t>("rows", bytes);
  s.selected = a.template Allocate<uint8_t>("selected", bytes);
  s.x = a.template Allocate<float>("x", t * c.hidden);
  s.branch = a.template Allocate<float>("branch", branches ? t * c.hidden : 0);
  return s;
}

}  // namespace

// The residual stream of a step, and the input of the next part.
class DecoderState::Impl::Stream {
 public:
  Stream(const Decoder::Impl& model, const Activations& s, int64_t tokens,
         Workspace scratch, Executor& executor)
      : model_(model),
        scratch_(scratch),
        executor_(executor),
        x_(DenseMatrix<float>(s.x, tokens, model.config.hidden)),
        branch_(DenseMatrix<float>(s.branch, tokens, model.config.hidden)),
        rows_(DenseAny(model.dtype, s.rows, tokens, model.config.hidden)) {}

  const AnyTensorView& x() const { return x_; }
  const AnyTensorView& rows() const { return rows_; }
  // Where the next part writes its result.
  LayerTarget target() const {
    return model_.branches() ? LayerTarget{branch_, {}} : LayerTarget{x_, x_};
  }

  // rows = rms_norm(x), with the weights `norm`; rows = x if they are empty.
  void Begin(const AlignedBuffer& norm) const {
    if (norm.bytes() == 0) return model_.operators->Copy(x_, rows_, executor_);
    model_.operators->Norm(x_, Weight(norm), rows_, scratch_, executor_);
  }
  // Adds the result of a part, summed over ranks and with kPostNorms normalised
  // by `post_norm`, to x. Then sets rows = rms_norm(x), with the weights
  // `next_norm`, or rows = x if they are empty.
  void Add(const AlignedBuffer& post_norm,
           const AlignedBuffer& next_norm) const {
    if (!model_.branches()) return Begin(next_norm);
    model_.communicator->AllReduceSum(branch_);
    if (model_.config.Has(ModelPart::kPostNorms)) {
      model_.operators->PostNorm(branch_, Weight(post_norm), scratch_,
                                 executor_);
    }
    // Where rows are not normalised, the sum alone is used of AddNorm, whatever
    // the weights.
    const bool bare = next_norm.bytes() == 0;
    model_.operators->AddNorm(branch_, x_, Weight(bare ? post_norm : next_norm),
                              rows_, scratch_, executor_);
    if (bare) model_.operators->Copy(x_, rows_, executor_);
  }

 private:
  VectorView<const float> Weight(const AlignedBuffer& norm) const {
    return DenseVector<const float>(norm.data<float>(), model_.config.hidden);
  }

  const Decoder::Impl& model_;
  Workspace scratch_;
  Executor& executor_;
  AnyTensorView x_, branch_, rows_;
};

absl::StatusOr<int64_t> DecoderState::Impl::ActivationBytes() const {
  WorkspaceLayout counted;
  LayOut(counted, model->config, model->dtype, model->branches(),
         spec.max_step_tokens);
  if (counted.overflow()) {
    return InvalidArgument(kOp, "max_step_tokens=", spec.max_step_tokens,
                           " needs more than 2^63 bytes");
  }
  return counted.bytes();
}

void DecoderState::Impl::Run(Executor& executor) {
  const DecoderConfig& c = model->config;
  const auto t = static_cast<int64_t>(tokens.size());
  const auto wanted = static_cast<int64_t>(logit_rows.size());
  Workspace memory(activations);
  const Activations s =
      LayOut(memory, c, model->dtype, model->branches(), spec.max_step_tokens);
  const Workspace work(scratch);
  const Stream stream(*model, s, t, work, executor);
  model->operators->Embed(
      DenseVector<const int32_t>(tokens.data(), t),
      AnyTensorView(model->embedding_dtype,
                    static_cast<const void*>(model->embedding.data()), 2,
                    {model->shard.vocab().width, c.hidden}, {c.hidden, 1}),
      stream.x(), work, executor);
  stream.Begin(model->layers.front().attn_norm);
  const LayerStep step = {stream.rows(),
                          DenseVector<const int64_t>(positions.data(), t), work,
                          &executor};
  const MixerMemory memory_of_sequences = {
      absl::MakeSpan(pools), recurrent.has_value() ? &*recurrent : nullptr};
  for (size_t layer = 0; layer < model->layers.size(); ++layer) {
    const DecoderLayer& l = model->layers[layer];
    l.mixer->Execute(step, memory_of_sequences, stream.target());
    stream.Add(l.post_attn_norm, l.ffn_norm);
    l.feed_forward->Execute(step, stream.target());
    const bool last = layer + 1 == model->layers.size();
    stream.Add(l.post_ffn_norm,
               last ? model->output_norm : model->layers[layer + 1].attn_norm);
  }

  const AnyTensorView selected =
      DenseAny(model->dtype, s.selected, wanted, c.hidden);
  model->operators->Gather(
      stream.rows(), DenseVector<const int64_t>(logit_rows.data(), wanted),
      selected, work, executor);
  // Puts each rank's columns in their place among all columns.
  const auto all = DenseMatrix(logits.data<float>(), wanted, c.vocab);
  const ColumnShards columns = model->shard.vocab();
  const int rank = model->shard.rank();
  const MatrixView<float> own(all.data() + columns.Begin(rank),
                              {wanted, columns.Count(rank)}, {c.vocab, 1});
  model->output->Execute(selected, own, {}, work, executor);
  model->communicator->AllGatherColumns(own, all, columns);
  model->operators->Finish(all, work, executor);
  CountWork();
}

void DecoderState::Impl::CountWork() {
  last_work = model->work.Step(static_cast<int64_t>(tokens.size()),
                               static_cast<int64_t>(logit_rows.size()));
  for (const PagePool& pool : pools) {
    last_work += pool.step_work();
  }
  if (recurrent.has_value()) {
    last_work.cache_bytes += recurrent->step_bytes();
    last_work.f32_ops += recurrent->step_ops();
  }
}

DecoderWork DecoderState::last_work() const { return impl_->last_work; }

}  // namespace quern
