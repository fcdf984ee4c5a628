#ifndef QUERN_OPS_MIXER_MIXER_FRAME_H_
#define QUERN_OPS_MIXER_MIXER_FRAME_H_

// What the layers of this folder have in common:
//
//   p = in_proj(x)                             [tokens, projected]
//   p[:, conv columns] = causal_conv1d(p[:, conv columns])
//   ...                                        what the layer is about
//   out = out_proj(p[:, some columns])
//
// p lies in the workspace and has the dtype of x, so each step rounds to it.
// Products compute the tokens of sequences and no others.

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/sequence_batch.h"

namespace quern {

// What every layer here is called with. A sequence without tokens changes
// nothing. Tokens of no sequence are neither read nor written. What the
// recurrence makes of a sequence in null_slot are zeros, of which the rest of
// the layer makes outputs.
struct MixerArgs {
  AnyTensorView x;            // [tokens, hidden]
  AnyTensorView conv_weight;  // [conv channels, width]
  AnyTensorView conv_bias;    // [conv channels], or no view
  AnyTensorView conv_state;   // [slots, width - 1 or more, conv channels]
  SequenceBatch batch;
  AnyTensorView out;  // [tokens, hidden]
};

struct MixerFrameSpec {
  const char* op = "";    // a literal, in whose name the layer refuses
  int64_t hidden = 0;     // columns of x and out
  int64_t projected = 0;  // columns of p
  int64_t inner = 0;      // columns that out_proj reads
  // Columns of p that are convolved.
  int64_t conv_column = 0;
  int64_t conv_channels = 0;
  int64_t conv_width = 0;
  ConvActivation activation = ConvActivation::kSilu;
  DType dtype = DType::kF32;         // of x, p, the window and out
  DType weight_dtype = DType::kF32;  // of conv_weight and conv_bias
  int64_t null_slot = -1;
  std::string kernels = {};  // LinearSpec::kernels of all products
  // LinearSpec::activations of products on weights that allow it.
  LinearActivations activations = LinearActivations::kExact;
};

// What the spec of every layer says of its frame; `op` is a literal.
template <class LayerSpec>
MixerFrameSpec MixerFrameSpecOf(const char* op, const LayerSpec& spec) {
  MixerFrameSpec frame;
  frame.op = op;
  frame.hidden = spec.hidden;
  frame.conv_width = spec.width;
  frame.dtype = spec.dtype;
  frame.weight_dtype = spec.weight_dtype;
  frame.null_slot = spec.null_slot;
  frame.kernels = spec.kernels;
  frame.activations = spec.activations;
  return frame;
}

using NamedView = std::pair<absl::string_view, AnyTensorView>;

class MixerFrame {
 public:
  // InvalidArgument, in the layer's name: width out of range, weights of
  // another shape than the spec's; what CausalConv1dPlan and LinearPlan refuse.
  // Unimplemented: other dtypes.
  static absl::StatusOr<MixerFrame> Create(const MixerFrameSpec& spec,
                                           const LinearWeights& in_proj,
                                           const LinearWeights& out_proj,
                                           Executor& executor);

  // A product of the layer's own, of dtype to dtype. InvalidArgument, in the
  // name of `field`, unless the weights are [n, k].
  static absl::StatusOr<LinearPlan> Product(const MixerFrameSpec& spec,
                                            absl::string_view field,
                                            const LinearWeights& weights,
                                            int64_t n, int64_t k,
                                            Executor& executor);

  const MixerFrameSpec& spec() const { return spec_; }
  const char* target() const { return conv_.target(); }

  // InvalidArgument names what is wrong with the common arguments, among it
  // rows of x or out that are farther apart than the implementation of their
  // product takes (gemm/linear.h), and num_accepted_tokens of a batch without
  // drafts, which mean windows in a slot to the convolution alone. `inputs` and
  // `written` are those of the layer's own, whose shapes have been checked;
  // inputs may have rank 0. None that is written may touch any other tensor.
  absl::Status CheckArgs(const MixerArgs& args,
                         absl::Span<const NamedView> inputs,
                         absl::Span<const NamedView> written) const;

  // Lays out p for so many tokens.
  template <typename Allocator>
  void* LayOutProjected(Allocator& a, int64_t tokens) const {
    return a.template Allocate<char>("projected",
                                     Bytes(tokens, spec_.projected));
  }
  // Bytes of tokens * columns elements of the layer's dtype; -1 for 2^63 or
  // more.
  int64_t Bytes(int64_t tokens, int64_t columns) const;

  // Bytes of workspace for both products, for `others` and for a recurrence of
  // `recurrence_bytes`, one after the other, after `layout`.
  // InvalidArgument and ResourceExhausted as LinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(
      WorkspaceLayout layout, absl::Span<const LinearPlan* const> others,
      int64_t recurrence_bytes, int64_t max_tokens, int max_workers) const;

  // p as [tokens, projected] at `data`.
  AnyTensorView Projected(void* data, int64_t tokens) const;

  // The tokens of sequences: [first, first + count).
  struct Tokens {
    explicit Tokens(const SequenceBatch& batch);
    int64_t first = 0, count = 0;
  };

  void Project(const MixerArgs& args, const AnyTensorView& p,
               const Workspace& workspace, Executor& executor) const;
  void Convolve(const MixerArgs& args, const AnyTensorView& p,
                Executor& executor) const;
  // From `inner` [tokens, spec().inner].
  void Finish(const MixerArgs& args, const AnyTensorView& inner,
              const Workspace& workspace, Executor& executor) const;
  // to = product(from) for the tokens of sequences.
  static void Multiply(const LinearPlan& product, const SequenceBatch& batch,
                       const AnyTensorView& from, const AnyTensorView& to,
                       const Workspace& workspace, Executor& executor);

 private:
  MixerFrame(const MixerFrameSpec& spec, LinearPlan in_proj,
             LinearPlan out_proj, const CausalConv1dPlan& conv);

  MixerFrameSpec spec_;
  LinearPlan in_proj_, out_proj_;
  CausalConv1dPlan conv_;
};

// What layers with a state and a norm have in common. InvalidArgument if eps is
// negative or not finite, Unimplemented for another state_dtype.
absl::Status CheckStateSpec(absl::string_view op, DType state_dtype, float eps);

// Columns [begin, begin + heads * dim) of a matrix as [rows, heads, dim].
AnyTensorView AsHeads(const AnyTensorView& matrix, int64_t begin, int64_t heads,
                      int64_t dim);

}  // namespace quern

#endif  // QUERN_OPS_MIXER_MIXER_FRAME_H_
