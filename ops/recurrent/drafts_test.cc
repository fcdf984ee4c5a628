// Several states for a sequence: each operator on drafts, against single decode
// steps.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/recurrent/testing/delta_rule_testutil.h"
#include "quern/ops/recurrent/testing/recurrent_fixture_testutil.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/ops/recurrent/testing/state_update_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr int64_t kSlots = 32;
constexpr int64_t kTokens = 32;

// Five sequences: one of four tokens that goes on from its third slot, one
// of no tokens, one that is skipped, one that begins anew and keeps the state
// after two of its tokens alone, and one of more tokens than a chunk, which
// goes on from its last slot. Token 0 is padding.
constexpr int64_t kColumns = 18;
Sequences Drafts() {
  constexpr int64_t kNull = -1, kUnread = 77;
  Sequences s = {{}, {1, 5, 5, 8, 13, 31}, {1, 1, 1, 0, 1}};
  const std::vector<std::vector<int64_t>> rows = {
      {3, 9, 1, 12},
      {kUnread},
      {kNull},
      {kNull, 5, kNull, kNull, 7},
      {13, 14, 31, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30}};
  for (const std::vector<int64_t>& row : rows) {
    s.slots.insert(s.slots.end(), row.begin(), row.end());
    s.slots.insert(s.slots.end(), kColumns - row.size(), kUnread);
  }
  // Where it begins does not matter to a fresh sequence, but for null_slot.
  s.accepted = {3, 0, 1, 2, 18};
  s.columns = kColumns;
  return s;
}

// The same with sources apart, two of which are one slot.
Sequences Apart() {
  Sequences s = Drafts();
  s.destinations = s.slots;
  s.destination_columns = kColumns;
  s.slots = {2, 0, -1, 29, 2};
  s.columns = 1;
  s.accepted.clear();
  return s;
}

// One destination of a sequence: that of its last token. Sequence 0 writes what
// it has read.
Sequences LastAlone() {
  Sequences s = Apart();
  s.destinations = {2, 77, 77, -1, 6};
  s.destination_columns = 1;
  s.slots = {2, 0, -1, 29, 4};
  return s;
}

using Codes = std::vector<uint32_t>;
// The bits of part i of `parts`, which have as many rows each.
Codes Part(const AnyMatrix& all, int64_t i, int64_t parts) {
  const int64_t rows = all.view().extent(0) / parts;
  return all.RowBits(i * rows, rows);
}

// The drafts have the bits of a decode step for each token, in the outputs and
// in all slots; slots that are no destination keep theirs. make(): the same
// data each time, of kTokens tokens and kSlots slots.
template <typename Fixture, typename Plan, typename Make>
void ExpectDecode(Fixture& fixture, const Plan& plan, const Make& make,
                  const Sequences& sequences) {
  const auto untouched = make();
  const auto parts = [](const AnyMatrix& m, int64_t count) {
    std::vector<Codes> all;
    for (int64_t i = 0; i < count; ++i) all.push_back(Part(m, i, count));
    return all;
  };
  std::vector<Codes> slots = parts(untouched.state(), kSlots);
  std::vector<Codes> rows = parts(untouched.out(), kTokens);
  const SequenceBatch batch = sequences.batch();
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    const auto data = make();
    for (int64_t t = batch.begin(s); t < batch.end(s); ++t) {
      const int64_t source = batch.source(s);
      const auto at = static_cast<int32_t>(t);
      const auto initial =
          static_cast<uint8_t>(batch.fresh(s) && t == batch.begin(s) ? 0 : 1);
      fixture.Run(plan, data, {{source}, {at, at + 1}, {initial}});
      rows[static_cast<size_t>(t)] = Part(data.out(), t, kTokens);
      if (source == -1) continue;
      const int64_t to = batch.destination(s, t - batch.begin(s), -1);
      if (to == -1) continue;
      slots[static_cast<size_t>(to)] = Part(data.state(), source, kSlots);
    }
  }
  for (const int workers : {1, 64}) {
    SCOPED_TRACE(testing::Message() << workers << " workers");
    const auto data = make();
    ManyWorkers many(workers);
    fixture.Run(plan, data, sequences, many);
    const std::vector<Codes> states = parts(data.state(), kSlots);
    for (size_t i = 0; i < slots.size(); ++i) {
      EXPECT_EQ(states[i], slots[i]) << "slot " << i;
    }
    const std::vector<Codes> outs = parts(data.out(), kTokens);
    for (size_t t = 0; t < rows.size(); ++t) {
      EXPECT_EQ(outs[t], rows[t]) << "token " << t;
    }
  }
}

