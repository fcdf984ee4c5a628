#ifndef QUERN_OPS_SAMPLING_TOKEN_LOGPROBS_H_
#define QUERN_OPS_SAMPLING_TOKEN_LOGPROBS_H_

// Log-probabilities of some tokens of each row of logits l[rows, vocab]:
//
//   logprob(i) = l[i] - max l - log(sum over j of exp(l[j] - max l))
//   rank(i)    = 1 + the number of tokens before i, where a larger logit comes
//                first, and of equal logits the lower id
//
// of the top_n first tokens in this order, and of `given` tokens that the
// caller names, such as those that were sampled.
//
// NaN counts as -infinity. The log-probability of -infinity is -infinity, and
// the rank is one more than the number of tokens above -infinity. Several
// logits of +infinity share equally. A row with fewer than top_n logits above
// -infinity has kNoToken and -infinity in the other places. A given id of
// kNoToken has -infinity and rank 0.
//
// A log-probability below the range of f32 is -infinity, too.
//
// Sums are double, of weights in f32 (sampler_kernels.h), so a log-probability
// is within (|logprob| + log(vocab) + 7) units of 2^-24. It does not depend on
// the batch, the number of workers or the instruction set.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/sampling/sampler_kernels.h"

namespace quern {

struct TokenLogprobsSpec {
  int64_t vocab = 0;  // 1 <= vocab < 2^31
  int64_t top_n = 1;  // 1 <= top_n <= vocab
  int64_t given = 1;  // tokens of each row; >= 1
};

struct TokenLogprobsArgs {
  MatrixView<const float> logits;  // rows may have any stride, here and below
  MatrixView<const int32_t> ids;   // [rows, given], below vocab or kNoToken
  MatrixView<int32_t> top_ids;     // [rows, top_n]
  MatrixView<float> top_logprobs;  // [rows, top_n]
  MatrixView<float> logprobs;      // [rows, given]
  MatrixView<int32_t> ranks;       // [rows, given]
};

class TokenLogprobsPlan {
 public:
  static constexpr int32_t kNoToken = -1;

  // InvalidArgument if a value is out of range.
  static absl::StatusOr<TokenLogprobsPlan> Create(
      const TokenLogprobsSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3".
  const char* target() const { return kernels_.target; }
  const TokenLogprobsSpec& spec() const { return spec_; }

  // Bytes of workspace that Execute needs for up to max_rows rows on up to
  // max_workers workers: some 4.1 * vocab for each worker. InvalidArgument if
  // max_rows < 0 or max_workers < 1, ResourceExhausted if the size overflows.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const;

  // Whether Execute may be called with these arguments. What is written lies
  // apart from all else. O(ids).
  absl::Status CheckArgs(const TokenLogprobsArgs& args) const;

  // Does nothing without rows. Allocates nothing; safe to call concurrently
  // with different workspaces. Reads a row twice, the second time by blocks of
  // 256 logits that each given token above them passes over.
  void Execute(const TokenLogprobsArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  explicit TokenLogprobsPlan(const TokenLogprobsSpec& spec)
      : spec_(spec), kernels_(GetSamplerKernels()) {}

  TokenLogprobsSpec spec_;
  SamplerKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_TOKEN_LOGPROBS_H_
