#ifndef QUERN_OPS_SAMPLING_ADJUST_LOGITS_H_
#define QUERN_OPS_SAMPLING_ADJUST_LOGITS_H_

// Changes logits l[rows, vocab] before tokens are sampled from them, each row
// in its own way. For token i of a row, in this order:
//
//   mask        l = -infinity unless bit i % 32 of word i / 32 of the row's
//               mask is 1
//   forbidden   l = -infinity if i is among the row's forbidden ids
//   bias        l = l + bias of i
//   repetition  l = l > 0 ? l / repetition : l * repetition
//               if i is in the prompt or in the output
//   frequency   l = l - frequency * (times that i is in the output)
//   presence    l = l - presence, if i is in the output
//
// Each step rounds to f32. vLLM has this order and these penalties. NaN stays
// NaN where no step says -infinity. A bias never revives a token: -infinity
// stays -infinity. A row whose tokens are all forbidden has logits of -infinity
// alone, from which the sampler takes SamplerPlan::kNoToken.
//
// Lists are the rows' lists one after the other: `ids` of row r are the
// elements starts[r] to starts[r + 1], exclusive. A tensor that is not needed
// is left out.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/sampling/adjust_logits_kernels.h"

namespace quern {

struct AdjustLogitsSpec {
  int64_t vocab = 0;  // 1 <= vocab < 2^31
};

// Token ids of each row.
struct TokenLists {
  IndexView ids;
  IndexView starts;  // rows + 1 numbers, of which the first is 0; empty: none
};

struct AdjustLogitsArgs {
  MatrixView<float> logits;  // changed in place; rows may have any stride

  MatrixView<const int32_t> masks;  // of ceil(vocab / 32) words or more each
  IndexView mask_rows;  // the mask of each row, or -1 for none; empty: mask r
                        // is of row r

  TokenLists forbidden;          // in any order, as often as you like
  TokenLists biased;             // no id twice in a row
  absl::Span<const float> bias;  // of each of biased.ids; finite

  TokenLists prompt;        // ids of each row strictly increase
  TokenLists output;        // likewise
  IndexView output_counts;  // of each of output.ids; 0: it is not there

  // One number for each row; empty: 1, 0 and 0.
  absl::Span<const float> repetition;  // finite, > 0
  absl::Span<const float> frequency;   // |frequency| <= kMaxPenalty
  absl::Span<const float> presence;    // |presence| <= kMaxPenalty
};

class AdjustLogitsPlan {
 public:
  // A row of mask_rows without a mask.
  static constexpr int64_t kNoMask = -1;

  // The largest |frequency| and |presence|. A count is below 2^31, so that
  // count * frequency is below 2^95: no penalty is infinite, and none makes NaN
  // of a logit of -infinity.
  static constexpr float kMaxPenalty = 0x1p64f;

  // InvalidArgument if vocab is out of range.
  static absl::StatusOr<AdjustLogitsPlan> Create(const AdjustLogitsSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3".
  const char* target() const { return kernels_.target; }
  const AdjustLogitsSpec& spec() const { return spec_; }

  // Whether Execute may be called with these arguments: extents that agree,
  // ids below vocab and in order, numbers in their ranges, logits that overlap
  // no other tensor. O(rows + ids).
  absl::Status CheckArgs(const AdjustLogitsArgs& args) const;

  // Does nothing without rows. Allocates nothing; safe to call concurrently on
  // different logits. Workers share the rows. A mask costs one pass over its
  // row, less the words whose tokens are all allowed; the rest costs O(ids).
  void Execute(const AdjustLogitsArgs& args, Executor& executor) const noexcept;

 private:
  AdjustLogitsPlan(const AdjustLogitsSpec& spec,
                   const AdjustLogitsKernels& kernels)
      : spec_(spec), kernels_(kernels) {}

  AdjustLogitsSpec spec_;
  AdjustLogitsKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_ADJUST_LOGITS_H_
