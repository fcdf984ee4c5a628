#include "quern/ops/mixer/short_conv.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/mixer_refusals_testutil.h"
#include "quern/ops/mixer/mixer_testutil.h"
#include "quern/ops/mixer/reference_mixers_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};

ShortConvSpec Spec(int64_t hidden, int64_t channels, int64_t width,
                   DType dtype) {
  ShortConvSpec spec;
  spec.hidden = hidden;
  spec.channels = channels;
  spec.width = width;
  spec.dtype = spec.weight_dtype = dtype;
  return spec;
}

struct Products {
  Products(const ShortConvSpec& spec, Rng& rng)
      : in_proj(spec.dtype, 3 * spec.channels, spec.hidden, 0.5, rng),
        out_proj(spec.dtype, spec.hidden, spec.channels, 0.5, rng) {}
  TestWeights in_proj, out_proj;
};

class Layer final : public MixerLayer {
 public:
  Layer(const ShortConvSpec& spec, const Products& products, int64_t tokens,
        Rng& rng)
      : MixerLayer({spec.hidden,
                    spec.channels,
                    spec.width,
                    spec.dtype,
                    spec.weight_dtype,
                    {},
                    DType::kF32},
                   tokens, /*biased=*/spec.channels % 2 == 0, rng),
        spec_(spec),
        products_(products) {}

  MixerArgs args(const Sequences& sequences) const {
    return CommonArgs(sequences);
  }

  BoundedRows Sequence(const BoundedRows& x, int64_t /*chunk*/,
                       BoundedWindow& window, BoundedRow&) const override {
    return ReferenceShortConv(
        spec_, Numbers(products_.in_proj, products_.out_proj), x, window);
  }

 private:
  ShortConvSpec spec_;
  const Products& products_;
};

// Makes layers that share the weights of their products.
auto Maker(const ShortConvSpec& spec, const Products& products) {
  return [&spec, &products](int64_t tokens, Rng& rng) {
    return std::make_unique<Layer>(spec, products, tokens, rng);
  };
}

class ShortConvTest : public MixerFixture {
 protected:
  ShortConvPlan Plan(const ShortConvSpec& spec, const Products& products) {
    InlineExecutor executor;
    auto plan = ShortConvPlan::Create(spec, products.in_proj.packed,
                                      products.out_proj.packed, executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
};
QUERN_INSTANTIATE_ISA_TEST(ShortConvTest);

TEST_P(ShortConvTest, IsTheFormula) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    for (const int64_t width : {2, 3, 4}) {
      for (const int64_t channels : {1, 7, 48, 300}) {
        SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " width "
                                        << width << " channels " << channels);
        const ShortConvSpec spec = Spec(20, channels, width, dtype);
        const Products products(spec, rng);
        ExpectOracle(Plan(spec, products), Maker(spec, products));
      }
    }
  }
}

// A sequence in several calls has the bits of one call.
TEST_P(ShortConvTest, StatesCarryOver) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    const ShortConvSpec spec = Spec(16, 33, 3, dtype);
    const Products products(spec, rng);
    const ShortConvPlan plan = Plan(spec, products);
    TestRng same(1), again(1);
    const Layer whole(spec, products, 9, same), cut(spec, products, 9, again);
    InlineExecutor executor;
    Run(plan, whole.args({{2}, {0, 9}, {0}}), 9, executor);
    Run(plan, cut.args({{2}, {0, 1}, {0}}), 9, executor);
    Run(plan, cut.args({{2}, {1, 7}, {1}}), 9, executor);
    Run(plan, cut.args({{2}, {7, 9}, {}}), 9, executor);
    EXPECT_TRUE(AllBitsEqual(cut.out().bits(), whole.out().bits()));
    EXPECT_TRUE(AllBitsEqual(cut.windows().bits(), whole.windows().bits()));
  }
}

TEST_P(ShortConvTest, PromptsAreTheFormula) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    SCOPED_TRACE(DTypeName(dtype));
    const ShortConvSpec spec = Spec(20, 48, 3, dtype);
    const Products products(spec, rng);
    ExpectPrompts(Plan(spec, products), Maker(spec, products));
  }
}

TEST_P(ShortConvTest, BitsDependOnNoWorkers) {
  TestRng rng;
  const ShortConvSpec spec = Spec(64, 192, 3, DType::kBF16);
  const Products products(spec, rng);
  ExpectSameBitsOnWorkers(Plan(spec, products), Maker(spec, products));
}

TEST_P(ShortConvTest, DoesNothingWithoutTokens) {
  TestRng rng;
  const ShortConvSpec spec = Spec(16, 33, 3, DType::kF32);
  const Products products(spec, rng);
  ExpectNothingWithoutTokens(Plan(spec, products), Maker(spec, products));
}

TEST(ShortConvRefusalTest, NamesWhatIsWrong) {
  TestRng rng;
  InlineExecutor executor;
  const ShortConvSpec right = Spec(16, 8, 3, DType::kF32);
  const Products products(right, rng);
  const Layer layer(right, products, 4, rng);
  const auto create = [&](const ShortConvSpec& spec) {
    return ShortConvPlan::Create(spec, products.in_proj.packed,
                                 products.out_proj.packed, executor)
        .status();
  };
  ExpectRefusal(create(Spec(16, 0, 3, DType::kF32)),
                "short_conv: channels=0; need 1");
  ExpectRefusal(create(Spec(16, 9, 3, DType::kF32)),
                "short_conv: columns of in_proj=24; need 27, as the layer has");
  ExpectRefusal(create(Spec(17, 8, 3, DType::kF32)),
                "short_conv: k of in_proj=16; need 17");
  ExpectRefusal(create(Spec(16, 8, 5, DType::kF32)),
                "short_conv: width=5; need 2");
  ExpectRefusal(create(Spec(16, 8, 3, DType::kI8)),
                absl::StatusCode::kUnimplemented,
                "short_conv: dtype is i8; need f32");
  ShortConvSpec odd = right;
  odd.weight_dtype = DType::kI8;
  ExpectRefusal(create(odd), absl::StatusCode::kUnimplemented,
                "short_conv: weight_dtype is i8");
  ExpectRefusal(ShortConvPlan::Create(right, products.in_proj.packed,
                                      products.in_proj.packed, executor)
                    .status(),
                "short_conv: columns of out_proj=24; need 16");
  const auto plan = ShortConvPlan::Create(right, products.in_proj.packed,
                                          products.out_proj.packed, executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "max_m=-1");
  const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
  const MixerArgs good = layer.args(sequences);
  ExpectCommonRefusals("short_conv", *plan, good,
                       [](MixerArgs& a) -> MixerArgs& { return a; });
  ShortConvSpec of_onednn = right;
  of_onednn.kernels = "onednn";
  const auto strided = ShortConvPlan::Create(
      of_onednn, products.in_proj.packed, products.out_proj.packed, executor);
  ASSERT_TRUE(strided.ok()) << strided.status();
  ExpectStrideRefusals("short_conv", *strided, good,
                       [](MixerArgs& a) -> MixerArgs& { return a; });
}

}  // namespace
}  // namespace quern
