#include "quern/ops/recurrent/causal_conv1d.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/parallel_rows.h"
#include "quern/ops/load_row.h"
#include "quern/ops/recurrent/state_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "causal_conv1d";
constexpr int64_t kMostChannels = static_cast<int64_t>(kConvChannels);
// Four cache lines of f32, a multiple of every vector.
constexpr int64_t kLeastChannels = 64;

// Weights of channels [first, first + count).
void LoadWeights(const CausalConv1dSpec& spec,
                 const CausalConv1dKernels& kernels,
                 const RowBlockKernels& blocks, const CausalConv1dArgs& args,
                 int64_t first, int64_t count, ConvWeights& weights) {
  alignas(64) float w[kMaxConvWidth * kConvChannels];
  const size_t element = SizeOf(spec.weight_dtype);
  if (spec.weight_layout == ConvWeightLayout::kPairs) {
    alignas(64) float pairs[kMaxConvWidth * kConvChannels];
    const char* const weight = ElementAt(args.weight, 0);
    LoadRow(blocks,
            weight + static_cast<size_t>(ConvPairOffset(first, 0)) * element,
            count * spec.width, element, pairs);
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t j = 0; j < spec.width; ++j) {
        w[c * spec.width + j] = pairs[ConvPairOffset(c, j)];
      }
    }
    // Weights may be columns of something wider.
  } else if (args.weight.stride(0) == spec.width || spec.channels == 1) {
    LoadRow(blocks, ElementAt(args.weight, first), count * spec.width, element,
            w);
  } else {
    alignas(64) float row[kRowBlock];
    for (int64_t c = 0; c < count; ++c) {
      blocks.load(ElementAt(args.weight, first + c),
                  static_cast<size_t>(spec.width), row);
      std::copy(row, row + spec.width, w + c * spec.width);
    }
  }
  // The last vector is whole.
  const int64_t end = RoundUp(count, 16) * spec.width;
  std::fill(w + count * spec.width, w + end, 0.0f);
  kernels.transpose(w, static_cast<size_t>(count), weights);
  if (args.bias.rank() == 0) {
    std::fill(std::begin(weights.bias), std::end(weights.bias), 0.0f);
  } else {
    LoadRow(blocks, ElementAt(args.bias, first), count, element, weights.bias);
  }
}

// Whether a slot holds the states of several tokens, which overlap.
bool Windows(const SequenceBatch& batch) {
  return batch.num_accepted_tokens.size() > 0 && !batch.drafts();
}

// Inputs of a channel that a slot has room for.
int64_t StateRows(const CausalConv1dSpec& spec, const CausalConv1dArgs& args) {
  return args.state.extent(spec.state_layout == ConvStateLayout::kRows ? 1 : 2);
}

// The states of a sequence, on a block of channels. Those of kChannels, and
// those that no slot keeps, lie in rows of `rows_` while a token needs them.
class States {
 public:
  States(const CausalConv1dSpec& spec, const CausalConv1dKernels& kernels,
         const CausalConv1dArgs& args, int64_t first, int64_t count)
      : spec_(spec),
        kernels_(kernels),
        args_(args),
        first_(first),
        count_(static_cast<size_t>(count)) {}

  // Puts the state of window `i` of a slot to where the kernel reads it.
  void Read(int64_t slot, int64_t i, ConvTokens& tokens) {
    if (spec_.state_layout == ConvStateLayout::kRows) {
      tokens.from = ElementAt(args_.state, slot, i, first_);
      tokens.from_stride = static_cast<size_t>(RowStride(args_.state));
      return;
    }
    tokens.from = rows_, tokens.from_stride = kConvChannels;
    if (tokens.fresh) return;
    kernels_.load_dense(ElementAt(args_.state, slot, first_, i), Stride(),
                        count_, rows_, kConvChannels);
  }
  // Where the kernel leaves the state that Keep is told of.
  void Write(int64_t slot, int64_t i, ConvTokens& tokens) {
    const bool rows =
        spec_.state_layout == ConvStateLayout::kRows && slot != spec_.null_slot;
    tokens.state = rows ? ElementAt(args_.state, slot, i, first_)
                        : static_cast<void*>(rows_);
    tokens.state_stride =
        rows ? static_cast<size_t>(RowStride(args_.state)) : kConvChannels;
  }
  void Keep(int64_t slot, int64_t i) {
    if (spec_.state_layout == ConvStateLayout::kRows ||
        slot == spec_.null_slot) {
      return;
    }
    kernels_.store_dense(rows_, kConvChannels, count_,
                         ElementAt(args_.state, slot, first_, i), Stride());
  }

