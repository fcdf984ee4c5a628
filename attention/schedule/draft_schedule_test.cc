// Trees of drafts in a schedule: what Build refuses, and what it makes of them.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/attention/testing/schedule_testutil.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::HasSubstr;
using Lens = std::vector<int64_t>;
using Masks = std::vector<uint64_t>;

absl::StatusOr<AttentionSchedule> BuildSchedule(
    const AttentionSpec& spec, const Lens& q_lens, const Lens& kv_lens,
    const Lens& draft_lens, const Masks& masks,
    AttentionScheduleStorage& storage) {
  AttentionBatch batch;
  batch.q_lens = q_lens;
  batch.kv_lens = kv_lens;
  batch.draft_lens = draft_lens;
  batch.draft_masks = masks;
  return AttentionSchedule::Build(spec, batch, AttentionTiles(), 3, storage);
}

TEST(DraftScheduleTest, RefusesDraftsThatMakeNoSense) {
  const struct {
    Lens q_lens, kv_lens;
    std::vector<uint8_t> causal;
    Lens draft_lens;
    Masks masks;
    const char* words;
  } kCases[] = {
      {{2}, {9}, {}, {}, {1}, "draft_masks.size()=1; need 0"},
      {{2}, {9}, {}, {2, 0}, {1, 1}, "draft_lens.size()=2; need 1"},
      {{2}, {9}, {}, {}, {1, 1}, "draft_masks.size()=2; need 0"},
      {{2}, {9}, {}, {-1}, {}, "sequence 0: draft_len=-1; need 0 <="},
      {{2}, {9}, {}, {3}, {1, 1, 1}, "draft_len=3; need 0 <= draft_len <= 2"},
      {{9, 65},
       {9, 65},
       {},
       {0, 65},
       Masks(65, 1),
       "sequence 1: draft_len=65; need 0 <= draft_len <= 64"},
      // Queries of a sequence without keys see nothing, drafts or not.
      {{2}, {0}, {}, {2}, {1, 1}, "draft_len=2; need 0 <= draft_len <= 0"},
      {{2, 2},
       {9, 9},
       {1, 0},
       {2, 2},
       {1, 1, 1, 1},
       "sequence 1: draft_len=2; need 0 of a sequence that is not causal"},
      {{2}, {9}, {}, {2}, {1}, "draft_masks.size()=1; need 2"},
      {{2}, {9}, {}, {2}, {1, 1, 1}, "draft_masks.size()=3; need 2"},
      {{2}, {9}, {}, {2}, {}, "draft_masks.size()=0; need 2"},
      {{2},
       {9},
       {},
       {2},
       {3, 3},
       "sequence 0: the mask of draft 0 is 0x3; need no bit above bit 0"},
      {{1, 2},
       {9, 9},
       {},
       {1, 2},
       {1, 1, 4},
       "sequence 1: the mask of draft 1 is 0x4; need no bit above bit 1"},
      {{1}, {9}, {}, {1}, {~uint64_t{0}}, "the mask of draft 0 is 0xffff"},
  };
  for (const auto& c : kCases) {
    AttentionBatch batch;
    batch.q_lens = c.q_lens;
    batch.kv_lens = c.kv_lens;
    batch.causal = c.causal;
    batch.draft_lens = c.draft_lens;
    batch.draft_masks = c.masks;
    AttentionScheduleStorage storage;
    const absl::Status status =
        AttentionSchedule::Build(ScheduleSpec(4, 2), batch, AttentionTiles(), 1,
                                 storage)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.words;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
  }
}

TEST(DraftScheduleTest, TakesTheMostDraftsAndNone) {
  Masks masks(64, ~uint64_t{0});
  for (size_t i = 0; i < masks.size(); ++i) masks[i] >>= 63 - i;
  AttentionScheduleStorage storage;
  const auto schedule = BuildSchedule(ScheduleSpec(4, 2), {64, 3, 70},
                                      {64, 9, 90}, {64, 0, 0}, masks, storage);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->drafts().size(), 64u);
  EXPECT_THAT(schedule->DebugString(), HasSubstr("64 drafts of sequence 0\n"));
  // Another step into the same storage has none.
  EXPECT_TRUE(BuildSchedule(ScheduleSpec(4, 2), {1}, {1}, {}, {}, storage)
                  ->drafts()
                  .empty());
}

