// The delta rule on prompts: by chunks of tokens, whose results are those of
// the recurrence token by token.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/testing/delta_rule_testutil.h"
#include "quern/ops/recurrent/testing/recurrent_fixture_testutil.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr DeltaDecay kDecays[] = {DeltaDecay::kPerHead,
                                  DeltaDecay::kPerChannel};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

DeltaRuleSpec Spec(DeltaDecay decay, int64_t heads, int64_t dk, int64_t dv,
                   int64_t chunk = 0) {
  DeltaRuleSpec spec;
  spec.key_heads = 1;
  spec.value_heads = heads;
  spec.dk = dk;
  spec.dv = dv;
  spec.decay = decay;
  spec.chunk = chunk;
  return spec;
}

class DeltaRuleChunksTest : public RecurrentFixture<DeltaRulePlan> {};
QUERN_INSTANTIATE_ISA_TEST(DeltaRuleChunksTest);

// Integers: no decay, beta 0 or 1, and keys with two ones at most, so that the
// state grows slowly. Every remainder of tokens, of the tiles of products, of
// vectors and of blocks of columns; the state is rounded once.
TEST_P(DeltaRuleChunksTest, AreExactOnSmallIntegers) {
  TestRng rng;
  struct Shape {
    int64_t chunk, tokens, dk, dv;
  };
  std::vector<Shape> shapes;
  for (int64_t tokens = 16; tokens <= 33; ++tokens) {
    shapes.push_back({tokens % 2 == 0 ? 8 : 16, tokens, 5, 19});
  }
  for (const int64_t dk : {1, 2, 15, 16, 17, 33}) {
    shapes.push_back({11, 16 + dk, dk, 3});
  }
  for (const int64_t dk : {256, 257, 511, 1024}) {
    shapes.push_back({16, 20, dk, 3});
  }
  for (const int64_t dv : {1, 8, 15, 16, 17, 31, 32, 33, 48, 65, 257, 300}) {
    shapes.push_back({32, 41, 3, dv});
  }
  for (const DeltaDecay decay : kDecays) {
    for (const DType state : kFloats) {
      for (const Shape& shape : shapes) {
        if (state != DType::kF32 && shape.chunk == 32) continue;
        SCOPED_TRACE(testing::Message() << shape.chunk << " " << shape.tokens
                                        << " " << shape.dk << " " << shape.dv);
        DeltaRuleSpec spec = Spec(decay, 2, shape.dk, shape.dv, shape.chunk);
        spec.state_dtype = state;
        spec.scale = 1;
        DeltaRuleData::Values values =
            DeltaRuleData::Random(spec, shape.tokens, 2, rng);
        for (Doubles* v : {&values.q, &values.v, &values.state}) {
          for (double& x : *v) x = static_cast<double>(rng.Integer(-2, 2));
        }
        for (double& x : values.beta) {
          x = static_cast<double>(rng.Integer(0, 1));
        }
        values.g.assign(values.g.size(), 0.0);
        values.k.assign(values.k.size(), 0.0);
        for (int64_t t = 0; t < shape.tokens; ++t) {
          for (int ones = 0; ones < 2; ++ones) {
            values.k[static_cast<size_t>(t * shape.dk +
                                         rng.Integer(0, shape.dk - 1))] = 1;
          }
        }
        const DeltaRuleData data(spec, shape.tokens, 2, values);
        const Sequences prompt = {
            {1}, {0, static_cast<int32_t>(shape.tokens)}, {}};
        const DeltaRuleData::Expected want = data.Expect(prompt, values.state);
        ManyWorkers many(shape.dv % 2 == 0 ? 1 : 8);
        Run(Plan(spec), data, prompt, many);
        Doubles last = want.state;
        for (double& x : last) x = RoundThroughF32(state, x);
        EXPECT_TRUE(AllEqual(data.out().doubles(), want.out));
        EXPECT_TRUE(AllEqual(data.state().doubles(), last));
      }
    }
  }
}

