#include "quern/ops/registry/families/linear/conv_ops.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/conv.h"

namespace quern {
namespace {

constexpr char kOp[] = "conv";

struct Spec : ConvSpec {
  bool video = false;
  ConvExtents in, out;
};
struct Args {
  AnyTensorView x, weight, bias, out;
};

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

// A plan that Prepare makes.
class Conv {
 public:
  static absl::StatusOr<Conv> Create(const Spec& spec) { return Conv(spec); }

  const Spec& spec() const { return spec_; }
  const char* target() const {
    return plan_.has_value() ? plan_->target() : ConvPlan::BestTarget();
  }
  std::string Explain(int64_t) const {
    if (!plan_.has_value()) return target();
    return absl::StrCat(plan_->implementation(), " ", plan_->target());
  }

  absl::Status Prepare(const Args& a, Executor& executor) {
    auto plan = ConvPlan::Create(spec_, AsVideo(a.weight), a.bias, executor);
    if (!plan.ok()) return plan.status();
    plan_.emplace(*std::move(plan));
    weight_ = a.weight;
    bias_ = a.bias;
    return absl::OkStatus();
  }

  absl::Status CheckArgs(const Args& a) const {
    QUERN_RETURN_IF_ERROR(CheckPrepared());
    if (!SameView(a.weight, weight_) || !SameView(a.bias, bias_)) {
      return InvalidArgument(kOp,
                             "weight or bias is not what Prepare was given");
    }
    QUERN_RETURN_IF_ERROR(CheckImages("x", a.x, spec_.in_channels, spec_.in));
    QUERN_RETURN_IF_ERROR(
        CheckImages("out", a.out, spec_.out_channels, spec_.out));
    return plan_->CheckArgs(AsVideo(a.x), AsVideo(a.out));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    QUERN_RETURN_IF_ERROR(CheckPrepared());
    return plan_->WorkspaceBytes(max_rows, spec_.in, max_workers);
  }

  void Execute(const Args& a, Workspace workspace, Executor& executor) const {
    QUERN_CHECK(plan_.has_value());
    plan_->Execute(AsVideo(a.x), AsVideo(a.out), workspace, executor);
  }

 private:
  explicit Conv(const Spec& spec) : spec_(spec) {}

  // The batch may have any size. Dimensions are counted as the caller has them.
  absl::Status CheckImages(absl::string_view field, const AnyTensorView& view,
                           int64_t channels, const ConvExtents& extents) const {
    const int last = view.rank() - 1;
    if (last >= 2 && view.extent(last) > 1 && view.stride(last) != 1 &&
        view.extent(1) > 1 && view.stride(1) == 1) {
      return InvalidArgument(
          kOp, field,
          " is channels_last: its channels have stride 1; need the columns to "
          "have stride 1");
    }
    int64_t want[] = {kAnyExtent, channels, extents.depth, extents.height,
                      extents.width};
    if (!spec_.video) std::copy(want + 3, want + 5, want + 2);
    return CheckInput(kOp, field, view, spec_.dtype,
                      absl::MakeConstSpan(want, spec_.video ? 5 : 4));
  }
  absl::Status CheckPrepared() const {
    if (plan_.has_value()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(kOp, ": has no weights; need a call of Prepare before"));
  }

