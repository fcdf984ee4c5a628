#include "quern/ops/recurrent/delta_rule.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/testing/delta_rule_testutil.h"
#include "quern/ops/recurrent/testing/recurrent_fixture_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

DeltaRuleSpec Spec(int64_t key_heads, int64_t value_heads, int64_t dk,
                   int64_t dv) {
  DeltaRuleSpec spec;
  spec.key_heads = key_heads;
  spec.value_heads = value_heads;
  spec.dk = dk;
  spec.dv = dv;
  return spec;
}

class DeltaRuleTest : public RecurrentFixture<DeltaRulePlan> {};
QUERN_INSTANTIATE_ISA_TEST(DeltaRuleTest);

// dk = dv = 2, three tokens from a state of zeros; a few roundings of numbers
// below 4.
TEST_P(DeltaRuleTest, ReproducesTheGoldenNumbers) {
  const DeltaRuleSpec spec = Spec(1, 1, 2, 2);
  const DeltaRuleData::Values values = {
      {1, 0, .6, .8, 0, 1}, {1, 0, 0, 1, .8, .6}, {1, 2, 3, -1, .5, .25},
      {-.1, -.5, -2},       {.5, 1, .25},         {kNaN, kNaN, kNaN, kNaN}};
  const DeltaRuleData data(spec, 3, 1, values);
  Run(Plan(spec), data, {{0}, {0, 3}, {0}});
  EXPECT_TRUE(AllClose(data.out().doubles(),
                       Doubles{.35355339, .70710678, 1.82572086, -.30835626,
                               .31080187, -.06753245},
                       1e-6));
  EXPECT_TRUE(AllClose(data.state().doubles(),
                       Doubles{.085755, .13519163, .43954022, -.09550531},
                       1e-6));
}

// Integers: every remainder of the rows in flight, of vectors, pairs of vectors
// and blocks of columns.
TEST_P(DeltaRuleTest, IsExactOnSmallIntegers) {
  TestRng rng;
  const int64_t dks[] = {1, 2, 3, 4, 5, 9, 16, 17, 33};
  const int64_t dvs[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 67, 257, 300};
  for (const DType dtype : kFloats) {
    for (const int64_t dk : dks) {
      for (const int64_t dv : dvs) {
        if (dtype != DType::kF32 && dk % 4 == 1 && dv > 33) continue;
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " " << dk << " " << dv);
        DeltaRuleSpec spec = Spec(1, 2, dk, dv);
        spec.dtype = spec.state_dtype = dtype;
        spec.scale = 1;
        // Four heads in all are enough for one worker and too few for eight.
        const auto integers = [&](int64_t n, int64_t lo, int64_t hi) {
          return ToDoubles(SmallIntegers(rng, n, lo, hi));
        };
        const DeltaRuleData::Values values = {
            integers(2 * dk, -1, 1), integers(2 * dk, -1, 1),
            integers(4 * dv, -2, 2), Doubles(4, 0.0),
            integers(4, 0, 1),       integers(3 * 2 * dk * dv, -1, 1)};
        const DeltaRuleData data(spec, 2, 3, values);
        const Sequences decode = {{2, 0}, {}, {}};
        const DeltaRuleData::Expected want = data.Expect(decode, values.state);
        ManyWorkers many(dv % 2 == 0 ? 1 : 8);
        Run(Plan(spec), data, decode, many);
        Doubles out = want.out, state = want.state;
        for (double& x : out) x = RoundThroughF32(dtype, x);
        for (double& x : state) x = RoundThroughF32(dtype, x);
        EXPECT_TRUE(AllEqual(data.out().doubles(), out));
        EXPECT_TRUE(AllEqual(data.state().doubles(), state));
      }
    }
  }
}

TEST_P(DeltaRuleTest, AgreesWithTheRecurrenceInDouble) {
  TestRng rng;
  const Sequences cases[] = {
      {{4, 1, 0}, {}, {}},
      {{4, -1, 0}, {}, {1, 0, 0}},
      {{2, 5, -1, 0, 3}, {1, 8, 8, 10, 11, 30}, {1, 1, 1, 0, 1}}};
  for (const DType dtype : kFloats) {
    for (const DType state : kFloats) {
      for (const DeltaDecay decay :
           {DeltaDecay::kPerHead, DeltaDecay::kPerChannel}) {
        for (const DeltaNorm norm : {DeltaNorm::kNone, DeltaNorm::kL2}) {
          for (const Sequences& sequences : cases) {
            DeltaRuleSpec spec = Spec(2, 4, 21, 35);
            spec.dtype = dtype;
            spec.state_dtype = state;
            spec.decay = decay;
            spec.norm = norm;
            if (norm == DeltaNorm::kNone) spec.scale = -1.5f;
            const int64_t tokens = sequences.starts.empty() ? 3 : 31;
            const auto values = DeltaRuleData::Random(spec, tokens, 6, rng);
            const DeltaRuleData data(spec, tokens, 6, values);
            const Doubles before = data.state().doubles();
            Run(Plan(spec), data, sequences);
            data.ExpectResults(sequences, before);
          }
        }
      }
    }
  }
}