TEST_P(DeltaRuleChunksTest, AgreeWithTheRecurrenceAtEveryLength) {
  TestRng rng;
  const int64_t chunks[] = {0, 8, 9, 16, 24, 31, 64, 128};
  for (const DeltaDecay decay : kDecays) {
    for (const DeltaNorm norm : {DeltaNorm::kNone, DeltaNorm::kL2}) {
      DeltaRuleSpec spec = Spec(decay, 2, 21, 35);
      spec.norm = norm;
      const auto values = DeltaRuleData::Random(spec, 150, 2, rng);
      for (const int64_t chunk : chunks) {
        SCOPED_TRACE(chunk);
        spec.chunk = chunk;
        const DeltaRuleData data(spec, 150, 2, values);
        const Doubles before = data.state().doubles();
        Run(Plan(spec), data, Prompt(150));
        data.ExpectResults(Prompt(150), before);
      }
    }
  }
}

// Keys longer than those of any model, up to the longest that a plan takes.
TEST_P(DeltaRuleChunksTest, AgreeWithTheRecurrenceForLongKeys) {
  TestRng rng;
  for (const DeltaDecay decay : kDecays) {
    for (const int64_t dk : {257, 300, 512, 1024}) {
      SCOPED_TRACE(dk);
      DeltaRuleSpec spec = Spec(decay, 2, dk, 9);
      spec.norm = DeltaNorm::kL2;
      const auto values = DeltaRuleData::Random(spec, 35, 1, rng);
      const DeltaRuleData data(spec, 35, 1, values);
      const Doubles before = data.state().doubles();
      ManyWorkers many(3);
      Run(Plan(spec), data, Prompt(35), many);
      data.ExpectResults(Prompt(35), before);
    }
  }
}

// Sequences by chunks and token by token in one call, with and without a state,
// in all types.
TEST_P(DeltaRuleChunksTest, AgreeWithTheRecurrenceInEveryType) {
  TestRng rng;
  const Sequences sequences = {
      {2, 5, -1, 0, 3}, {1, 18, 21, 40, 41, 78}, {1, 1, 1, 0, 0}};
  for (const DType dtype : kFloats) {
    for (const DType state : kFloats) {
      for (const DeltaDecay decay : kDecays) {
        DeltaRuleSpec spec = Spec(decay, 4, 21, 35, 16);
        spec.key_heads = 2;
        spec.dtype = dtype;
        spec.state_dtype = state;
        if (state == DType::kF32) spec.scale = -1.5f;
        if (dtype == DType::kF32) spec.norm = DeltaNorm::kL2;
        const auto values = DeltaRuleData::Random(spec, 80, 6, rng);
        const DeltaRuleData data(spec, 80, 6, values);
        const Doubles before = data.state().doubles();
        Run(Plan(spec), data, sequences);
        data.ExpectResults(sequences, before);
      }
    }
  }
}

// Workers, neighbours and the order of sequences change no bit, and a sequence
// of fewer than kChunkedFrom tokens goes token by token in any call.
TEST_P(DeltaRuleChunksTest, BatchesAndWorkersChangeNoBit) {
  TestRng rng;
  constexpr int64_t kTokens = 100;
  for (const DeltaDecay decay : kDecays) {
    DeltaRuleSpec spec = Spec(decay, 3, 19, 130);
    spec.norm = DeltaNorm::kL2;
    spec.state_dtype = DType::kBF16;
    const auto values = DeltaRuleData::Random(spec, kTokens, 3, rng);
    const DeltaRulePlan plan = Plan(spec);
    const DeltaRuleData whole(spec, kTokens, 3, values);
    const Sequences all = {{0, 1, 2}, {0, 37, 52, 100}, {}};
    Run(plan, whole, all);
    const std::vector<Sequences> alone = {
        {{2}, {52, 100}, {}}, {{0}, {0, 37}, {}}, {{1}, {37, 52}, {}}};
    const auto pool = Workers(3);
    // Threads that share what is a worker's own do so in one of these.
    for (int repeat = 0; repeat < 20; ++repeat) {
      const DeltaRuleData threaded(spec, kTokens, 3, values);
      Execute(plan, threaded.args(all), *pool);
      EXPECT_EQ(threaded.out().bits(), whole.out().bits());
      EXPECT_EQ(threaded.state().bits(), whole.state().bits());
    }
    for (const int workers : {1, 3, 64}) {
      ManyWorkers many(workers);
      const DeltaRuleData apart(spec, kTokens, 3, values);
      for (const Sequences& one : alone) Run(plan, apart, one, many);
      EXPECT_EQ(apart.out().bits(), whole.out().bits());
      EXPECT_EQ(apart.state().bits(), whole.state().bits());
    }
    // The 15 tokens of the second have the bits of token by token.
    spec.chunk = 1;
    const DeltaRuleData tokens(spec, kTokens, 3, values);
    Run(Plan(spec), tokens, alone[2]);
    const int64_t row = 3 * 130;
    const Doubles got = whole.out().doubles(), want = tokens.out().doubles();
    EXPECT_EQ(Doubles(got.begin() + 37 * row, got.begin() + 52 * row),
              Doubles(want.begin() + 37 * row, want.begin() + 52 * row));
  }
}

