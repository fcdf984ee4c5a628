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
#include "quern/ops/mixer/mixer_testutil.h"
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

  BoundedRow Token(const BoundedRow& x, BoundedWindow& window,
                   BoundedRow&) const override {
    const int64_t n = spec_.channels;
    const DType dtype = spec_.dtype;
    const BoundedRow p = BoundedLinear(dtype, x, products_.in_proj.values);
    BoundedRow v = Part(p, 2 * n, n);
    for (size_t c = 0; c < v.size(); ++c) v[c] = Rounded(dtype, p[c] * v[c]);
    BoundedRow y = Convolve(v, /*silu=*/false, window);
    for (size_t c = 0; c < y.size(); ++c) {
      y[c] = Rounded(dtype, p[c + static_cast<size_t>(n)] * y[c]);
    }
    return BoundedLinear(dtype, y, products_.out_proj.values);
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
  ExpectRefusal(create(Spec(16, 8, 5, DType::kF32)), "width=5; need 2");
  const auto plan = ShortConvPlan::Create(right, products.in_proj.packed,
                                          products.out_proj.packed, executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "max_m=-1");
  const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
  const MixerArgs good = layer.args(sequences);
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());
  struct Case {
    void (*spoil)(MixerArgs&);
    std::string words;
  };
  const Case cases[] = {
      {[](MixerArgs& a) { a.x = a.conv_weight; }, "short_conv: x is"},
      {[](MixerArgs& a) { a.conv_weight = a.x; }, "short_conv: conv_weight is"},
      {[](MixerArgs& a) { a.conv_bias = a.x; }, "short_conv: conv_bias is"},
      {[](MixerArgs& a) { a.conv_state = a.x; }, "short_conv: conv_state is"},
      {[](MixerArgs& a) { a.out = a.conv_bias; }, "short_conv: out is"},
      {[](MixerArgs& a) {
         a.out = AnyTensorView(a.x.dtype(), const_cast<void*>(a.x.data()), 2,
                               {4, 16}, {a.x.stride(0), 1});
       },
       "short_conv: out overlaps x"},
      {[](MixerArgs& a) {
         static const int64_t beyond[] = {0, 1, 2, 5};
         a.batch.state_indices = DenseVector(beyond, 4);
       },
       "short_conv: state_indices[3]=5; need 0 <= index < 5"},
  };
  for (const Case& c : cases) {
    MixerArgs args = good;
    c.spoil(args);
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

}  // namespace
}  // namespace quern
