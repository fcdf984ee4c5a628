#include "quern/ops/mixer/gated_delta_net.h"

#include <cmath>
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
#include "quern/ops/mixer/bounded_recurrences_testutil.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/mixer_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

GatedDeltaNetSpec Spec(DType dtype) {
  GatedDeltaNetSpec spec;
  spec.hidden = 20;
  spec.key_heads = 2;
  spec.value_heads = 4;
  spec.dk = 12;
  spec.dv = 18;
  spec.dtype = dtype;
  spec.weight_dtype = dtype;
  return spec;
}

struct Products {
  Products(const GatedDeltaNetSpec& s, Rng& rng)
      : in_proj(s.dtype, s.projected(), s.hidden, 0.4, rng),
        out_proj(s.dtype, s.hidden, s.values(), 0.3, rng) {}
  TestWeights in_proj, out_proj;
};

class Layer final : public MixerLayer {
 public:
  Layer(const GatedDeltaNetSpec& s, const Products& products, int64_t tokens,
        Rng& rng)
      : MixerLayer({s.hidden,
                    s.conv_channels(),
                    s.width,
                    s.dtype,
                    s.weight_dtype,
                    {s.value_heads, s.dk, s.dv},
                    s.state_dtype},
                   tokens, /*biased=*/false, rng),
        spec_(s),
        products_(products),
        a_log_(DType::kF32, {s.value_heads}, -1, 1, rng),
        bias_(DType::kF32, {s.value_heads}, -1, 1, rng),
        norm_(s.weight_dtype, {s.dv}, 0.5, 1.5, rng) {}

  GatedDeltaNetArgs args(const Sequences& sequences) const {
    GatedDeltaNetArgs args;
    args.layer = CommonArgs(sequences);
    args.state = states().view();
    args.a_log = a_log_.const_view();
    args.dt_bias = bias_.const_view();
    args.norm = norm_.const_view();
    return args;
  }

  BoundedRow Token(const BoundedRow& x, BoundedWindow& window,
                   BoundedRow& state) const override {
    const GatedDeltaNetSpec& s = spec_;
    const BoundedRow p = BoundedLinear(s.dtype, x, products_.in_proj.values);
    const BoundedRow mixed =
        Convolve(Part(p, 0, s.conv_channels()), /*silu=*/true, window);
    const int64_t z_at = s.conv_channels(), b_at = z_at + s.values();
    const Doubles a_log = a_log_.doubles(), bias = bias_.doubles();
    const Doubles w = norm_.doubles();
    BoundedRow y;
    for (int64_t h = 0; h < s.value_heads; ++h) {
      const auto at = static_cast<size_t>(h);
      const int64_t key = h / (s.value_heads / s.key_heads);
      const Bounded delta =
          BoundedSoftplus(p[static_cast<size_t>(b_at + s.value_heads + h)] +
                          Bounded{bias[at], 0});
      const Bounded rate = RoundedF32(-std::exp(a_log[at]), 0) * delta;
      const Bounded beta = BoundedSigmoid(p[static_cast<size_t>(b_at + h)]);
      const BoundedRow raw = Rounded(
          s.dtype,
          BoundedDeltaHead(Part(mixed, key * s.dk, s.dk),
                           Part(mixed, s.keys() + key * s.dk, s.dk),
                           Part(mixed, 2 * s.keys() + h * s.dv, s.dv), rate,
                           beta, s.state_dtype,
                           &state[static_cast<size_t>(h * s.dk * s.dv)]));
      const Bounded inverse = BoundedInverseNorm(
          raw, static_cast<double>(raw.size()), double{s.eps});
      for (size_t i = 0; i < raw.size(); ++i) {
        const Bounded z = p[static_cast<size_t>(z_at + h * s.dv) + i];
        y.push_back(Rounded(
            s.dtype, raw[i] * inverse * Bounded{w[i], 0} * BoundedSilu(z)));
      }
    }
    return BoundedLinear(s.dtype, y, products_.out_proj.values);
  }

 private:
  GatedDeltaNetSpec spec_;
  const Products& products_;
  TestTensor a_log_, bias_, norm_;
};

auto Maker(const GatedDeltaNetSpec& spec, const Products& products) {
  return [&spec, &products](int64_t tokens, Rng& rng) {
    return std::make_unique<Layer>(spec, products, tokens, rng);
  };
}