template <typename AnyPlan, bool kWorkspace = true>
class DraftsFixture : public RecurrentFixture<AnyPlan, kWorkspace> {
 public:
  using RecurrentFixture<AnyPlan, kWorkspace>::Run;
  template <typename Spec, typename Make>
  void ExpectDecodeOf(const Spec& spec, const Make& make) {
    const AnyPlan plan = this->Plan(spec);
    for (const Sequences& sequences : {Drafts(), Apart(), LastAlone()}) {
      ExpectDecode(*this, plan, make, sequences);
    }
  }
};

class DeltaRuleDraftsTest : public DraftsFixture<DeltaRulePlan> {};
QUERN_INSTANTIATE_ISA_TEST(DeltaRuleDraftsTest);

TEST_P(DeltaRuleDraftsTest, HaveTheBitsOfDecode) {
  TestRng rng;
  for (const DType state : kFloats) {
    for (const bool kda : {false, true}) {
      DeltaRuleSpec spec;
      spec.key_heads = 1;
      spec.value_heads = 2;
      // Blocks of 16 columns, and a tail.
      spec.dk = kda ? 130 : 11;
      spec.dv = 37;
      spec.dtype = kda ? DType::kBF16 : DType::kF32;
      spec.state_dtype = state;
      spec.norm = DeltaNorm::kL2;
      if (kda) spec.decay = DeltaDecay::kPerChannel;
      const auto values = DeltaRuleData::Random(spec, kTokens, kSlots, rng);
      ExpectDecodeOf(
          spec, [&] { return DeltaRuleData(spec, kTokens, kSlots, values); });
    }
  }
}

// Rows of states that are aligned to cache lines are kept by stores past the
// caches, also behind a block of columns that is not whole.
TEST_P(DeltaRuleDraftsTest, InAlignedSlotsHaveTheBitsOfDecode) {
  TestRng rng;
  DeltaRuleSpec spec;
  spec.key_heads = spec.value_heads = 1;
  spec.dk = 20;
  for (const int64_t dv : {48, 64}) {
    SCOPED_TRACE(dv);
    spec.dv = dv;
    const auto values = DeltaRuleData::Random(spec, kTokens, kSlots, rng);
    ExpectDecodeOf(spec, [&] {
      return DeltaRuleData(spec, kTokens, kSlots, values, /*pad=*/0);
    });
  }
}

// Blocks have 32 columns or 16, and the last has fewer. Memory holds 16 of the
// 18 tokens of a sequence, or two.
TEST_P(DeltaRuleDraftsTest, OfLongKeysHaveTheBitsOfDecode) {
  TestRng rng;
  for (const int64_t dk : {300, 1024}) {
    SCOPED_TRACE(dk);
    DeltaRuleSpec spec;
    spec.key_heads = spec.value_heads = 1;
    spec.dk = dk;
    spec.dv = dk == 300 ? 35 : 23;
    spec.norm = DeltaNorm::kL2;
    const auto values = DeltaRuleData::Random(spec, kTokens, kSlots, rng);
    ExpectDecode(
        *this, Plan(spec),
        [&] { return DeltaRuleData(spec, kTokens, kSlots, values); },
        dk == 300 ? Apart() : LastAlone());
  }
}

class StateUpdateDraftsTest : public DraftsFixture<StateUpdatePlan> {};
QUERN_INSTANTIATE_ISA_TEST(StateUpdateDraftsTest);

