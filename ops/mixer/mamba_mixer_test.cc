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
#include "quern/ops/mixer/bounded_recurrences_testutil.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/mixer_testutil.h"
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
    args.state = states().view();
    args.a = a_.const_view();
    args.d = d_.const_view();
    args.dt_bias = bias_.const_view();
    if (spec_.norm == MambaNorm::kNone) return args;
    args.dt_norm = dt_norm_.const_view();
    args.b_norm = b_norm_.const_view();
    args.c_norm = c_norm_.const_view();
    return args;
  }

  BoundedRow Token(const BoundedRow& x, BoundedWindow& window,
                   BoundedRow& state) const override {
    const MambaMixerSpec& s = spec_;
    const bool mamba = s.form == MambaForm::kMamba;
    const int64_t channels = s.channels(), n = s.d_state;
    const BoundedRow p = BoundedLinear(s.dtype, x, products_.in_proj.values);
    const BoundedRow z = Part(p, mamba ? channels : 0, channels);
    const BoundedRow u = Convolve(Part(p, mamba ? 0 : channels, channels),
                                  /*silu=*/true, window);
    const BoundedRow second =
        BoundedLinear(s.dtype, u, products_.x_proj.values);
    const BoundedRow low =
        Normed(Part(second, mamba ? 0 : 2 * n, s.dt_rank), dt_norm_);
    const BoundedRow b =
        Normed(Part(second, mamba ? s.dt_rank : 0, n), b_norm_);
    const BoundedRow c =
        Normed(Part(second, (mamba ? s.dt_rank : 0) + n, n), c_norm_);
    const BoundedRow dt = BoundedLinear(s.dtype, low, products_.dt_proj.values);
    const Doubles a = a_.doubles(), d = d_.doubles(), bias = bias_.doubles();
    BoundedRow y;
    for (int64_t i = 0; i < channels; ++i) {
      // Numbers of a row, or of its head.
      const auto at = static_cast<size_t>(mamba ? i : i / s.head_dim);
      BoundedRow rates;
      for (size_t j = 0; j < static_cast<size_t>(n); ++j) {
        rates.push_back(
            {mamba ? a[at * static_cast<size_t>(n) + j] : a[at], 0});
      }
      const auto row = static_cast<size_t>(i);
      const Bounded out =
          BoundedStateRow(u[row], dt[at], bias[at], d[at], rates, b, c,
                          s.state_dtype, &state[row * static_cast<size_t>(n)]);
      y.push_back(Rounded(s.dtype, out * BoundedSilu(z[row])));
    }
    return BoundedLinear(s.dtype, y, products_.out_proj.values);
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
  BoundedRow Normed(const BoundedRow& x, const TestTensor& weight) const {
    if (spec_.norm == MambaNorm::kNone) return x;
    const Bounded inverse =
        BoundedInverseNorm(x, static_cast<double>(x.size()), double{spec_.eps});
    const Doubles w = weight.doubles();
    BoundedRow y;
    for (size_t i = 0; i < x.size(); ++i) {
      y.push_back(Rounded(spec_.dtype, x[i] * inverse * Bounded{w[i], 0}));
    }
    return y;
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

TEST_P(MambaMixerTest, APromptIsItsSteps) {
  TestRng rng;
  const MambaMixerSpec spec =
      Spec(MambaForm::kPlamo2, DType::kF32, MambaNorm::kRms);
  const Products products(spec, rng);
  ExpectPromptIsItsSteps(Plan(spec, products), Maker(spec, products));
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
      {[](MambaMixerSpec& s) { s.heads = 0; },
       "plamo2_mamba_mixer: heads=0; need 1"},
      {[](MambaMixerSpec& s) { s.head_dim = -1; }, "head_dim=-1; need 1"},
      {[](MambaMixerSpec& s) { s.heads = s.head_dim = 1 << 29; },
       "need 1 <= heads"},
      {[](MambaMixerSpec& s) { s.d_state = 1025; }, "d_state=1025; need 1"},
      {[](MambaMixerSpec& s) { s.dt_rank = 0; }, "dt_rank=0; need 1"},
      {[](MambaMixerSpec& s) { s.form = MambaForm::kMamba; },
       "mamba_mixer: heads=3; need 1"},
      {[](MambaMixerSpec& s) { s.hidden = 21; }, "k of in_proj=20; need 21"},
      {[](MambaMixerSpec& s) { s.d_state = 20; },
       "columns of x_proj=43; need 45"},
      {[](MambaMixerSpec& s) { s.eps = -1; }, "eps=-1"},
  };
  for (const SpecCase& c : specs) {
    MambaMixerSpec spec = right;
    c.spoil(spec);
    ExpectRefusal(
        MambaMixerPlan::Create(spec, products.packed(), executor).status(),
        c.words);
  }
  const auto plan = MambaMixerPlan::Create(right, products.packed(), executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Layer layer(right, products, 4, rng);
  const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
  const MambaMixerArgs good = layer.args(sequences);
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());
  struct Case {
    void (*spoil)(MambaMixerArgs&);
    std::string words;
  };
  const Case cases[] = {
      {[](MambaMixerArgs& a) { a.state = a.layer.x; },
       "plamo2_mamba_mixer: state is"},
      {[](MambaMixerArgs& a) { a.a = a.layer.x; }, "mixer: a is"},
      {[](MambaMixerArgs& a) { a.d = a.layer.x; }, "mixer: d is"},
      {[](MambaMixerArgs& a) { a.dt_bias = a.layer.x; }, "mixer: dt_bias is"},
      {[](MambaMixerArgs& a) { a.dt_norm = {}; }, "mixer: dt_norm is"},
      {[](MambaMixerArgs& a) { a.c_norm = a.dt_norm; }, "mixer: c_norm is"},
      {[](MambaMixerArgs& a) { a.layer.out = a.a; }, "mixer: out is"},
      {[](MambaMixerArgs& a) {
         a.state = AnyTensorView(
             DType::kF32, a.state.mutable_data(), 4, {4, 3, 17, 19},
             {a.state.stride(0), a.state.stride(1), a.state.stride(2), 1});
       },
       "slots of the state=4; need 5, as conv_state has"},
      {[](MambaMixerArgs& a) {
         a.a = AnyTensorView(DType::kF32, a.state.data(), 1, {3}, {1});
       },
       "state overlaps a"},
  };
  for (const Case& c : cases) {
    MambaMixerArgs args = good;
    c.spoil(args);
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

}  // namespace
}  // namespace quern