// Cutting a prompt changes roundings alone.
TEST_P(DeltaRuleChunksTest, CutsStayWithinTheBound) {
  TestRng rng;
  for (const DeltaDecay decay : kDecays) {
    const DeltaRuleSpec spec = Spec(decay, 1, 16, 16, 16);
    const auto values = DeltaRuleData::Random(spec, 70, 1, rng);
    const DeltaRulePlan plan = Plan(spec);
    const DeltaRuleData data(spec, 70, 1, values);
    Doubles before = data.state().doubles();
    int32_t begin = 0;
    for (const int32_t end : {20, 21, 40, 47, 70}) {
      const Sequences part = {{0}, {begin, end}, {}};
      Run(plan, data, part);
      // The oracle goes on from what the last part has left.
      const auto want = data.Expect(part, before);
      const Doubles out = data.out().doubles(), state = data.state().doubles();
      for (size_t i = static_cast<size_t>(begin) * 16;
           i < static_cast<size_t>(end) * 16; ++i) {
        EXPECT_NEAR(out[i], want.out[i], want.out_bounds[i] + 1e-7);
      }
      for (size_t i = 0; i < state.size(); ++i) {
        EXPECT_NEAR(state[i], want.state[i], want.state_bounds[i]);
      }
      before = state;
      begin = end;
    }
  }
}

TEST_P(DeltaRuleChunksTest, OutMayBeV) {
  TestRng rng;
  for (const DeltaDecay decay : kDecays) {
    const DeltaRuleSpec spec = Spec(decay, 2, 8, 70, 16);
    const auto values = DeltaRuleData::Random(spec, 45, 1, rng);
    const DeltaRuleData apart(spec, 45, 1, values);
    const DeltaRuleData in_place(spec, 45, 1, values);
    ManyWorkers executor(5);
    const DeltaRulePlan plan = Plan(spec);
    Run(plan, apart, Prompt(45));
    DeltaRuleArgs args = in_place.args(Prompt(45));
    const Sequences one = Prompt(45);
    args.batch = one.batch();
    args.out = args.v;
    Execute(plan, args, executor);
    EXPECT_EQ(in_place.v().bits(), apart.out().bits());
  }
}

// Decays over the whole range, one after the other: e^-90 and less, whose
// products underflow, beside none at all.
TEST_P(DeltaRuleChunksTest, AreAccurateForEveryDecay) {
  TestRng rng;
  const double decays[] = {0, 2, -1e-6, -0.5, -20, -90, -1000, -1e30, -kInf};
  for (const DeltaDecay decay : kDecays) {
    for (const int64_t chunk : {8, 32, 128}) {
      const DeltaRuleSpec spec = Spec(decay, 1, 9, 7, chunk);
      auto values = DeltaRuleData::Random(spec, 90, 1, rng);
      for (double& g : values.g) {
        g = decays[rng.Integer(0, rng.Integer(0, 8))];
      }
      const DeltaRuleData data(spec, 90, 1, values);
      const Doubles before = data.state().doubles();
      Run(Plan(spec), data, Prompt(90));
      data.ExpectResults(Prompt(90), before);
      // Only the last token counts.
      values.g.assign(values.g.size(), -90);
      const DeltaRuleData last(spec, 90, 1, values);
      Run(Plan(spec), last, Prompt(90));
      last.ExpectResults(Prompt(90), before);
    }
  }
}

