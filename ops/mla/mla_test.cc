#include "quern/ops/mla/mla.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_testutil.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/errors/rounding_error.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};

class MlaTest : public IsaTest {
 protected:
  MlaPlan Plan(const MlaSpec& spec, const TestMlaWeights& weights) {
    InlineExecutor executor;
    auto plan = MlaPlan::Create(spec, weights.packed, executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  // A layer and a sequence of `length` tokens in steps of these sizes.
  std::unique_ptr<MlaSequences> RunOne(const MlaSpec& spec,
                                       const TestMlaWeights& weights,
                                       int64_t length, uint64_t seed,
                                       const std::vector<int64_t>& steps) {
    Rng rng(seed);
    auto layer = std::make_unique<MlaSequences>(
        spec, weights, std::vector<int64_t>{length}, rng);
    InlineExecutor executor;
    const MlaPlan plan = Plan(spec, weights);
    for (const int64_t tokens : steps) {
      layer->Step(plan, {{0, tokens}}, executor);
    }
    return layer;
  }
};
QUERN_INSTANTIATE_ISA_TEST(MlaTest);

// Sequences of all kinds: prompts in either form, one of them cut in two,
// decode steps before, among and after direct ones, and no tokens at all. With
// these sizes a prompt is direct from 31 tokens on.
const std::vector<int64_t> kLengths = {42, 30, 40, 5, 34, 6};
const std::vector<std::vector<MlaPart>> kSteps = {
    {{0, 36}, {1, 5}},
    {{5, 4}},
    {{1, 1}, {2, 33}, {3, 0}, {0, 1}, {4, 34}, {5, 2}},
    {{0, 3}, {1, 10}, {2, 1}},
};

TEST_P(MlaTest, IsTheFormulaInBothForms) {
  TestRng rng;
  InlineExecutor executor;
  for (const DType dtype : kFloats) {
    for (const int64_t q_lora : {0, 14}) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(dtype) << " q_lora " << q_lora);
      MlaSpec spec = SmallMla(dtype, q_lora);
      if (q_lora > 0) spec.scale = 0.5f;
      const TestMlaWeights weights(spec, rng);
      const MlaPlan plan = Plan(spec, weights);
      MlaSequences layer(
          spec, weights, kLengths, rng,
          q_lora > 0 ? RotaryStyle::kHalves : RotaryStyle::kPairs);
      for (const auto& step : kSteps) layer.Step(plan, step, executor);
      EXPECT_TRUE(layer.WasDirect(0, 0) && layer.WasDirect(2, 0) &&
                  layer.WasDirect(4, 0));
      EXPECT_FALSE(layer.WasDirect(0, 36) || layer.WasDirect(1, 0));
      layer.ExpectOracle();
    }
  }
}

// Every dtype of x with every dtype of out, with and without a residual, which
// is out itself in some steps.
TEST_P(MlaTest, AddsAResidualInTheDtypeOfOut) {
  TestRng rng;
  InlineExecutor executor;
  for (const DType dtype : kFloats) {
    for (const DType out : kFloats) {
      for (const bool residual : {false, true}) {
        SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " to "
                                        << DTypeName(out) << " " << residual);
        MlaSpec spec = SmallMla(dtype, 0);
        spec.out_dtype = out;
        spec.residual = residual;
        const TestMlaWeights weights(spec, rng);
        const MlaPlan plan = Plan(spec, weights);
        MlaSequences layer(spec, weights, kLengths, rng);
        for (const auto& step : kSteps) layer.Step(plan, step, executor);
        layer.ExpectOracle();
      }
    }
  }
}

// More keys than a chunk of attention.
TEST_P(MlaTest, IsTheFormulaForLongSequences) {
  TestRng rng;
  for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kDirect}) {
    MlaSpec spec = SmallMla(DType::kF32, 0);
    spec.form = form;
    const TestMlaWeights weights(spec, rng);
    RunOne(spec, weights, 275, 3, {270, 4, 1})->ExpectOracle();
  }
}