class GatedDeltaNetTest : public MixerFixture {
 protected:
  GatedDeltaNetPlan Plan(const GatedDeltaNetSpec& spec,
                         const Products& products) {
    InlineExecutor executor;
    auto plan = GatedDeltaNetPlan::Create(spec, products.in_proj.packed,
                                          products.out_proj.packed, executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
};
QUERN_INSTANTIATE_ISA_TEST(GatedDeltaNetTest);

// The bounds of 16-bit types grow with the tokens until they say nothing, so
// the oracle judges f32, and the test below the other types.
TEST_P(GatedDeltaNetTest, IsTheFormula) {
  TestRng rng;
  for (const int64_t key_heads : {1, 2, 4}) {
    GatedDeltaNetSpec spec = Spec(DType::kF32);
    spec.key_heads = key_heads;
    const Products products(spec, rng);
    ExpectOracle(Plan(spec, products), Maker(spec, products));
  }
}

// One token of each sequence, in all types.
TEST_P(GatedDeltaNetTest, DecodesInAllTypes) {
  TestRng rng;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(DTypeName(dtype));
    GatedDeltaNetSpec spec = Spec(dtype);
    spec.state_dtype = dtype;
    const Products products(spec, rng);
    const Layer layer(spec, products, 4, rng);
    const MixerLayer::Pools before = layer.pools();
    const Sequences sequences = {{4, 0, -1, 2}, {}, {1, 0, 1, 1}};
    InlineExecutor executor;
    Run(Plan(spec, products), layer.args(sequences), 4, executor);
    layer.ExpectResults(sequences, before);
  }
}

TEST_P(GatedDeltaNetTest, APromptIsItsSteps) {
  TestRng rng;
  const GatedDeltaNetSpec spec = Spec(DType::kF32);
  const Products products(spec, rng);
  ExpectPromptIsItsSteps(Plan(spec, products), Maker(spec, products));
}

TEST_P(GatedDeltaNetTest, BitsDependOnNoWorkers) {
  TestRng rng;
  GatedDeltaNetSpec spec = Spec(DType::kBF16);
  spec.dk = 32;
  spec.dv = 64;
  const Products products(spec, rng);
  ExpectSameBitsOnWorkers(Plan(spec, products), Maker(spec, products));
}

TEST_P(GatedDeltaNetTest, DoesNothingWithoutTokens) {
  TestRng rng;
  const GatedDeltaNetSpec spec = Spec(DType::kF32);
  const Products products(spec, rng);
  ExpectNothingWithoutTokens(Plan(spec, products), Maker(spec, products));
}

TEST(GatedDeltaNetRefusalTest, NamesWhatIsWrong) {
  TestRng rng;
  InlineExecutor executor;
  const GatedDeltaNetSpec right = Spec(DType::kF32);
  const Products products(right, rng);
  const auto create = [&](const GatedDeltaNetSpec& spec) {
    return GatedDeltaNetPlan::Create(spec, products.in_proj.packed,
                                     products.out_proj.packed, executor);
  };
  struct SpecCase {
    void (*spoil)(GatedDeltaNetSpec&);
    std::string words;
  };
  const SpecCase specs[] = {
      {[](GatedDeltaNetSpec& s) { s.key_heads = 0; },
       "gated_delta_net: key_heads=0; need 1"},
      {[](GatedDeltaNetSpec& s) { s.value_heads = 0; },
       "value_heads=0; need 1"},
      {[](GatedDeltaNetSpec& s) { s.dk = 1025; }, "dk=1025; need 1"},
      {[](GatedDeltaNetSpec& s) { s.dv = 0; }, "dv=0; need 1"},
      {[](GatedDeltaNetSpec& s) { s.dv = 19; },
       "columns of in_proj=200; need 208, as the layer has"},
      {[](GatedDeltaNetSpec& s) { s.eps = -1; }, "eps=-1"},
  };
  for (const SpecCase& c : specs) {
    GatedDeltaNetSpec spec = right;
    c.spoil(spec);
    ExpectRefusal(create(spec).status(), c.words);
  }
  const auto plan = create(right);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Layer layer(right, products, 4, rng);
  const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
  const GatedDeltaNetArgs good = layer.args(sequences);
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());
  struct Case {
    void (*spoil)(GatedDeltaNetArgs&);
    std::string words;
  };
  const Case cases[] = {
      {[](GatedDeltaNetArgs& a) { a.state = a.layer.x; },
       "gated_delta_net: state is"},
      {[](GatedDeltaNetArgs& a) { a.a_log = a.norm; },
       "gated_delta_net: a_log is"},
      {[](GatedDeltaNetArgs& a) { a.dt_bias = {}; },
       "gated_delta_net: dt_bias is"},
      {[](GatedDeltaNetArgs& a) { a.norm = a.a_log; },
       "gated_delta_net: norm is"},
  };
  for (const Case& c : cases) {
    GatedDeltaNetArgs args = good;
    c.spoil(args);
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

}  // namespace
}  // namespace quern
