#include "quern/ops/conv/conv.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/float_type.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/conv/conv_parts.h"
#include "quern/ops/conv/padded_image.h"
#include "quern/ops/dense_view.h"
#include "quern/quant/scalar_convert.h"

namespace quern {

using conv_internal::DenseRows;
using conv_internal::ExtentsOf;
using conv_internal::kBlock;
using conv_internal::kPatchRows;
using conv_internal::WeightsOfOutput;

namespace {

constexpr char kOp[] = "conv";

absl::Status CheckExtents(const char* what, const ConvExtents& extents,
                          int64_t least) {
  const std::pair<const char*, int64_t> all[] = {{"depth", extents.depth},
                                                 {"height", extents.height},
                                                 {"width", extents.width}};
  for (const auto& [dimension, value] : all) {
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, absl::StrCat(what, ".", dimension),
                                     value, least, ConvSpec::kMaxExtent));
  }
  return absl::OkStatus();
}

absl::Status CheckSpec(const ConvSpec& s) {
  const std::pair<const char*, int64_t> counts[] = {
      {"in_channels", s.in_channels},
      {"out_channels", s.out_channels},
      {"groups", s.groups}};
  for (const auto& [field, value] : counts) {
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, field, value, 1, ConvSpec::kMaxExtent));
  }
  for (const auto& [field, value] : counts) {
    if (value % s.groups == 0) continue;
    return InvalidArgument(kOp, field, "=", value, "; need a multiple of the ",
                           s.groups, " groups");
  }
  QUERN_RETURN_IF_ERROR(CheckExtents("kernel", s.kernel, 1));
  QUERN_RETURN_IF_ERROR(CheckExtents("stride", s.stride, 1));
  QUERN_RETURN_IF_ERROR(CheckExtents("padding", s.padding, 0));
  QUERN_RETURN_IF_ERROR(CheckExtents("dilation", s.dilation, 1));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", s.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "weight_dtype", s.weight_dtype, kFloatDTypes));
  int64_t weights = 0;
  if (WeightsOfOutput(s, &weights) && weights <= LinearWeights::kMaxExtent) {
    return absl::OkStatus();
  }
  return InvalidArgument(
      kOp, "in_channels=", s.in_channels, ", groups=", s.groups, ", kernel=[",
      s.kernel.depth, ", ", s.kernel.height, ", ", s.kernel.width,
      "]; need at most ", LinearWeights::kMaxExtent, " weights for an output");
}

bool IsPatches(const ConvSpec& s) {
  return s.groups == 1 && s.kernel == s.stride &&
         s.padding == ConvExtents{0, 0, 0} && s.dilation == ConvExtents();
}

absl::Status OutExtent(const char* dimension, int64_t in, int64_t kernel,
                       int64_t stride, int64_t padding, int64_t dilation,
                       int64_t* out) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, absl::StrCat("in.", dimension), in, 1,
                                   ConvSpec::kMaxExtent));
  // The extents are below 2^33, their product below 2^62.
  const int64_t padded = in + 2 * padding;
  const int64_t reach = dilation * (kernel - 1) + 1;
  if (reach > padded) {
    return InvalidArgument(kOp, "kernel.", dimension, "=", kernel,
                           " with dilation ", dilation, " reaches over ", reach,
                           " positions; need at most ", padded,
                           ", as the padded input has");
  }
  *out = (padded - reach) / stride + 1;
  return absl::OkStatus();
}

absl::StatusOr<ConvExtents> OutExtentsOf(const ConvSpec& s,
                                         const ConvExtents& in) {
  ConvExtents out;
  QUERN_RETURN_IF_ERROR(OutExtent("depth", in.depth, s.kernel.depth,
                                  s.stride.depth, s.padding.depth,
                                  s.dilation.depth, &out.depth));
  QUERN_RETURN_IF_ERROR(OutExtent("height", in.height, s.kernel.height,
                                  s.stride.height, s.padding.height,
                                  s.dilation.height, &out.height));
  QUERN_RETURN_IF_ERROR(OutExtent("width", in.width, s.kernel.width,
                                  s.stride.width, s.padding.width,
                                  s.dilation.width, &out.width));
  return out;
}

