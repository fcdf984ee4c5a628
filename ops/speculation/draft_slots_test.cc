#include "quern/ops/speculation/draft_slots.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/numbers_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Values = std::vector<int64_t>;
constexpr DType kI32 = DType::kI32;
constexpr DType kI64 = DType::kI64;
constexpr DType kIndices[] = {kI32, kI64};

// Rows of slots, of which no two are equal.
constexpr int64_t kPool = 32, kRows = 6;
Values Slots(Rng& rng) {
  Values slots;
  for (int64_t i = 0; i < kPool * kRows; ++i) slots.push_back(1000 + i);
  rng.Shuffle(slots);
  return slots;
}
Values Filled(int64_t n, int64_t value) {
  return Values(static_cast<size_t>(n), value);
}

// ---- Copies between rows and a vector.

CopySlotsSpec CopySpec(SlotCopy to) {
  CopySlotsSpec spec;
  spec.pool_len = kPool;
  spec.to = to;
  return spec;
}

TEST(CopySlotsTest, CopiesBothWays) {
  TestRng rng;
  for (const DType rows_of : kIndices) {
    for (const DType offsets : kIndices) {
      const Values pool = Slots(rng);
      const Numbers rows(rows_of, {4, 0, 2, 5}), start(offsets, {0, 3, 30, 9}),
          end(offsets, {6, 3, 32, 16});
      const int64_t count = 6 + 0 + 2 + 7;
      // From rows, into a vector that is longer than need be.
      const Numbers from(kI32, pool, kPool, /*gap=*/3),
          out(kI64, Filled(count + 2, -9));
      RunPlan<CopySlotsPlan>(
          CopySpec(SlotCopy::kFromRows),
          CopySlotsArgs{rows.view(), from.view(), start.view(), end.view(),
                        out.view()});
      Values want, want_pool = pool;
      const int64_t row_of[] = {4, 0, 2, 5}, first[] = {0, 3, 30, 9},
                    last[] = {6, 3, 32, 16};
      for (int r = 0; r < 4; ++r) {
        for (int64_t t = first[r]; t < last[r]; ++t) {
          const auto at = static_cast<size_t>(row_of[r] * kPool + t);
          want.push_back(pool[at]);
          want_pool[at] = static_cast<int64_t>(want.size()) + 50;
        }
      }
      want.insert(want.end(), {-9, -9});
      EXPECT_EQ(out.Read(), want);
      // To rows, from one that is.
      Values given;
      for (int64_t i = 0; i < count + 1; ++i) given.push_back(51 + i);
      const Numbers slots(kI64, given);
      RunPlan<CopySlotsPlan>(
          CopySpec(SlotCopy::kToRows),
          CopySlotsArgs{rows.view(), from.view(), start.view(), end.view(),
                        slots.view()});
      EXPECT_EQ(from.Read(), want_pool);
      EXPECT_TRUE(from.GapsAreIntact());
    }
  }
}

TEST(CopySlotsTest, TheLastOfSeveralWritesStays) {
  const Numbers rows(kI32, {1, 1}), start(kI32, {0, 1}), end(kI32, {3, 3}),
      pool(kI32, Filled(2 * kPool, 0), kPool), slots(kI64, {5, 6, 7, 8, 9});
  RunPlan<CopySlotsPlan>(CopySpec(SlotCopy::kToRows),
                         CopySlotsArgs{rows.view(), pool.view(), start.view(),
                                       end.view(), slots.view()});
  const Values got = pool.Read();
  EXPECT_EQ(Values(got.begin() + kPool, got.begin() + kPool + 4),
            (Values{5, 8, 9, 0}));
}

