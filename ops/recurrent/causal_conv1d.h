#ifndef QUERN_OPS_RECURRENT_CAUSAL_CONV1D_H_
#define QUERN_OPS_RECURRENT_CAUSAL_CONV1D_H_

// The causal depthwise convolution in front of a recurrent layer:
//
//   out[t, c] = round(act(bias[c] + sum over j < width of
//                                   weight[c, j] * x[t - width + 1 + j, c]))
//
//   kNone   act(y) = y          kSilu   act(y) = y / (1 + e^-y)
//
// where x before the first token of a sequence is what its state holds, the
// oldest first: state[slot, i, c] is x[first - width + 1 + i, c]. Afterwards
// the state holds the last width - 1 inputs of the sequence, of which old ones
// are still some where it has fewer tokens. A decode step is a batch of
// sequences of one token.
//
// f32 sums, from the bias on in the order of j, rounded once, to nearest even.
// The state has the dtype of x and holds its values, so a sequence that is cut
// into several calls has the bits of one call; only the payload of a NaN may
// differ. A NaN touches its channel alone, and there the width tokens that see
// it.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/causal_conv1d_kernels.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct CausalConv1dSpec {
  int64_t channels = 0;  // >= 1
  int64_t width = 4;     // 2, 3 or 4
  ConvActivation activation = ConvActivation::kSilu;
  DType dtype = DType::kF32;         // of x, state and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // of weight and bias: f32, bf16 or f16
  int64_t null_slot = -1;            // state index of a sequence to skip
};

// vLLM and SGLang see x and the state as [channels, tokens] and
// [slots, channels, width - 1], with channels contiguous: this memory.
struct CausalConv1dArgs {
  AnyTensorView x;       // [tokens, channels]
  AnyTensorView weight;  // [channels, width]
  AnyTensorView bias;    // [channels], or no view
  AnyTensorView state;   // [slots, width - 1 or more, channels]
  SequenceBatch batch;
  AnyTensorView out;  // [tokens, channels]
};

class CausalConv1dPlan {
 public:
  // InvalidArgument if channels or width is out of range; Unimplemented for
  // other dtypes.
  static absl::StatusOr<CausalConv1dPlan> Create(const CausalConv1dSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const CausalConv1dSpec& spec() const { return spec_; }

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; a state index that is out of range or given twice; starts that
  // decrease or leave the tokens; a state that touches another tensor; out on
  // anything but the elements of x.
  absl::Status CheckArgs(const CausalConv1dArgs& args) const;

  // Writes width - 1 rows of the slots that are named, and out for the tokens
  // of all sequences: zeros for a sequence whose index is null_slot. Rows of a
  // state from width - 1 on, tokens of no sequence and the state of a sequence
  // without tokens are neither read nor written. out may be x itself. Views may
  // have any strides, the last one 1. Allocates nothing; safe to call
  // concurrently on distinct slots. Workers divide sequences and channels; the
  // bits depend on neither.
  void Execute(const CausalConv1dArgs& args, Executor& executor) const noexcept;

 private:
  explicit CausalConv1dPlan(const CausalConv1dSpec& spec);

  CausalConv1dSpec spec_;
  CausalConv1dKernels kernels_;
  RowBlockKernels weight_blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_CAUSAL_CONV1D_H_
