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
  // Weights may be columns of something wider.
  if (args.weight.stride(0) == spec.width || spec.channels == 1) {
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

void RunSequence(const CausalConv1dSpec& spec,
                 const CausalConv1dKernels& kernels,
                 const CausalConv1dArgs& args, const ConvWeights& weights,
                 int64_t sequence, int64_t first, int64_t count) {
  const int64_t begin = args.batch.begin(sequence);
  const int64_t end = args.batch.end(sequence);
  if (begin == end) return;
  const int64_t slot = args.batch.state_indices[sequence];
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
  tokens.state = ElementAt(args.state, slot, 0, first);
  tokens.state_stride = static_cast<size_t>(RowStride(args.state));
  tokens.tokens = static_cast<size_t>(end - begin);
  tokens.channels = static_cast<size_t>(count);
  tokens.fresh = args.batch.fresh(sequence);
  // A decode step reads few bytes in many places.
  const int64_t next = sequence + 1;
  if (end - begin == 1 && next < args.batch.sequences() &&
      args.batch.end(next) - args.batch.begin(next) == 1 &&
      args.batch.state_indices[next] != spec.null_slot) {
    tokens.next_state =
        ElementAt(args.state, args.batch.state_indices[next], 0, first);
    tokens.next_x = ElementAt(args.x, args.batch.begin(next), first);
    tokens.next_out = ElementAt(args.out, args.batch.begin(next), first);
  }
  kernels.run(weights, tokens);
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
  return CausalConv1dPlan(spec);
}

absl::Status CausalConv1dPlan::CheckArgs(const CausalConv1dArgs& args) const {
  const CausalConv1dSpec& s = spec_;
  const int64_t tokens = args.x.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", args.x, s.dtype, {kAnyExtent, s.channels}));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "weight", args.weight, s.weight_dtype,
                                   {s.channels, s.width}));
  const bool biased = args.bias.rank() != 0;
  if (biased) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "bias", args.bias, s.weight_dtype, {s.channels}));
  }
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "state", args.state, s.dtype,
                                    {kAnyExtent, kAnyExtent, s.channels}));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "rows of state", args.state.extent(1), s.width - 1));
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
  return CheckSequences(kOp, args.batch, tokens, args.state.extent(0),
                        s.null_slot);
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
