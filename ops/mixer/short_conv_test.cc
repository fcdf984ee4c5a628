#include "quern/ops/mixer/short_conv.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/mixer_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

ShortConvSpec Spec(int64_t hidden, int64_t channels, int64_t width,
                   DType dtype) {
  ShortConvSpec spec;
  spec.hidden = hidden;
  spec.channels = channels;
  spec.width = width;
  spec.dtype = spec.weight_dtype = dtype;
  return spec;
}

// The tensors of one layer and its pool.
struct Layer {
  Layer(const ShortConvSpec& spec, int64_t tokens, Rng& rng, bool biased)
      : spec(spec),
        in_proj(spec.dtype, 3 * spec.channels, spec.hidden, 0.5, rng),
        out_proj(spec.dtype, spec.hidden, spec.channels, 0.5, rng),
        weight(spec.dtype, {spec.channels, spec.width}, -1, 1, rng),
        bias(spec.dtype, {spec.channels}, -1, 1, rng),
        biased(biased),
        x(spec.dtype, ToDoubles(UniformReals(rng, tokens * spec.hidden, -2, 2)),
          tokens, spec.hidden, spec.hidden + 3),
        state(spec.dtype, {kTestSlots, spec.width, spec.channels}, -2, 2, rng),
        out(spec.dtype, tokens, spec.hidden, spec.hidden + 3) {}

  MixerArgs args(const Sequences& sequences) const {
    MixerArgs args;
    args.x = x.const_view();
    args.conv_weight = weight.const_view();
    if (biased) args.conv_bias = bias.const_view();
    args.conv_state = state.view();
    args.batch = sequences.batch();
    args.out = out.view();
    return args;
  }

  // Judges out and the pool. before: the pool that the call found.
  void ExpectResults(const Sequences& sequences, const Doubles& before) const {
    const int64_t n = spec.channels, history = spec.width - 1;
    const Doubles in = x.doubles();
    BoundedRow pool = ExactRow(before, 0, static_cast<int64_t>(before.size()));
    BoundedRow want(in.size(), Bounded{kNaN, 0});
    const SequenceBatch batch = sequences.batch();
    for (int64_t s = 0; s < batch.sequences(); ++s) {
      const int64_t slot = batch.state_indices[s];
      if (batch.begin(s) == batch.end(s)) continue;
      const auto row = [&](int64_t i) { return (slot * spec.width + i) * n; };
      BoundedWindow window;
      for (int64_t i = 0; i < history; ++i) {
        window.push_back(slot < 0 || batch.fresh(s)
                             ? BoundedRow(static_cast<size_t>(n))
                             : Part(pool, row(i), n));
      }
      for (int64_t t = batch.begin(s); t < batch.end(s); ++t) {
        const BoundedRow y =
            Token(ExactRow(in, t, spec.hidden), slot < 0, window);
        std::copy(y.begin(), y.end(), want.begin() + t * spec.hidden);
      }
      for (int64_t i = 0; slot >= 0 && i < history; ++i) {
        const BoundedRow& kept = window[static_cast<size_t>(i)];
        std::copy(kept.begin(), kept.end(), pool.begin() + row(i));
      }
    }
    EXPECT_TRUE(WithinBounds(out.doubles(), want));
    EXPECT_TRUE(WithinBounds(state.doubles(), pool));
  }

  // The layer's output for one token.
  BoundedRow Token(const BoundedRow& token, bool skipped,
                   BoundedWindow& window) const {
    const int64_t n = spec.channels;
    const DType dtype = spec.dtype;
    const BoundedRow p = BoundedLinear(dtype, token, in_proj.values);
    BoundedRow v = Part(p, 2 * n, n);
    for (size_t c = 0; c < v.size(); ++c) v[c] = Rounded(dtype, p[c] * v[c]);
    BoundedRow y =
        BoundedConv(weight.doubles(), biased ? bias.doubles() : Doubles(),
                    /*silu=*/false, dtype, v, window);
    for (size_t c = 0; c < y.size(); ++c) {
      if (skipped) y[c] = {};
      y[c] = Rounded(dtype, p[c + static_cast<size_t>(n)] * y[c]);
    }
    return BoundedLinear(dtype, y, out_proj.values);
  }

  ShortConvSpec spec;
  TestWeights in_proj, out_proj;
  TestTensor weight, bias;
  bool biased;
  AnyMatrix x;
  TestTensor state;
  AnyMatrix out;
};

