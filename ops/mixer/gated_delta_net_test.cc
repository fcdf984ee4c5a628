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
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/mixer_refusals_testutil.h"
#include "quern/ops/mixer/mixer_testutil.h"
#include "quern/ops/mixer/reference_mixers_testutil.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};

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

  BoundedRows Sequence(const BoundedRows& x, int64_t chunk,
                       BoundedWindow& window,
                       BoundedRow& state) const override {
    return ReferenceDeltaNet(
        spec_, Numbers(products_.in_proj, products_.out_proj),
        {a_log_.doubles(), bias_.doubles(), norm_.doubles()}, x, chunk, window,
        state);
  }
  int64_t ChunkOf(int64_t tokens) const override {
    return tokens < DeltaRulePlan::kChunkedFrom ? 1 : DeltaRulePlan::kChunk;
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

TEST_P(GatedDeltaNetTest, IsTheFormula) {
  TestRng rng;
  for (const int64_t key_heads : {1, 2, 4}) {
    for (const DType dtype : kFloats) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(dtype) << " key heads " << key_heads);
      GatedDeltaNetSpec spec = Spec(dtype);
      if (key_heads != 2) spec.state_dtype = dtype;
      spec.key_heads = key_heads;
      const Products products(spec, rng);
      ExpectOracle(Plan(spec, products), Maker(spec, products));
    }
  }
}

TEST_P(GatedDeltaNetTest, PromptsAreTheFormula) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    SCOPED_TRACE(DTypeName(dtype));
    GatedDeltaNetSpec spec = Spec(dtype);
    if (dtype == DType::kF16) spec.state_dtype = DType::kF16;
    const Products products(spec, rng);
    ExpectPrompts(Plan(spec, products), Maker(spec, products));
  }
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
      {[](GatedDeltaNetSpec& s) { s.value_heads = 5; },
       "value_heads=5; need a multiple of key_heads=2"},
      {[](GatedDeltaNetSpec& s) { s.dk = 1025; }, "dk=1025; need 1"},
      {[](GatedDeltaNetSpec& s) { s.dv = 0; }, "dv=0; need 1"},
      {[](GatedDeltaNetSpec& s) { s.dv = 19; },
       "columns of in_proj=200; need 208, as the layer has"},
      {[](GatedDeltaNetSpec& s) { s.eps = -1; }, "eps=-1"},
      {[](GatedDeltaNetSpec& s) { s.dtype = DType::kI8; }, "dtype is i8"},
      {[](GatedDeltaNetSpec& s) { s.weight_dtype = DType::kI8; },
       "weight_dtype is i8"},
      {[](GatedDeltaNetSpec& s) { s.state_dtype = DType::kI8; },
       "state_dtype is i8"},
      {[](GatedDeltaNetSpec& s) { s.hidden = 19; }, "k of in_proj=20; need 19"},
      {[](GatedDeltaNetSpec& s) { s.width = 5; }, "width=5; need 2"},
      {[](GatedDeltaNetSpec& s) { s.key_heads = 1 << 28, s.dk = 1024; },
       "need 1 <= key_heads"},
      {[](GatedDeltaNetSpec& s) { s.value_heads = s.dv = 1 << 27; },
       "need 1 <= value_heads * dv"},
  };
  for (const SpecCase& c : specs) {
    GatedDeltaNetSpec spec = right;
    c.spoil(spec);
    ExpectOwnRefusal("gated_delta_net", create(spec).status(), c.words);
  }
  const auto plan = create(right);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Layer layer(right, products, 4, rng);
  const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
  const GatedDeltaNetArgs good = layer.args(sequences);
  ExpectCommonRefusals(
      "gated_delta_net", *plan, good,
      [](GatedDeltaNetArgs& a) -> MixerArgs& { return a.layer; });
  GatedDeltaNetSpec of_onednn = right;
  of_onednn.kernels = "onednn";
  const auto strided = create(of_onednn);
  ASSERT_TRUE(strided.ok()) << strided.status();
  ExpectStrideRefusals(
      "gated_delta_net", *strided, good,
      [](GatedDeltaNetArgs& a) -> MixerArgs& { return a.layer; });
  ExpectRefusal(GatedDeltaNetPlan::Create(right, products.in_proj.packed,
                                          products.in_proj.packed, executor)
                    .status(),
                "gated_delta_net: columns of out_proj=200; need 20");
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "=-1");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(), "max_workers=0");
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
      {[](GatedDeltaNetArgs& a) { a.state = ReadOnly(a.state); },
       "gated_delta_net: state is read-only"},
      {[](GatedDeltaNetArgs& a) {
         a.a_log = AnyTensorView(DType::kF32, a.state.data(), 1, {4}, {1});
       },
       "gated_delta_net: state overlaps a_log"},
      {[](GatedDeltaNetArgs& a) {
         a.norm = AnyTensorView(DType::kF32, a.layer.out.data(), 1, {18}, {1});
       },
       "gated_delta_net: out overlaps norm"},
  };
  for (const Case& c : cases) {
    GatedDeltaNetArgs args = good;
    c.spoil(args);
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

}  // namespace
}  // namespace quern