// v[i] as f32 for 0 <= i < n.
void CopyAsF32(DType dtype, const void* v, int64_t n, float* to) {
  WithFloatType(dtype, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(v);
    for (int64_t i = 0; i < n; ++i) to[i] = ToF32(from[i]);
    return 0;
  });
}

}  // namespace

absl::StatusOr<ConvExtents> ConvOutExtents(const ConvSpec& spec,
                                           const ConvExtents& in) {
  QUERN_RETURN_IF_ERROR(CheckSpec(spec));
  return OutExtentsOf(spec, in);
}

const char* ConvPlan::BestTarget() {
  return GetConvKernels(DType::kF32).target;
}

ConvPlan::ConvPlan(const ConvSpec& spec)
    : spec_(spec),
      kernels_(GetConvKernels(spec.dtype)),
      blocks_(GetRowBlockKernels(spec.dtype, spec.dtype)) {}

absl::StatusOr<ConvPlan> ConvPlan::Create(const ConvSpec& spec,
                                          const AnyTensorView& weight,
                                          const AnyTensorView& bias,
                                          Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckSpec(spec));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weight", weight, spec.weight_dtype,
                 {spec.out_channels, spec.in_channels / spec.groups,
                  spec.kernel.depth, spec.kernel.height, spec.kernel.width}));
  if (!IsDense(weight, 1)) {
    return InvalidArgument(kOp,
                           "weight has gaps between the weights of an output; "
                           "need dense dimensions but for the first");
  }
  QUERN_RETURN_IF_ERROR(CheckElementsApart(kOp, "weight", weight));
  if (bias.rank() != 0) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "bias", bias, spec.weight_dtype, {spec.out_channels}));
  }
  ConvPlan plan(spec);
  QUERN_ASSIGN_OR_RETURN(plan.bias_,
                         AlignedBuffer::Create(spec.out_channels * 4));
  float* const bias_f32 = plan.bias_.data<float>();
  if (bias.rank() != 0) {
    CopyAsF32(bias.dtype(), bias.data(), spec.out_channels, bias_f32);
  } else {
    std::fill(bias_f32, bias_f32 + spec.out_channels, 0.0f);
  }
  if (IsPatches(spec)) {
    QUERN_RETURN_IF_ERROR(plan.PackPatches(weight, executor));
  } else {
    QUERN_RETURN_IF_ERROR(plan.PackDirect(weight));
  }
  return plan;
}

absl::Status ConvPlan::PackPatches(const AnyTensorView& weight,
                                   Executor& executor) {
  LinearWeightsSpec weights_spec;
  weights_spec.n = spec_.out_channels;
  WeightsOfOutput(spec_, &weights_spec.k);
  weights_spec.format = FormatOfFloats(spec_.weight_dtype);
  LinearSource source;
  source.codes = DenseRows(weight, 0, weights_spec.n, weights_spec.k);
  source.bias =
      DenseVector<const float>(bias_.data<const float>(), spec_.out_channels);
  QUERN_ASSIGN_OR_RETURN(const LinearWeights weights,
                         LinearWeights::Pack(weights_spec, {source}, executor));
  LinearSpec linear;
  linear.a = linear.c = spec_.dtype;
  linear.kernels = spec_.kernels;
  QUERN_ASSIGN_OR_RETURN(LinearPlan plan,
                         LinearPlan::Create(linear, weights, executor));
  linear_.emplace(std::move(plan));
  return absl::OkStatus();
}