TEST_P(StateUpdateDraftsTest, HaveTheBitsOfDecode) {
  TestRng rng;
  for (const DType state : kFloats) {
    for (const SsmForm form : {SsmForm::kPerHead, SsmForm::kPerRow}) {
      StateUpdateSpec spec;
      spec.heads = 2;
      // Blocks of 20 rows, and a tail.
      spec.head_dim = 25;
      spec.d_state = form == SsmForm::kPerHead ? 203 : 16;
      spec.form = form;
      spec.state_dtype = state;
      if (state == DType::kF16) spec.dtype = DType::kBF16;
      const auto values = StateUpdateData::Random(spec, kTokens, kSlots, rng);
      ExpectDecodeOf(
          spec, [&] { return StateUpdateData(spec, kTokens, kSlots, values); });
    }
  }
}

// Rows that are aligned to cache lines, of as many columns as registers take at
// once, of half as many and of twice as many.
TEST_P(StateUpdateDraftsTest, InAlignedSlotsHaveTheBitsOfDecode) {
  TestRng rng;
  for (const int64_t d_state : {64, 128, 256}) {
    SCOPED_TRACE(d_state);
    StateUpdateSpec spec;
    spec.heads = 2;
    spec.head_dim = 5;
    spec.d_state = d_state;
    spec.form = SsmForm::kPerHead;
    const auto values = StateUpdateData::Random(spec, kTokens, kSlots, rng);
    ExpectDecodeOf(spec, [&] {
      return StateUpdateData(spec, kTokens, kSlots, values, /*pad=*/0);
    });
  }
}

// The arguments of one call of the convolution.
class ConvData {
 public:
  ConvData(const CausalConv1dSpec& spec, int64_t tokens, int64_t slots,
           int64_t rows, const std::vector<Doubles>& values)
      : spec_(spec),
        slots_(slots),
        rows_(rows),
        x_(spec.dtype, values[0], tokens, spec.channels, spec.channels + 3),
        weight_(spec.weight_dtype, values[1], spec.channels, spec.width,
                spec.width),
        state_(spec.state_layout == ConvStateLayout::kRows
                   ? AnyMatrix(spec.dtype, values[2], slots * rows,
                               spec.channels, spec.channels + 3)
                   : AnyMatrix(spec.dtype, values[2], slots * spec.channels,
                               rows, rows)),
        out_(spec.dtype, tokens, spec.channels, spec.channels + 3) {}

  static std::vector<Doubles> Random(const CausalConv1dSpec& spec,
                                     int64_t tokens, int64_t rows, Rng& rng) {
    std::vector<Doubles> values;
    for (const int64_t n : {tokens, spec.width, rows}) {
      values.push_back(ToDoubles(UniformReals(rng, n * spec.channels, -3, 3)));
    }
    return values;
  }
  CausalConv1dArgs args(const Sequences& sequences) const {
    CausalConv1dArgs a;
    a.x = x_.view();
    a.weight = weight_.const_view();
    const AnyTensorView rows = state_.view();
    const int64_t row = rows.stride(0);
    a.state = spec_.state_layout == ConvStateLayout::kRows
                  ? AnyTensorView(spec_.dtype, rows.mutable_data(), 3,
                                  {slots_, rows_, spec_.channels},
                                  {rows_ * row, row, 1})
                  : AnyTensorView(spec_.dtype, rows.mutable_data(), 3,
                                  {slots_, spec_.channels, rows_},
                                  {spec_.channels * row, row, 1});
    a.batch = sequences.batch();
    a.out = out_.view();
    return a;
  }
  const AnyMatrix& state() const { return state_; }
  const AnyMatrix& out() const { return out_; }
  // Row `r` of a slot: one input of each channel.
  Codes StateRow(int64_t slot, int64_t r) const {
    const auto bits = state_.bits();
    const bool by_rows = spec_.state_layout == ConvStateLayout::kRows;
    Codes row;
    for (int64_t c = 0; c < spec_.channels; ++c) {
      const int64_t at = by_rows ? (slot * rows_ + r) * spec_.channels + c
                                 : (slot * spec_.channels + c) * rows_ + r;
      row.push_back(bits[static_cast<size_t>(at)]);
    }
    return row;
  }

 private:
  CausalConv1dSpec spec_;
  int64_t slots_, rows_;
  AnyMatrix x_, weight_, state_, out_;
};

