#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int64_t kMost = ConvSpec::kMaxExtent;

// Six channels to four, in two groups, 3 x 3.
ConvSpec Spec() {
  ConvSpec spec;
  spec.in_channels = 6;
  spec.out_channels = 4;
  spec.groups = 2;
  spec.kernel = {1, 3, 3};
  return spec;
}

struct Tensors {
  std::vector<float> weight = std::vector<float>(4 * 3 * 9);
  std::vector<float> bias = std::vector<float>(4);
  std::vector<float> in = std::vector<float>(2 * 6 * 5 * 7);
  std::vector<float> out = std::vector<float>(2 * 4 * 3 * 5);

  AnyTensorView Weight() {
    return DenseTensor<float, 5>(weight.data(), {4, 3, 1, 3, 3});
  }
  AnyTensorView Bias() { return DenseVector(bias.data(), 4); }
  AnyTensorView In() {
    return DenseTensor<float, 5>(in.data(), {2, 6, 1, 5, 7});
  }
  AnyTensorView Out() {
    return DenseTensor<float, 5>(out.data(), {2, 4, 1, 3, 5});
  }
};

TEST(ConvRefusalTest, CreateNamesTheField) {
  struct Case {
    void (*spoil)(ConvSpec&);
    std::string words;
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  };
  const Case cases[] = {
      {[](ConvSpec& s) { s.in_channels = 0; },
       "conv: in_channels=0; need 1 <= in_channels <= 2147483647"},
      {[](ConvSpec& s) { s.out_channels = -4; }, "out_channels=-4; need 1"},
      {[](ConvSpec& s) { s.out_channels = kMost + 1; },
       "out_channels=2147483648; need 1"},
      {[](ConvSpec& s) { s.groups = 0; }, "groups=0; need 1"},
      {[](ConvSpec& s) { s.groups = 3; },
       "out_channels=4; need a multiple of the 3 groups"},
      {[](ConvSpec& s) { s.groups = 4; },
       "in_channels=6; need a multiple of the 4 groups"},
      {[](ConvSpec& s) { s.kernel.depth = 0; }, "kernel.depth=0; need 1"},
      {[](ConvSpec& s) { s.stride.height = 0; }, "stride.height=0; need 1"},
      {[](ConvSpec& s) { s.stride.width = -1; }, "stride.width=-1; need 1"},
      {[](ConvSpec& s) { s.dilation.width = 0; }, "dilation.width=0; need 1"},
      {[](ConvSpec& s) { s.padding.height = -1; },
       "padding.height=-1; need 0 <= padding.height <= 2147483647"},
      {[](ConvSpec& s) {
         s.kernel = {kMost, kMost, kMost};
       },
       "need at most 2147483647 weights for an output"},
      {[](ConvSpec& s) { s.dtype = DType::kI8; },
       "dtype is i8; need f32 or bf16 or f16",
       absl::StatusCode::kUnimplemented},
      {[](ConvSpec& s) { s.weight_dtype = DType::kF8E4M3; },
       "weight_dtype is f8e4m3; need f32 or bf16 or f16",
       absl::StatusCode::kUnimplemented},
      {[](ConvSpec& s) { s.kernel.width = 4; },
       "weight is [4, 3, 1, 3, 3]; need [4, 3, 1, 3, 4]"},
      {[](ConvSpec& s) { s.groups = 1; },
       "weight is [4, 3, 1, 3, 3]; need [4, 6, 1, 3, 3]"},
      {[](ConvSpec& s) { s.weight_dtype = DType::kBF16; },
       "weight is f32; need bf16"},
  };
  Tensors t;
  InlineExecutor executor;
  for (const Case& c : cases) {
    ConvSpec spec = Spec();
    c.spoil(spec);
    ExpectRefusal(
        ConvPlan::Create(spec, t.Weight(), t.Bias(), executor).status(), c.code,
        c.words);
  }
  ExpectRefusal(ConvPlan::Create(Spec(), t.Weight(),
                                 DenseVector(t.bias.data(), 3), executor)
                    .status(),
                "bias is [3]; need [4]");
  const AnyTensorView gaps(DType::kF32, t.weight.data(), 5, {4, 3, 1, 3, 3},
                           {27, 9, 9, 1, 1});
  ExpectRefusal(ConvPlan::Create(Spec(), gaps, {}, executor).status(),
                "weight has gaps");
  // Patches, which are packed, and others alike.
  for (const bool patches : {false, true}) {
    ConvSpec spec = Spec();
    spec.groups = patches ? 1 : 2;
    spec.in_channels = patches ? 3 : 6;
    if (patches) spec.stride = spec.kernel;
    for (const int64_t stride : {0, 26}) {
      const AnyTensorView overlapping(DType::kF32, t.weight.data(), 5,
                                      {4, 3, 1, 3, 3}, {stride, 9, 9, 3, 1});
      ExpectRefusal(ConvPlan::Create(spec, overlapping, {}, executor).status(),
                    "conv: weight has stride " + std::to_string(stride) +
                        " in dimension 0; need 27 or more, as its elements "
                        "must not overlap");
    }
  }
}