// Decode steps and a prompt that goes by chunks.
TEST_P(DeltaRuleTest, TakesGatesOf16BitsAndAnotherEpsilon) {
  TestRng rng;
  const Sequences sequences = {{4, 1, 0}, {0, 3, 4, 23}, {1, 1, 0}};
  for (const DType gates : kFloats) {
    for (const DeltaDecay decay :
         {DeltaDecay::kPerHead, DeltaDecay::kPerChannel}) {
      DeltaRuleSpec spec = Spec(2, 4, 21, 35);
      spec.g_dtype = gates;
      spec.beta_dtype = gates;
      spec.decay = decay;
      spec.norm = DeltaNorm::kL2;
      spec.norm_eps = 0.75f;
      const auto values = DeltaRuleData::Random(spec, 23, 6, rng);
      const DeltaRuleData data(spec, 23, 6, values);
      const Doubles before = data.state().doubles();
      Run(Plan(spec), data, sequences);
      data.ExpectResults(sequences, before);
    }
  }
}

// One call, token by token, other cuts; other neighbours; other workers.
TEST_P(DeltaRuleTest, CutsBatchesAndWorkersChangeNoBit) {
  TestRng rng;
  constexpr int64_t kTokens = 12;
  for (const DType state : kFloats) {
    DeltaRuleSpec spec = Spec(1, 3, 19, 130);
    spec.state_dtype = state;
    spec.norm = DeltaNorm::kL2;
    spec.decay = DeltaDecay::kPerChannel;
    const auto values = DeltaRuleData::Random(spec, kTokens, 2, rng);
    const DeltaRulePlan plan = Plan(spec);
    const DeltaRuleData whole(spec, kTokens, 2, values);
    Run(plan, whole, {{0, 1}, {0, 7, 12}, {}});
    const std::vector<std::vector<Sequences>> ways = {
        {{{1, 0}, {0, 0, 0}, {}}, {{0}, {0, 7}, {}}, {{1}, {7, 12}, {}}},
        {{{0, 1}, {0, 3, 3}, {}}, {{0, 1}, {3, 7, 9}, {}}, {{1}, {9, 12}, {}}},
    };
    // Real threads write the same bits.
    const DeltaRuleData threaded(spec, kTokens, 2, values);
    const Sequences both = {{0, 1}, {0, 7, 12}, {}};
    const auto pool = Workers(3);
    Execute(plan, threaded.args(both), *pool);
    EXPECT_EQ(threaded.out().bits(), whole.out().bits());
    EXPECT_EQ(threaded.state().bits(), whole.state().bits());
    for (const int workers : {1, 3, 64}) {
      ManyWorkers many(workers);
      for (const auto& calls : ways) {
        const DeltaRuleData cut(spec, kTokens, 2, values);
        for (const Sequences& call : calls) Run(plan, cut, call, many);
        EXPECT_EQ(cut.out().bits(), whole.out().bits());
        EXPECT_EQ(cut.state().bits(), whole.state().bits());
      }
      const DeltaRuleData single(spec, kTokens, 2, values);
      for (int32_t t = 0; t < kTokens; ++t) {
        Run(plan, single, {{t < 7 ? 0 : 1}, {t, t + 1}, {}}, many);
      }
      EXPECT_EQ(single.out().bits(), whole.out().bits());
      EXPECT_EQ(single.state().bits(), whole.state().bits());
    }
  }
}

// A decode step takes whole heads, a single sequence of one token blocks of
// columns.
TEST_P(DeltaRuleTest, DecodeInABatchHasTheBitsOfDecodeAlone) {
  TestRng rng;
  DeltaRuleSpec spec = Spec(2, 2, 16, 200);
  const auto values = DeltaRuleData::Random(spec, 4, 4, rng);
  const DeltaRulePlan plan = Plan(spec);
  const DeltaRuleData batch(spec, 4, 4, values), alone(spec, 4, 4, values);
  Run(plan, batch, {{3, 1, 0, 2}, {}, {}});
  ManyWorkers many(16);
  const int64_t slots[] = {3, 1, 0, 2};
  for (int32_t t = 0; t < 4; ++t) {
    Run(plan, alone, {{slots[t]}, {t, t + 1}, {}}, many);
  }
  EXPECT_EQ(batch.out().bits(), alone.out().bits());
  EXPECT_EQ(batch.state().bits(), alone.state().bits());
}

TEST_P(DeltaRuleTest, OutMayBeV) {
  TestRng rng;
  const DeltaRuleSpec spec = Spec(1, 2, 8, 70);
  const auto values = DeltaRuleData::Random(spec, 5, 1, rng);
  const DeltaRuleData apart(spec, 5, 1, values), in_place(spec, 5, 1, values);
  const Sequences one = {{0}, {0, 5}, {}};
  InlineExecutor executor;
  const DeltaRulePlan plan = Plan(spec);
  Run(plan, apart, one);
  DeltaRuleArgs args = in_place.args(one);
  args.out = args.v;
  Execute(plan, args, executor);
  EXPECT_EQ(in_place.v().bits(), apart.out().bits());
}