 private:
  size_t Stride() const { return static_cast<size_t>(RowStride(args_.state)); }

  const CausalConv1dSpec& spec_;
  const CausalConv1dKernels& kernels_;
  const CausalConv1dArgs& args_;
  const int64_t first_;
  const size_t count_;
  alignas(64) float rows_[(kMaxConvWidth - 1) * kConvChannels];
};

// One token after the other, each of which leaves its state in another place.
void RunDrafts(const CausalConv1dSpec& spec, const CausalConv1dKernels& kernels,
               const CausalConv1dArgs& args, const ConvWeights& weights,
               int64_t sequence, States& states, ConvTokens tokens) {
  const SequenceBatch& batch = args.batch;
  const auto element = static_cast<int64_t>(SizeOf(spec.dtype));
  const int64_t source = batch.source(sequence);
  const auto count = static_cast<int64_t>(tokens.tokens);
  const bool windows = Windows(batch);
  const int64_t accepted = batch.accepted(sequence);
  tokens.tokens = 1;
  states.Read(source, windows && accepted > 1 ? accepted - 1 : 0, tokens);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t window = windows ? i : 0;
    const int64_t slot =
        windows ? source : batch.destination(sequence, i, spec.null_slot);
    states.Write(slot, window, tokens);
    kernels.run(weights, tokens);
    states.Keep(slot, window);
    tokens.fresh = false;
    tokens.from = tokens.state, tokens.from_stride = tokens.state_stride;
    tokens.x = static_cast<const char*>(tokens.x) +
               static_cast<int64_t>(tokens.x_stride) * element;
    tokens.out = static_cast<char*>(tokens.out) +
                 static_cast<int64_t>(tokens.out_stride) * element;
  }
}

void RunSequence(const CausalConv1dSpec& spec,
                 const CausalConv1dKernels& kernels,
                 const CausalConv1dArgs& args, const ConvWeights& weights,
                 int64_t sequence, int64_t first, int64_t count) {
  const int64_t begin = args.batch.begin(sequence);
  const int64_t end = args.batch.end(sequence);
  if (begin == end) return;
  const int64_t slot = args.batch.source(sequence);
  const auto element = static_cast<int64_t>(SizeOf(spec.dtype));
  if (slot == spec.null_slot) {
    ZeroRows(ElementAt(args.out, begin, first), end - begin, count * element,
             RowStride(args.out) * element);
    return;
  }
  ConvTokens tokens = {};
  tokens.x = ElementAt(args.x, begin, first);
  tokens.x_stride = static_cast<size_t>(RowStride(args.x));
  tokens.out = ElementAt(args.out, begin, first);
  tokens.out_stride = static_cast<size_t>(RowStride(args.out));
  tokens.tokens = static_cast<size_t>(end - begin);
  tokens.channels = static_cast<size_t>(count);
  tokens.fresh = args.batch.fresh(sequence);
  States states(spec, kernels, args, first, count);
  if (args.batch.drafts() || Windows(args.batch)) {
    return RunDrafts(spec, kernels, args, weights, sequence, states, tokens);
  }
  states.Read(slot, 0, tokens);
  states.Write(slot, 0, tokens);
  // A decode step reads few bytes in many places.
  const int64_t next = sequence + 1;
  if (end - begin == 1 && next < args.batch.sequences() &&
      args.batch.end(next) - args.batch.begin(next) == 1 &&
      spec.state_layout == ConvStateLayout::kRows &&
      args.batch.state_indices[next] != spec.null_slot) {
    tokens.next_state =
        ElementAt(args.state, args.batch.state_indices[next], 0, first);
    tokens.next_x = ElementAt(args.x, args.batch.begin(next), first);
    tokens.next_out = ElementAt(args.out, args.batch.begin(next), first);
  }
  kernels.run(weights, tokens);
  states.Keep(slot, 0);
}

}  // namespace

CausalConv1dPlan::CausalConv1dPlan(const CausalConv1dSpec& spec)
    : spec_(spec),
      kernels_(GetCausalConv1dKernels(spec.dtype, spec.width, spec.activation)),
      weight_blocks_(GetRowBlockKernels(spec.weight_dtype, spec.dtype)) {}