TEST_P(MlaTest, FormsAgree) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    SCOPED_TRACE(DTypeName(dtype));
    MlaSpec spec = SmallMla(dtype, 0);
    const TestMlaWeights weights(spec, rng);
    spec.form = MlaForm::kDirect;
    const auto direct = RunOne(spec, weights, 24, 5, {24});
    spec.form = MlaForm::kAbsorbed;
    const auto absorbed = RunOne(spec, weights, 24, 5, {24});
    ASSERT_TRUE(direct->WasDirect(0, 0));
    ASSERT_FALSE(absorbed->WasDirect(0, 0));
    const std::vector<BoundedRow> of_direct = direct->OracleOf(0);
    const std::vector<BoundedRow> of_absorbed = absorbed->OracleOf(0);
    // The difference of two samples is a sample of the forms' difference.
    RoundingError error;
    size_t at = 0;
    for (size_t t = 0; t < of_direct.size(); ++t) {
      for (size_t i = 0; i < of_direct[t].size(); ++i, ++at) {
        const Bounded d = of_direct[t][i], a = of_absorbed[t][i];
        // In double they are one formula.
        EXPECT_NEAR(d.value, a.value, 1e-12);
        error.Add(direct->out(0)[at], absorbed->out(0)[at],
                  d.rounded - a.rounded);
      }
    }
    EXPECT_EQ(error.Complaint(), "");
  }
}

TEST_P(MlaTest, RoundsLatentsToTheCache) {
  TestRng rng;
  MlaSpec spec = SmallMla(DType::kF32, 0);
  KvLayoutSpec layout;
  layout.kv_heads = 1;
  layout.head_dim = spec.latent_row();
  layout.v_head_dim = spec.kv_lora;
  layout.page_size = 32;
  layout.form = KvForm::kLatent;
  for (const KvScaling scaling : {KvScaling::kNone, KvScaling::kPerBlock}) {
    SCOPED_TRACE(KvScalingName(scaling));
    layout.dtype = scaling == KvScaling::kNone ? DType::kBF16 : DType::kF8E4M3;
    layout.scaling = scaling;
    spec.cache = KvLayout::Create(layout).value();
    const TestMlaWeights weights(spec, rng);
    RunOne(spec, weights, 40, 7, {34, 2, 1})->ExpectOracle();
    // However the prompt is cut, the absorbed form has the same bits.
    spec.form = MlaForm::kAbsorbed;
    const auto whole = RunOne(spec, weights, 33, 9, {33});
    whole->ExpectOracle();
    const auto cut = RunOne(spec, weights, 33, 9, {20, 0, 12, 1});
    EXPECT_TRUE(AllBitsEqual(cut->out(0), whole->out(0)));
    spec.form = MlaForm::kAutomatic;
  }
}

// A prompt in the absorbed form has the bits of its steps.
TEST_P(MlaTest, AbsorbedBitsDependOnNoCut) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    MlaSpec spec = SmallMla(dtype, 14);
    spec.form = MlaForm::kAbsorbed;
    const TestMlaWeights weights(spec, rng);
    const auto whole = RunOne(spec, weights, 33, 9, {33});
    const auto cut = RunOne(spec, weights, 33, 9, {20, 0, 12, 1});
    EXPECT_TRUE(AllBitsEqual(cut->out(0), whole->out(0)));
  }
}

TEST_P(MlaTest, BitsDependOnNoWorkersAndNoNeighbours) {
  TestRng rng;
  const MlaSpec spec = SmallMla(DType::kBF16, 14);
  const TestMlaWeights weights(spec, rng);
  const MlaPlan plan = Plan(spec, weights);
  InlineExecutor executor;
  const auto run = [&](Executor& workers) {
    Rng same(11);
    auto layer = std::make_unique<MlaSequences>(spec, weights, kLengths, same);
    for (const auto& step : kSteps) layer->Step(plan, step, workers);
    return layer;
  };
  const auto want = run(executor);
  const auto threads = Workers(3);
  ManyWorkers many(17);
  for (Executor* workers :
       {static_cast<Executor*>(threads.get()), static_cast<Executor*>(&many)}) {
    const auto got = run(*workers);
    for (size_t s = 0; s < kLengths.size(); ++s) {
      EXPECT_TRUE(AllBitsEqual(got->out(s), want->out(s)));
    }
  }
  Rng same(11);
  MlaSequences alone(spec, weights, kLengths, same);
  for (const auto& step : kSteps) {
    for (const MlaPart& part : step) alone.Step(plan, {part}, executor);
  }
  for (size_t s = 0; s < kLengths.size(); ++s) {
    EXPECT_TRUE(AllBitsEqual(alone.out(s), want->out(s)));
  }
}

}  // namespace
}  // namespace quern