class ShortConvTest : public MixerFixture {
 protected:
  ShortConvPlan Plan(const Layer& layer) {
    InlineExecutor executor;
    auto plan = ShortConvPlan::Create(layer.spec, layer.in_proj.packed,
                                      layer.out_proj.packed, executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }
};
QUERN_INSTANTIATE_ISA_TEST(ShortConvTest);

TEST_P(ShortConvTest, IsTheFormulaForMixedBatches) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    for (const int64_t width : {2, 3, 4}) {
      for (const int64_t channels : {1, 7, 48, 300}) {
        SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " width "
                                        << width << " channels " << channels);
        const Layer layer(Spec(20, channels, width, dtype), kMixedTokens, rng,
                          channels % 2 == 0);
        const ShortConvPlan plan = Plan(layer);
        const Doubles before = layer.state.doubles();
        InlineExecutor executor;
        Run(plan, layer.args(MixedBatch()), kMixedTokens, executor);
        layer.ExpectResults(MixedBatch(), before);
      }
    }
  }
}

TEST_P(ShortConvTest, DecodesWithoutStarts) {
  TestRng rng;
  const Layer layer(Spec(24, 40, 3, DType::kBF16), 4, rng, true);
  const Doubles before = layer.state.doubles();
  InlineExecutor executor;
  const Sequences sequences = {{4, 0, -1, 2}, {}, {}};
  Run(Plan(layer), layer.args(sequences), 4, executor);
  layer.ExpectResults(sequences, before);
}

// A sequence in calls of 1, 3, 0 and 5 tokens has the bits of one call of 9.
TEST_P(ShortConvTest, StatesCarryOver) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    const ShortConvSpec spec = Spec(16, 33, 3, dtype);
    TestRng same_one(1), same_two(1);
    const Layer whole(spec, 9, same_one, true), cut(spec, 9, same_two, true);
    InlineExecutor executor;
    const ShortConvPlan plan = Plan(whole);
    Run(plan, whole.args({{2}, {0, 9}, {0}}), 9, executor);
    uint8_t begun = 0;
    for (const auto& [begin, end] :
         std::vector<std::pair<int, int>>{{0, 1}, {1, 4}, {4, 4}, {4, 9}}) {
      Run(plan, cut.args({{2}, {begin, end}, {begun}}), 9, executor);
      begun = 1;
    }
    EXPECT_TRUE(AllBitsEqual(cut.out.bits(), whole.out.bits()));
    EXPECT_TRUE(AllBitsEqual(cut.state.bits(), whole.state.bits()));
  }
}

TEST_P(ShortConvTest, BitsDependOnNoWorkers) {
  TestRng same(7);
  const ShortConvSpec spec = Spec(64, 192, 3, DType::kBF16);
  const Layer alone(spec, kMixedTokens, same, true);
  const ShortConvPlan plan = Plan(alone);
  InlineExecutor executor;
  Run(plan, alone.args(MixedBatch()), kMixedTokens, executor);
  const auto threads = Workers(3);
  ManyWorkers many(17);
  for (Executor* workers :
       {static_cast<Executor*>(threads.get()), static_cast<Executor*>(&many)}) {
    TestRng again(7);
    const Layer layer(spec, kMixedTokens, again, true);
    Run(plan, layer.args(MixedBatch()), kMixedTokens, *workers);
    EXPECT_TRUE(AllBitsEqual(layer.out.bits(), alone.out.bits()));
    EXPECT_TRUE(AllBitsEqual(layer.state.bits(), alone.state.bits()));
  }
}

TEST_P(ShortConvTest, DoesNothingWithoutTokens) {
  TestRng rng;
  const Layer layer(Spec(16, 33, 3, DType::kF32), 2, rng, true);
  const ShortConvPlan plan = Plan(layer);
  const auto before = layer.state.bits();
  InlineExecutor executor;
  Run(plan, layer.args({{2, 1}, {1, 1, 1}, {0, 1}}), 2, executor);
  Run(plan, layer.args({{}, {0}, {}}), 2, executor);
  EXPECT_TRUE(AllBitsEqual(layer.state.bits(), before));
  for (const double y : layer.out.doubles()) EXPECT_TRUE(std::isnan(y));
}

TEST(ShortConvRefusalTest, NamesWhatIsWrong) {
  TestRng rng;
  InlineExecutor executor;
  const Layer layer(Spec(16, 8, 3, DType::kF32), 4, rng, true);
  const auto create = [&](const ShortConvSpec& spec) {
    return ShortConvPlan::Create(spec, layer.in_proj.packed,
                                 layer.out_proj.packed, executor)
        .status();
  };
  ExpectRefusal(create(Spec(16, 0, 3, DType::kF32)),
                "short_conv: channels=0; need 1");
  ExpectRefusal(create(Spec(16, 9, 3, DType::kF32)),
                "short_conv: columns of in_proj=24; need 27, as the layer has");
  ExpectRefusal(create(Spec(17, 8, 3, DType::kF32)),
                "short_conv: k of in_proj=16; need 17");
  ExpectRefusal(create(Spec(16, 8, 5, DType::kF32)), "width=5; need 2");
  const auto plan = ShortConvPlan::Create(layer.spec, layer.in_proj.packed,
                                          layer.out_proj.packed, executor);
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
