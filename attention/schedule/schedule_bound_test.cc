// No schedule within the limits is larger than AttentionBoundOf said, and Build
// into reserved storage allocates nothing.

#include "quern/attention/schedule_bound.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/testing/schedule_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

struct Batch {
  std::vector<int64_t> q_lens, kv_lens;
  std::vector<PrefixGroup> groups;
  std::vector<int32_t> members;
};

// As many sequences and tokens as the limits allow, or fewer; often with one
// sequence that is as long as may be.
Batch RandomBatch(Rng& rng, const AttentionLimits& limits) {
  Batch batch;
  int64_t tokens = limits.max_tokens;
  const int64_t sequences = rng.Integer(0, 2) == 0
                                ? rng.Integer(0, limits.max_sequences)
                                : limits.max_sequences;
  const int64_t most = rng.Integer(0, 1) == 0 ? 1 : limits.max_tokens;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t kv_len = rng.Integer(0, 2) == 0
                               ? rng.Integer(0, limits.max_kv_len)
                               : limits.max_kv_len;
    const int64_t q_len = rng.Integer(0, std::min({tokens, most, kv_len}));
    tokens -= q_len;
    batch.q_lens.push_back(q_len);
    batch.kv_lens.push_back(kv_len);
  }
  if (!limits.prefix_groups) return batch;
  constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;
  PrefixGroup group = {0, 0, 0};
  for (size_t s = 0; s < batch.q_lens.size(); ++s) {
    const int64_t shared =
        (batch.kv_lens[s] - batch.q_lens[s]) / kChunk * kChunk;
    if (shared == 0) continue;
    const bool joins = group.begin < group.end && rng.Integer(0, 9) != 0;
    if (!joins && group.begin < group.end) {
      batch.groups.push_back(group);
      group = {group.end, group.end, 0};
    }
    group.tokens = joins ? std::min(group.tokens, shared) : shared;
    batch.members.push_back(static_cast<int32_t>(s));
    ++group.end;
  }
  if (group.begin < group.end) batch.groups.push_back(group);
  return batch;
}

void ExpectWithin(const AttentionBound& bound,
                  const AttentionSchedule& schedule,
                  const AttentionScheduleStorage& storage) {
  const auto expect = [](const char* what, size_t size, int64_t most) {
    EXPECT_LE(static_cast<int64_t>(size), most) << what;
  };
  expect("sequences", storage.sequences.size(), bound.sequences);
  expect("work", storage.work.size(), bound.work);
  expect("shares", storage.shares.size(), bound.shares);
  expect("runs", storage.runs.size(), bound.runs);
  expect("merges", storage.merges.size(), bound.merges);
  expect("members", storage.members.size(), bound.members);
  expect("places", storage.places.size(), bound.members);
  expect("prefixes", storage.prefixes.size(), bound.prefixes);
  expect("prefix_runs", storage.prefix_runs.size(), bound.prefix_runs);
  EXPECT_LE(schedule.max_block_rows(), bound.max_block_rows);
  EXPECT_LE(schedule.partial_rows(), bound.partial_rows);
}

