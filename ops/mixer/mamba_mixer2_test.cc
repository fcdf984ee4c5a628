#include "quern/ops/mixer/mamba_mixer2.h"

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
#include "quern/ops/recurrent/state_update.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};

MambaMixer2Spec Spec(DType dtype, Mamba2Norm norm) {
  MambaMixer2Spec spec;
  spec.hidden = 20;
  spec.heads = 6;
  spec.groups = 2;
  spec.head_dim = 9;
  spec.d_state = 19;
  spec.norm = norm;
  spec.dtype = dtype;
  spec.weight_dtype = dtype;
  return spec;
}

struct Products {
  Products(const MambaMixer2Spec& s, Rng& rng)
      : in_proj(s.dtype, s.projected(), s.hidden, 0.4, rng),
        out_proj(s.dtype, s.hidden, s.channels(), 0.3, rng) {}
  TestWeights in_proj, out_proj;
};

class Layer final : public MixerLayer {
 public:
  Layer(const MambaMixer2Spec& s, const Products& products, int64_t tokens,
        Rng& rng)
      : MixerLayer({s.hidden,
                    s.conv_channels(),
                    s.width,
                    s.dtype,
                    s.weight_dtype,
                    {s.heads, s.head_dim, s.d_state},
                    s.state_dtype},
                   tokens, /*biased=*/true, rng),
        spec_(s),
        products_(products),
        a_(DType::kF32, {s.heads}, -2, -0.1, rng),
        d_(DType::kF32, {s.heads}, -1, 1, rng),
        bias_(DType::kF32, {s.heads}, -1, 1, rng),
        norm_(s.weight_dtype, {s.channels()}, 0.5, 1.5, rng) {}

  MambaMixer2Args args(const Sequences& sequences) const {
    MambaMixer2Args args;
    args.layer = CommonArgs(sequences);
    args.ssm_state = states().view();
    args.a = a_.const_view();
    args.d = d_.const_view();
    args.dt_bias = bias_.const_view();
    if (spec_.norm == Mamba2Norm::kGroups) args.norm = norm_.const_view();
    return args;
  }

  BoundedRows Sequence(const BoundedRows& x, int64_t chunk,
                       BoundedWindow& window,
                       BoundedRow& state) const override {
    return ReferenceMamba2(spec_,
                           Numbers(products_.in_proj, products_.out_proj),
                           {a_.doubles(), d_.doubles(), bias_.doubles()},
                           norm_.doubles(), x, chunk, window, state);
  }
  int64_t ChunkOf(int64_t tokens) const override {
    return tokens < StateUpdatePlan::kChunkedFrom ? 1 : StateUpdatePlan::kChunk;
  }

 private:
  MambaMixer2Spec spec_;
  const Products& products_;
  TestTensor a_, d_, bias_, norm_;
};

auto Maker(const MambaMixer2Spec& spec, const Products& products) {
  return [&spec, &products](int64_t tokens, Rng& rng) {
    return std::make_unique<Layer>(spec, products, tokens, rng);
  };
}

class MambaMixer2Test : public MixerFixture {
 protected:
  MambaMixer2Plan Plan(const MambaMixer2Spec& spec, const Products& products) {
    InlineExecutor executor;
    auto plan = MambaMixer2Plan::Create(spec, products.in_proj.packed,
                                        products.out_proj.packed, executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
};
QUERN_INSTANTIATE_ISA_TEST(MambaMixer2Test);

TEST_P(MambaMixer2Test, IsTheFormula) {
  TestRng rng;
  for (const Mamba2Norm norm : {Mamba2Norm::kNone, Mamba2Norm::kGroups}) {
    for (const DType dtype : kFloats) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(dtype) << " norm " << static_cast<int>(norm));
      MambaMixer2Spec spec = Spec(dtype, norm);
      if (dtype == DType::kBF16) spec.state_dtype = DType::kBF16;
      const Products products(spec, rng);
      ExpectOracle(Plan(spec, products), Maker(spec, products));
    }
  }
}

TEST_P(MambaMixer2Test, PromptsAreTheFormula) {
  TestRng rng;
  for (const Mamba2Norm norm : {Mamba2Norm::kNone, Mamba2Norm::kGroups}) {
    for (const DType dtype : kFloats) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(dtype) << " norm " << static_cast<int>(norm));
      MambaMixer2Spec spec = Spec(dtype, norm);
      if (dtype == DType::kF16) spec.state_dtype = DType::kF16;
      const Products products(spec, rng);
      ExpectPrompts(Plan(spec, products), Maker(spec, products));
    }
  }
}

TEST_P(MambaMixer2Test, BitsDependOnNoWorkers) {
  TestRng rng;
  MambaMixer2Spec spec = Spec(DType::kBF16, Mamba2Norm::kGroups);
  spec.head_dim = 32;
  const Products products(spec, rng);
  ExpectSameBitsOnWorkers(Plan(spec, products), Maker(spec, products));
}

TEST_P(MambaMixer2Test, DoesNothingWithoutTokens) {
  TestRng rng;
  const MambaMixer2Spec spec = Spec(DType::kF32, Mamba2Norm::kGroups);
  const Products products(spec, rng);
  ExpectNothingWithoutTokens(Plan(spec, products), Maker(spec, products));
}