TEST(CopySlotsTest, Refuses) {
  for (const SlotCopy to : {SlotCopy::kToRows, SlotCopy::kFromRows}) {
    const auto refuse = [&](const char* words, const Values& rows,
                            const Values& start, const Values& end,
                            const Values& slots) {
      const Numbers r(kI64, rows), s(kI64, start), e(kI64, end), o(kI64, slots),
          pool(kI32, Filled(2 * kPool, 0), kPool);
      ExpectRefusal(
          StatusOf<CopySlotsPlan>(CopySpec(to),
                                  CopySlotsArgs{r.view(), pool.view(), s.view(),
                                                e.view(), o.view()}),
          words);
    };
    const Values slots = {1, 2, 3, 4};
    refuse("req_pool_indices[1]=2; need 0 <=", {0, 2}, {0, 0}, {1, 1}, slots);
    refuse("req_pool_indices[0]=-1; need 0 <=", {-1, 1}, {0, 0}, {1, 1}, slots);
    refuse("start_offset[0]=-1; need 0 <=", {0, 1}, {-1, 0}, {1, 1}, slots);
    refuse("end_offset[1]=33; need", {0, 1}, {0, 32}, {1, 33}, slots);
    refuse("end_offset[0]=2; need 3 <=", {0, 1}, {3, 0}, {2, 1}, slots);
    refuse("out_cache_loc has 4 slots; need 5 for request 1", {0, 1}, {0, 0},
           {2, 3}, slots);
    if (to == SlotCopy::kFromRows) continue;
    refuse("out_cache_loc[1]=-1; need 0 <=", {0, 1}, {0, 0}, {2, 1},
           {1, -1, 3});
    refuse("out_cache_loc[2]=2147483648; need 0 <=", {0, 1}, {0, 0}, {2, 1},
           {1, 2, int64_t{1} << 31});
  }
  const Numbers r(kI64, {0}), pool(kI64, Filled(kPool, 0), kPool),
      slots(kI64, {0});
  ExpectRefusal(
      StatusOf<CopySlotsPlan>(CopySpec(SlotCopy::kFromRows),
                              CopySlotsArgs{r.view(), pool.view(), r.view(),
                                            r.view(), slots.view()}),
      "req_to_token is i64");
}

// ---- Drafts behind the tokens of a row.

DraftRowsSpec DraftSpec(int64_t topk, int64_t steps) {
  DraftRowsSpec spec;
  spec.pool_len = kPool;
  spec.topk = topk;
  spec.num_steps = steps;
  return spec;
}

TEST(DraftSlotsTest, ListsThemAndExpandsRows) {
  TestRng rng;
  for (const DType dtype : kIndices) {
    for (const int64_t topk : {1, 4}) {
      for (const int64_t steps : {0, 1, 2, 3}) {
        const Values pool = Slots(rng), rows = {5, 1, 3}, lengths = {9, 0, 20};
        const Numbers p(kI32, pool, kPool, /*gap=*/1), r(kI64, rows),
            l(dtype, lengths), list(kI64, Filled(3 * topk * steps, -1)),
            out(kI32, Filled(3 * topk * kPool, -1), kPool, /*gap=*/2);
        const DraftRowsSpec spec = DraftSpec(topk, steps);
        RunPlan<DraftSlotsPlan>(
            static_cast<const DraftSlotsSpec&>(spec),
            DraftSlotsArgs{r.view(), p.view(), l.view(), list.view()});
        RunPlan<DraftRowsPlan>(
            spec, DraftRowsArgs{p.view(), r.view(), l.view(), out.view()});
        Values want_list, want_rows;
        for (size_t b = 0; b < 3; ++b) {
          const auto slot = [&](int64_t t) {
            return pool[static_cast<size_t>(rows[b] * kPool + t)];
          };
          for (int64_t i = 0; i < topk * steps; ++i) {
            want_list.push_back(slot(lengths[b] + i));
          }
          for (int64_t c = 0; c < topk; ++c) {
            Values row;
            for (int64_t t = 0; t < lengths[b]; ++t) row.push_back(slot(t));
            for (int64_t s = 0; s < steps; ++s) {
              row.push_back(slot(lengths[b] + c * steps + s));
            }
            row.resize(kPool, -1);
            want_rows.insert(want_rows.end(), row.begin(), row.end());
          }
        }
        EXPECT_EQ(list.Read(), want_list);
        EXPECT_EQ(out.Read(), want_rows);
        EXPECT_TRUE(out.GapsAreIntact());
      }
    }
  }
}

