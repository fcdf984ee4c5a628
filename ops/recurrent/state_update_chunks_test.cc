// The state update of Mamba-2 on prompts: by chunks of tokens, whose results
// are those of the recurrence token by token.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/recurrent/testing/recurrent_fixture_testutil.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/ops/recurrent/testing/state_update_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

StateUpdateSpec Spec(int64_t heads, int64_t groups, int64_t head_dim,
                     int64_t d_state, int64_t chunk = 0) {
  StateUpdateSpec spec;
  spec.heads = heads;
  spec.groups = groups;
  spec.head_dim = head_dim;
  spec.d_state = d_state;
  spec.chunk = chunk;
  return spec;
}

class StateUpdateChunksTest : public RecurrentFixture<StateUpdatePlan> {};
QUERN_INSTANTIATE_ISA_TEST(StateUpdateChunksTest);

// Integers and no decay: every remainder of tokens, of tiles, of vectors and of
// blocks of rows; the state is rounded once.
TEST_P(StateUpdateChunksTest, AreExactOnSmallIntegers) {
  TestRng rng;
  struct Shape {
    int64_t chunk, tokens, head_dim, d_state;
  };
  std::vector<Shape> shapes;
  for (int64_t tokens = 16; tokens <= 33; ++tokens) {
    shapes.push_back({tokens % 2 == 0 ? 8 : 16, tokens, 19, 5});
  }
  for (const int64_t n : {1, 2, 15, 16, 17, 33, 257}) {
    shapes.push_back({11, 16 + n % 32, 3, n});
  }
  for (const int64_t p : {1, 8, 15, 16, 17, 31, 32, 33, 48, 65, 257, 300}) {
    shapes.push_back({32, 41, p, 3});
  }
  for (const DType state : kFloats) {
    for (const Shape& shape : shapes) {
      if (state != DType::kF32 && shape.chunk == 32) continue;
      SCOPED_TRACE(testing::Message()
                   << shape.chunk << " " << shape.tokens << " "
                   << shape.head_dim << " " << shape.d_state);
      // Ten heads of a group are not a multiple of those that a unit takes.
      StateUpdateSpec spec = Spec(shape.head_dim == 19 ? 20 : 6, 2,
                                  shape.head_dim, shape.d_state, shape.chunk);
      spec.delta = SsmDelta::kPlain;
      spec.state_dtype = state;
      auto values = StateUpdateData::Random(spec, shape.tokens, 2, rng);
      for (Doubles* v : {&values.state, &values.x, &values.dt, &values.b,
                         &values.c, &values.d, &values.dt_bias}) {
        for (double& x : *v) x = static_cast<double>(rng.Integer(-1, 1));
      }
      for (double& a : values.a) a = 0;
      values.z.clear();
      const StateUpdateData data(spec, shape.tokens, 2, values);
      const Sequences prompt = {
          {1}, {0, static_cast<int32_t>(shape.tokens)}, {}};
      const auto want = data.Expect(prompt, values.state);
      ManyWorkers many(shape.tokens % 2 == 0 ? 1 : 8);
      Run(Plan(spec), data, prompt, many);
      Doubles last = want.state;
      for (double& x : last) x = RoundThroughF32(state, x);
      EXPECT_TRUE(AllEqual(data.out().doubles(), want.out));
      EXPECT_TRUE(AllEqual(data.state().doubles(), last));
    }
  }
}

TEST_P(StateUpdateChunksTest, AgreeWithTheRecurrenceAtEveryLength) {
  TestRng rng;
  StateUpdateSpec spec = Spec(2, 1, 9, 35);
  const auto values = StateUpdateData::Random(spec, 150, 1, rng);
  for (const int64_t chunk : {0, 8, 9, 16, 24, 31, 64, 128}) {
    SCOPED_TRACE(chunk);
    spec.chunk = chunk;
    const StateUpdateData data(spec, 150, 1, values);
    const Doubles before = data.state().doubles();
    Run(Plan(spec), data, Prompt(150));
    data.ExpectResults(Prompt(150), before);
  }
}