TEST(MambaMixer2RefusalTest, NamesWhatIsWrong) {
  TestRng rng;
  InlineExecutor executor;
  const MambaMixer2Spec right = Spec(DType::kF32, Mamba2Norm::kGroups);
  const Products products(right, rng);
  const auto create = [&](const MambaMixer2Spec& spec) {
    return MambaMixer2Plan::Create(spec, products.in_proj.packed,
                                   products.out_proj.packed, executor);
  };
  struct SpecCase {
    void (*spoil)(MambaMixer2Spec&);
    std::string words;
  };
  const SpecCase specs[] = {
      {[](MambaMixer2Spec& s) { s.heads = 0; }, "mamba_mixer2: heads=0; need"},
      {[](MambaMixer2Spec& s) { s.groups = 4; },
       "groups=4; need a divisor of heads=6"},
      {[](MambaMixer2Spec& s) { s.groups = 0; }, "groups=0; need 1"},
      {[](MambaMixer2Spec& s) { s.head_dim = 0; }, "head_dim=0; need 1"},
      {[](MambaMixer2Spec& s) { s.d_state = 0; }, "d_state=0; need 1"},
      {[](MambaMixer2Spec& s) { s.head_dim = 10; },
       "columns of in_proj=190; need 202, as the layer has"},
      {[](MambaMixer2Spec& s) { s.width = 1; }, "width=1; need 2"},
      {[](MambaMixer2Spec& s) { s.hidden = 21; }, "k of in_proj=20; need 21"},
      {[](MambaMixer2Spec& s) { s.eps = -1; }, "eps=-1"},
      {[](MambaMixer2Spec& s) { s.dtype = DType::kI8; }, "dtype is i8"},
      {[](MambaMixer2Spec& s) { s.weight_dtype = DType::kI8; },
       "weight_dtype is i8"},
      {[](MambaMixer2Spec& s) { s.state_dtype = DType::kI8; },
       "state_dtype is i8"},
      {[](MambaMixer2Spec& s) { s.heads = s.head_dim = 1 << 27; },
       "need 1 <= heads * head_dim"},
  };
  for (const SpecCase& c : specs) {
    MambaMixer2Spec spec = right;
    c.spoil(spec);
    ExpectOwnRefusal("mamba_mixer2", create(spec).status(), c.words);
  }
  const auto plan = create(right);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Layer layer(right, products, 4, rng);
  const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
  const MambaMixer2Args good = layer.args(sequences);
  ExpectCommonRefusals(
      "mamba_mixer2", *plan, good,
      [](MambaMixer2Args& a) -> MixerArgs& { return a.layer; });
  MambaMixer2Spec of_onednn = right;
  of_onednn.kernels = "onednn";
  const auto strided = create(of_onednn);
  ASSERT_TRUE(strided.ok()) << strided.status();
  ExpectStrideRefusals(
      "mamba_mixer2", *strided, good,
      [](MambaMixer2Args& a) -> MixerArgs& { return a.layer; });
  ExpectRefusal(MambaMixer2Plan::Create(right, products.in_proj.packed,
                                        products.in_proj.packed, executor)
                    .status(),
                "mamba_mixer2: columns of out_proj=190; need 20");
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "=-1");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(), "max_workers=0");
  const auto without = create(Spec(DType::kF32, Mamba2Norm::kNone));
  ASSERT_TRUE(without.ok()) << without.status();
  ExpectRefusal(without->CheckArgs(good),
                "mamba_mixer2: norm has rank 1; need none");
  struct Case {
    void (*spoil)(MambaMixer2Args&);
    std::string words;
  };
  const Case cases[] = {
      {[](MambaMixer2Args& a) { a.ssm_state = a.layer.x; },
       "mamba_mixer2: ssm_state is"},
      {[](MambaMixer2Args& a) { a.a = a.layer.x; }, "mamba_mixer2: a is"},
      {[](MambaMixer2Args& a) { a.d = a.norm; }, "mamba_mixer2: d is"},
      {[](MambaMixer2Args& a) { a.dt_bias = a.norm; },
       "mamba_mixer2: dt_bias is"},
      {[](MambaMixer2Args& a) { a.norm = {}; }, "mamba_mixer2: norm is"},
      {[](MambaMixer2Args& a) { a.layer.conv_state = a.ssm_state; },
       "mamba_mixer2: conv_state is"},
      {[](MambaMixer2Args& a) { a.ssm_state = ReadOnly(a.ssm_state); },
       "mamba_mixer2: ssm_state is read-only"},
      {[](MambaMixer2Args& a) {
         a.d = AnyTensorView(DType::kF32, a.ssm_state.data(), 1, {6}, {1});
       },
       "mamba_mixer2: ssm_state overlaps d"},
      {[](MambaMixer2Args& a) {
         a.dt_bias =
             AnyTensorView(DType::kF32, a.layer.out.data(), 1, {6}, {1});
       },
       "mamba_mixer2: out overlaps dt_bias"},
  };
  for (const Case& c : cases) {
    MambaMixer2Args args = good;
    c.spoil(args);
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

}  // namespace
}  // namespace quern