// State of one head of 2 x 2 after tokens with these g, beta, k and v.
TEST_P(DeltaRuleTest, HasTheLimitsOfTheFormula) {
  const DeltaRuleSpec spec = Spec(1, 1, 2, 2);
  const DeltaRulePlan plan = Plan(spec);
  const Doubles old = {1, 2, 3, 4};
  const auto after = [&](Doubles g, Doubles beta, Doubles k, Doubles v) {
    const auto tokens = static_cast<int32_t>(g.size());
    const DeltaRuleData data(spec, tokens, 1,
                             {Doubles(k.size(), 1.0), k, v, g, beta, old});
    Run(plan, data, {{0}, {0, tokens}, {}});
    return data.state().doubles();
  };
  // Nothing decays and nothing is written.
  EXPECT_EQ(after({0}, {0}, {1, 1}, {5, 6}), old);
  // g > 0 counts as 0.
  EXPECT_EQ(after({3}, {0}, {1, 1}, {5, 6}), old);
  // beta = 1 and orthonormal keys: S^T k is v.
  EXPECT_EQ(after({0, 0}, {1, 1}, {1, 0, 0, 1}, {5, 6, 7, 8}),
            (Doubles{5, 6, 7, 8}));
  // Only the last token counts.
  EXPECT_TRUE(AllClose(after({-90, -90}, {1, 1}, {1, 1, 1, 0}, {5, 6, 7, 8}),
                       Doubles{7, 8, 0, 0}, 1e-30));
  EXPECT_EQ(after({-kInf, -kInf}, {1, 1}, {1, 1, 1, 0}, {5, 6, 7, 8}),
            (Doubles{7, 8, 0, 0}));
  EXPECT_TRUE(std::isnan(after({kNaN}, {1}, {1, 1}, {5, 6})[3]));
}

// From a state of zeros, with beta = 1 and no decay: k v^T.
TEST_P(DeltaRuleTest, DividesShortKeysByARootThatIsNotZero) {
  DeltaRuleSpec spec = Spec(1, 1, 2, 1);
  spec.norm = DeltaNorm::kL2;
  const DeltaRulePlan plan = Plan(spec);
  for (const double k : {0.0, 1e-3, 1e-30}) {
    const DeltaRuleData data(spec, 1, 1,
                             {{k, 0}, {0, k}, {2}, {0}, {1}, {0, 0}});
    const Doubles before = data.state().doubles();
    Run(plan, data, {{0}, {}, {}});
    data.ExpectResults({{0}, {}, {}}, before);
    EXPECT_NEAR(data.state().doubles()[1], 2 * k / std::sqrt(k * k + 1e-6),
                1e-6);
  }
}

TEST_P(DeltaRuleTest, KeepsNaNWhereItBelongs) {
  TestRng rng;
  const DeltaRuleSpec spec = Spec(1, 2, 3, 2);
  auto values = DeltaRuleData::Random(spec, 6, 4, rng);
  // Token 0 is padding, token 2 has a NaN in v of head 1, column 0; slot 1 is
  // in no sequence, slot 3 has no initial state.
  for (int64_t i = 0; i < 3; ++i) values.q[static_cast<size_t>(i)] = kNaN;
  values.k[0] = values.v[0] = values.g[0] = values.beta[0] = kNaN;
  values.v[2 * 4 + 2] = kNaN;
  for (const size_t slot : {1, 3}) {
    for (size_t i = 0; i < 12; ++i) values.state[slot * 12 + i] = kNaN;
  }
  const DeltaRuleData data(spec, 6, 4, values);
  const Doubles before = data.state().doubles();
  const Sequences sequences = {{0, 3}, {1, 3, 6}, {1, 0}};
  Run(Plan(spec), data, sequences);
  const Doubles out = data.out().doubles(), state = data.state().doubles();
  data.ExpectResults(sequences, before);
  EXPECT_TRUE(std::isnan(out[2 * 4 + 2]));
  EXPECT_FALSE(std::isnan(out[2 * 4 + 3]));
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(std::isnan(state[i]), i >= 6 && i % 2 == 0) << i;
    EXPECT_TRUE(std::isnan(state[12 + i]));
    EXPECT_FALSE(std::isnan(state[36 + i]));
  }
}

TEST_P(DeltaRuleTest, TakesNoTokensAndNoSequences) {
  const DeltaRuleSpec spec = Spec(1, 1, 2, 2);
  const DeltaRuleData none(spec, 0, 1, {{}, {}, {}, {}, {}, {1, 2, 3, 4}});
  Run(Plan(spec), none, {});
  Run(Plan(spec), none, {{0}, {0, 0}, {0}});
  EXPECT_EQ(none.state().doubles(), (Doubles{1, 2, 3, 4}));
}

}  // namespace
}  // namespace quern