// Sequences by chunks and token by token in one call, with and without a state,
// in all types. Mamba-1 goes token by token.
TEST_P(StateUpdateChunksTest, AgreeWithTheRecurrenceInEveryType) {
  TestRng rng;
  const Sequences sequences = {
      {2, 5, -1, 0, 3}, {1, 18, 21, 40, 41, 78}, {1, 1, 1, 0, 0}};
  for (const SsmForm form : {SsmForm::kPerRow, SsmForm::kPerHead}) {
    for (const DType dtype : kFloats) {
      for (const DType state : kFloats) {
        StateUpdateSpec spec = Spec(4, 2, 9, 35, 16);
        spec.form = form;
        spec.dtype = dtype;
        spec.state_dtype = state;
        if (state == DType::kF32) spec.delta = SsmDelta::kPlain;
        auto values = StateUpdateData::Random(spec, 80, 6, rng);
        // Each may be left out.
        if (state == DType::kBF16) values.d.clear();
        if (dtype == DType::kBF16) values.z.clear();
        if (state == DType::kF16) values.dt_bias.clear();
        const StateUpdateData data(spec, 80, 6, values);
        const Doubles before = data.state().doubles();
        Run(Plan(spec), data, sequences);
        data.ExpectResults(sequences, before);
      }
    }
  }
}

// Workers, neighbours and the order of sequences change no bit, and a sequence
// of fewer than kChunkedFrom tokens goes token by token in any call.
TEST_P(StateUpdateChunksTest, BatchesAndWorkersChangeNoBit) {
  TestRng rng;
  constexpr int64_t kTokens = 100;
  StateUpdateSpec spec = Spec(6, 2, 140, 19);
  spec.state_dtype = DType::kBF16;
  const auto values = StateUpdateData::Random(spec, kTokens, 3, rng);
  const StateUpdatePlan plan = Plan(spec);
  const StateUpdateData whole(spec, kTokens, 3, values);
  const Sequences all = {{0, 1, 2}, {0, 37, 52, 100}, {}};
  Run(plan, whole, all);
  const std::vector<Sequences> alone = {
      {{2}, {52, 100}, {}}, {{0}, {0, 37}, {}}, {{1}, {37, 52}, {}}};
  const auto pool = Workers(3);
  // Threads that share what is a worker's own do so in one of these.
  for (int repeat = 0; repeat < 20; ++repeat) {
    const StateUpdateData threaded(spec, kTokens, 3, values);
    Execute(plan, threaded.args(all), *pool);
    EXPECT_EQ(threaded.out().bits(), whole.out().bits());
    EXPECT_EQ(threaded.state().bits(), whole.state().bits());
  }
  for (const int workers : {1, 3, 64}) {
    ManyWorkers many(workers);
    const StateUpdateData apart(spec, kTokens, 3, values);
    for (const Sequences& one : alone) Run(plan, apart, one, many);
    EXPECT_EQ(apart.out().bits(), whole.out().bits());
    EXPECT_EQ(apart.state().bits(), whole.state().bits());
  }
  // out is x, or z.
  for (const bool gate : {false, true}) {
    const StateUpdateData in_place(spec, kTokens, 3, values);
    StateUpdateArgs args = in_place.args(all);
    args.out = gate ? args.z : args.x;
    ManyWorkers many(5);
    Execute(plan, args, many);
    EXPECT_EQ((gate ? in_place.z() : in_place.x()).bits(), whole.out().bits());
  }
  // The 15 tokens of the second have the bits of token by token.
  spec.chunk = 1;
  const StateUpdateData tokens(spec, kTokens, 3, values);
  Run(Plan(spec), tokens, alone[2]);
  const int64_t row = 6 * 140;
  const Doubles got = whole.out().doubles(), want = tokens.out().doubles();
  EXPECT_EQ(Doubles(got.begin() + 37 * row, got.begin() + 52 * row),
            Doubles(want.begin() + 37 * row, want.begin() + 52 * row));
}