TEST_P(DeltaRuleChunksTest, KeepTheStateWithoutDecayAndBeta) {
  TestRng rng;
  for (const DeltaDecay decay : kDecays) {
    const DeltaRuleSpec spec = Spec(decay, 1, 5, 20);
    auto values = DeltaRuleData::Random(spec, 50, 1, rng);
    values.g.assign(values.g.size(), 0.0);
    values.beta.assign(values.beta.size(), 0.0);
    const DeltaRuleData data(spec, 50, 1, values);
    const Doubles before = data.state().doubles();
    Run(Plan(spec), data, Prompt(50));
    EXPECT_EQ(data.state().doubles(), before);
  }
}

// A NaN stays where the recurrence leaves it: in no earlier token of its chunk,
// no other column, head, sequence or slot.
TEST_P(DeltaRuleChunksTest, KeepNaNWhereItBelongs) {
  TestRng rng;
  enum Input { kQ, kK, kV, kG, kBeta, kNone };
  for (const DeltaDecay decay : kDecays) {
    for (const Input input : {kQ, kK, kV, kG, kBeta, kNone}) {
      for (const int64_t token : {40, 49, 57, 71}) {
        SCOPED_TRACE(testing::Message() << input << " " << token);
        DeltaRuleSpec spec = Spec(decay, 2, 6, 19, 16);
        auto values = DeltaRuleData::Random(spec, 90, 4, rng);
        const int64_t rates = decay == DeltaDecay::kPerHead ? 2 : 12;
        // Token 0 is padding; slot 1 is in no sequence, slot 3 begins.
        for (size_t i = 0; i < 6; ++i) values.q[i] = values.k[i] = kNaN;
        values.v[0] = values.g[0] = values.beta[0] = kNaN;
        for (size_t i = 0; i < 2 * 6 * 19; ++i) {
          values.state[1 * 2 * 6 * 19 + i] = kNaN;
          values.state[3 * 2 * 6 * 19 + i] = kNaN;
        }
        const auto at = [&](Doubles& v, int64_t width, int64_t i) -> double& {
          return v[static_cast<size_t>(token * width + i)];
        };
        if (input == kQ) at(values.q, 6, 2) = kNaN;
        if (input == kK) at(values.k, 6, 5) = kNaN;
        if (input == kV) at(values.v, 38, 19 + 3) = kNaN;
        if (input == kG) at(values.g, rates, rates / 2) = kNaN;
        if (input == kBeta) at(values.beta, 2, 1) = kNaN;
        const DeltaRuleData data(spec, 90, 4, values);
        const Doubles before = data.state().doubles();
        const Sequences sequences = {{0, 3, 2}, {1, 33, 73, 90}, {1, 0, 1}};
        Run(Plan(spec), data, sequences);
        // The oracle has NaN, and no bound, in the same places.
        data.ExpectResults(sequences, before);
      }
    }
  }
}

TEST(DeltaRuleChunksPlanTest, StateTheirWorkspace) {
  DeltaRuleSpec spec = Spec(DeltaDecay::kPerHead, 4, 128, 128);
  const auto plan = DeltaRulePlan::Create(spec);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->spec().chunk, DeltaRulePlan::kChunk);
  const int64_t from = DeltaRulePlan::kChunkedFrom;
  EXPECT_EQ(plan->WorkspaceBytes(from - 1, 8).value(), 0);
  const int64_t one = plan->WorkspaceBytes(from, 1).value();
  EXPECT_GT(one, 128 * 128 * 4);
  EXPECT_LT(one, 400 * 1024);
  EXPECT_GT(plan->WorkspaceBytes(from, 8).value(), 7 * one);
  // More tokens are more sequences that may go by chunks.
  EXPECT_LT(plan->WorkspaceBytes(1 << 20, 1).value(), one + (1 << 20));
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "max_tokens=-1");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(), "max_workers=0");
  spec.chunk = 1;
  EXPECT_EQ(DeltaRulePlan::Create(spec)->WorkspaceBytes(4096, 8).value(), 0);
  for (const int64_t chunk : {-1, 2, 7, 129}) {
    spec.chunk = chunk;
    ExpectRefusal(DeltaRulePlan::Create(spec).status(), "need 8 <= chunk");
  }
}

}  // namespace
}  // namespace quern
