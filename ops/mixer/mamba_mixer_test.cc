#include "quern/ops/mixer/mamba_mixer.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

MambaMixerSpec Spec(MambaForm form, DType dtype, MambaNorm norm) {
  MambaMixerSpec spec;
  spec.form = form;
  spec.hidden = 20;
  spec.heads = form == MambaForm::kMamba ? 1 : 3;
  spec.head_dim = form == MambaForm::kMamba ? 37 : 17;
  spec.d_state = 19;
  spec.dt_rank = 5;
  spec.norm = norm;
  spec.dtype = dtype;
  spec.weight_dtype = dtype;
  return spec;
}

struct Products {
  Products(const MambaMixerSpec& s, Rng& rng)
      : in_proj(s.dtype, 2 * s.channels(), s.hidden, 0.4, rng),
        x_proj(s.dtype, s.dt_rank + 2 * s.d_state, s.channels(), 0.3, rng),
        dt_proj(s.dtype, s.form == MambaForm::kMamba ? s.channels() : s.heads,
                s.dt_rank, 0.3, rng),
        out_proj(s.dtype, s.hidden, s.channels(), 0.3, rng) {}
  MambaMixerWeights packed() const {
    return {in_proj.packed, x_proj.packed, dt_proj.packed, out_proj.packed};
  }
  TestWeights in_proj, x_proj, dt_proj, out_proj;
};

class Layer final : public MixerLayer {
 public:
  Layer(const MambaMixerSpec& s, const Products& products, int64_t tokens,
        Rng& rng)
      : MixerLayer({s.hidden,
                    s.channels(),
                    s.width,
                    s.dtype,
                    s.weight_dtype,
                    {s.heads, s.head_dim, s.d_state},
                    s.state_dtype},
                   tokens, /*biased=*/s.form == MambaForm::kMamba, rng),
        spec_(s),
        products_(products),
        a_(DType::kF32, Rates(s), -2, -0.1, rng),
        d_(DType::kF32, PerRow(s), -1, 1, rng),
        bias_(DType::kF32, PerRow(s), -1, 1, rng),
        dt_norm_(s.weight_dtype, {s.dt_rank}, 0.5, 1.5, rng),
        b_norm_(s.weight_dtype, {s.d_state}, 0.5, 1.5, rng),
        c_norm_(s.weight_dtype, {s.d_state}, 0.5, 1.5, rng) {}

  MambaMixerArgs args(const Sequences& sequences) const {
    MambaMixerArgs args;
    args.layer = CommonArgs(sequences);
    args.ssm_state = states().view();
    args.a = a_.const_view();
    args.d = d_.const_view();
    args.dt_bias = bias_.const_view();
    if (spec_.norm == MambaNorm::kNone) return args;
    args.dt_norm = dt_norm_.const_view();
    args.b_norm = b_norm_.const_view();
    args.c_norm = c_norm_.const_view();
    return args;
  }

  BoundedRows Sequence(const BoundedRows& x, int64_t chunk,
                       BoundedWindow& window,
                       BoundedRow& state) const override {
    return ReferenceMamba(
        spec_, Numbers(products_.in_proj, products_.out_proj),
        {products_.x_proj.values, products_.dt_proj.values, dt_norm_.doubles(),
         b_norm_.doubles(), c_norm_.doubles()},
        {a_.doubles(), d_.doubles(), bias_.doubles()}, x, chunk, window, state);
  }
  int64_t ChunkOf(int64_t tokens) const override {
    const bool chunked = spec_.form == MambaForm::kPlamo2 &&
                         tokens >= StateUpdatePlan::kChunkedFrom;
    return chunked ? StateUpdatePlan::kChunk : 1;
  }

 private:
  static std::vector<int64_t> Rates(const MambaMixerSpec& s) {
    if (s.form == MambaForm::kPlamo2) return {s.heads};
    return {s.heads, s.head_dim, s.d_state};
  }
  static std::vector<int64_t> PerRow(const MambaMixerSpec& s) {
    if (s.form == MambaForm::kPlamo2) return {s.heads};
    return {s.heads, s.head_dim};
  }
  MambaMixerSpec spec_;
  const Products& products_;
  TestTensor a_, d_, bias_, dt_norm_, b_norm_, c_norm_;
};

auto Maker(const MambaMixerSpec& spec, const Products& products) {
  return [&spec, &products](int64_t tokens, Rng& rng) {
    return std::make_unique<Layer>(spec, products, tokens, rng);
  };
}

