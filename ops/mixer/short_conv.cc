#include "quern/ops/mixer/short_conv.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rows_of.h"

namespace quern {
namespace {

constexpr char kOp[] = "short_conv";
// 3 * channels fits a LinearWeights.
constexpr int64_t kMostChannels = LinearWeights::kMaxExtent / 3;

// out = round(a * b), row by row. out may be a or b.
void MultiplyRows(const RowBlockKernels& blocks, const AnyTensorView& a,
                  const AnyTensorView& b, const AnyTensorView& out,
                  Executor& executor) {
  const RowsOf as(a), bs(b), outs(out);
  const size_t size = SizeOf(out.dtype());
  const auto n = static_cast<size_t>(out.extent(1));
  ParallelRows(executor, out.extent(0), 3 * out.extent(1),
               [&](int64_t begin, int64_t end) {
                 alignas(64) float left[kRowBlock];
                 alignas(64) float right[kRowBlock];
                 for (int64_t t = begin; t < end; ++t) {
                   for (size_t i = 0; i < n; i += kRowBlock) {
                     const size_t count = std::min(kRowBlock, n - i);
                     blocks.load(as[t] + i * size, count, left);
                     blocks.load(bs[t] + i * size, count, right);
                     blocks.mul_store(left, right, count, /*stream=*/false,
                                      outs[t] + i * size);
                   }
                 }
               });
}

}  // namespace

ShortConvPlan::ShortConvPlan(const ShortConvSpec& spec, MixerFrame frame)
    : spec_(spec),
      frame_(std::move(frame)),
      blocks_(GetRowBlockKernels(spec.dtype, spec.dtype)) {}

absl::StatusOr<ShortConvPlan> ShortConvPlan::Create(
    const ShortConvSpec& spec, const LinearWeights& in_proj,
    const LinearWeights& out_proj, Executor& executor) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "channels", spec.channels, 1, kMostChannels));
  MixerFrameSpec frame = MixerFrameSpecOf(kOp, spec);
  frame.projected = 3 * spec.channels;
  frame.inner = spec.channels;
  frame.conv_column = 2 * spec.channels;
  frame.conv_channels = spec.channels;
  frame.activation = ConvActivation::kNone;
  QUERN_ASSIGN_OR_RETURN(
      MixerFrame made, MixerFrame::Create(frame, in_proj, out_proj, executor));
  return ShortConvPlan(spec, std::move(made));
}

absl::StatusOr<int64_t> ShortConvPlan::WorkspaceBytes(int64_t max_tokens,
                                                      int max_workers) const {
  WorkspaceLayout layout;
  frame_.LayOutProjected(layout, max_tokens);
  return frame_.WorkspaceBytes(layout, {}, 0, max_tokens, max_workers);
}

absl::Status ShortConvPlan::CheckArgs(const MixerArgs& args) const {
  return frame_.CheckArgs(args, {}, {});
}

void ShortConvPlan::Execute(const MixerArgs& args, Workspace workspace,
                            Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const MixerFrame::Tokens tokens(args.batch);
  if (tokens.count == 0) return;
  const int64_t rows = args.x.extent(0);
  const AnyTensorView p =
      frame_.Projected(frame_.LayOutProjected(workspace, rows), rows);
  frame_.Project(args, p, workspace, executor);
  const AnyTensorView own = RowSlice(p, tokens.first, tokens.count);
  const int64_t n = spec_.channels;
  const AnyTensorView b = ColumnSlice(own, 0, n), c = ColumnSlice(own, n, n);
  const AnyTensorView u = ColumnSlice(own, 2 * n, n);
  MultiplyRows(blocks_, b, u, u, executor);
  frame_.Convolve(args, p, executor);
  MultiplyRows(blocks_, c, u, c, executor);
  frame_.Finish(args, ColumnSlice(p, n, n), workspace, executor);
}

}  // namespace quern
