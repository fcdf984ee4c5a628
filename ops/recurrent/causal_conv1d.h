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
// Drafts (sequence_batch.h) have slots as the other operators have them, or
// share one. With num_accepted_tokens and one slot for each sequence, the state
// after token i is rows i to i + width - 2 of the slot, and the sequence begins
// from row max(accepted, 1) - 1. A slot of width - 1 + n rows keeps n + 1
// states. Both have the bits of decode steps.
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

// Where a slot of the state keeps the inputs of a channel: in the rows of
// state[slots, width - 1 or more, channels], or side by side in
// state[slots, channels, width - 1 or more].
enum class ConvStateLayout : uint8_t { kRows, kChannels };

// Where weight j of channel c is: weight[c, j]; or, as SGLang packs weights of
// width 4 of a multiple of 32 channels, among the same bytes as
// [c / 32][j / 2][c % 32][j % 2].
enum class ConvWeightLayout : uint8_t { kPlain, kPairs };
inline constexpr int64_t kConvPairChannels = 32;
// The number of elements before weight j of channel c, as kPairs has them.
constexpr int64_t ConvPairOffset(int64_t c, int64_t j) {
  constexpr int64_t kBlock = kConvPairChannels;
  return c / kBlock * (4 * kBlock) + j / 2 * (2 * kBlock) + c % kBlock * 2 +
         j % 2;
}

struct CausalConv1dSpec {
  int64_t channels = 0;  // >= 1
  int64_t width = 4;     // 2, 3 or 4
  ConvActivation activation = ConvActivation::kSilu;
  DType dtype = DType::kF32;         // of x, state and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // of weight and bias: f32, bf16 or f16
  int64_t null_slot = -1;            // state index of a sequence to skip
  ConvStateLayout state_layout = ConvStateLayout::kRows;
  ConvWeightLayout weight_layout = ConvWeightLayout::kPlain;
};

// vLLM and SGLang see x as [channels, tokens] with channels contiguous: this
// memory. Their state [slots, channels, width - 1] is kRows where channels are
// contiguous and kChannels where it is dense. kChannels costs a transposition
// of the state in each call, in registers.
struct CausalConv1dArgs {
  AnyTensorView x;       // [tokens, channels]
  AnyTensorView weight;  // [channels, width], dense for kPairs
  AnyTensorView bias;    // [channels], or no view
  AnyTensorView state;   // as the layout says
  SequenceBatch batch;
  AnyTensorView out;  // [tokens, channels]
};

class CausalConv1dPlan {
 public:
  // InvalidArgument if channels or width is out of range, or not what kPairs
  // can have; Unimplemented for other dtypes.
  static absl::StatusOr<CausalConv1dPlan> Create(const CausalConv1dSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const CausalConv1dSpec& spec() const { return spec_; }

  // InvalidArgument names the argument: a shape, dtype or stride that is not
  // the spec's; a state index that is out of range or given twice; starts that
  // decrease or leave the tokens; drafts that CheckSequences refuses, or more
  // of them than a slot has states; a state that touches another tensor; out on
  // anything but the elements of x.
  absl::Status CheckArgs(const CausalConv1dArgs& args) const;

  // Writes width - 1 rows of the slots that are named, with drafts in one slot
  // a row more for each further token, and out for the tokens
  // of all sequences: zeros for a sequence whose index is null_slot. Further
  // rows of a state, tokens of no sequence and the state of a sequence
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
