#ifndef QUERN_OPS_SAMPLING_SAMPLER_H_
#define QUERN_OPS_SAMPLING_SAMPLER_H_

// Chooses the next token of each sequence from its logits l[vocab].
//
//   temperature 0:  the largest logit; of equal ones, the lowest id.
//   otherwise:      1. weight[i] = exp((l[i] - max l) / temperature)
//                   2. top_n_sigma > 0: only logits of at least
//                      max l - top_n_sigma * sigma remain, sigma being the
//                      standard deviation of the row's logits above -infinity
//                   3. min_p > 0: only weights of at least min_p remain, which
//                      is min_p of the largest weight
//                   4. top_k > 0: only the k largest remain
//                   5. top_p < 1: of those, the fewest largest whose weights
//                      sum to at least top_p of what remains after step 4
//                   6. typical_p < 1: of those, with p[i] = weight[i] / sum of
//                      weights and the entropy H = -sum of p[i] log p[i], the
//                      fewest with the least |-log p[i] - H| whose weights sum
//                      to at least typical_p of what remains after step 5
//                   7. draw i with probability weight[i] / sum of weights
//
// vLLM has steps 1, 3, 4, 5 and 7 in this order. "Larger" is a strict order: by
// logit, and of equal logits the lower id first, so exactly k remain and at
// least one does. Step 6 prefers the lower id among equals, too; steps 2 and 3
// keep equals together. Logits that are NaN or -infinity never win. +infinity
// wins over every number; several share equally. A row with nothing to choose
// from gives kNoToken. A weight whose exponent is below -87 is 0.
//
// The draw compares u * sum of weights with the running sum in order of ids,
// u being a number in [0, 1) from Philox4x32-10 with key `seed` and counter
// `step`: it depends on (seed, step) and the row alone, not on the batch, the
// number of workers or the instruction set. A filter that keeps every token
// changes nothing.
//
// Weights are f32, within 4 units of 2^-24 of the equation with l[i] - max l
// rounded to f32, relative. Sums are double.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/sampling/sampler_kernels.h"

namespace quern {

// How one sequence is sampled.
struct SamplingParams {
  float temperature = 0.0f;  // finite, >= 0; 0: greedy
  int64_t top_k = 0;         // >= 0; 0 or vocab and more: all
  float top_p = 1.0f;        // in (0, 1]; 1: all
  uint64_t seed = 0;         // names the sequence's stream of draws
  uint64_t step = 0;         // the draw's number, e.g. the token's position
  float min_p = 0.0f;        // in [0, 1]; 0: all
  float top_n_sigma = 0.0f;  // finite, >= 0; 0: all
  float typical_p = 1.0f;    // in (0, 1]; 1: all
};

struct SamplerSpec {
  int64_t vocab = 0;  // 1 <= vocab < 2^31
};

class SamplerPlan {
 public:
  // The token of a row without any eligible logit.
  static constexpr int32_t kNoToken = -1;

  // InvalidArgument if vocab is out of range.
  static absl::StatusOr<SamplerPlan> Create(const SamplerSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3".
  const char* target() const { return kernels_.target; }

  // Whether each field is in its range. InvalidArgument names the field.
  static absl::Status CheckParams(const SamplingParams& params);

  // Bytes of workspace that Execute needs for up to max_rows rows on up to
  // max_workers workers: some 8.1 * vocab for each worker, whatever the number
  // of rows. InvalidArgument if max_rows < 0 or max_workers < 1,
  // ResourceExhausted if the size overflows.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const;

  // Whether Execute may be called with these arguments: one row of logits, one
  // element of params and one token for each sequence, and params that
  // CheckParams accepts.
  absl::Status CheckArgs(MatrixView<const float> logits,
                         absl::Span<const SamplingParams> params,
                         absl::Span<const int32_t> tokens) const;

  // logits[rows, vocab], params[rows] -> tokens[rows]. Rows may have any
  // stride. rows = 0 does nothing. Allocates nothing; safe to call
  // concurrently with different workspaces. O(vocab). A row is read once for
  // greedy sampling, twice for a plain draw, min_p and top_p, and once more for
  // top_n_sigma. top_k reads it once and k blocks of 256 logits again, if k is
  // at most vocab / 256. Larger top_k, top_p that needs more than one token in
  // 1024, and typical_p also count all tokens in buckets, some ten times the
  // time of a read, and select among those of one bucket.
  void Execute(MatrixView<const float> logits,
               absl::Span<const SamplingParams> params,
               absl::Span<int32_t> tokens, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  explicit SamplerPlan(const SamplerSpec& spec)
      : spec_(spec), kernels_(GetSamplerKernels()) {}

  SamplerSpec spec_;
  SamplerKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_SAMPLER_H_