TEST(AttentionBoundTest, HoldsForEveryStep) {
  TestRng rng;
  const AttentionLimits kLimits[] = {
      {1, 1, 100000, false}, {1, 1, 100000, true},  {40, 40, 3000, false},
      {40, 40, 3000, true},  {700, 5, 2000, false}, {700, 5, 2000, true},
      {300, 150, 600, true}, {0, 3, 50, true},      {5, 0, 50, false}};
  for (AttentionLimits limits : kLimits) {
    for (const int max_workers : {1, 2, 7, 64}) {
      for (const int64_t kv_heads : {1, 2, 6}) {
        for (const int64_t group : {1, 4, 200}) {
          const AttentionSpec spec = ScheduleSpec(kv_heads * group, kv_heads);
          const AttentionTiles tiles =
              rng.Integer(0, 1) == 0 ? AttentionTiles{}
                                     : AttentionTiles{rng.Integer(1, 300), 1};
          // Often a schedule is built for more workers than run it.
          limits.max_schedule_workers = static_cast<int>(
              rng.Integer(0, 1) * rng.Integer(1, 3 * max_workers));
          const int most_built =
              std::max(max_workers, limits.max_schedule_workers);
          SCOPED_TRACE(testing::Message()
                       << "tokens " << limits.max_tokens << " sequences "
                       << limits.max_sequences << " kv_len "
                       << limits.max_kv_len << " prefixes "
                       << limits.prefix_groups << " workers " << max_workers
                       << " built for " << most_built << " kv_heads "
                       << kv_heads << " group " << group << " block_rows "
                       << tiles.block_rows);
          const auto bound = AttentionBoundOf(spec, limits, tiles, max_workers);
          ASSERT_TRUE(bound.ok()) << bound.status();
          AttentionScheduleStorage storage;
          Reserve(*bound, storage);
          const auto plan = PagedAttentionPlan::Create(spec);
          ASSERT_TRUE(plan.ok()) << plan.status();
          const int64_t bytes =
              plan->WorkspaceBytes(limits, max_workers).value();
          for (int step = 0; step < 8; ++step) {
            const Batch batch = RandomBatch(rng, limits);
            const auto workers = static_cast<int>(rng.Integer(1, most_built));
            const AttentionBatch arrays = {
                batch.q_lens, batch.kv_lens, {}, batch.groups, batch.members};
            AttentionSchedule schedule;
            EXPECT_NO_ALLOCATION(schedule =
                                     AttentionSchedule::Build(
                                         spec, arrays, tiles, workers, storage)
                                         .value());
            ExpectWithin(*bound, schedule, storage);
            if (tiles == AttentionTiles()) {
              EXPECT_LE(plan->WorkspaceBytes(schedule, max_workers).value(),
                        bytes);
            }
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(AttentionBoundTest, RefusesLimitsThatMakeNoSense) {
  const AttentionSpec spec = ScheduleSpec(4, 2);
  const struct {
    AttentionLimits limits;
    AttentionTiles tiles;
    int workers;
    const char* words;
  } kCases[] = {
      {{-1, 1, 1}, {}, 1, "max_tokens=-1; need 0 <= max_tokens"},
      {{1, -1, 1}, {}, 1, "max_sequences=-1; need 0 <= max_sequences"},
      {{1, 1, -1}, {}, 1, "max_kv_len=-1; need 0 <= max_kv_len"},
      {{int64_t{1} << 62, 1, 1}, {}, 1, "max_tokens=4611686018427387904"},
      {{1, 1, int64_t{1} << 31}, {}, 1, "max_kv_len=2147483648"},
      {{1, 1, 1, false, 0, -1}, {}, 1, "max_schedule_workers=-1; need 0 <="},
      {{1, 1, 1, false, 0, 65537}, {}, 1, "max_schedule_workers=65537"},
      {{1, 1, 1}, {}, 0, "max_workers=0; need 1 <= max_workers <= 65536"},
      {{1, 1, 1}, {0, 1}, 1, "block_rows=0"},
      {{1, 1, 1}, {32, 33}, 1, "row_tile=33"},
  };
  for (const auto& c : kCases) {
    const absl::Status status =
        AttentionBoundOf(spec, c.limits, c.tiles, c.workers).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.words;
    EXPECT_NE(status.message().find(c.words), std::string::npos) << status;
  }
  // The largest limits are bounded too.
  const int64_t most = AttentionSchedule::kMaxTokens;
  const auto bound = AttentionBoundOf(
      ScheduleSpec(2147483647, 2147483647), {most, most, most, true},
      AttentionTiles(), AttentionSchedule::kMaxWorkers);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->partial_rows, AttentionSchedule::kMaxPartialRows);
  EXPECT_FALSE(PagedAttentionPlan::Create(spec)
                   ->WorkspaceBytes(AttentionLimits{1, 1, 1}, 0)
                   .ok());
}

}  // namespace
}  // namespace quern
