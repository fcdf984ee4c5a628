// How evenly a schedule divides its work, and what that costs in merges.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_makespan.h"
#include "quern/attention/testing/schedule_testutil.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using Lens = std::vector<int64_t>;
constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;

struct Case {
  Lens q_lens, kv_lens;
  int64_t q_heads = 32, kv_heads = 8;
  int workers = 64;
};

TEST(AttentionScheduleBalanceTest, IsWithinATenthOfTheIdeal) {
  const Lens batch8(8, 1), batch256(256, 1);
  const Case kCases[] = {
      {{1}, {8192}},
      {{1}, {32768}},
      {{1}, {131072}, 8, 1, 64},
      {{1, 1, 1}, {100, 5000, 20000}},
      {{1, 1, 1}, {100, 5000, 20000}, 32, 8, 2},
      {{1, 1, 1}, {100, 5000, 20000}, 32, 8, 3},
      {{1, 1, 1}, {100, 5000, 20000}, 32, 8, 24},
      {batch8, Lens(8, 4096)},
      {batch8, Lens(8, 4096), 32, 8, 48},
      {batch256, Lens(256, 2048)},
      {batch256, Lens(256, 2048), 32, 8, 2},
      {{2048}, {2048}},
      {{2048}, {2048}, 4, 1, 64},  // a shard of tensor-parallel prefill
      {{256}, {4352}},
      {{8}, {4104}},
      {{512, 1, 1, 1}, {512, 2048, 2048, 2048}},
      {{1}, {32768}, 71, 1, 64},
  };
  for (const Case& c : kCases) {
    AttentionScheduleStorage storage;
    const auto schedule =
        AttentionSchedule::Build(ScheduleSpec(c.q_heads, c.kv_heads, 128),
                                 c.q_lens, c.kv_lens, c.workers, storage)
            .value();
    const AttentionMakespan makespan = SimulateMakespan(schedule, c.workers);
    EXPECT_LE(makespan.ratio(), 1.1)
        << c.q_lens.size() << " sequences, the first " << c.q_lens[0] << " of "
        << c.kv_lens[0] << ", " << c.workers << " workers: work "
        << makespan.work / makespan.ideal << " merges "
        << makespan.merges / makespan.ideal;
  }
}

// Counts the keys that each worker reads, because these are the makespan of
// decode, whatever the plan's own costs say.
TEST(AttentionScheduleBalanceTest, DividesTheKeysOfDecodeEvenly) {
  const Lens kCases[] = {{8192}, {100, 5000, 20000}, {70000, 3, 900}};
  for (const Lens& kv_lens : kCases) {
    for (const int workers : {2, 5, 16, 64}) {
      AttentionScheduleStorage storage;
      const auto schedule = AttentionSchedule::Build(ScheduleSpec(32, 8, 128),
                                                     Lens(kv_lens.size(), 1),
                                                     kv_lens, workers, storage)
                                .value();
      double total = 0;
      std::vector<double> busy(static_cast<size_t>(workers));
      for (const AttentionShare& share : schedule.shares()) {
        auto& worker = *std::min_element(busy.begin(), busy.end());
        for (const AttentionWork& work : schedule.Work(share)) {
          const auto keys =
              static_cast<double>(std::min(schedule.VisibleEnd(work.block, 0),
                                           work.chunk_end * kChunk) -
                                  work.chunk_begin * kChunk);
          worker += keys;
          total += keys;
        }
      }
      EXPECT_LE(*std::max_element(busy.begin(), busy.end()),
                1.08 * total / workers + 16)
          << kv_lens[0] << ", " << workers << " workers";
    }
  }
}

// No worker waits for longer than a chunk of the largest block and the slack,
// for any batch.
TEST(AttentionScheduleBalanceTest, HasABoundForAnyBatch) {
  TestRng rng;
  for (int round = 0; round < 300; ++round) {
    Case c;
    const int64_t sequences = rng.Integer(1, 12);
    for (int64_t s = 0; s < sequences; ++s) {
      c.kv_lens.push_back(rng.Integer(0, 1) == 0 ? rng.Integer(1, 30000)
                                                 : rng.Integer(1, 500));
      c.q_lens.push_back(rng.Integer(0, 2) == 0
                             ? std::min(c.kv_lens.back(), rng.Integer(1, 600))
                             : 1);
    }
    c.workers = static_cast<int>(rng.Integer(1, 100));
    AttentionScheduleStorage storage;
    const auto schedule =
        AttentionSchedule::Build(ScheduleSpec(32, 8, 128), c.q_lens, c.kv_lens,
                                 c.workers, storage)
            .value();
    const AttentionMakespan makespan = SimulateMakespan(schedule, c.workers);
    const double chunk =
        AttentionSchedule::kItemCost +
        static_cast<double>(kChunk * (8 + schedule.max_block_rows()));
    EXPECT_LE(makespan.work, 1.04 * makespan.ideal + chunk)
        << "round " << round << ", " << c.workers << " workers";
  }
}

// Workers of unequal speed: one gets its first share late, by a quarter of the
// step, and the others do what it cannot.
TEST(AttentionScheduleBalanceTest, OneSlowWorkerDoesNotHoldUpTheOthers) {
  AttentionScheduleStorage storage;
  const auto schedule =
      AttentionSchedule::Build(ScheduleSpec(32, 8, 128), {1, 1}, {32768, 20000},
                               4, storage)
          .value();
  const double ideal = SimulateMakespan(schedule, 4).ideal;
  std::vector<double> busy = {ideal / 4, 0, 0, 0};
  for (const AttentionShare& share : schedule.shares()) {
    auto& worker = *std::min_element(busy.begin(), busy.end());
    for (const AttentionWork& work : schedule.Work(share)) {
      worker += schedule.Cost(work);
    }
  }
  EXPECT_LE(*std::max_element(busy.begin(), busy.end()), 1.1 * ideal);
}

// Each worker begins with the head where its stretch of the line begins.
TEST(AttentionScheduleBalanceTest, WorkersAreAStretchApart) {
  for (const int workers : {2, 4, 8}) {
    AttentionScheduleStorage storage;
    const auto schedule =
        AttentionSchedule::Build(ScheduleSpec(32, 8, 128), Lens{512}, Lens{512},
                                 workers, storage)
            .value();
    std::vector<int> first_heads(static_cast<size_t>(workers));
    for (size_t i = 0; i < first_heads.size(); ++i) {
      first_heads[i] = schedule.Work(schedule.shares()[i])[0].block.kv_head;
    }
    std::sort(first_heads.begin(), first_heads.end());
    for (int i = 0; i < workers; ++i) {
      EXPECT_EQ(first_heads[static_cast<size_t>(i)], 8 * i / workers)
          << workers << " workers";
    }
  }
}

// A block is cut only where a share ends.
TEST(AttentionScheduleBalanceTest, CutsFewBlocks) {
  for (const int workers : {2, 16, 64}) {
    AttentionScheduleStorage storage;
    const auto schedule =
        AttentionSchedule::Build(ScheduleSpec(32, 8, 128), {1}, {131072},
                                 workers, storage)
            .value();
    EXPECT_LE(schedule.work().size(), 8u + static_cast<size_t>(workers) * 6);
    // f32 rows of 128 against keys and values of 16 bits, all read once.
    const double left = static_cast<double>(schedule.partial_rows()) * 512;
    const double read = 131072.0 * 8 * 512;
    EXPECT_LE(left, 0.01 * read) << workers;
  }
}

}  // namespace
}  // namespace quern
