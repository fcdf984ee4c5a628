#include "quern/ops/conv/conv.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/conv/conv_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};

ConvSpec Spec(int64_t in_channels, int64_t out_channels,
              const ConvExtents& kernel) {
  ConvSpec spec;
  spec.in_channels = in_channels;
  spec.out_channels = out_channels;
  spec.kernel = kernel;
  return spec;
}
// A spec whose patches do not overlap.
ConvSpec Patches(int64_t in_channels, int64_t out_channels,
                 const ConvExtents& kernel) {
  ConvSpec spec = Spec(in_channels, out_channels, kernel);
  spec.stride = kernel;
  return spec;
}

class ConvTest : public IsaTest {
 protected:
  ConvPlan Plan(const ConvSpec& spec, const ConvData& data) {
    InlineExecutor executor;
    auto plan = ConvPlan::Create(spec, data.weight(), data.bias(), executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
  void ExpectExact(const ConvSpec& spec, const ConvExtents& in, int64_t batch,
                   const std::string& implementation, int64_t pad = 3) {
    SCOPED_TRACE(testing::Message()
                 << "channels " << spec.in_channels << " -> "
                 << spec.out_channels << " groups " << spec.groups << " kernel "
                 << spec.kernel.depth << "x" << spec.kernel.height << "x"
                 << spec.kernel.width << " in " << in.depth << "x" << in.height
                 << "x" << in.width);
    TestRng rng;
    ConvData::Values values = ConvData::Integers(spec, in, batch, rng);
    if (spec.out_channels % 2 == 0) values.bias.clear();
    const ConvData data(spec, in, batch, values, pad);
    const ConvPlan plan = Plan(spec, data);
    EXPECT_EQ(plan.implementation(), implementation);
    InlineExecutor executor;
    data.Run(plan, executor);
    data.ExpectOutputs(/*exact=*/true);
  }
};
QUERN_INSTANTIATE_ISA_TEST(ConvTest);

// Every remainder of a pair of vectors and of a block of channels.
TEST_P(ConvTest, IsExactAtEveryWidthAndChannel) {
  for (int64_t width = 1; width <= 67; ++width) {
    const int64_t channels = width % 9 + 1;
    ConvSpec spec = Spec(2, channels, {1, 2, 3});
    spec.padding = {0, 0, 1};
    spec.dtype = kFloats[width % 3];
    ExpectExact(spec, {1, 3, width}, 2, "direct");
  }
}

TEST_P(ConvTest, IsExactForRandomShapes) {
  TestRng rng;
  for (int i = 0; i < 120; ++i) {
    ConvSpec spec;
    spec.groups = rng.Integer(1, 3);
    spec.in_channels = spec.groups * rng.Integer(1, 3);
    spec.out_channels = spec.groups * rng.Integer(1, 6);
    const auto some = [&](int64_t lo, int64_t hi) {
      ConvExtents e = {rng.Integer(lo, hi), rng.Integer(lo, hi),
                       rng.Integer(lo, hi)};
      return e;
    };
    spec.kernel = some(1, 4);
    spec.stride = some(1, 4);
    spec.padding = some(0, 3);
    spec.dilation = some(1, 3);
    spec.dtype = kFloats[rng.Integer(0, 2)];
    spec.weight_dtype = kFloats[rng.Integer(0, 2)];
    // As small as the kernel allows, or larger.
    const auto extent = [&](int64_t kernel, int64_t dilation, int64_t padding,
                            int64_t more) {
      const int64_t least = dilation * (kernel - 1) + 1 - 2 * padding;
      return std::max<int64_t>(1, least + rng.Integer(0, more));
    };
    const ConvExtents in = {
        extent(spec.kernel.depth, spec.dilation.depth, spec.padding.depth, 3),
        extent(spec.kernel.height, spec.dilation.height, spec.padding.height,
               5),
        extent(spec.kernel.width, spec.dilation.width, spec.padding.width, 40)};
    const bool patches = spec.groups == 1 && spec.kernel == spec.stride &&
                         spec.padding == ConvExtents{0, 0, 0} &&
                         spec.dilation == ConvExtents();
    ExpectExact(spec, in, rng.Integer(1, 2), patches ? "patches" : "direct",
                rng.Integer(0, 3));
  }
}

// A row of 700 spans blocks of 256, which a stride of 3 divides unevenly.
TEST_P(ConvTest, IsExactOnLongRows) {
  for (const int64_t stride : {1, 2, 3, 5}) {
    ConvSpec spec = Spec(1, 5, {1, 1, 5});
    spec.stride.width = stride;
    spec.dilation.width = 7;
    spec.padding.width = 13;
    ExpectExact(spec, {1, 2, 700}, 1, "direct");
  }
}

TEST_P(ConvTest, IsExactOnPatches) {
  for (const DType dtype : kFloats) {
    for (const DType weight_dtype : kFloats) {
      ConvSpec spec = Patches(3, 5, {1, 4, 4});
      spec.dtype = dtype;
      spec.weight_dtype = weight_dtype;
      ExpectExact(spec, {1, 12, 20}, 2, "patches");
      // A remainder that no patch covers.
      ExpectExact(spec, {1, 15, 23}, 2, "patches");
    }
  }
  ExpectExact(Patches(3, 8, {2, 14, 14}), {4, 28, 42}, 1, "patches");
  // More patches than a product has rows, which end within a row of outputs.
  ExpectExact(Patches(2, 35, {1, 1, 1}), {1, 37, 41}, 1, "patches");
}

// Inputs of one patch, dense and not, are read where they are.
TEST_P(ConvTest, ReadsWholePatches) {
  for (const int64_t pad : {0, 3}) {
    ExpectExact(Patches(3, 40, {2, 4, 6}), {2, 4, 6}, 7, "patches", pad);
    ExpectExact(Patches(1, 1, {1, 1, 5}), {1, 1, 5}, 1, "patches", pad);
    // More inputs than a product has rows.
    ExpectExact(Patches(1, 3, {1, 1, 2}), {1, 1, 2}, 1500, "patches", pad);
  }
}

TEST_P(ConvTest, IsWithinItsBound) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    ConvSpec specs[] = {Spec(6, 7, {2, 3, 5}), Patches(3, 9, {1, 14, 14})};
    specs[0].padding = {1, 1, 2};
    specs[0].stride = {1, 2, 1};
    for (ConvSpec& spec : specs) {
      spec.dtype = spec.weight_dtype = dtype;
      const ConvExtents in = {3, 28, 30};
      const ConvData data(spec, in, 2, ConvData::Reals(spec, in, 2, rng), 2);
      const ConvPlan plan = Plan(spec, data);
      InlineExecutor executor;
      data.Run(plan, executor);
      data.ExpectOutputs(/*exact=*/false);
    }
  }
}

