#ifndef QUERN_OPS_CONV_CONV_TESTUTIL_H_
#define QUERN_OPS_CONV_CONV_TESTUTIL_H_

// The tensors of one convolution, between guard pages and with poison between
// the rows of images, and the verdict on its outputs.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/conv/reference_conv_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"

namespace quern {

using Doubles = std::vector<double>;

inline int64_t Volume(const ConvExtents& e) {
  return e.depth * e.height * e.width;
}

// Rows of `matrix` as [batch, channels, depth, height, width].
inline AnyTensorView AsImages(const AnyMatrix& matrix, int64_t batch,
                              int64_t channels, const ConvExtents& e) {
  const AnyTensorView v = matrix.view();
  const int64_t row = v.stride(0);
  return AnyTensorView(v.dtype(), v.mutable_data(), 5,
                       {batch, channels, e.depth, e.height, e.width},
                       {channels * e.depth * e.height * row,
                        e.depth * e.height * row, e.height * row, row, 1});
}

class ConvData {
 public:
  struct Values {
    Doubles in, weight, bias;
  };
  // pad: poison between rows of the images.
  ConvData(const ConvSpec& spec, const ConvExtents& in, int64_t batch,
           const Values& values, int64_t pad)
      : spec_(spec),
        batch_(batch),
        shape_{
            spec.in_channels, spec.out_channels, spec.groups,  in,
            spec.kernel,      spec.stride,       spec.padding, spec.dilation},
        biased_(!values.bias.empty()),
        in_(spec.dtype, values.in,
            batch * spec.in_channels * in.depth * in.height, in.width,
            in.width + pad),
        weight_(spec.weight_dtype, values.weight, spec.out_channels,
                WeightsOfOutput(spec), WeightsOfOutput(spec) + pad),
        bias_(spec.weight_dtype,
              biased_ ? values.bias
                      : Doubles(static_cast<size_t>(spec.out_channels)),
              1, spec.out_channels, spec.out_channels),
        out_extents_(OutOf(spec, in)),
        out_(spec.dtype,
             batch * spec.out_channels * out_extents_.depth *
                 out_extents_.height,
             out_extents_.width, out_extents_.width + pad) {}

  static int64_t WeightsOfOutput(const ConvSpec& s) {
    return s.in_channels / s.groups * Volume(s.kernel);
  }
  static Values Integers(const ConvSpec& s, const ConvExtents& in,
                         int64_t batch, Rng& rng) {
    const auto some = [&](int64_t n) {
      return ToDoubles(SmallIntegers(rng, n, -2, 2));
    };
    return {some(batch * s.in_channels * Volume(in)),
            some(s.out_channels * WeightsOfOutput(s)), some(s.out_channels)};
  }
  static Values Reals(const ConvSpec& s, const ConvExtents& in, int64_t batch,
                      Rng& rng) {
    const auto some = [&](int64_t n) {
      return ToDoubles(UniformReals(rng, n, -3, 3));
    };
    return {some(batch * s.in_channels * Volume(in)),
            some(s.out_channels * WeightsOfOutput(s)), some(s.out_channels)};
  }

  AnyTensorView in() const {
    return AsImages(in_, batch_, spec_.in_channels, shape_.in);
  }
  AnyTensorView out() const {
    return AsImages(out_, batch_, spec_.out_channels, out_extents_);
  }
  AnyTensorView weight() const {
    const AnyTensorView v = weight_.view();
    const ConvExtents& k = spec_.kernel;
    return AnyTensorView(
        v.dtype(), v.data(), 5,
        {spec_.out_channels, spec_.in_channels / spec_.groups, k.depth,
         k.height, k.width},
        {v.stride(0), Volume(k), k.height * k.width, k.width, 1});
  }
  AnyTensorView bias() const {
    return biased_ ? bias_.vector() : AnyTensorView();
  }
  const AnyMatrix& outputs() const { return out_; }

  // Runs the plan on a workspace of exactly as many bytes as it asks for, all
  // NaN.
  void Run(const ConvPlan& plan, Executor& executor) const {
    const auto bytes =
        plan.WorkspaceBytes(batch_, shape_.in, executor.num_workers());
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    GuardBuffer<float> memory(*bytes / 4);
    const Workspace workspace(memory.data(), static_cast<size_t>(*bytes));
    ASSERT_EQ(plan.CheckArgs(in(), out()), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.Execute(in(), out(), workspace, executor));
  }

  // Judges all outputs. exact: sums must be exact, and only the last rounding
  // remains.
  void ExpectOutputs(bool exact) const {
    const Doubles in = in_.doubles(), weight = weight_.doubles();
    const Doubles bias = biased_ ? bias_.doubles() : Doubles();
    const auto image =
        static_cast<int64_t>(spec_.in_channels * Volume(shape_.in));
    Doubles want, bounds;
    for (int64_t b = 0; b < batch_; ++b) {
      const Doubles one(in.begin() + b * image, in.begin() + (b + 1) * image);
      for (int64_t i = 0; i < spec_.out_channels * Volume(out_extents_); ++i) {
        const ConvExtents& e = out_extents_;
        const ConvOutput y =
            ReferenceConvolution(shape_, one, weight, bias, i / Volume(e),
                                 i / (e.width * e.height) % e.depth,
                                 i / e.width % e.height, i % e.width);
        want.push_back(exact ? RoundThroughF32(spec_.dtype, y.value) : y.value);
        const double error = ConvolutionBound(shape_, y.magnitude);
        bounds.push_back(exact ? 0.0
                               : error + ResultBound(spec_.dtype,
                                                     std::abs(y.value) + error,
                                                     0.0));
      }
    }
    EXPECT_TRUE(AllWithin(out_.doubles(), want, [&](double y, int64_t i) {
      // Where a NaN is expected there is no distance.
      return std::isnan(y) ? 0.0 : bounds[static_cast<size_t>(i)];
    }));
  }

 private:
  static ConvExtents OutOf(const ConvSpec& s, const ConvExtents& in) {
    const auto extent = [](int64_t n, int64_t k, int64_t stride, int64_t pad,
                           int64_t dilation) {
      return (n + 2 * pad - dilation * (k - 1) - 1) / stride + 1;
    };
    return {extent(in.depth, s.kernel.depth, s.stride.depth, s.padding.depth,
                   s.dilation.depth),
            extent(in.height, s.kernel.height, s.stride.height,
                   s.padding.height, s.dilation.height),
            extent(in.width, s.kernel.width, s.stride.width, s.padding.width,
                   s.dilation.width)};
  }

  ConvSpec spec_;
  int64_t batch_;
  ConvShape shape_;
  bool biased_;
  AnyMatrix in_, weight_, bias_;
  ConvExtents out_extents_;
  AnyMatrix out_;
};

}  // namespace quern

#endif  // QUERN_OPS_CONV_CONV_TESTUTIL_H_