absl::StatusOr<CausalConv1dPlan> CausalConv1dPlan::Create(
    const CausalConv1dSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "channels", spec.channels, 1, int64_t{1} << 40));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "width", spec.width, 2,
                                   static_cast<int64_t>(kMaxConvWidth)));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "weight_dtype", spec.weight_dtype, kFloatDTypes));
  if (spec.weight_layout == ConvWeightLayout::kPairs &&
      (spec.width != 4 || spec.channels % kConvPairChannels != 0)) {
    return InvalidArgument(kOp, "packed weights of width=", spec.width,
                           " and channels=", spec.channels,
                           "; need 4 and a multiple of ", kConvPairChannels);
  }
  return CausalConv1dPlan(spec);
}

absl::Status CausalConv1dPlan::CheckArgs(const CausalConv1dArgs& args) const {
  const CausalConv1dSpec& s = spec_;
  const int64_t tokens = args.x.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", args.x, s.dtype, {kAnyExtent, s.channels}));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "weight", args.weight, s.weight_dtype,
                                   {s.channels, s.width}));
  if (s.weight_layout == ConvWeightLayout::kPairs && s.channels > 1 &&
      args.weight.stride(0) != s.width) {
    return InvalidArgument(kOp, "packed weight has stride ",
                           args.weight.stride(0), "; need ", s.width);
  }
  const bool biased = args.bias.rank() != 0;
  if (biased) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "bias", args.bias, s.weight_dtype, {s.channels}));
  }
  const bool rows = s.state_layout == ConvStateLayout::kRows;
  QUERN_RETURN_IF_ERROR(
      rows ? CheckOutput(kOp, "state", args.state, s.dtype,
                         {kAnyExtent, kAnyExtent, s.channels})
           : CheckOutput(kOp, "state", args.state, s.dtype,
                         {kAnyExtent, s.channels, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "rows of state", StateRows(s, args), s.width - 1));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", args.out, s.dtype, {tokens, s.channels}));
  const std::pair<absl::string_view, const AnyTensorView*> weights[] = {
      {"weight", &args.weight}, {"bias", &args.bias}};
  for (const auto& [name, view] : weights) {
    if (view->rank() == 0) continue;
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "state", args.state));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "out", args.out));
  }
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "x", args.x, "state", args.state));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "state", args.state, "out", args.out));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "x", args.x, "out", args.out));
  QUERN_RETURN_IF_ERROR(CheckBatchApart(kOp, args.batch, "state", args.state));
  QUERN_RETURN_IF_ERROR(CheckBatchApart(kOp, args.batch, "out", args.out));
  if (!Windows(args.batch)) {
    return CheckSequences(kOp, args.batch, tokens, args.state.extent(0),
                          s.null_slot);
  }
  const int64_t places = StateRows(s, args) - s.width + 2;
  QUERN_RETURN_IF_ERROR(CheckSequences(
      kOp, args.batch, tokens, args.state.extent(0), s.null_slot, places));
  for (int64_t i = 0; i < args.batch.sequences(); ++i) {
    const int64_t drafts = args.batch.end(i) - args.batch.begin(i);
    if (drafts > places) {
      return InvalidArgument(kOp, "sequence ", i, " has ", drafts,
                             " tokens; a state of ", StateRows(s, args),
                             " rows keeps those of ", places);
    }
  }
  return absl::OkStatus();
}

void CausalConv1dPlan::Execute(const CausalConv1dArgs& args,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const int64_t sequences = args.batch.sequences();
  if (sequences == 0) return;
  const int64_t tokens = args.batch.end(sequences - 1) - args.batch.begin(0);
  // Blocks as large as leave four tasks for each worker. Units are sequences
  // within blocks of channels, because consecutive ones share weights.
  const int64_t wanted =
      DivCeil(spec_.channels * sequences, 4 * executor.num_workers());
  const int64_t channels = std::clamp(RoundUp(wanted, kLeastChannels),
                                      kLeastChannels, kMostChannels);
  const int64_t units = DivCeil(spec_.channels, channels) * sequences;
  const int64_t cost = DivCeil(std::max<int64_t>(tokens, 1), sequences) * 2 *
                       std::min(channels, spec_.channels);
  ParallelRowRanges(executor, units, cost, tokens <= sequences ? 4 : 16,
                    [&](int64_t begin, int64_t end) {
                      ConvWeights weights;
                      int64_t loaded = -1;
                      for (int64_t i = begin; i < end; ++i) {
                        const int64_t first = i / sequences * channels;
                        const int64_t count =
                            std::min(channels, spec_.channels - first);
                        if (first != loaded) {
                          LoadWeights(spec_, kernels_, weight_blocks_, args,
                                      first, count, weights);
                          loaded = first;
                        }
                        RunSequence(spec_, kernels_, args, weights,
                                    i % sequences, first, count);
                      }
                    });
}

}  // namespace quern
