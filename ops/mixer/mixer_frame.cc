#include "quern/ops/mixer/mixer_frame.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"

namespace quern {

absl::Status CheckStateSpec(absl::string_view op, DType state_dtype,
                            float eps) {
  QUERN_RETURN_IF_ERROR(CheckNotNegative(op, "eps", eps, "finite eps"));
  return CheckDTypeIn(op, "state_dtype", state_dtype, kFloatDTypes);
}

AnyTensorView AsHeads(const AnyTensorView& matrix, int64_t begin, int64_t heads,
                      int64_t dim) {
  const AnyTensorView part = ColumnSlice(matrix, begin, heads * dim);
  const AnyTensorView::Dims extents = {part.extent(0), heads, dim};
  const AnyTensorView::Dims strides = {part.stride(0), dim, 1};
  if (part.writable()) {
    return AnyTensorView(part.dtype(), part.mutable_data(), 3, extents,
                         strides);
  }
  return AnyTensorView(part.dtype(), part.data(), 3, extents, strides);
}

MixerFrame::MixerFrame(const MixerFrameSpec& spec, LinearPlan in_proj,
                       LinearPlan out_proj, const CausalConv1dPlan& conv)
    : spec_(spec),
      in_proj_(std::move(in_proj)),
      out_proj_(std::move(out_proj)),
      conv_(conv) {}

absl::StatusOr<LinearPlan> MixerFrame::Product(const MixerFrameSpec& spec,
                                               absl::string_view field,
                                               const LinearWeights& weights,
                                               int64_t n, int64_t k,
                                               Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckEqual(spec.op, absl::StrCat("columns of ", field),
                                   weights.spec().n, n, "the layer has"));
  QUERN_RETURN_IF_ERROR(CheckEqual(spec.op, absl::StrCat("k of ", field),
                                   weights.spec().k, k, "the layer has"));
  LinearSpec linear;
  linear.a = linear.c = spec.dtype;
  linear.kernels = spec.kernels;
  linear.activations = ActivationsFor(weights.spec(), spec.activations);
  return LinearPlan::Create(linear, weights, executor);
}

absl::StatusOr<MixerFrame> MixerFrame::Create(const MixerFrameSpec& spec,
                                              const LinearWeights& in_proj,
                                              const LinearWeights& out_proj,
                                              Executor& executor) {
  // Steps would refuse these in names of their own.
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(spec.op, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(spec.op, "weight_dtype", spec.weight_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckRange(spec.op, "width", spec.conv_width, 2, 4));
  CausalConv1dSpec conv_spec;
  conv_spec.channels = spec.conv_channels;
  conv_spec.width = spec.conv_width;
  conv_spec.activation = spec.activation;
  conv_spec.dtype = spec.dtype;
  conv_spec.weight_dtype = spec.weight_dtype;
  conv_spec.null_slot = spec.null_slot;
  QUERN_ASSIGN_OR_RETURN(const CausalConv1dPlan conv,
                         CausalConv1dPlan::Create(conv_spec));
  QUERN_ASSIGN_OR_RETURN(
      LinearPlan in,
      Product(spec, "in_proj", in_proj, spec.projected, spec.hidden, executor));
  QUERN_ASSIGN_OR_RETURN(
      LinearPlan out,
      Product(spec, "out_proj", out_proj, spec.hidden, spec.inner, executor));
  return MixerFrame(spec, std::move(in), std::move(out), conv);
}

absl::Status MixerFrame::CheckArgs(const MixerArgs& args,
                                   absl::Span<const NamedView> inputs,
                                   absl::Span<const NamedView> written) const {
  const MixerFrameSpec& s = spec_;
  QUERN_RETURN_IF_ERROR(
      CheckInput(s.op, "x", args.x, s.dtype, {kAnyExtent, s.hidden}));
  QUERN_RETURN_IF_ERROR(in_proj_.CheckRowStride(s.op, "x", args.x));
  QUERN_RETURN_IF_ERROR(CheckInput(s.op, "conv_weight", args.conv_weight,
                                   s.weight_dtype,
                                   {s.conv_channels, s.conv_width}));
  if (args.conv_bias.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(s.op, "conv_bias", args.conv_bias,
                                     s.weight_dtype, {s.conv_channels}));
  }
  QUERN_RETURN_IF_ERROR(CheckOutput(s.op, "conv_state", args.conv_state,
                                    s.dtype,
                                    {kAnyExtent, kAnyExtent, s.conv_channels}));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(
      s.op, "rows of conv_state", args.conv_state.extent(1), s.conv_width - 1));
  QUERN_RETURN_IF_ERROR(CheckOutput(s.op, "out", args.out, s.dtype,
                                    {args.x.extent(0), s.hidden}));
  QUERN_RETURN_IF_ERROR(out_proj_.CheckRowStride(s.op, "out", args.out));
  const NamedView common_inputs[] = {{"x", args.x},
                                     {"conv_weight", args.conv_weight},
                                     {"conv_bias", args.conv_bias}};
  const NamedView common_written[] = {{"conv_state", args.conv_state},
                                      {"out", args.out}};
  const auto apart = [&](const NamedView& a, const NamedView& b) {
    if (a.second.rank() == 0 || b.second.rank() == 0) return absl::OkStatus();
    return CheckApart(s.op, a.first, a.second, b.first, b.second);
  };
  const absl::Span<const NamedView> all_inputs[] = {common_inputs, inputs};
  const absl::Span<const NamedView> all_written[] = {common_written, written};
  for (const auto& some : all_written) {
    for (const NamedView& w : some) {
      QUERN_RETURN_IF_ERROR(
          CheckBatchApart(s.op, args.batch, w.first, w.second));
      for (const auto& others : all_inputs) {
        for (const NamedView& in : others) {
          QUERN_RETURN_IF_ERROR(apart(in, w));
        }
      }
    }
  }
  QUERN_RETURN_IF_ERROR(apart(common_written[0], common_written[1]));
  for (const NamedView& w : written) {
    QUERN_RETURN_IF_ERROR(apart(w, common_written[0]));
    QUERN_RETURN_IF_ERROR(apart(w, common_written[1]));
    if (w.second.extent(0) == args.conv_state.extent(0)) continue;
    return CheckEqual(s.op, absl::StrCat("slots of ", w.first),
                      w.second.extent(0), args.conv_state.extent(0),
                      "conv_state has");
  }
  // The convolution would take a slot for the windows of several tokens, which
  // the recurrence does not have.
  if (args.batch.num_accepted_tokens.size() > 0 && !args.batch.drafts()) {
    return InvalidArgument(
        s.op, "num_accepted_tokens without drafts; need rows of ",
        args.batch.indices_name, ", or ", args.batch.destinations_name);
  }
  return CheckSequences(s.op, args.batch, args.x.extent(0),
                        args.conv_state.extent(0), s.null_slot);
}