class MambaMixerTest : public MixerFixture {
 protected:
  MambaMixerPlan Plan(const MambaMixerSpec& spec, const Products& products) {
    InlineExecutor executor;
    auto plan = MambaMixerPlan::Create(spec, products.packed(), executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
};
QUERN_INSTANTIATE_ISA_TEST(MambaMixerTest);

TEST_P(MambaMixerTest, IsTheFormula) {
  TestRng rng;
  for (const MambaForm form : {MambaForm::kMamba, MambaForm::kPlamo2}) {
    for (const MambaNorm norm : {MambaNorm::kNone, MambaNorm::kRms}) {
      for (const DType dtype : kFloats) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " form " << static_cast<int>(form)
                     << " norm " << static_cast<int>(norm));
        MambaMixerSpec spec = Spec(form, dtype, norm);
        if (dtype == DType::kBF16) spec.state_dtype = DType::kBF16;
        const Products products(spec, rng);
        ExpectOracle(Plan(spec, products), Maker(spec, products));
      }
    }
  }
}

TEST_P(MambaMixerTest, PromptsAreTheFormula) {
  TestRng rng;
  for (const MambaForm form : {MambaForm::kMamba, MambaForm::kPlamo2}) {
    for (const DType dtype : kFloats) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(dtype) << " form " << static_cast<int>(form));
      MambaMixerSpec spec = Spec(form, dtype, MambaNorm::kRms);
      if (dtype == DType::kF16) spec.state_dtype = DType::kF16;
      const Products products(spec, rng);
      ExpectPrompts(Plan(spec, products), Maker(spec, products));
    }
  }
}

TEST_P(MambaMixerTest, BitsDependOnNoWorkers) {
  TestRng rng;
  for (const MambaForm form : {MambaForm::kMamba, MambaForm::kPlamo2}) {
    MambaMixerSpec spec = Spec(form, DType::kBF16, MambaNorm::kRms);
    spec.head_dim = form == MambaForm::kMamba ? 200 : 64;
    const Products products(spec, rng);
    ExpectSameBitsOnWorkers(Plan(spec, products), Maker(spec, products));
  }
}

TEST_P(MambaMixerTest, DoesNothingWithoutTokens) {
  TestRng rng;
  const MambaMixerSpec spec =
      Spec(MambaForm::kPlamo2, DType::kF32, MambaNorm::kRms);
  const Products products(spec, rng);
  ExpectNothingWithoutTokens(Plan(spec, products), Maker(spec, products));
}

