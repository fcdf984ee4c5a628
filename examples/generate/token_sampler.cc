#include "examples/generate/token_sampler.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/generate/options.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/families/rows/sampling_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {

TokenSampler::TokenSampler(const GenerateOptions& options)
    : step_(std::make_unique<SamplingStep>()) {
  common_.temperature = options.temperature;
  common_.top_k = options.top_k;
  common_.top_p = options.top_p;
  common_.min_p = options.min_p;
  common_.top_n_sigma = options.top_n_sigma;
  common_.typical_p = options.typical_p;
  common_.seed = options.seed;
}

absl::StatusOr<TokenSampler> TokenSampler::Create(
    const GenerateOptions& options, int64_t vocab, const OpDispatcher& ops,
    const Executor& executor) {
  TokenSampler sampler(options);
  QUERN_ASSIGN_OR_RETURN(
      MadeOp sample,
      ops.Make("sample", {{"logits", TensorMeta{DType::kF32, {1, vocab}}},
                          {"step", sampler.step_.get()}}));
  sampler.sample_ = std::move(sample.op);
  QUERN_ASSIGN_OR_RETURN(
      const int64_t bytes,
      sampler.sample_->WorkspaceBytes(options.samples, executor.num_workers()));
  QUERN_ASSIGN_OR_RETURN(sampler.scratch_, AlignedBuffer::Create(bytes));
  return sampler;
}

absl::StatusOr<absl::Span<const int32_t>> TokenSampler::Next(
    MatrixView<const float> logits, absl::Span<const int64_t> texts,
    absl::Span<const int64_t> lengths, Executor& executor) {
  params_.assign(texts.size(), common_);
  for (size_t i = 0; i < texts.size(); ++i) {
    params_[i].seed += static_cast<uint64_t>(texts[i]);
    params_[i].step = static_cast<uint64_t>(lengths[i]);
  }
  step_->params = params_;
  tokens_.assign(texts.size(), SamplerPlan::kNoToken);
  sample_->Execute({logits, DenseVector(tokens_.data(), logits.extent(0))},
                   Workspace(scratch_), executor);
  for (const int32_t token : tokens_) {
    if (token == SamplerPlan::kNoToken) {
      return absl::DataLossError(
          "the model gave no usable probabilities: its weights are damaged");
    }
  }
  return tokens_;
}

}  // namespace quern