TEST(ConvRefusalTest, CheckArgsNamesTheArgument) {
  Tensors t;
  InlineExecutor executor;
  const auto plan = ConvPlan::Create(Spec(), t.Weight(), t.Bias(), executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->CheckArgs(t.In(), t.Out()), absl::OkStatus());
  ExpectRefusal(plan->CheckArgs(DenseMatrix(t.in.data(), 2, 3), t.Out()),
                "conv: in is [2, 3]; need [any, 6, any, any, any]");
  ExpectRefusal(
      plan->CheckArgs(DenseTensor<float, 5>(t.in.data(), {2, 6, 1, 2, 7}),
                      t.Out()),
      "kernel.height=3 with dilation 1 reaches over 3 positions; need at most "
      "2, as the padded input has");
  ExpectRefusal(
      plan->CheckArgs(DenseTensor<float, 5>(t.in.data(), {2, 6, 1, 5, 0}),
                      t.Out()),
      "in.width=0; need 1 <= in.width <= 2147483647");
  ExpectRefusal(plan->CheckArgs(t.In(), DenseTensor<float, 5>(t.out.data(),
                                                              {2, 4, 1, 3, 4})),
                "out is [2, 4, 1, 3, 4]; need [2, 4, 1, 3, 5]");
  ExpectRefusal(plan->CheckArgs(t.In(), DenseTensor<const float, 5>(
                                            t.out.data(), {2, 4, 1, 3, 5})),
                "out is read-only");
  ExpectRefusal(plan->CheckArgs(t.In(), DenseTensor<float, 5>(t.in.data(),
                                                              {2, 4, 1, 3, 5})),
                "out overlaps in");
}

TEST(ConvRefusalTest, WorkspaceBytesNamesTheBound) {
  Tensors t;
  InlineExecutor executor;
  ConvSpec spec = Spec();
  spec.padding = {0, kMost, kMost};
  const auto direct = ConvPlan::Create(spec, t.Weight(), {}, executor);
  ASSERT_TRUE(direct.ok()) << direct.status();
  const ConvExtents in = {1, 5, 7};
  ExpectRefusal(direct->WorkspaceBytes(1, in, 1).status(),
                absl::StatusCode::kResourceExhausted,
                "conv: an input of [6, 1, 5, 7] needs a workspace of 2^63");
  ExpectRefusal(direct->WorkspaceBytes(-1, in, 1).status(),
                "max_batch=-1; need max_batch >= 0");
  ExpectRefusal(direct->WorkspaceBytes(1, in, 0).status(),
                "max_workers=0; need 1");
  ExpectRefusal(direct->WorkspaceBytes(1, {0, 5, 7}, 1).status(),
                "in.depth=0; need 1");
  // More patches than 63 bits count: a product has 1024 at most.
  spec = Spec();
  spec.groups = 1;
  spec.in_channels = 3;
  spec.stride = spec.kernel;
  const auto patches = ConvPlan::Create(spec, t.Weight(), {}, executor);
  ASSERT_TRUE(patches.ok()) << patches.status();
  EXPECT_TRUE(patches->WorkspaceBytes(kMost, {kMost, kMost, kMost}, 1).ok());
}

}  // namespace
}  // namespace quern
