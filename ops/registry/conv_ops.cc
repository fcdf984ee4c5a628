#include "quern/ops/registry/conv_ops.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_conv.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kConv2d[] = "conv2d";
constexpr char kConv3d[] = "conv3d";

// What the plan calls its arguments.
OpRules ConvRules() {
  OpRules rules;
  rules.words = {{"in_channels", "channels of x"},
                 {"out_channels", "channels of out"},
                 {"weight_dtype", "weight"},
                 {"dtype", "x"},
                 {"in", "x"},
                 {"kernel", "weight"}};
  for (const char* field : {"stride", "padding", "dilation"}) {
    for (const char* dimension : {"depth", "height", "width"}) {
      rules.words.emplace_back(
          absl::StrCat(field, ".", dimension),
          absl::StrCat(field, "_", absl::string_view(dimension, 1)));
    }
  }
  return rules;
}

// Views an image as a video of one frame; other ranks are returned unchanged,
// and the plan refuses them.
AnyTensorView AsVideo(const AnyTensorView& v) {
  if (v.rank() != 4) return v;
  const AnyTensorView::Dims extents = {v.extent(0), v.extent(1), 1, v.extent(2),
                                       v.extent(3)};
  const AnyTensorView::Dims strides = {v.stride(0), v.stride(1), v.stride(1),
                                       v.stride(2), v.stride(3)};
  if (v.writable()) {
    return AnyTensorView(v.dtype(), v.mutable_data(), 5, extents, strides);
  }
  return AnyTensorView(v.dtype(), v.data(), 5, extents, strides);
}

// An operator as its arguments describe it.
struct Described {
  const char* op = "";  // a literal
  ConvSpec spec;
  ConvExtents in;
  bool biased = false;
  TensorMeta x, out;
};

absl::StatusOr<Described> Describe(
    const char* op, const TensorMeta& x, const TensorMeta& weight,
    const MaybeMeta& bias, const ConvExtents& stride,
    const ConvExtents& padding, const ConvExtents& dilation, int64_t groups) {
  const size_t rank = absl::string_view(op) == kConv2d ? 4 : 5;
  const std::pair<absl::string_view, const TensorMeta*> tensors[] = {
      {"x", &x}, {"weight", &weight}};
  for (const auto& [name, meta] : tensors) {
    if (meta->extents.size() == rank) continue;
    return InvalidArgument(op, name, " has rank ", meta->extents.size(),
                           "; need ", rank);
  }
  const auto extents = [&](const TensorMeta& meta) {
    const auto& e = meta.extents;
    return rank == 4 ? ConvExtents{1, e[2], e[3]}
                     : ConvExtents{e[2], e[3], e[4]};
  };
  Described d;
  d.op = op;
  d.spec.in_channels = x.extents[1];
  d.spec.out_channels = weight.extents[0];
  d.spec.groups = groups;
  d.spec.kernel = extents(weight);
  d.spec.stride = stride;
  d.spec.padding = padding;
  d.spec.dilation = dilation;
  d.spec.dtype = x.dtype;
  d.spec.weight_dtype = weight.dtype;
  d.in = extents(x);
  d.biased = bias.has_value();
  const auto extents_of_out = ConvOutExtents(d.spec, d.in);
  if (!extents_of_out.ok()) return extents_of_out.status();
  const ConvExtents& out = *extents_of_out;
  QUERN_RETURN_IF_ERROR(CheckEqual(op, "channels of weight", weight.extents[1],
                                   d.spec.in_channels / groups,
                                   "the groups of x have"));
  if (bias.has_value()) {
    QUERN_RETURN_IF_ERROR(
        CheckMeta(op, "bias", *bias, {weight.dtype, {d.spec.out_channels}}));
  }
  d.x = d.out = x;
  d.out.extents[1] = d.spec.out_channels;
  d.out.extents[rank - 1] = out.width;
  d.out.extents[rank - 2] = out.height;
  if (rank == 5) d.out.extents[2] = out.depth;
  return d;
}

// x, weight, bias (or nothing), out.
class BoundConv final : public BoundOp {
 public:
  BoundConv(Described described, bool native)
      : d_(std::move(described)), native_(native) {}

  const char* target() const override {
    if (native_) return "scalar";
    return plan_.has_value() ? plan_->target() : ConvPlan::BestTarget();
  }
  std::string Explain(int64_t) const override {
    if (native_ || !plan_.has_value()) return target();
    return absl::StrCat(plan_->implementation(), " ", plan_->target());
  }