// From no decay to e^-2000 in one token, whose products underflow.
TEST_P(StateUpdateChunksTest, AreAccurateForEveryDecay) {
  TestRng rng;
  for (const int64_t chunk : {8, 32, 128}) {
    StateUpdateSpec spec = Spec(4, 1, 3, 7, chunk);
    spec.delta = SsmDelta::kPlain;
    auto values = StateUpdateData::Random(spec, 90, 1, rng);
    values.a = {-0.01, -1, -100, 3};
    values.dt_bias.clear();
    for (double& dt : values.dt) {
      dt = std::ldexp(1, static_cast<int>(rng.Integer(-10, 4)));
    }
    const StateUpdateData data(spec, 90, 1, values);
    const Doubles before = data.state().doubles();
    Run(Plan(spec), data, Prompt(90));
    data.ExpectResults(Prompt(90), before);
  }
}

// A NaN stays where the recurrence leaves it: in no earlier token of its chunk,
// no other row, head, sequence or slot.
TEST_P(StateUpdateChunksTest, KeepNaNWhereItBelongs) {
  TestRng rng;
  enum Input { kX, kDt, kB, kC, kZ, kNone };
  for (const Input input : {kX, kDt, kB, kC, kZ, kNone}) {
    for (const int64_t token : {40, 49, 57, 71}) {
      SCOPED_TRACE(testing::Message() << input << " " << token);
      const StateUpdateSpec spec = Spec(4, 2, 5, 7, 16);
      auto values = StateUpdateData::Random(spec, 90, 4, rng);
      // Token 0 is padding; slot 1 is in no sequence, slot 3 begins.
      for (size_t i = 0; i < 20; ++i) values.x[i] = values.z[i] = kNaN;
      for (size_t i = 0; i < 14; ++i) values.b[i] = values.c[i] = kNaN;
      values.dt[0] = kNaN;
      for (size_t i = 0; i < 20 * 7; ++i) {
        values.state[1 * 20 * 7 + i] = values.state[3 * 20 * 7 + i] = kNaN;
      }
      const auto at = [&](Doubles& v, int64_t width, int64_t i) -> double& {
        return v[static_cast<size_t>(token * width + i)];
      };
      if (input == kX) at(values.x, 20, 7) = kNaN;
      if (input == kDt) at(values.dt, 4, 2) = kNaN;
      if (input == kB) at(values.b, 14, 3) = kNaN;
      if (input == kC) at(values.c, 14, 9) = kNaN;
      if (input == kZ) at(values.z, 20, 19) = kNaN;
      const StateUpdateData data(spec, 90, 4, values);
      const Doubles before = data.state().doubles();
      const Sequences sequences = {{0, 3, 2}, {1, 33, 73, 90}, {1, 0, 1}};
      Run(Plan(spec), data, sequences);
      // The oracle has NaN, and no bound, in the same places.
      data.ExpectResults(sequences, before);
    }
  }
}

TEST(StateUpdateChunksPlanTest, StateTheirWorkspace) {
  StateUpdateSpec spec = Spec(80, 1, 64, 128);
  const auto plan = StateUpdatePlan::Create(spec);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->spec().chunk, StateUpdatePlan::kChunk);
  const int64_t from = StateUpdatePlan::kChunkedFrom;
  EXPECT_EQ(plan->WorkspaceBytes(from - 1, 8).value(), 0);
  const int64_t one = plan->WorkspaceBytes(from, 1).value();
  EXPECT_GT(one, 64 * 128 * 4);
  EXPECT_LT(one, 600 * 1024);
  EXPECT_GT(plan->WorkspaceBytes(from, 8).value(), 7 * one);
  EXPECT_LT(plan->WorkspaceBytes(1 << 20, 1).value(), one + (1 << 20));
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "max_tokens=-1");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(), "max_workers=0");
  spec.chunk = 1;
  EXPECT_EQ(StateUpdatePlan::Create(spec)->WorkspaceBytes(4096, 8).value(), 0);
  for (const int64_t chunk : {-1, 2, 7, 129}) {
    spec.chunk = chunk;
    ExpectRefusal(StateUpdatePlan::Create(spec).status(), "need 8 <= chunk");
  }
  spec.chunk = 0;
  spec.form = SsmForm::kPerRow;
  EXPECT_EQ(StateUpdatePlan::Create(spec)->WorkspaceBytes(4096, 8).value(), 0);
}

}  // namespace
}  // namespace quern
