#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/gated_delta_rule.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/recurrent/testing/delta_rule_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

DeltaRuleSpec Good() {
  DeltaRuleSpec spec;
  spec.key_heads = 2;
  spec.value_heads = 4;
  spec.dk = 8;
  spec.dv = 6;
  return spec;
}

TEST(DeltaRulePlanTest, RefusesBadSpecs) {
  struct Case {
    void (*spoil)(DeltaRuleSpec&);
    absl::StatusCode code;
    std::string words;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kMissing = absl::StatusCode::kUnimplemented;
  const Case cases[] = {
      {[](DeltaRuleSpec& s) { s.key_heads = 0; }, kInvalid,
       "delta_rule: key_heads=0; need 1 <= key_heads"},
      {[](DeltaRuleSpec& s) { s.value_heads = -4; }, kInvalid,
       "value_heads=-4; need 1 <="},
      {[](DeltaRuleSpec& s) { s.value_heads = 5; }, kInvalid,
       "value_heads=5; need a multiple of key_heads=2"},
      {[](DeltaRuleSpec& s) { s.dk = 0; }, kInvalid, "dk=0; need 1 <= dk"},
      {[](DeltaRuleSpec& s) { s.dk = 1025; }, kInvalid, "dk <= 1024"},
      {[](DeltaRuleSpec& s) { s.dv = 0; }, kInvalid, "dv=0; need 1 <= dv"},
      {[](DeltaRuleSpec& s) { s.scale = std::nanf(""); }, kInvalid,
       "need a finite number"},
      {[](DeltaRuleSpec& s) { s.norm_eps = -1e-6f; }, kInvalid,
       "norm_eps=-1e-06; need 0 or more"},
      {[](DeltaRuleSpec& s) { s.norm_eps = std::nanf(""); }, kInvalid,
       "norm_eps"},
      {[](DeltaRuleSpec& s) { s.g_dtype = DType::kI8; }, kMissing,
       "g is i8; need f32 or bf16 or f16"},
      {[](DeltaRuleSpec& s) { s.dtype = DType::kI8; }, kMissing,
       "dtype is i8; need f32 or bf16 or f16"},
      {[](DeltaRuleSpec& s) { s.state_dtype = DType::kF8E4M3; }, kMissing,
       "state_dtype is f8e4m3; need f32 or bf16 or f16"},
  };
  for (const Case& c : cases) {
    DeltaRuleSpec spec = Good();
    c.spoil(spec);
    ExpectRefusal(DeltaRulePlan::Create(spec).status(), c.code, c.words);
  }
}

TEST(DeltaRulePlanTest, RefusesBadSequences) {
  TestRng rng;
  const DeltaRuleSpec spec = Good();
  const auto plan = DeltaRulePlan::Create(spec);
  const DeltaRuleData data(spec, 4, 5, DeltaRuleData::Random(spec, 4, 5, rng));
  EXPECT_EQ(plan->CheckArgs(data.args({{0, 1, -1, -1}, {}, {}})),
            absl::OkStatus());
  struct Case {
    Sequences sequences;
    std::string words;
  };
  const Case cases[] = {
      {{{0, 1, 2}, {}, {}}, "state_indices=3; need 4, as every token"},
      {{{0, 1, 5, 2}, {}, {}},
       "delta_rule: state_indices[2]=5; need 0 <= index < 5"},
      {{{0, 1, -2, 2}, {}, {}}, "state_indices[2]=-2; need"},
      {{{0, 1, 2, 1}, {}, {}}, "state_indices[3]=1 is given twice"},
      {{{0, 1}, {0, 4}, {}}, "query_start_loc=1; need 2"},
      {{{0, 1}, {0, 3, 2}, {}}, "query_start_loc[2]=2; need 3 <= start <= 4"},
      {{{0, 1}, {0, 3, 5}, {}}, "query_start_loc[2]=5; need 3 <= start <= 4"},
      {{{0, 1}, {-1, 3, 4}, {}}, "query_start_loc[0]=-1; need 0 <="},
      {{{0, 1}, {0, 3, 4}, {1}}, "has_initial_state=1; need 2"},
  };
  for (const Case& c : cases) {
    ExpectRefusal(plan->CheckArgs(data.args(c.sequences)), c.words);
  }
}

TEST(DeltaRulePlanTest, RefusesBadTensors) {
  TestRng rng;
  const DeltaRuleSpec spec = Good();
  const auto plan = DeltaRulePlan::Create(spec);
  const DeltaRuleData data(spec, 4, 5, DeltaRuleData::Random(spec, 4, 5, rng));
  const Sequences sequences = {{0, 1, 2, 3}, {}, {}};
  struct Case {
    void (*spoil)(DeltaRuleArgs&);
    std::string words;
  };
  const Case cases[] = {
      {[](DeltaRuleArgs& a) { a.q = a.v; }, "delta_rule: q"},
      {[](DeltaRuleArgs& a) { a.k = a.v; }, "delta_rule: k"},
      {[](DeltaRuleArgs& a) { a.v = a.q; }, "delta_rule: v"},
      {[](DeltaRuleArgs& a) { a.g = a.k; }, "delta_rule: g"},
      {[](DeltaRuleArgs& a) { a.beta = a.k; }, "delta_rule: beta"},
      {[](DeltaRuleArgs& a) { a.state = a.k; }, "delta_rule: state"},
      {[](DeltaRuleArgs& a) { a.out = a.k; }, "delta_rule: out"},
      {[](DeltaRuleArgs& a) {
         a.out = AnyTensorView(a.out.dtype(), a.out.data(), 3, {4, 4, 6},
                               {27, 6, 1});
       },
       "out is read-only"},
      {[](DeltaRuleArgs& a) {
         a.q = AnyTensorView(a.q.dtype(), a.state.data(), 3, {4, 2, 8},
                             {16, 8, 1});
       },
       "state overlaps q"},
      {[](DeltaRuleArgs& a) {
         a.out = AnyTensorView(a.v.dtype(),
                               static_cast<float*>(a.v.mutable_data()) + 1, 3,
                               {4, 4, 6}, {27, 6, 1});
       },
       "out overlaps v"},
  };
  for (const Case& c : cases) {
    DeltaRuleArgs args = data.args(sequences);
    c.spoil(args);
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

TEST(GatedDeltaRulePlanTest, RefusesADecayForEachChannel) {
  GatedDeltaRuleSpec spec;
  spec.rule = Good();
  EXPECT_EQ(GatedDeltaRulePlan::Create(spec).status(), absl::OkStatus());
  spec.rule.decay = DeltaDecay::kPerChannel;
  ExpectRefusal(GatedDeltaRulePlan::Create(spec).status(),
                "gated_delta_rule: a decay for each channel; need one a head");
}

// Indices farther apart than one pass marks.
TEST(SequenceBatchTest, FindsSlotsThatAreGivenTwice) {
  std::vector<int64_t> slots = {int64_t{1} << 40, 5, 32773, 65536, 7};
  const auto check = [&] {
    SequenceBatch batch;
    batch.state_indices = DenseVector(slots.data(), 5);
    return CheckSequences("op", batch, 5, int64_t{1} << 41, 7);
  };
  EXPECT_EQ(check(), absl::OkStatus());
  for (const size_t twice : {0u, 1u, 2u, 3u}) {
    const int64_t was = slots[4];
    slots[4] = slots[twice];
    ExpectRefusal(check(),
                  "op: state_indices[4]=" + std::to_string(slots[twice]) +
                      " is given twice");
    slots[4] = was;
  }
  // The null slot may be any index.
  slots = {7, 7, 1, 2, 7};
  EXPECT_EQ(check(), absl::OkStatus());
}

}  // namespace
}  // namespace quern
