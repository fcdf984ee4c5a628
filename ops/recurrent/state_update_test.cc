#include "quern/ops/recurrent/state_update.h"

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
#include "quern/ops/any_matrix_testutil.h"
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
constexpr SsmForm kForms[] = {SsmForm::kPerRow, SsmForm::kPerHead};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

StateUpdateSpec Spec(SsmForm form, int64_t heads, int64_t groups,
                     int64_t head_dim, int64_t d_state) {
  StateUpdateSpec spec;
  spec.form = form;
  spec.heads = heads;
  spec.groups = groups;
  spec.head_dim = head_dim;
  spec.d_state = d_state;
  return spec;
}

class StateUpdateTest : public RecurrentFixture<StateUpdatePlan> {
 protected:
  using RecurrentFixture::Run;
  void Run(const StateUpdatePlan& plan, const StateUpdateData& data,
           const Sequences& sequences, int workers) {
    ManyWorkers executor(workers);
    Run(plan, data, sequences, executor);
  }
};
QUERN_INSTANTIATE_ISA_TEST(StateUpdateTest);

// Integers and no decay: every remainder of a vector and of a block of rows.
TEST_P(StateUpdateTest, IsExactOnSmallIntegers) {
  TestRng rng;
  const int64_t dims[] = {1, 3, 64, 65, 257};
  const int64_t states[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 128};
  for (const SsmForm form : kForms) {
    for (const DType dtype : kFloats) {
      for (const int64_t head_dim : dims) {
        for (const int64_t n : states) {
          if (head_dim > 64 && n > 17) continue;
          SCOPED_TRACE(testing::Message()
                       << DTypeName(dtype) << " " << head_dim << " " << n);
          StateUpdateSpec spec = Spec(form, 2, 1, head_dim, n);
          spec.delta = SsmDelta::kPlain;
          spec.dtype = spec.state_dtype = dtype;
          StateUpdateData::Values values =
              StateUpdateData::Random(spec, 2, 3, rng);
          for (Doubles* v : {&values.state, &values.x, &values.dt, &values.b,
                             &values.c, &values.d, &values.dt_bias}) {
            for (double& x : *v) x = static_cast<double>(rng.Integer(-1, 1));
          }
          for (double& x : values.a) x = 0;
          values.z.clear();
          const StateUpdateData data(spec, 2, 3, values);
          const Sequences decode = {{2, 0}, {}, {}};
          const auto want = data.Expect(decode, values.state);
          Run(Plan(spec), data, decode, n % 2 == 0 ? 1 : 16);
          Doubles out = want.out, state = want.state;
          for (double& x : out) x = RoundThroughF32(dtype, x);
          for (double& x : state) x = RoundThroughF32(dtype, x);
          EXPECT_TRUE(AllEqual(data.out().doubles(), out));
          EXPECT_TRUE(AllEqual(data.state().doubles(), state));
        }
      }
    }
  }
}

TEST_P(StateUpdateTest, AgreesWithTheRecurrenceInDouble) {
  TestRng rng;
  const Sequences cases[] = {
      {{4, 1, 0}, {}, {}},
      {{4, -1, 0}, {}, {1, 0, 0}},
      {{2, 5, -1, 0, 3}, {1, 8, 8, 10, 11, 30}, {1, 1, 1, 0, 1}}};
  for (const SsmForm form : kForms) {
    for (const DType dtype : kFloats) {
      for (const DType state : kFloats) {
        for (const SsmDelta delta : {SsmDelta::kPlain, SsmDelta::kSoftplus}) {
          for (const Sequences& sequences : cases) {
            StateUpdateSpec spec = Spec(form, 4, 2, 9, 35);
            spec.dtype = dtype;
            spec.state_dtype = state;
            spec.delta = delta;
            const int64_t tokens = sequences.starts.empty() ? 3 : 31;
            auto values = StateUpdateData::Random(spec, tokens, 6, rng);
            // Each may be left out.
            if (state == DType::kBF16) values.d.clear();
            if (dtype == DType::kBF16) values.z.clear();
            if (state == DType::kF16) values.dt_bias.clear();
            const StateUpdateData data(spec, tokens, 6, values);
            const Doubles before = data.state().doubles();
            Run(Plan(spec), data, sequences);
            data.ExpectResults(sequences, before);
          }
        }
      }
    }
  }
}

// Softplus and decays over their whole range: e^(a delta) from 1 to 0, delta
// from e^-100 to 100.
TEST_P(StateUpdateTest, IsAccurateOverTheRangeOfDelta) {
  for (const SsmForm form : kForms) {
    const StateUpdateSpec spec = Spec(form, 1, 1, 1, 1);
    const StateUpdatePlan plan = Plan(spec);
    for (double dt = -100; dt <= 100; dt += 0.37) {
      for (const double a : {-0.01, -1.0, -20.0, 3.0}) {
        const StateUpdateData data(spec, 1, 1,
                                   {{2}, {1}, {dt}, {a}, {1}, {1}, {}, {}, {}});
        Run(plan, data, {{0}, {}, {}});
        data.ExpectResults({{0}, {}, {}}, {2});
      }
      // A state of 0 becomes delta itself, which e^-87 and less makes denormal.
      if (dt < -80) continue;
      const StateUpdateData fresh(spec, 1, 1,
                                  {{0}, {1}, {dt}, {-1}, {1}, {1}, {}, {}, {}});
      Run(plan, fresh, {{0}, {}, {}});
      fresh.ExpectResults({{0}, {}, {}}, {0});
    }
  }
}