  absl::Status Prepare(Tensors t, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(d_.op, t, 4));
    if ((t[2].rank() != 0) != d_.biased) {
      return InvalidArgument(d_.op, "bias has rank ", t[2].rank(),
                             "; need what the operator was made with");
    }
    auto plan = ConvPlan::Create(d_.spec, AsVideo(t[1]), t[2], executor);
    if (!plan.ok()) return plan.status();
    plan_.emplace(*std::move(plan));
    weight_ = t[1];
    bias_ = t[2];
    return absl::OkStatus();
  }

  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(d_.op, t, 4));
    QUERN_RETURN_IF_ERROR(CheckPrepared());
    if (!SameView(t[1], weight_) || !SameView(t[2], bias_)) {
      return InvalidArgument(d_.op,
                             "weight or bias is not what Prepare was given");
    }
    QUERN_RETURN_IF_ERROR(CheckImages("x", t[0], d_.x));
    QUERN_RETURN_IF_ERROR(CheckImages("out", t[3], d_.out));
    return plan_->CheckArgs(AsVideo(t[0]), AsVideo(t[3]));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    QUERN_RETURN_IF_ERROR(CheckPrepared());
    if (native_) return 0;
    return plan_->WorkspaceBytes(max_rows, d_.in, max_workers);
  }

  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    QUERN_CHECK(plan_.has_value());
    if (native_) {
      NativeConv(d_.spec, AsVideo(t[0]), AsVideo(t[1]), t[2], AsVideo(t[3]));
    } else {
      plan_->Execute(AsVideo(t[0]), AsVideo(t[3]), workspace, executor);
    }
  }

 private:
  // The batch may have any size. Dimensions are counted as the caller has them.
  absl::Status CheckImages(absl::string_view field, const AnyTensorView& view,
                           const TensorMeta& meta) const {
    const int last = view.rank() - 1;
    if (last >= 2 && view.extent(last) > 1 && view.stride(last) != 1 &&
        view.extent(1) > 1 && view.stride(1) == 1) {
      return InvalidArgument(
          d_.op, field,
          " is channels_last: its channels have stride 1; need the columns to "
          "have stride 1");
    }
    std::array<int64_t, 5> want = {};  // on the stack: allocates nothing
    std::copy(meta.extents.begin(), meta.extents.end(), want.begin());
    want[0] = kAnyExtent;
    return CheckInput(d_.op, field, view, meta.dtype,
                      absl::MakeConstSpan(want.data(), meta.extents.size()));
  }
  absl::Status CheckPrepared() const {
    if (plan_.has_value()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(d_.op, ": has no weights; need a call of Prepare before"));
  }

  const Described d_;
  const bool native_;
  std::optional<ConvPlan> plan_;
  AnyTensorView weight_, bias_;
};

absl::StatusOr<Described> Describe2d(const TensorMeta& x, const TensorMeta& w,
                                     const MaybeMeta& bias, int64_t stride_h,
                                     int64_t stride_w, int64_t padding_h,
                                     int64_t padding_w, int64_t dilation_h,
                                     int64_t dilation_w, int64_t groups) {
  return Describe(kConv2d, x, w, bias, {1, stride_h, stride_w},
                  {0, padding_h, padding_w}, {1, dilation_h, dilation_w},
                  groups);
}
absl::StatusOr<Described> Describe3d(const TensorMeta& x, const TensorMeta& w,
                                     const MaybeMeta& bias, int64_t stride_d,
                                     int64_t stride_h, int64_t stride_w,
                                     int64_t padding_d, int64_t padding_h,
                                     int64_t padding_w, int64_t dilation_d,
                                     int64_t dilation_h, int64_t dilation_w,
                                     int64_t groups) {
  return Describe(kConv3d, x, w, bias, {stride_d, stride_h, stride_w},
                  {padding_d, padding_h, padding_w},
                  {dilation_d, dilation_h, dilation_w}, groups);
}

// The functions that a registry needs for an operator described by kDescribe.
template <auto kDescribe>
struct OpOf;
template <class... A, absl::StatusOr<Described> (*kDescribe)(A...)>
struct OpOf<kDescribe> {
  static Metas Shapes(A... args) {
    QUERN_ASSIGN_OR_RETURN(const Described d, kDescribe(args...));
    return std::vector<TensorMeta>{d.out};
  }
  template <bool kNative>
  static Bound Make(A... args) {
    QUERN_ASSIGN_OR_RETURN(Described d, kDescribe(args...));
    return std::unique_ptr<BoundOp>(new BoundConv(std::move(d), kNative));
  }
};

template <auto kDescribe>
absl::Status Register(OpRegistry& r, absl::string_view op,
                      absl::string_view params, OpExample example) {
  using Op = OpOf<kDescribe>;
  QUERN_RETURN_IF_ERROR(r.Define<&Op::Shapes>(
      absl::StrCat(op, "(Tensor x, Tensor weight, Tensor? bias, ", params,
                   ", int groups=1) -> Tensor"),
      example));
  QUERN_RETURN_IF_ERROR(r.Declare(op, ConvRules()));
  QUERN_RETURN_IF_ERROR((r.Add<&Op::template Make<false>>(op, "simd")));
  return r.Add<&Op::template Make<true>>(op, OpRegistry::kReference);
}

NamedArgs Example2d(DType dtype) {
  return {{"x", TensorMeta{dtype, {2, 4, 5, 6}}},
          {"weight", TensorMeta{dtype, {6, 2, 3, 2}}},
          {"bias", TensorMeta{dtype, {6}}},
          {"stride_w", int64_t{2}},
          {"padding_h", int64_t{1}},
          {"groups", int64_t{2}}};
}
// A patch embedding.
NamedArgs Example3d(DType dtype) {
  return {{"x", TensorMeta{dtype, {2, 3, 2, 4, 6}}},
          {"weight", TensorMeta{dtype, {5, 3, 2, 2, 2}}},
          {"stride_d", int64_t{2}},
          {"stride_h", int64_t{2}},
          {"stride_w", int64_t{2}}};
}

}  // namespace

absl::Status RegisterConvOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(Register<&Describe2d>(
      r, kConv2d,
      "int stride_h=1, int stride_w=1, int padding_h=0, int padding_w=0, "
      "int dilation_h=1, int dilation_w=1",
      &Example2d));
  return Register<&Describe3d>(
      r, kConv3d,
      "int stride_d=1, int stride_h=1, int stride_w=1, int padding_d=0, "
      "int padding_h=0, int padding_w=0, int dilation_d=1, int dilation_h=1, "
      "int dilation_w=1",
      &Example3d);
}

}  // namespace quern