// Threads and the rest of the batch decide nothing.
TEST_P(ConvTest, BitsDependOnNeitherWorkersNorBatch) {
  TestRng rng;
  ConvSpec specs[] = {Spec(16, 24, {1, 3, 3}), Patches(3, 64, {1, 7, 7}),
                      Spec(32, 32, {1, 3, 3})};
  specs[0].padding = {0, 1, 1};
  specs[2].groups = 32;
  for (ConvSpec& spec : specs) {
    spec.dtype = DType::kBF16;
    const ConvExtents in = {1, 35, 40};
    const auto values = ConvData::Reals(spec, in, 3, rng);
    const ConvData alone(spec, in, 3, values, 2);
    const ConvPlan plan = Plan(spec, alone);
    InlineExecutor executor;
    alone.Run(plan, executor);
    for (const int workers : {2, 7, 64}) {
      const ConvData data(spec, in, 3, values, 2);
      ManyWorkers many(workers);
      data.Run(plan, many);
      EXPECT_TRUE(AllBitsEqual(data.outputs().bits(), alone.outputs().bits()));
    }
    const auto threads = Workers(4);
    const ConvData data(spec, in, 3, values, 2);
    data.Run(plan, *threads);
    EXPECT_TRUE(AllBitsEqual(data.outputs().bits(), alone.outputs().bits()));
    // The second input by itself.
    const auto image = static_cast<int64_t>(values.in.size() / 3);
    const ConvData::Values one = {
        Doubles(values.in.begin() + image, values.in.begin() + 2 * image),
        values.weight, values.bias};
    const ConvData single(spec, in, 1, one, 0);
    single.Run(plan, executor);
    const auto bits = alone.outputs().bits();
    const auto part = static_cast<int64_t>(bits.size() / 3);
    EXPECT_TRUE(AllBitsEqual(
        single.outputs().bits(),
        std::vector<uint32_t>(bits.begin() + part, bits.begin() + 2 * part)));
  }
}

TEST_P(ConvTest, ANaNTouchesTheOutputsThatSeeIt) {
  TestRng rng;
  for (ConvSpec spec : {Spec(2, 5, {1, 3, 3}), Patches(2, 5, {1, 3, 3})}) {
    const ConvExtents in = {1, 9, 21};
    auto values = ConvData::Reals(spec, in, 1, rng);
    values.in[5 * 21 + 10] = std::numeric_limits<double>::quiet_NaN();
    const ConvData data(spec, in, 1, values, 2);
    InlineExecutor executor;
    data.Run(Plan(spec, data), executor);
    data.ExpectOutputs(/*exact=*/false);
  }
}

TEST_P(ConvTest, DoesNothingForAnEmptyBatch) {
  TestRng rng;
  for (const ConvSpec& spec :
       {Spec(2, 5, {1, 3, 3}), Patches(2, 5, {1, 3, 3})}) {
    const ConvExtents in = {1, 9, 21};
    const ConvData data(spec, in, 0, ConvData::Reals(spec, in, 0, rng), 2);
    const ConvPlan plan = Plan(spec, data);
    const auto bytes = plan.WorkspaceBytes(0, in, 1);
    ASSERT_TRUE(bytes.ok());
    EXPECT_EQ(*bytes, 0);
    InlineExecutor executor;
    data.Run(plan, executor);
  }
}

}  // namespace
}  // namespace quern