TEST(MambaMixerRefusalTest, NamesWhatIsWrong) {
  TestRng rng;
  InlineExecutor executor;
  const MambaMixerSpec right =
      Spec(MambaForm::kPlamo2, DType::kF32, MambaNorm::kRms);
  const Products products(right, rng);
  struct SpecCase {
    void (*spoil)(MambaMixerSpec&);
    std::string words;
  };
  const SpecCase specs[] = {
      {[](MambaMixerSpec& s) { s.heads = 0; }, "heads=0; need 1"},
      {[](MambaMixerSpec& s) { s.head_dim = -1; }, "head_dim=-1; need 1"},
      {[](MambaMixerSpec& s) { s.heads = s.head_dim = 1 << 29; },
       "need 1 <= heads"},
      {[](MambaMixerSpec& s) { s.d_state = 1025; }, "d_state=1025; need 1"},
      {[](MambaMixerSpec& s) { s.dt_rank = 0; }, "dt_rank=0; need 1"},
      {[](MambaMixerSpec& s) { s.form = MambaForm::kMamba; },
       "heads=3; need 1"},
      {[](MambaMixerSpec& s) { s.hidden = 21; }, "k of in_proj=20; need 21"},
      {[](MambaMixerSpec& s) { s.d_state = 20; },
       "columns of x_proj=43; need 45"},
      {[](MambaMixerSpec& s) { s.eps = -1; }, "eps=-1"},
      {[](MambaMixerSpec& s) { s.width = 5; }, "width=5; need 2"},
      {[](MambaMixerSpec& s) { s.dtype = DType::kI8; }, "dtype is i8"},
      {[](MambaMixerSpec& s) { s.weight_dtype = DType::kI8; },
       "weight_dtype is i8"},
      {[](MambaMixerSpec& s) { s.state_dtype = DType::kI8; },
       "state_dtype is i8"},
  };
  for (const SpecCase& c : specs) {
    MambaMixerSpec spec = right;
    c.spoil(spec);
    ExpectOwnRefusal(
        spec.form == MambaForm::kMamba ? "mamba_mixer" : "plamo2_mamba_mixer",
        MambaMixerPlan::Create(spec, products.packed(), executor).status(),
        c.words);
  }
  const auto plan = MambaMixerPlan::Create(right, products.packed(), executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Layer layer(right, products, 4, rng);
  const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
  const MambaMixerArgs good = layer.args(sequences);
  ExpectCommonRefusals("plamo2_mamba_mixer", *plan, good,
                       [](MambaMixerArgs& a) -> MixerArgs& { return a.layer; });
  const auto swapped = [&](const MambaMixerWeights& weights) {
    return MambaMixerPlan::Create(right, weights, executor).status();
  };
  MambaMixerWeights weights = products.packed();
  weights.dt_proj = weights.x_proj;
  ExpectRefusal(swapped(weights),
                "plamo2_mamba_mixer: columns of dt_proj=43; need 3");
  weights = products.packed();
  weights.x_proj = weights.in_proj;
  ExpectRefusal(swapped(weights), "columns of x_proj=102; need 43");
  weights = products.packed();
  weights.out_proj = weights.in_proj;
  ExpectRefusal(swapped(weights), "columns of out_proj=102; need 20");
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "=-1");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(), "max_workers=0");
  MambaMixerSpec plain = right;
  plain.norm = MambaNorm::kNone;
  const auto without =
      MambaMixerPlan::Create(plain, products.packed(), executor);
  ASSERT_TRUE(without.ok()) << without.status();
  ExpectRefusal(without->CheckArgs(good),
                "plamo2_mamba_mixer: dt_norm has rank 1; need none");
  struct Case {
    void (*spoil)(MambaMixerArgs&);
    std::string words;
  };
  const Case cases[] = {
      {[](MambaMixerArgs& a) { a.ssm_state = a.layer.x; },
       "plamo2_mamba_mixer: ssm_state is"},
      {[](MambaMixerArgs& a) { a.a = a.layer.x; }, "mixer: a is"},
      {[](MambaMixerArgs& a) { a.d = a.layer.x; }, "mixer: d is"},
      {[](MambaMixerArgs& a) { a.dt_bias = a.layer.x; }, "mixer: dt_bias is"},
      {[](MambaMixerArgs& a) { a.dt_norm = {}; }, "mixer: dt_norm is"},
      {[](MambaMixerArgs& a) { a.c_norm = a.dt_norm; }, "mixer: c_norm is"},
      {[](MambaMixerArgs& a) { a.b_norm = a.dt_norm; }, "mixer: b_norm is"},
      {[](MambaMixerArgs& a) { a.ssm_state = ReadOnly(a.ssm_state); },
       "mixer: ssm_state is read-only"},
      {[](MambaMixerArgs& a) {
         a.c_norm =
             AnyTensorView(DType::kF32, a.layer.out.data(), 1, {19}, {1});
       },
       "mixer: out overlaps c_norm"},
      {[](MambaMixerArgs& a) {
         a.ssm_state = AnyTensorView(
             DType::kF32, a.ssm_state.mutable_data(), 4, {4, 3, 17, 19},
             {a.ssm_state.stride(0), a.ssm_state.stride(1),
              a.ssm_state.stride(2), 1});
       },
       "slots of ssm_state=4; need 5, as conv_state has"},
      {[](MambaMixerArgs& a) {
         a.a = AnyTensorView(DType::kF32, a.ssm_state.data(), 1, {3}, {1});
       },
       "ssm_state overlaps a"},
  };
  for (const Case& c : cases) {
    MambaMixerArgs args = good;
    c.spoil(args);
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

TEST(MambaMixerRefusalTest, NamesStridesThatOneDnnCannotHold) {
  TestRng rng;
  InlineExecutor executor;
  for (const MambaForm form : {MambaForm::kMamba, MambaForm::kPlamo2}) {
    MambaMixerSpec spec = Spec(form, DType::kF32, MambaNorm::kRms);
    spec.kernels = "onednn";
    const Products products(spec, rng);
    const auto plan = MambaMixerPlan::Create(spec, products.packed(), executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Layer layer(spec, products, 4, rng);
    const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
    ExpectStrideRefusals(
        form == MambaForm::kMamba ? "mamba_mixer" : "plamo2_mamba_mixer", *plan,
        layer.args(sequences),
        [](MambaMixerArgs& a) -> MixerArgs& { return a.layer; });
  }
}

}  // namespace
}  // namespace quern