TEST(DraftSlotsTest, Refuses) {
  const auto refuse = [](const char* words, int64_t topk, int64_t steps,
                         const Values& rows, const Values& lengths) {
    const Numbers p(kI32, Filled(2 * kPool, 0), kPool), r(kI64, rows),
        l(kI64, lengths), list(kI64, Filled(8, 0)),
        out(kI32, Filled(4 * kPool, 0), kPool);
    const DraftRowsSpec spec = DraftSpec(topk, steps);
    ExpectRefusal(
        StatusOf<DraftSlotsPlan>(
            static_cast<const DraftSlotsSpec&>(spec),
            DraftSlotsArgs{r.view(), p.view(), l.view(), list.view()}),
        words);
    ExpectRefusal(
        StatusOf<DraftRowsPlan>(
            spec, DraftRowsArgs{p.view(), r.view(), l.view(), out.view()}),
        words);
  };
  refuse("seq_lens[1]=29; need 0 <= seq_lens[i] <= 28", 2, 2, {0, 1}, {5, 29});
  refuse("seq_lens[0]=-1; need 0 <=", 2, 2, {0, 1}, {-1, 3});
  refuse("req_pool_indices[0]=2; need 0 <=", 2, 2, {2, 1}, {1, 3});
  refuse("topk=0; need", 0, 2, {0, 1}, {1, 3});
  refuse("num_steps=-1; need", 2, -1, {0, 1}, {1, 3});
  refuse("num_steps=2147483647; need", 2, 2147483647, {0, 1}, {1, 3});
  const Numbers p(kI32, Filled(kPool, 0), kPool), one(kI64, {0}),
      list(kI64, Filled(3, 0));
  ExpectRefusal(
      StatusOf<DraftSlotsPlan>(
          static_cast<const DraftSlotsSpec&>(DraftSpec(2, 2)),
          DraftSlotsArgs{one.view(), p.view(), one.view(), list.view()}),
      "out_cache_loc is [3]; need [4]");
}

// ---- Tokens.

TEST(BonusTokensTest, AreTheLastAccepted) {
  for (const DType dtype : kIndices) {
    for (const DType lengths_of : kIndices) {
      const Numbers tokens(dtype, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 3,
                           /*gap=*/1),
          lengths(lengths_of, {1, 3, 0, 2}), bonus(dtype, {-1, -1, -1, -1});
      BonusTokensSpec spec;
      spec.stride = 3;
      const BonusTokensArgs args = {tokens.view(), lengths.view(),
                                    bonus.view()};
      RunPlan<BonusTokensPlan>(spec, args);
      EXPECT_EQ(bonus.Read(), (Values{1, 6, -1, 11}));
      const Numbers bad(lengths_of, {1, 4, 0, 2}),
          low(lengths_of, {1, 1, 1, -1});
      ExpectRefusal(
          StatusOf<BonusTokensPlan>(
              spec, BonusTokensArgs{tokens.view(), bad.view(), bonus.view()}),
          "accept_lens[1]=4; need 0 <= accept_lens[i] <= 3");
      ExpectRefusal(
          StatusOf<BonusTokensPlan>(
              spec, BonusTokensArgs{tokens.view(), low.view(), bonus.view()}),
          "accept_lens[3]=-1; need 0 <=");
    }
  }
}

TEST(BonusTokensTest, WhatIsWrittenLiesApart) {
  const Numbers tokens(kI64, {1, 2, 3, 4}, 2), lengths(kI64, {1, 2});
  BonusTokensSpec spec;
  spec.stride = 2;
  ExpectRefusal(
      StatusOf<BonusTokensPlan>(
          spec, BonusTokensArgs{tokens.view(), lengths.view(), lengths.view()}),
      "bonus_tokens overlaps accept_lens");
}

TEST(AcceptedSlotsTest, FollowOneAnother) {
  const Numbers slots(kI64, {50, 51, 52, 53, 54, 55, 56, 57});
  for (const DType dtype : kIndices) {
    for (const int64_t cols : {0, 3}) {
      const Numbers index(dtype, {0, 1, -1, 4, 7, -1, -1, 5, 3}, cols, cols),
          out(kI64, Filled(10, -3));
      const AcceptedSlotsArgs args = {index.view(), slots.view(), out.view()};
      RunPlan<AcceptedSlotsPlan>(AcceptedSlotsSpec{}, args);
      EXPECT_EQ(out.Read(), (Values{50, 51, 54, 57, 55, 53, -3, -3, -3, -3}));
      for (const int64_t bad : {8, -2}) {
        const Numbers other(dtype, {0, 1, bad}), little(kI64, {0, 0, 0});
        ExpectRefusal(
            StatusOf<AcceptedSlotsPlan>(
                AcceptedSlotsSpec{},
                AcceptedSlotsArgs{other.view(), slots.view(), little.view()}),
            "accept_index[2]=" + std::to_string(bad) + "; need -1 <=");
      }
      const Numbers little(kI64, Filled(8, 0));
      ExpectRefusal(
          StatusOf<AcceptedSlotsPlan>(
              AcceptedSlotsSpec{},
              AcceptedSlotsArgs{index.view(), slots.view(), little.view()}),
          "length of accept_out_cache_loc=8; need");
    }
  }
}