int64_t MixerFrame::Bytes(int64_t tokens, int64_t columns) const {
  int64_t bytes = 0;
  const bool fits =
      CheckedMul(tokens, columns, &bytes) &&
      CheckedMul(bytes, static_cast<int64_t>(SizeOf(spec_.dtype)), &bytes);
  return fits ? bytes : -1;
}

absl::StatusOr<int64_t> MixerFrame::WorkspaceBytes(
    WorkspaceLayout layout, absl::Span<const LinearPlan* const> others,
    int64_t recurrence_bytes, int64_t max_tokens, int max_workers) const {
  int64_t most = recurrence_bytes;
  const auto need = [&](const LinearPlan& plan) {
    const auto bytes = plan.WorkspaceBytes(max_tokens, max_workers);
    if (bytes.ok()) most = std::max(most, *bytes);
    return bytes.status();
  };
  QUERN_RETURN_IF_ERROR(need(in_proj_));
  QUERN_RETURN_IF_ERROR(need(out_proj_));
  for (const LinearPlan* other : others) QUERN_RETURN_IF_ERROR(need(*other));
  layout.Allocate<char>("one step", most);
  if (!layout.overflow()) return layout.bytes();
  return absl::ResourceExhaustedError(
      absl::StrCat(spec_.op, ": max_tokens=", max_tokens,
                   " needs a workspace of 2^63 bytes or more; need less"));
}

AnyTensorView MixerFrame::Projected(void* data, int64_t tokens) const {
  return AnyTensorView(spec_.dtype, data, 2, {tokens, spec_.projected},
                       {spec_.projected, 1});
}

MixerFrame::Tokens::Tokens(const SequenceBatch& batch) {
  if (batch.sequences() == 0) return;
  first = batch.begin(0);
  count = batch.end(batch.sequences() - 1) - first;
}

void MixerFrame::Multiply(const LinearPlan& product, const SequenceBatch& batch,
                          const AnyTensorView& from, const AnyTensorView& to,
                          const Workspace& workspace, Executor& executor) {
  const Tokens tokens(batch);
  LinearArgs args;
  args.a = RowSlice(from, tokens.first, tokens.count);
  args.c = RowSlice(to, tokens.first, tokens.count);
  product.Execute(args, workspace, executor);
}

void MixerFrame::Project(const MixerArgs& args, const AnyTensorView& p,
                         const Workspace& workspace, Executor& executor) const {
  Multiply(in_proj_, args.batch, args.x, p, workspace, executor);
}

void MixerFrame::Convolve(const MixerArgs& args, const AnyTensorView& p,
                          Executor& executor) const {
  CausalConv1dArgs conv;
  conv.x = conv.out = ColumnSlice(p, spec_.conv_column, spec_.conv_channels);
  conv.weight = args.conv_weight;
  conv.bias = args.conv_bias;
  conv.state = args.conv_state;
  conv.batch = args.batch;
  conv_.Execute(conv, executor);
}

void MixerFrame::Finish(const MixerArgs& args, const AnyTensorView& inner,
                        const Workspace& workspace, Executor& executor) const {
  Multiply(out_proj_, args.batch, inner, args.out, workspace, executor);
}

}  // namespace quern