// Five drafts after two other queries:  0 - 1 - 3 - 4, 0 - 2; draft 2 does not
// see itself.
TEST(DraftScheduleTest, CountsPositionsAlongThePath) {
  AttentionSpec spec = ScheduleSpec(4, 2);
  const Masks masks = {0b1, 0b11, 0b001, 0b1011, 0b11011};
  const auto expect = [&](int64_t window, const Masks& seen,
                          const Lens& begins) {
    spec.window_left = window;
    AttentionScheduleStorage storage, copy;
    const auto schedule =
        BuildSchedule(spec, {1, 7}, {30, 20}, {0, 5}, masks, storage);
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    for (const AttentionSchedule& s : {*schedule, schedule->CopyTo(copy)}) {
      ASSERT_EQ(s.drafts().size(), 5u);
      EXPECT_EQ(s.Draft(s.sequences()[0], 0), nullptr);
      EXPECT_EQ(s.Draft(s.sequences()[1], 1), nullptr);
      const AttentionBlock block = {1, 0, 0, 7, kNoPrefix};
      for (int64_t query = 0; query < 7; ++query) {
        const auto q = static_cast<size_t>(query);
        EXPECT_EQ(s.VisibleBegin(block, query), begins[q]) << query;
        EXPECT_EQ(s.VisibleEnd(block, query), 14 + query) << query;
        if (query < 2) continue;
        EXPECT_EQ(s.Draft(s.sequences()[1], query)->seen, seen[q - 2]) << query;
        const int64_t before[] = {0, 1, 1, 2, 3};
        EXPECT_EQ(s.Draft(s.sequences()[1], query)->before, before[q - 2]);
      }
    }
  };
  // The queries stand at 13, 14, and at 15, 16, 16, 17 and 18.
  expect(kNoWindow, masks, {0, 0, 0, 0, 0, 0, 0});
  expect(4, masks, {9, 10, 11, 12, 12, 13, 14});
  expect(1, {0b1, 0b11, 0b001, 0b1010, 0b11000}, {12, 13, 14, 15, 15, 16, 17});
  expect(0, {0b1, 0b10, 0, 0b1000, 0b10000}, {13, 14, 15, 16, 16, 17, 18});
}

// A late draft may stand where the first one does, so all blocks of drafts
// begin with what the first one sees.
TEST(DraftScheduleTest, EachBlockHasWhatItsQueriesSee) {
  AttentionSpec spec = ScheduleSpec(16, 1);
  Masks masks;
  for (int i = 0; i < 64; ++i) masks.push_back(uint64_t{1} << i);
  for (const int64_t window : {0, 10, 300, 900}) {
    spec.window_left = window;
    for (const int64_t kv_len : {64, 324, 1100, 3000}) {
      AttentionScheduleStorage storage;
      const auto schedule =
          BuildSchedule(spec, {64}, {kv_len}, {64}, masks, storage);
      ASSERT_TRUE(schedule.ok()) << schedule.status();
      int64_t queries = 0;
      for (const AttentionWork& work : schedule->work()) {
        if (work.chunk_begin == schedule->FirstChunk(work.block)) {
          queries += work.block.q_count();
        }
        for (int64_t q = work.block.q_begin; q < work.block.q_end; ++q) {
          EXPECT_LE(schedule->FirstKey(work.block),
                    schedule->VisibleBegin(work.block, q));
        }
        if (work.partial != kNoPartial) continue;
        EXPECT_EQ(work.chunk_begin, schedule->FirstChunk(work.block));
        EXPECT_GE(work.chunk_end * AttentionSchedule::kChunkTokens,
                  schedule->VisibleEnd(work.block, work.block.q_end - 1));
      }
      EXPECT_EQ(queries, 64);
      EXPECT_GT(schedule->work().size(), 1u);
    }
  }
}

TEST(DraftScheduleTest, AllocatesNothingWithinItsBound) {
  const AttentionSpec spec = ScheduleSpec(8, 2);
  AttentionLimits limits = {130, 4, 5000};
  limits.max_drafts = 128;
  const auto bound = AttentionBoundOf(spec, limits, AttentionTiles(), 3);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->drafts, 128);
  AttentionScheduleStorage storage;
  Reserve(*bound, storage);
  const Lens q_lens = {64, 1, 65}, kv_lens = {900, 5000, 80};
  const Lens draft_lens = {64, 0, 64};
  const Masks masks(128, 1);
  EXPECT_NO_ALLOCATION(
      BuildSchedule(spec, q_lens, kv_lens, draft_lens, masks, storage).value());
  limits.max_drafts = -1;
  EXPECT_THAT(
      AttentionBoundOf(spec, limits, AttentionTiles(), 3).status().message(),
      HasSubstr("max_drafts=-1; need 0 <= max_drafts"));
}

}  // namespace
}  // namespace quern
