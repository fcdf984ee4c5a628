// conv2d and conv3d by name: simd writes the bits of the plan, reference what
// is within rounding of them, and what is wrong is refused.

#include "quern/ops/registry/families/linear/conv_ops.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Floats = std::vector<float>;

const TensorMeta kX = {DType::kF32, {2, 4, 6, 9}};
const TensorMeta kWeight = {DType::kF32, {6, 2, 3, 2}};
const TensorMeta kBias = {DType::kF32, {6}};
const NamedArgs kArgs = {{"x", kX},
                         {"weight", kWeight},
                         {"bias", kBias},
                         {"stride_h", int64_t{1}},
                         {"stride_w", int64_t{2}},
                         {"padding_h", int64_t{1}},
                         {"dilation_w", int64_t{3}},
                         {"groups", int64_t{2}}};

class ConvOpsTest : public OpFixture {
 protected:
  ConvOpsTest() { EXPECT_EQ(RegisterConvOps(registry_), absl::OkStatus()); }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(ConvOpsTest);

TEST_P(ConvOpsTest, Conv2dIsThePlan) {
  const auto x = UniformReals<float>(rng_, 3 * 4 * 6 * 9);
  const auto weight = UniformReals<float>(rng_, 6 * 2 * 3 * 2);
  const auto bias = UniformReals<float>(rng_, 6);
  ConvSpec spec;
  spec.in_channels = 4;
  spec.out_channels = 6;
  spec.groups = 2;
  spec.kernel = {1, 3, 2};
  spec.stride = {1, 1, 2};
  spec.padding = {0, 1, 0};
  spec.dilation = {1, 1, 3};
  const auto plan = ConvPlan::Create(
      spec, DenseTensor<const float, 5>(weight.data(), {6, 2, 1, 3, 2}),
      DenseVector<const float>(bias.data(), 6), executor_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  // One input more than the operator is made with.
  Floats want(3 * 6 * 6 * 3);
  const auto bytes = plan->WorkspaceBytes(3, {1, 6, 9}, 1);
  ASSERT_TRUE(bytes.ok());
  auto memory = AlignedBuffer::Create(*bytes);
  plan->Execute(DenseTensor<const float, 5>(x.data(), {3, 4, 1, 6, 9}),
                DenseTensor<float, 5>(want.data(), {3, 6, 1, 6, 3}),
                Workspace(*memory), executor_);
  for (const char* provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    const MadeOp op = Make(provider, "conv2d", kArgs);
    Floats out(want.size());
    const AnyTensorView w =
        DenseTensor<const float, 4>(weight.data(), {6, 2, 3, 2});
    const AnyTensorView b = DenseVector<const float>(bias.data(), 6);
    const AnyTensorView in =
        DenseTensor<const float, 4>(x.data(), {3, 4, 6, 9});
    const AnyTensorView y = DenseTensor<float, 4>(out.data(), {3, 6, 6, 3});
    const std::vector<AnyTensorView> tensors = {in, w, b, y};
    ExpectRefusal(op.CheckArgs(tensors), absl::StatusCode::kFailedPrecondition,
                  "conv2d: has no weights; need a call of Prepare before");
    ASSERT_EQ(op.Prepare(tensors, executor_), absl::OkStatus());
    Run(op, {{"x", in}, {"weight", w}, {"bias", b}, {"out", y}});
    if (std::string(provider) == "simd") {
      EXPECT_TRUE(AllBitsEqual(out, want));
    } else {
      EXPECT_TRUE(AllClose(out, want, 1e-5));
    }
    const AnyTensorView other =
        DenseTensor<const float, 4>(x.data(), {6, 2, 3, 2});
    ExpectRefusal(op.CheckArgs({in, other, b, y}),
                  "weight or bias is not what Prepare was given");
    const AnyTensorView lower =
        DenseTensor<const float, 4>(x.data(), {3, 4, 5, 9});
    ExpectRefusal(op.CheckArgs({lower, w, b, y}),
                  "conv2d: x is [3, 4, 5, 9]; need [any, 4, 6, 9]");
    ExpectRefusal(
        op.CheckArgs(
            {in, w, b, DenseTensor<float, 4>(out.data(), {3, 4, 6, 9})}),
        "conv2d: out is [3, 4, 6, 9]; need [any, 6, 6, 3]");
    ExpectRefusal(
        op.CheckArgs(
            {DenseTensor<const float, 4>(out.data(), {3, 4, 6, 9}), w, b, y}),
        "conv2d: out overlaps x");
    ExpectRefusal(op.Prepare({in, w, AnyTensorView(), y}, executor_),
                  "conv2d: bias is missing; need what the operator was made");
    // Strides that a framework calls channels_last.
    const AnyTensorView last(DType::kF32, static_cast<const void*>(x.data()), 4,
                             {3, 4, 6, 9}, {216, 1, 36, 4});
    ExpectRefusal(op.CheckArgs({last, w, b, y}),
                  "conv2d: x is channels_last: its channels have stride 1");
    ExpectRefusal(
        op.CheckArgs({in, w, b,
                      AnyTensorView(DType::kF32, static_cast<void*>(out.data()),
                                    4, {1, 6, 6, 3}, {216, 36, 6, 2})}),
        "conv2d: out has stride 2 in dimension 3; need 1");
    const AnyTensorView gaps(DType::kF32, weight.data(), 4, {6, 2, 3, 2},
                             {12, 6, 2, 2});
    ExpectRefusal(op.Prepare({in, gaps, b, y}, executor_), "conv2d: weight ");
    if (std::string(provider) == "simd") {
      ExpectRefusal(op.WorkspaceBytes({in, w, b, y}, 0).status(),
                    "conv2d: max_workers=0; need 1");
    }
  }
}

// A patch as large as the image, as encoders of images have it, leaves dense
// outputs whose channels have stride 1.
TEST_P(ConvOpsTest, OneColumnIsNotChannelsLast) {
  const auto x = SmallIntegers<float>(rng_, 2 * 4 * 3 * 2, -4, 4);
  const auto weight = SmallIntegers<float>(rng_, 6 * 4 * 3 * 2, -4, 4);
  Floats want(2 * 6);
  for (size_t b = 0; b < 2; ++b) {
    for (size_t o = 0; o < 6; ++o) {
      for (size_t i = 0; i < 24; ++i) {
        want[b * 6 + o] += x[b * 24 + i] * weight[o * 24 + i];
      }
    }
  }
  const NamedArgs args = {{"x", TensorMeta{DType::kF32, {2, 4, 3, 2}}},
                          {"weight", TensorMeta{DType::kF32, {6, 4, 3, 2}}}};
  for (const char* provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    const MadeOp op = Make(provider, "conv2d", args);
    Floats out(want.size());
    const AnyTensorView in =
        DenseTensor<const float, 4>(x.data(), {2, 4, 3, 2});
    const AnyTensorView w =
        DenseTensor<const float, 4>(weight.data(), {6, 4, 3, 2});
    const AnyTensorView y = DenseTensor<float, 4>(out.data(), {2, 6, 1, 1});
    ASSERT_EQ(op.Prepare({in, w, AnyTensorView(), y}, executor_),
              absl::OkStatus());
    Run(op, {{"x", in}, {"weight", w}, {"out", y}});
    EXPECT_EQ(out, want);
  }
}

TEST(ConvOpsRefusalTest, NamesWhatIsWrong) {
  OpRegistry registry;
  ASSERT_EQ(RegisterConvOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  struct Case {
    std::string field;
    OpArg value;
    std::string words;
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  };
  const Case cases[] = {
      {"x", kBias, "conv2d: x is f32[6]; need [n, n, n, n]"},
      {"weight", kBias, "weight is f32[6]; need [n, n, n, n]"},
      {"bias", kX, "bias is f32[2, 4, 6, 9]; need f32[6]"},
      {"groups", int64_t{4},
       "conv2d: channels of out=6; need a multiple of the 4 groups"},
      {"groups", int64_t{3}, "conv2d: channels of x=4; need a multiple of"},
      {"groups", int64_t{1}, "conv2d: channels of weight=2; need 4"},
      {"stride_h", int64_t{0}, "conv2d: stride_h=0; need 1 <= stride_h <="},
      {"padding_h", int64_t{-1}, "conv2d: padding_h=-1; need 0"},
      {"dilation_w", int64_t{9},
       "conv2d: weight.width=2 with dilation 9 reaches over"},
      {"x", TensorMeta{DType::kF32, {2, 4, 0, 9}}, "conv2d: x.height=0; need"},
      {"x", TensorMeta{DType::kI8, {2, 4, 6, 9}}, "conv2d: x is i8; need f32",
       absl::StatusCode::kUnimplemented},
      {"weight", TensorMeta{DType::kI8, {6, 2, 3, 2}},
       "conv2d: weight is i8; need f32", absl::StatusCode::kUnimplemented},
  };
  for (const Case& c : cases) {
    NamedArgs args = kArgs;
    for (auto& [name, value] : args) {
      if (name == c.field) value = c.value;
    }
    ExpectRefusal(ops.Make("conv2d", args).status(), c.code, c.words);
    ExpectRefusal(registry.InferShapes("conv2d", args).status(), c.code,
                  c.words);
  }
  const TensorMeta video = {DType::kF32, {2, 4, 3, 6, 9}};
  const TensorMeta cube = {DType::kF32, {6, 4, 2, 3, 2}};
  const std::pair<const char*, const char*> numbers[] = {
      {"stride_d", "conv3d: stride_d=-1; need 1"},
      {"stride_w", "conv3d: stride_w=-1; need 1"},
      {"padding_d", "conv3d: padding_d=-1; need 0"},
      {"padding_w", "conv3d: padding_w=-1; need 0"},
      {"dilation_d", "conv3d: dilation_d=-1; need 1"},
      {"dilation_h", "conv3d: dilation_h=-1; need 1"}};
  for (const auto& [field, words] : numbers) {
    ExpectRefusal(
        ops.Make("conv3d",
                 {{"x", video}, {"weight", cube}, {field, int64_t{-1}}})
            .status(),
        words);
  }
  ExpectRefusal(ops.Make("conv3d", {{"x", kX}, {"weight", kWeight}}).status(),
                "conv3d: x is f32[2, 4, 6, 9]; need [n, n, n, n, n]");
}

}  // namespace
}  // namespace quern