TEST_P(StateUpdateTest, CutsBatchesAndWorkersChangeNoBit) {
  TestRng rng;
  constexpr int64_t kTokens = 12;
  for (const SsmForm form : kForms) {
    for (const DType state : kFloats) {
      StateUpdateSpec spec = Spec(form, 2, 1, 140, 19);
      spec.state_dtype = state;
      const auto values = StateUpdateData::Random(spec, kTokens, 2, rng);
      const StateUpdatePlan plan = Plan(spec);
      const StateUpdateData whole(spec, kTokens, 2, values);
      Run(plan, whole, {{0, 1}, {0, 7, 12}, {}});
      const std::vector<std::vector<Sequences>> ways = {
          {{{1}, {7, 12}, {}}, {{0}, {0, 7}, {}}},
          {{{0, 1}, {0, 3, 3}, {}},
           {{0, 1}, {3, 7, 9}, {}},
           {{1}, {9, 12}, {}}},
      };
      // Real threads write the same bits.
      const StateUpdateData threaded(spec, kTokens, 2, values);
      const Sequences both = {{0, 1}, {0, 7, 12}, {}};
      const auto pool = Workers(3);
      Execute(plan, threaded.args(both), *pool);
      EXPECT_EQ(threaded.out().bits(), whole.out().bits());
      EXPECT_EQ(threaded.state().bits(), whole.state().bits());
      for (const int workers : {1, 3, 64}) {
        for (const auto& calls : ways) {
          const StateUpdateData cut(spec, kTokens, 2, values);
          for (const Sequences& call : calls) Run(plan, cut, call, workers);
          EXPECT_EQ(cut.out().bits(), whole.out().bits());
          EXPECT_EQ(cut.state().bits(), whole.state().bits());
        }
      }
      // out is x, or z.
      for (const bool gate : {false, true}) {
        const StateUpdateData in_place(spec, kTokens, 2, values);
        const Sequences two = {{0, 1}, {0, 7, 12}, {}};
        StateUpdateArgs args = in_place.args(two);
        args.out = gate ? args.z : args.x;
        InlineExecutor executor;
        Execute(plan, args, executor);
        EXPECT_EQ((gate ? in_place.z() : in_place.x()).bits(),
                  whole.out().bits());
      }
    }
  }
}

TEST_P(StateUpdateTest, KeepsNaNWhereItBelongs) {
  TestRng rng;
  for (const SsmForm form : kForms) {
    const StateUpdateSpec spec = Spec(form, 2, 2, 3, 4);
    auto values = StateUpdateData::Random(spec, 6, 4, rng);
    // Token 0 is padding, token 2 has a NaN in x of head 1, row 0; slot 1 is of
    // nobody, slot 3 of a fresh sequence.
    for (size_t i = 0; i < 6; ++i) values.x[i] = values.z[i] = kNaN;
    for (size_t i = 0; i < 4; ++i) values.b[i] = values.c[i] = kNaN;
    values.dt[0] = kNaN;
    values.x[2 * 6 + 3] = kNaN;
    for (const size_t slot : {1, 3}) {
      for (size_t i = 0; i < 24; ++i) values.state[slot * 24 + i] = kNaN;
    }
    const StateUpdateData data(spec, 6, 4, values);
    const Doubles before = data.state().doubles();
    const Sequences sequences = {{0, 3}, {1, 3, 6}, {1, 0}};
    Run(Plan(spec), data, sequences);
    data.ExpectResults(sequences, before);
    const Doubles out = data.out().doubles(), state = data.state().doubles();
    EXPECT_TRUE(std::isnan(out[2 * 6 + 3]));
    EXPECT_FALSE(std::isnan(out[2 * 6 + 4]));
    for (size_t i = 0; i < 24; ++i) {
      EXPECT_EQ(std::isnan(state[i]), i >= 12 && i < 16) << i;
      EXPECT_TRUE(std::isnan(state[24 + i]));
      EXPECT_FALSE(std::isnan(state[72 + i]));
    }
  }
}

// What follows a row in its last vector adds nothing to an infinite sum.
TEST_P(StateUpdateTest, InfiniteInputsGiveInfinityForAnyStateSize) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const SsmForm form : kForms) {
    for (const int64_t n : {1, 3, 8, 17, 35}) {
      SCOPED_TRACE(n);
      const StateUpdateSpec spec = Spec(form, 1, 1, 1, n);
      const auto count = static_cast<size_t>(n);
      const Doubles ones(count, 1.0);
      const Doubles rates(form == SsmForm::kPerRow ? count : 1, -1.0);
      const StateUpdateData data(
          spec, 1, 1, {ones, {infinity}, {1}, rates, ones, ones, {1}, {}, {}});
      Run(Plan(spec), data, {{0}, {}, {}});
      EXPECT_EQ(data.out().doubles(), Doubles{infinity});
      EXPECT_EQ(data.state().doubles(), Doubles(count, infinity));
    }
  }
}

