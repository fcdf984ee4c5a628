// Batches with drafts that CheckSequences and CheckBatchApart refuse.

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

TEST(SequenceBatchDraftsTest, RefusesBadSlots) {
  struct Case {
    void (*spoil)(Sequences&);
    std::string words;
  };
  const Case cases[] = {
      {[](Sequences& s) { s.accepted[0] = 4; },
       "op: num_accepted_tokens[0]=4; need 0 <= accepted <= 3"},
      {[](Sequences& s) { s.accepted[1] = -1; },
       "num_accepted_tokens[1]=-1; need 0 <="},
      {[](Sequences& s) { s.accepted.pop_back(); },
       "num_accepted_tokens=1; need 2"},
      {[](Sequences& s) { s.slots.pop_back(); },
       "state_indices has 5 numbers; need rows of 3"},
      {[](Sequences& s) {
         s.starts = {0, 4, 5};
       },
       "sequence 0 has 4 tokens; state_indices has 3 slots for it"},
      {[](Sequences& s) { s.slots[1] = 8; },
       "state_indices: sequence 0 begins from slot 8; need 0 <= index < 8"},
      {[](Sequences& s) { s.slots[0] = -2; },
       "token 0 of sequence 0 has slot -2; need 0 <= index < 8"},
      {[](Sequences& s) { s.slots[2] = 8; },
       "token 2 of sequence 0 has slot 8; need 0 <= index < 8"},
      {[](Sequences& s) { s.slots[4] = 8; }, "token 1 of sequence 1"},
      // Within a sequence, and of two.
      {[](Sequences& s) { s.slots[2] = 0; },
       "slot 0 is given twice; need a slot for each token"},
      {[](Sequences& s) { s.slots[4] = 1; }, "slot 1 is given twice"},
      {[](Sequences& s) {
         s.destinations = s.slots, s.destination_columns = 3;
         s.slots = {6, 0}, s.columns = 1, s.accepted = {};
       },
       "sequence 1 begins from slot 0, where another leaves a state"},
      {[](Sequences& s) {
         s.destinations = {0, 1, 2, 3}, s.destination_columns = 3;
       },
       "destination_indices=4; need 6"},
      {[](Sequences& s) {
         s.destinations = {0, 1, 2, 9, 4, 5}, s.destination_columns = 3;
       },
       "destination_indices: token 0 of sequence 1 has slot 9"},
      {[](Sequences& s) {
         s.starts = {0, 3, 6};
       },
       "query_start_loc[2]=6; need 3 <= start <= 5"},
      {[](Sequences& s) { s.has_initial_state = {1}; },
       "has_initial_state=1; need 2"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    Sequences s = {{0, 1, 2, 3, 4, 77}, {0, 3, 5}, {}};
    s.columns = 3;
    s.accepted = {2, 1};
    const auto check = [&] {
      return CheckSequences("op", s.batch(), 5, 8, /*null_slot=*/-1);
    };
    EXPECT_EQ(check(), absl::OkStatus());
    c.spoil(s);
    ExpectRefusal(check(), c.words);
  }
  // Several accepted tokens need several slots.
  Sequences one = {{0}, {0, 5}, {}};
  one.accepted = {2};
  ExpectRefusal(CheckSequences("op", one.batch(), 5, 8, -1),
                "num_accepted_tokens[0]=2; need 0 <= accepted <= 1");
}

// 4 (2^62 + 1) and 2 (3 - 2^63) are 4 and 6 modulo 2^64, as many as there are
// destinations.
TEST(SequenceBatchDraftsTest, RefusesColumnsWhoseProductWraps) {
  Sequences s = {{0, 1, 2, 3}, {0, 1, 2, 3, 4}, {}};
  s.destinations = {4, 5, 6, 7};
  s.destination_columns = (int64_t{1} << 62) + 1;
  const auto check = [&] { return CheckSequences("op", s.batch(), 4, 8, -1); };
  ExpectRefusal(check(),
                "destination_indices=4; need rows of 4611686018427387905, one "
                "for each of 4 sequences");
  s = {{0, 1}, {0, 1, 2}, {}};
  s.destinations = {2, 3, 4, 5, 6, 7};
  s.destination_columns = std::numeric_limits<int64_t>::min() + 3;
  ExpectRefusal(CheckSequences("op", s.batch(), 2, 8, -1),
                "destination_columns=-9223372036854775805; need");
}

TEST(SequenceBatchDraftsTest, RefusesListsWithoutMemory) {
  struct Case {
    void (*spoil)(SequenceBatch&);
    std::string words;
  };
  constexpr const int64_t* kNowhere = nullptr;
  const Case cases[] = {
      {[](SequenceBatch& b) { b.state_indices = DenseVector(kNowhere, 6); },
       "op: state_indices is null"},
      {[](SequenceBatch& b) { b.query_start_loc = DenseVector(kNowhere, 3); },
       "op: query_start_loc is null"},
      {[](SequenceBatch& b) {
         b.num_accepted_tokens = DenseVector(kNowhere, 2);
       },
       "op: num_accepted_tokens is null"},
      {[](SequenceBatch& b) {
         b.destination_indices = DenseVector(kNowhere, 6);
         b.destination_columns = 3;
       },
       "op: destination_indices is null"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    Sequences s = {{0, 1, 2, 3, 4, 77}, {0, 3, 5}, {}};
    s.columns = 3;
    SequenceBatch batch = s.batch();
    EXPECT_EQ(CheckSequences("op", batch, 5, 8, -1), absl::OkStatus());
    c.spoil(batch);
    ExpectRefusal(CheckSequences("op", batch, 5, 8, -1), c.words);
  }
}

TEST(SequenceBatchDraftsTest, RefusesAStateOnAList) {
  Sequences s = {{0, 1}, {0, 1, 2}, {1, 1}};
  s.destinations = {2, 3};
  s.destination_columns = 1;
  s.accepted = {1, 1};
  const SequenceBatch batch = s.batch();
  const auto on = [](auto& list) {
    return AnyTensorView(DType::kU8, static_cast<void*>(list.data()), 1, {1},
                         {1});
  };
  const struct {
    AnyTensorView state;
    std::string list;
  } cases[] = {{on(s.slots), "state_indices"},
               {on(s.starts), "query_start_loc"},
               {on(s.destinations), "destination_indices"},
               {on(s.accepted), "num_accepted_tokens"},
               {on(s.has_initial_state), "has_initial_state"}};
  for (const auto& c : cases) {
    ExpectRefusal(CheckBatchApart("op", batch, "state", c.state),
                  "op: state overlaps " + c.list);
  }
  std::vector<uint8_t> apart(1);
  EXPECT_EQ(CheckBatchApart("op", batch, "state", on(apart)), absl::OkStatus());
}

}  // namespace
}  // namespace quern
