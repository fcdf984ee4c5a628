#ifndef QUERN_EXAMPLES_GENERATE_TOKEN_SAMPLER_H_
#define QUERN_EXAMPLES_GENERATE_TOKEN_SAMPLER_H_

// The next tokens of several texts, by the operator `sample`.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/generate/options.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/rows/sampling_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {

class TokenSampler {
 public:
  // Samples among `vocab` logits as the options say, with the executor's number
  // of workers.
  static absl::StatusOr<TokenSampler> Create(const GenerateOptions& options,
                                             int64_t vocab,
                                             const OpDispatcher& ops,
                                             const Executor& executor);

  // Samples a token from each row of logits. Row i is of text texts[i], which
  // has a stream of draws of its own and lengths[i] tokens. The result is valid
  // until the next call. DataLoss if a row has no usable number.
  absl::StatusOr<absl::Span<const int32_t>> Next(
      MatrixView<const float> logits, absl::Span<const int64_t> texts,
      absl::Span<const int64_t> lengths, Executor& executor);

 private:
  explicit TokenSampler(const GenerateOptions& options);

  SamplingParams common_;
  std::vector<SamplingParams> params_;
  std::vector<int32_t> tokens_;
  std::unique_ptr<SamplingStep> step_;  // where sample_ finds it
  std::unique_ptr<const BoundOp> sample_;
  AlignedBuffer scratch_;
};

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_TOKEN_SAMPLER_H_