  Spec spec_;
  std::optional<ConvPlan> plan_;
  AnyTensorView weight_, bias_;
};

using Op = OpDeclaration<Conv, Spec, Args>;

constexpr std::pair<absl::string_view, int64_t ConvExtents::*> kDimensions[] = {
    {"depth", &ConvExtents::depth},
    {"height", &ConvExtents::height},
    {"width", &ConvExtents::width}};

// The numbers of a field, such as stride_h and stride_w. Plans call them
// stride.height and stride.width.
void AddNumbers(Op& op, absl::string_view field, int64_t value,
                ConvExtents ConvSpec::*to, bool video) {
  for (const auto& [dimension, of] : kDimensions) {
    if (dimension == "depth" && !video) continue;
    const std::string name = absl::StrCat(field, "_", dimension.substr(0, 1));
    op.Attr(name.c_str(), value)
        .Word(absl::StrCat(field, ".", dimension).c_str(), name.c_str())
        .Then([name, to, of = of](Spec& spec, const OpCall& call) {
          spec.*to.*of = call.Int(name);
          return absl::OkStatus();
        });
  }
}

template <auto kExtents, auto kDimension>
int64_t& Extent(Spec& spec) {
  return spec.*kExtents.*kDimension;
}
// Two dimensions, and then those of an image or a video.
template <auto kExtents>
OpShape<Spec> ShapeOf(OpDim<Spec> first, OpDim<Spec> second, bool video) {
  OpShape<Spec> shape = {first, second, &Extent<kExtents, &ConvExtents::height>,
                         &Extent<kExtents, &ConvExtents::width>};
  if (video) {
    shape.dims.insert(shape.dims.begin() + 2,
                      &Extent<kExtents, &ConvExtents::depth>);
  }
  return shape;
}

absl::Status FillOut(Spec& spec, const OpCall& call) {
  const TensorMeta& weight = *call.Tensor("weight");
  const TensorMeta* const bias = call.Tensor("bias");
  QUERN_ASSIGN_OR_RETURN(spec.out, ConvOutExtents(spec, spec.in));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(call.op(), "channels of weight", weight.extents[1],
                 spec.in_channels / spec.groups, "the groups of x have"));
  if (bias == nullptr) return absl::OkStatus();
  return CheckMeta(call.op(), "bias", *bias,
                   {weight.dtype, {spec.out_channels}});
}

absl::Status AddConv(const char* name, bool video,
                     std::vector<OpExampleArg> example, OpRegistry& registry) {
  Op op(name);
  op.Given(&Spec::video, video)
      .In("x", &Args::x, ShapeOf<&Spec::in>(kRows, &Spec::in_channels, video),
          &Spec::dtype)
      .In("weight", &Args::weight,
          ShapeOf<&Spec::kernel>(&Spec::out_channels, kAny, video),
          &Spec::weight_dtype)
      .Maybe("bias", &Args::bias);
  AddNumbers(op, "stride", 1, &Spec::stride, video);
  AddNumbers(op, "padding", 0, &Spec::padding, video);
  AddNumbers(op, "dilation", 1, &Spec::dilation, video);
  return op.Attr("groups", int64_t{1}, &Spec::groups)
      .Then(&FillOut)
      .Out("out", &Args::out,
           ShapeOf<&Spec::out>(kRows, &Spec::out_channels, video), Like("x"))
      .Word("in_channels", "channels of x")
      .Word("out_channels", "channels of out")
      .Word("weight_dtype", "weight")
      .Word("dtype", "x")
      .Word("in", "x")
      .Word("kernel", "weight")
      .Reference([](const Spec& spec, const Args& a) {
        NativeConv(spec, AsVideo(a.x), AsVideo(a.weight), a.bias,
                   AsVideo(a.out));
      })
      .Example(std::move(example))
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterConvOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddConv("conv2d", false,
                                {{"x", {2, 4, 5, 6}},
                                 {"weight", {6, 2, 3, 2}},
                                 {"bias", {6}},
                                 {"stride_w", int64_t{2}},
                                 {"padding_h", int64_t{1}},
                                 {"groups", int64_t{2}}},
                                registry));
  // A patch embedding.
  return AddConv("conv3d", true,
                 {{"x", {2, 3, 2, 4, 6}},
                  {"weight", {5, 3, 2, 2, 2}},
                  {"stride_d", int64_t{2}},
                  {"stride_h", int64_t{2}},
                  {"stride_w", int64_t{2}}},
                 registry);
}

}  // namespace quern