class ConvDraftsTest : public DraftsFixture<CausalConv1dPlan, false> {};
QUERN_INSTANTIATE_ISA_TEST(ConvDraftsTest);

TEST_P(ConvDraftsTest, HaveTheBitsOfDecode) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    for (const int64_t width : {2, 3, 4}) {
      CausalConv1dSpec spec;
      spec.channels = width == 4 ? 530 : 21;
      spec.width = width;
      spec.dtype = dtype;
      if (dtype != DType::kF32) spec.state_layout = ConvStateLayout::kChannels;
      const auto values =
          ConvData::Random(spec, kTokens, kSlots * (width - 1), rng);
      ExpectDecodeOf(spec, [&] {
        return ConvData(spec, kTokens, kSlots, width - 1, values);
      });
    }
  }
}

// A slot whose rows are the states of all drafts: the window behind token i
// begins in row i. Five tokens, then three that go on from each of them.
TEST_P(ConvDraftsTest, WindowsInASlotHaveTheBitsOfDecode) {
  TestRng rng;
  const auto expect = [&](const CausalConv1dSpec& spec, int32_t accepted) {
    const CausalConv1dPlan plan = Plan(spec);
    const int64_t rows = spec.width - 1 + 4;
    const auto values = ConvData::Random(spec, 8, 2 * rows, rng);
    const ConvData drafts(spec, 8, 2, rows, values);
    const ConvData decode(spec, 8, 2, rows, values);
    Sequences first = {{1}, {0, 5}, {}}, second = {{1}, {5, 8}, {}};
    first.accepted = {1};
    second.accepted = {accepted};
    Run(plan, drafts, first);
    Run(plan, drafts, second);
    // What was not accepted did not happen.
    const int32_t kept = accepted == 0 ? 1 : accepted;
    for (int32_t t = 0; t < 8; ++t) {
      if (t >= kept && t < 5) continue;
      Run(plan, decode, {{1}, {t, t + 1}, {}});
      EXPECT_EQ(Part(drafts.out(), t, 8), Part(decode.out(), t, 8))
          << "token " << t;
    }
    // The third window of the second call is what decode leaves.
    for (int64_t r = 0; r + 1 < spec.width; ++r) {
      EXPECT_EQ(drafts.StateRow(1, 2 + r), decode.StateRow(1, r))
          << "row " << r;
    }
  };
  for (const DType dtype : kFloats) {
    for (const int64_t width : {2, 3, 4}) {
      for (const ConvStateLayout layout :
           {ConvStateLayout::kRows, ConvStateLayout::kChannels}) {
        CausalConv1dSpec spec;
        spec.channels = 37;
        spec.width = width;
        spec.dtype = dtype;
        spec.state_layout = layout;
        for (const int32_t accepted : {0, 1, 2, 3, 4, 5}) {
          SCOPED_TRACE(testing::Message()
                       << DTypeName(dtype) << " width " << width << " layout "
                       << static_cast<int>(layout) << " accepted " << accepted);
          expect(spec, accepted);
        }
      }
    }
  }
}

TEST(ConvDraftsRefusalTest, RefusesMoreTokensThanASlotHasWindows) {
  TestRng rng;
  CausalConv1dSpec spec;
  spec.channels = 5;
  const auto plan = CausalConv1dPlan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const ConvData data(spec, 8, 2, 6, ConvData::Random(spec, 8, 12, rng));
  Sequences sequences = {{1}, {0, 4}, {}};
  sequences.accepted = {4};
  EXPECT_EQ(plan->CheckArgs(data.args(sequences)), absl::OkStatus());
  sequences.accepted = {5};
  ExpectRefusal(plan->CheckArgs(data.args(sequences)),
                "causal_conv1d: num_accepted_tokens[0]=5; need 0 <= accepted "
                "<= 4");
  sequences.accepted = {1};
  sequences.starts = {0, 5};
  ExpectRefusal(plan->CheckArgs(data.args(sequences)),
                "sequence 0 has 5 tokens; a state of 6 rows keeps those of 4");
}

}  // namespace
}  // namespace quern