TEST_P(StateUpdateTest, TakesNoTokensAndNoSequences) {
  const StateUpdateSpec spec = Spec(SsmForm::kPerHead, 1, 1, 1, 2);
  const StateUpdateData none(spec, 0, 1,
                             {{5, 6}, {}, {}, {-1}, {}, {}, {}, {}, {}});
  Run(Plan(spec), none, {});
  Run(Plan(spec), none, {{0}, {0, 0}, {0}});
  EXPECT_EQ(none.state().doubles(), (Doubles{5, 6}));
}

TEST(StateUpdatePlanTest, RefusesBadSpecs) {
  struct Case {
    void (*spoil)(StateUpdateSpec&);
    absl::StatusCode code;
    std::string words;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kMissing = absl::StatusCode::kUnimplemented;
  const Case cases[] = {
      {[](StateUpdateSpec& s) { s.heads = 0; }, kInvalid,
       "state_update: heads=0; need 1 <= heads"},
      {[](StateUpdateSpec& s) { s.groups = 0; }, kInvalid,
       "groups=0; need 1 <= groups <= 4"},
      {[](StateUpdateSpec& s) { s.groups = 3; }, kInvalid,
       "groups=3; need a divisor of heads=4"},
      {[](StateUpdateSpec& s) { s.head_dim = 0; }, kInvalid,
       "head_dim=0; need 1 <= head_dim"},
      {[](StateUpdateSpec& s) { s.d_state = 0; }, kInvalid,
       "d_state=0; need 1 <= d_state <= 1024"},
      {[](StateUpdateSpec& s) { s.d_state = 1025; }, kInvalid,
       "d_state=1025; need"},
      {[](StateUpdateSpec& s) { s.dtype = DType::kI8; }, kMissing,
       "dtype is i8; need f32 or bf16 or f16"},
      {[](StateUpdateSpec& s) { s.state_dtype = DType::kI8; }, kMissing,
       "state_dtype is i8; need f32 or bf16 or f16"},
  };
  for (const Case& c : cases) {
    StateUpdateSpec spec = Spec(SsmForm::kPerHead, 4, 2, 8, 16);
    c.spoil(spec);
    ExpectRefusal(StateUpdatePlan::Create(spec).status(), c.code, c.words);
  }
}

TEST(StateUpdatePlanTest, RefusesBadTensors) {
  TestRng rng;
  static const int64_t good[] = {0, 1, 2, 3};
  static const int64_t twice[] = {0, 1, 2, 1};
  struct Case {
    void (*spoil)(StateUpdateArgs&);
    std::string words;
  };
  const Case cases[] = {
      {[](StateUpdateArgs& a) { a.state = a.x; }, "state_update: state"},
      {[](StateUpdateArgs& a) { a.x = a.b; }, "state_update: x"},
      {[](StateUpdateArgs& a) { a.dt = a.b; }, "state_update: dt"},
      {[](StateUpdateArgs& a) { a.a = a.x; }, "state_update: a"},
      {[](StateUpdateArgs& a) { a.b = a.x; }, "state_update: b"},
      {[](StateUpdateArgs& a) { a.c = a.x; }, "state_update: c"},
      {[](StateUpdateArgs& a) { a.d = a.x; }, "state_update: d"},
      {[](StateUpdateArgs& a) { a.z = a.b; }, "state_update: z"},
      {[](StateUpdateArgs& a) { a.dt_bias = a.x; }, "state_update: dt_bias"},
      {[](StateUpdateArgs& a) { a.out = a.b; }, "state_update: out"},
      {[](StateUpdateArgs& a) {
         a.out = AnyTensorView(a.x.dtype(),
                               static_cast<float*>(a.x.mutable_data()) + 1, 3,
                               {4, 4, 6}, {27, 6, 1});
       },
       "out overlaps x"},
      {[](StateUpdateArgs& a) {
         a.batch.state_indices = DenseVector(twice, 4);
       },
       "state_indices[3]=1 is given twice"},
  };
  for (const SsmForm form : kForms) {
    const StateUpdateSpec spec = Spec(form, 4, 2, 6, 8);
    const auto plan = StateUpdatePlan::Create(spec);
    const StateUpdateData data(spec, 4, 5,
                               StateUpdateData::Random(spec, 4, 5, rng));
    for (const Case& c : cases) {
      StateUpdateArgs args = data.args({});
      args.batch.state_indices = DenseVector(good, 4);
      EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
      c.spoil(args);
      ExpectRefusal(plan->CheckArgs(args), c.words);
    }
  }
}

}  // namespace
}  // namespace quern