absl::Status ConvPlan::PackDirect(const AnyTensorView& weight) {
  int64_t taps = 0, all = 0;
  WeightsOfOutput(spec_, &taps);
  // Both numbers are below 2^31.
  CheckedMul(taps, spec_.out_channels, &all);
  int64_t bytes = 0;
  if (!CheckedMul(all, 4, &bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": weights need 2^63 bytes or more; need less"));
  }
  QUERN_ASSIGN_OR_RETURN(weights_, AlignedBuffer::Create(bytes));
  const int64_t of_group = spec_.out_channels / spec_.groups;
  const int64_t stride = weight.RowStride();
  float* to = weights_.data<float>();
  WithFloatType(weight.dtype(), [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(weight.data());
    for (int64_t o = 0; o < spec_.out_channels;) {
      const int64_t count = std::min(kBlock, of_group - o % of_group);
      for (int64_t tap = 0; tap < taps; ++tap) {
        for (int64_t i = o; i < o + count; ++i) {
          *to++ = ToF32(from[i * stride + tap]);
        }
      }
      o += count;
    }
    return 0;
  });
  return absl::OkStatus();
}

const char* ConvPlan::target() const {
  return linear_.has_value() ? linear_->target() : kernels_.target;
}

const char* ConvPlan::implementation() const {
  return linear_.has_value() ? "patches" : "direct";
}

absl::StatusOr<ConvExtents> ConvPlan::OutExtents(const ConvExtents& in) const {
  return OutExtentsOf(spec_, in);
}

absl::StatusOr<int64_t> ConvPlan::WorkspaceBytes(int64_t max_batch,
                                                 const ConvExtents& in,
                                                 int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(const ConvExtents out, OutExtents(in));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_batch", max_batch, 0));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_workers", max_workers, 1, LinearPlan::kMaxWorkers));
  if (max_batch == 0) return 0;
  WorkspaceLayout layout;
  bool fits = true;
  if (linear_.has_value()) {
    int64_t rows = 0;
    const bool many = !CheckedMul(max_batch, out.depth, &rows) ||
                      !CheckedMul(rows, out.height, &rows) ||
                      !CheckedMul(rows, out.width, &rows);
    rows = many ? kPatchRows : std::min(rows, kPatchRows);
    const auto element = static_cast<int64_t>(SizeOf(spec_.dtype));
    // The product is below 2^10 * 2^31 * 2^2.
    conv_internal::LayOutPatches(layout, rows * linear_->k() * element,
                                 rows * linear_->n() * element);
    QUERN_ASSIGN_OR_RETURN(const int64_t product,
                           linear_->WorkspaceBytes(rows, max_workers));
    layout.Allocate<char>("product", product);
  } else {
    const PaddedImage image(spec_.kernel, spec_.stride, spec_.padding,
                            spec_.dilation, out);
    int64_t elements = 0;
    fits = image.RowElements(&elements) &&
           CheckedMul(elements, image.height(), &elements) &&
           CheckedMul(elements, image.depth(), &elements) &&
           CheckedMul(elements, spec_.in_channels, &elements);
    conv_internal::LayOutDirect(layout, spec_.kernel.width, elements);
  }
  if (fits && !layout.overflow()) return layout.bytes();
  return absl::ResourceExhaustedError(
      absl::StrCat(kOp, ": an input of [", spec_.in_channels, ", ", in.depth,
                   ", ", in.height, ", ", in.width,
                   "] needs a workspace of 2^63 bytes or more; need less"));
}

absl::Status ConvPlan::CheckArgs(const AnyTensorView& in,
                                 const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(CheckInput(
      kOp, "in", in, spec_.dtype,
      {kAnyExtent, spec_.in_channels, kAnyExtent, kAnyExtent, kAnyExtent}));
  QUERN_ASSIGN_OR_RETURN(const ConvExtents e, OutExtents(ExtentsOf(in)));
  QUERN_RETURN_IF_ERROR(CheckOutput(
      kOp, "out", out, spec_.dtype,
      {in.extent(0), spec_.out_channels, e.depth, e.height, e.width}));
  return CheckApart(kOp, "in", in, "out", out);
}

void ConvPlan::Execute(const AnyTensorView& in, const AnyTensorView& out,
                       const Workspace& workspace,
                       Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(in, out));
  if (in.extent(0) == 0) return;
  if (linear_.has_value()) {
    ExecutePatches(in, out, workspace, executor);
  } else {
    ExecuteDirect(in, out, workspace, executor);
  }
}

}  // namespace quern