// A stride of 0 makes a few numbers as many rows as a caller likes.
TEST(AcceptedSlotsTest, RefusesMoreIndicesThanI64Counts) {
  const Numbers index(kI64, {0, 0, 0, 0}), slots(kI64, {50}), out(kI64, {0});
  const auto refuse = [&](const char* words, int64_t rows, int64_t cols) {
    const AnyTensorView many(kI64, index.view().data(), 2, {rows, cols},
                             {0, 1});
    ExpectRefusal(StatusOf<AcceptedSlotsPlan>(
                      AcceptedSlotsSpec{},
                      AcceptedSlotsArgs{many, slots.view(), out.view()}),
                  words);
  };
  refuse("rows of accept_index=4611686018427387904; need 0 <=",
         int64_t{1} << 62, 4);
  refuse("columns of accept_index=1152921504606846975; need 0 <=", 16,
         (int64_t{1} << 60) - 1);
}

TEST(RotateTokensTest, MovesEachRequestByOne) {
  const Values ids = {10, 11, 12, 13, 14, 15, 16, 17, 18};
  for (const DType dtype : kIndices) {
    for (const int64_t cols : {0, 1}) {
      const Numbers start(dtype, {0, 4, 9, 5}), lengths(kI32, {4, 1, 0, 3}),
          next(kI64, {100, 200, 300, 400}, cols);
      const Numbers plain(kI64, ids);
      RunPlan<RotateTokensPlan>(
          RotateTokensSpec{},
          RotateTokensArgs{plain.view(), start.view(), lengths.view(),
                           next.view(), AnyTensorView()});
      EXPECT_EQ(plain.Read(), (Values{11, 12, 13, 100, 200, 16, 17, 400, 18}));
      // A place for each; that of a request without tokens is not read.
      const Numbers places(kI64, {2, 4, -99, 8}), chosen(kI64, ids);
      RunPlan<RotateTokensPlan>(
          RotateTokensSpec{},
          RotateTokensArgs{chosen.view(), start.view(), lengths.view(),
                           next.view(), places.view()});
      EXPECT_EQ(chosen.Read(), (Values{11, 12, 100, 13, 200, 16, 17, 17, 400}));
    }
  }
}

TEST(RotateTokensTest, Refuses) {
  const auto refuse = [](const char* words, const Values& start,
                         const Values& lengths, const Values& places) {
    const Numbers ids(kI64, {1, 2, 3, 4}), s(kI64, start), l(kI64, lengths),
        p(kI64, places), next(kI64, {7, 8});
    ExpectRefusal(
        StatusOf<RotateTokensPlan>(
            RotateTokensSpec{}, RotateTokensArgs{ids.view(), s.view(), l.view(),
                                                 next.view(), p.view()}),
        words);
  };
  refuse("extend_seq_lens[1]=3; need 0 <=", {0, 2}, {2, 3}, {0, 0});
  refuse("extend_seq_lens[0]=-1; need 0 <=", {0, 2}, {-1, 2}, {0, 0});
  refuse("extend_start_loc[1]=5; need 0 <=", {0, 5}, {2, 0}, {0, 0});
  refuse("extend_start_loc[0]=-1; need 0 <=", {-1, 2}, {1, 1}, {0, 0});
  refuse("select_index[1]=4; need 0 <=", {0, 2}, {2, 2}, {0, 4});
  refuse("select_index[0]=-1; need 0 <=", {0, 2}, {2, 2}, {-1, 0});
  const Numbers ids(kI32, {1, 2}), one(kI64, {1});
  ExpectRefusal(StatusOf<RotateTokensPlan>(
                    RotateTokensSpec{},
                    RotateTokensArgs{ids.view(), one.view(), one.view(),
                                     one.view(), AnyTensorView()}),
                "input_ids is i32; need i64");
}

}  // namespace
}  // namespace quern
