#include "quern/tools/perf/linear/conv.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/conv/reference_conv_testutil.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/recurrent/recurrent_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

constexpr int64_t kMost = int64_t{1} << 20;

int64_t Volume(const ConvExtents& e) { return e.depth * e.height * e.width; }
std::string Text(const ConvExtents& e) {
  return absl::StrCat(e.depth, "x", e.height, "x", e.width);
}

// All working sets are multiplied by the weights of one plan.
class Conv final : public Op {
 public:
  template <bool kVideo>
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    ConvSpec spec;
    ConvExtents in;
    QUERN_ASSIGN_OR_RETURN(const int64_t batch, args.Int("batch", 1, kMost));
    QUERN_ASSIGN_OR_RETURN(spec.in_channels, args.Int("channels", 1, kMost));
    QUERN_ASSIGN_OR_RETURN(spec.out_channels, args.Int("out", 1, kMost));
    QUERN_ASSIGN_OR_RETURN(spec.groups, args.Int("groups", 1, kMost));
    QUERN_ASSIGN_OR_RETURN(in.width, args.Int("size", 1, kMost));
    QUERN_ASSIGN_OR_RETURN(spec.kernel.width, args.Int("kernel", 1, kMost));
    QUERN_ASSIGN_OR_RETURN(spec.stride.width, args.Int("stride", 1, kMost));
    QUERN_ASSIGN_OR_RETURN(spec.padding.width, args.Int("padding", 0, kMost));
    QUERN_ASSIGN_OR_RETURN(spec.dilation.width, args.Int("dilation", 1, kMost));
    QUERN_ASSIGN_OR_RETURN(spec.dtype, args.Type("dtype", kFloatDTypes));
    spec.weight_dtype = spec.dtype;
    for (ConvExtents* e :
         {&in, &spec.kernel, &spec.stride, &spec.padding, &spec.dilation}) {
      e->height = e->width;
    }
    if (kVideo) {
      QUERN_ASSIGN_OR_RETURN(in.depth, args.Int("depth", 1, kMost));
      QUERN_ASSIGN_OR_RETURN(spec.kernel.depth, args.Int("kernel_d", 1, kMost));
      QUERN_ASSIGN_OR_RETURN(spec.stride.depth, args.Int("stride_d", 1, kMost));
    }
    QUERN_ASSIGN_OR_RETURN(const ConvExtents out, ConvOutExtents(spec, in));
    return std::unique_ptr<Op>(absl::WrapUnique(
        new Conv(std::string(args.op()), spec, in, out, batch)));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("batch=", batch_, " channels=", spec_.in_channels,
                              "->", spec_.out_channels, " in=", Text(in_),
                              " kernel=", Text(spec_.kernel),
                              " stride=", Text(spec_.stride));
    if (spec_.groups > 1)
      absl::StrAppend(&info.shape, " groups=", spec_.groups);
    info.dtype = std::string(DTypeName(spec_.dtype));
    if (plan_.has_value()) {
      info.isa = plan_->target();
      absl::StrAppend(&info.shape, " ", plan_->implementation());
    }
    info.SetTraffic(static_cast<double>(in_bytes() + weight_bytes()),
                    static_cast<double>(out_bytes()));
    info.flops = 2.0 * static_cast<double>(out_elements()) *
                 static_cast<double>(weights_of_output());
    info.peak_kind = PeakKindOf(spec_.dtype);
    return info;
  }

  int64_t set_bytes() const override {
    return in_bytes() + out_bytes() + weight_bytes();
  }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(x_.Create(sets, in_bytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, out_bytes()));
    QUERN_RETURN_IF_ERROR(weight_.Create(1, weight_bytes()));
    WithType(spec_.dtype, [this](auto type) {
      for (SetBuffer* b : {&x_, &weight_}) FillReals<decltype(type)>(-1, 1, *b);
    });
    QUERN_ASSIGN_OR_RETURN(ConvPlan plan,
                           ConvPlan::Create(spec_, Weight(), Bias(), executor));
    plan_.emplace(std::move(plan));
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        plan_->WorkspaceBytes(batch_, in_, executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(memory_, AlignedBuffer::Create(bytes));
    return plan_->CheckArgs(X(0), Out(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_->Execute(X(set), Out(set), Workspace(memory_), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    const ConvShape shape = {
        spec_.in_channels, spec_.out_channels, spec_.groups,  in_,
        spec_.kernel,      spec_.stride,       spec_.padding, spec_.dilation};
    const auto weight = Doubles(spec_.dtype, weight_, 0,
                                spec_.out_channels * weights_of_output());
    const auto bias =
        Doubles(spec_.dtype, weight_, spec_.out_channels * weights_of_output(),
                spec_.out_channels);
    // A prime step looks at every channel and at both edges.
    const int64_t every = CheckEvery(out_elements(), weights_of_output()) | 1;
    Verdict all;
    executor.ParallelFor(batch_, [&](int64_t b, int) {
      const int64_t image = spec_.in_channels * Volume(in_);
      const auto x = Doubles(spec_.dtype, x_, b * image, image);
      const int64_t outputs = spec_.out_channels * Volume(out_extents_);
      const auto got = Doubles(spec_.dtype, out_, b * outputs, outputs);
      const ConvExtents& e = out_extents_;
      Verdict mine;
      for (int64_t i = b % every; i < outputs; i += every) {
        const ConvOutput y =
            ReferenceConvolution(shape, x, weight, bias, i / Volume(e),
                                 i / (e.width * e.height) % e.depth,
                                 i / e.width % e.height, i % e.width);
        const double error = ConvolutionBound(shape, y.magnitude);
        mine.Add(
            b * outputs + i, got[static_cast<size_t>(i)], y.value,
            error +
                (std::abs(y.value) + error) * RelativeRoundoff(spec_.dtype) +
                0x1p-25);
      }
      all.Merge(mine);
    });
    return all.Result(name_);
  }

 private:
  Conv(std::string name, const ConvSpec& spec, const ConvExtents& in,
       const ConvExtents& out, int64_t batch)
      : name_(std::move(name)),
        spec_(spec),
        in_(in),
        out_extents_(out),
        batch_(batch) {}

  int64_t element() const { return static_cast<int64_t>(SizeOf(spec_.dtype)); }
  int64_t weights_of_output() const {
    return spec_.in_channels / spec_.groups * Volume(spec_.kernel);
  }
  int64_t out_elements() const {
    return batch_ * spec_.out_channels * Volume(out_extents_);
  }
  int64_t in_bytes() const {
    return batch_ * spec_.in_channels * Volume(in_) * element();
  }
  int64_t out_bytes() const { return out_elements() * element(); }
  // Weights and bias.
  int64_t weight_bytes() const {
    return spec_.out_channels * (weights_of_output() + 1) * element();
  }
  AnyTensorView View(void* data, int64_t n, int64_t channels,
                     const ConvExtents& e) const {
    return DenseView(
        spec_.dtype, data,
        std::array<int64_t, 5>{n, channels, e.depth, e.height, e.width});
  }
  AnyTensorView X(int64_t set) {
    return View(x_.at(set), batch_, spec_.in_channels, in_);
  }
  AnyTensorView Out(int64_t set) {
    return View(out_.at(set), batch_, spec_.out_channels, out_extents_);
  }
  AnyTensorView Weight() {
    return View(weight_.at(0), spec_.out_channels,
                spec_.in_channels / spec_.groups, spec_.kernel);
  }
  AnyTensorView Bias() {
    return DenseView(
        spec_.dtype,
        weight_.at(0) + spec_.out_channels * weights_of_output() * element(),
        std::array<int64_t, 1>{spec_.out_channels});
  }

  std::string name_;
  ConvSpec spec_;
  ConvExtents in_, out_extents_;
  int64_t batch_;
  std::optional<ConvPlan> plan_;
  SetBuffer x_, out_, weight_;
  AlignedBuffer memory_;
};

std::vector<Key> Keys(absl::string_view batch, absl::string_view out,
                      absl::string_view size) {
  return {{"batch", batch, "images"},
          {"channels", "3", "channels of an image"},
          {"out", out, "output channels"},
          {"groups", "1", "groups of channels"},
          {"size", size, "height and width of an image"},
          {"kernel", "14", "height and width of the kernel"},
          {"stride", "14", "steps along height and width"},
          {"padding", "0", "zeros on each side of height and width"},
          {"dilation", "1", "steps between taps along height and width"},
          {"dtype", "bf16", "of all tensors: f32, bf16 or f16"}};
}

}  // namespace

std::vector<OpEntry> ConvOps() {
  std::vector<Key> video = Keys("1024", "1280", "14");
  video.push_back({"depth", "2", "frames of a video"});
  video.push_back({"kernel_d", "2", "frames of the kernel"});
  video.push_back({"stride_d", "2", "steps along frames"});
  return {{"conv2d", "a convolution of images; by default a patch embedding",
           Keys("1", "1152", "448"), &Conv::Create<false>},
          {"conv3d", "a convolution of videos; by default a patch embedding",
           video, &Conv::Create<true>}};
}

}  // namespace quern
