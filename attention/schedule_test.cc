#include "attention/schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/attention_spec.h"
#include "cache/kv_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/data.h"
#include "testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::HasSubstr;
using Lens = std::vector<int64_t>;

AttentionSpec MakeSpec(int64_t q_heads, int64_t kv_heads) {
  KvLayoutSpec layout;
  layout.kv_heads = kv_heads;
  layout.head_dim = 8;
  layout.page_size = 16;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = q_heads;
  return spec;
}

// Everything that a schedule must be, whatever the lengths.
void ExpectValid(const AttentionSchedule& schedule, const AttentionSpec& spec,
                 const Lens& q_lens, const Lens& kv_lens) {
  // Of each (sequence, kv_head, query): how often each key is computed, and how
  // often the output is written.
  std::map<std::tuple<int, int, int>, std::vector<int>> computed;
  std::map<std::tuple<int, int, int>, int> written;
  // Of each row of partial results: the chunk whose it is, and -1 when merged.
  std::vector<std::vector<int64_t>> partials(
      static_cast<size_t>(schedule.partial_rows()));
  int64_t tokens = 0;
  ASSERT_EQ(schedule.sequences().size(), q_lens.size());
  for (size_t s = 0; s < q_lens.size(); ++s) {
    EXPECT_EQ(schedule.sequences()[s].q_offset, tokens);
    tokens += q_lens[s];
    for (int h = 0; h < spec.kv.kv_heads(); ++h) {
      for (int q = 0; q < q_lens[s]; ++q) {
        computed[{static_cast<int>(s), h, q}].assign(
            static_cast<size_t>(kv_lens[s]), 0);
        written[{static_cast<int>(s), h, q}] = 0;
      }
    }
  }
  EXPECT_EQ(schedule.num_tokens(), tokens);
  const auto rows_of = [&](const AttentionBlock& block) {
    EXPECT_LT(block.q_begin, block.q_end);
    const int64_t rows = block.q_count() * spec.group();
    EXPECT_LE(rows, schedule.max_block_rows());
    EXPECT_TRUE(rows <= AttentionSchedule::kBlockRows || block.q_count() == 1);
    return rows;
  };
  for (const AttentionWork& work : schedule.work()) {
    const AttentionBlock& block = work.block;
    const int64_t rows = rows_of(block);
    if (work.partial != kNoPartial) {
      ASSERT_EQ(work.chunk_end - work.chunk_begin, 1);
      ASSERT_LE(work.partial + rows, schedule.partial_rows());
      for (int64_t row = 0; row < rows; ++row) {
        partials[static_cast<size_t>(work.partial + row)].push_back(
            work.chunk_begin);
      }
    }
    for (int q = block.q_begin; q < block.q_end; ++q) {
      const std::tuple<int, int, int> key = {block.sequence, block.kv_head, q};
      ASSERT_EQ(computed.count(key), 1u);
      if (work.partial == kNoPartial) ++written[key];
      const int64_t end =
          std::min(schedule.VisibleKeys(block, q),
                   int64_t{work.chunk_end} * AttentionSchedule::kChunkTokens);
      for (int64_t t =
               int64_t{work.chunk_begin} * AttentionSchedule::kChunkTokens;
           t < end; ++t) {
        ++computed[key].at(static_cast<size_t>(t));
      }
    }
  }
  for (const AttentionMerge& merge : schedule.merges()) {
    const AttentionBlock& block = merge.block;
    const int64_t rows = rows_of(block);
    for (int64_t chunk = 0; chunk < merge.chunks; ++chunk) {
      for (int64_t row = 0; row < rows; ++row) {
        auto& partial = partials.at(
            static_cast<size_t>(merge.partial + chunk * rows + row));
        ASSERT_EQ(partial, std::vector<int64_t>{chunk});
        partial = {-1};
      }
    }
    for (int q = block.q_begin; q < block.q_end; ++q) {
      ++written[{block.sequence, block.kv_head, q}];
    }
  }
  for (const auto& partial : partials) {
    EXPECT_EQ(partial, std::vector<int64_t>{-1});  // written once, merged once
  }
  for (const auto& [key, count] : written) EXPECT_EQ(count, 1);
  for (const auto& [key, counts] : computed) {
    const auto s = static_cast<size_t>(std::get<0>(key));
    for (size_t t = 0; t < counts.size(); ++t) {
      const bool sees =
          static_cast<int64_t>(t) <= kv_lens[s] - q_lens[s] + std::get<2>(key);
      ASSERT_EQ(counts[t], sees ? 1 : 0);
    }
  }
}

TEST(AttentionScheduleTest, CoversEachPairOfAQueryAndAKeyOnce) {
  TestRng rng;
  for (int round = 0; round < 60; ++round) {
    const int64_t kv_heads = rng.Integer(1, 3);
    const AttentionSpec spec =
        MakeSpec(kv_heads * std::vector<int64_t>{1, 2, 3, 4, 7, 8, 16, 40}.at(
                                static_cast<size_t>(rng.Integer(0, 7))),
                 kv_heads);
    Lens q_lens, kv_lens;
    const int64_t sequences = rng.Integer(0, 5);
    for (int64_t s = 0; s < sequences; ++s) {
      kv_lens.push_back(rng.Integer(0, 4) == 0 ? 0 : rng.Integer(1, 1500));
      const int64_t most = kv_lens.back() == 0 ? 3 : kv_lens.back();
      q_lens.push_back(rng.Integer(0, 1) == 0
                           ? std::min(most, int64_t{1})
                           : rng.Integer(0, std::min(most, int64_t{70})));
    }
    for (const int workers : {1, 2, 7, 64}) {
      AttentionScheduleStorage storage;
      const auto schedule =
          AttentionSchedule::Build(spec, q_lens, kv_lens, workers, storage);
      ASSERT_TRUE(schedule.ok()) << schedule.status();
      ExpectValid(*schedule, spec, q_lens, kv_lens);
    }
  }
}

TEST(AttentionScheduleTest, IsTheSameForTheSameArguments) {
  const AttentionSpec spec = MakeSpec(8, 2);
  const Lens q_lens = {1, 300, 1, 7}, kv_lens = {5000, 300, 3, 700};
  AttentionScheduleStorage a, b;
  // b is dirty from another step.
  ASSERT_TRUE(AttentionSchedule::Build(spec, {40}, {4000}, 16, b).ok());
  const auto first = AttentionSchedule::Build(spec, q_lens, kv_lens, 64, a);
  const auto second = AttentionSchedule::Build(spec, q_lens, kv_lens, 64, b);
  ASSERT_FALSE(a.merges.empty());
  ASSERT_EQ(a.work.size(), b.work.size());
  EXPECT_EQ(std::memcmp(a.work.data(), b.work.data(),
                        a.work.size() * sizeof(AttentionWork)),
            0);
  ASSERT_EQ(a.merges.size(), b.merges.size());
  EXPECT_EQ(std::memcmp(a.merges.data(), b.merges.data(),
                        a.merges.size() * sizeof(AttentionMerge)),
            0);
  EXPECT_EQ(first->DebugString(), second->DebugString());
}

TEST(AttentionScheduleTest, SplitsALongSequenceForSeveralWorkersOnly) {
  const AttentionSpec spec = MakeSpec(4, 1);
  AttentionScheduleStorage storage;
  const auto one =
      AttentionSchedule::Build(spec, {1}, {1000}, 1, storage).value();
  EXPECT_EQ(one.DebugString(),
            "work sequence 0 kv_head 0 queries [0, 1) chunks [0, 4)\n");
  const auto two =
      AttentionSchedule::Build(spec, {1}, {1000}, 2, storage).value();
  EXPECT_EQ(
      two.DebugString(),
      "work sequence 0 kv_head 0 queries [0, 1) chunks [0, 1) partial 0\n"
      "work sequence 0 kv_head 0 queries [0, 1) chunks [1, 2) partial 4\n"
      "work sequence 0 kv_head 0 queries [0, 1) chunks [2, 3) partial 8\n"
      "work sequence 0 kv_head 0 queries [0, 1) chunks [3, 4) partial 12\n"
      "merge sequence 0 kv_head 0 queries [0, 1) chunks 4 partial 0\n");
  // A block that is a small part of the step is left whole.
  const Lens q_lens(64, 1), kv_lens(64, 1000);
  const auto many =
      AttentionSchedule::Build(spec, q_lens, kv_lens, 2, storage).value();
  EXPECT_TRUE(many.merges().empty());
}

// No item is larger than a quarter of a worker's share, or a chunk.
TEST(AttentionScheduleTest, LeavesNoItemTooLargeToBalance) {
  const AttentionSpec spec = MakeSpec(32, 8);
  const Lens q_lens = {1, 1, 1}, kv_lens = {100, 5000, 20000};
  AttentionScheduleStorage storage;
  const auto schedule =
      AttentionSchedule::Build(spec, q_lens, kv_lens, 16, storage).value();
  const int64_t share = (100 + 5000 + 20000) * 8 / 16;
  for (const AttentionWork& work : schedule.work()) {
    const int64_t keys =
        (work.chunk_end - work.chunk_begin) * AttentionSchedule::kChunkTokens;
    EXPECT_TRUE(keys <= AttentionSchedule::kChunkTokens || keys <= share / 4)
        << keys;
  }
}

TEST(AttentionScheduleTest, AllocatesNothingAfterTheFirstStep) {
  const AttentionSpec spec = MakeSpec(8, 2);
  const Lens q_lens = {1, 30, 1}, kv_lens = {5000, 300, 3};
  AttentionScheduleStorage storage;
  ASSERT_TRUE(AttentionSchedule::Build(spec, q_lens, kv_lens, 4, storage).ok());
  EXPECT_NO_ALLOCATION(
      AttentionSchedule::Build(spec, q_lens, kv_lens, 4, storage).value());
}

TEST(AttentionScheduleTest, RefusesMoreWorkThanItHasMemoryFor) {
  constexpr int64_t kLong = AttentionSchedule::kMaxTokens;
  const struct {
    AttentionSpec spec;
    Lens q_lens, kv_lens;
    int workers;
  } kCases[] = {
      {MakeSpec(32, 32), {kLong}, {kLong}, 1},
      {MakeSpec(2147483647, 2147483647), {kLong, kLong}, {kLong, kLong}, 1},
      {MakeSpec(1, 1), Lens(5, kLong), Lens(5, kLong), 1},
      // One chunk too many: each head has as many as there may be.
      {MakeSpec(2, 2), {1}, {kLong}, 4},
  };
  for (const auto& c : kCases) {
    AttentionScheduleStorage storage;
    const absl::Status status =
        AttentionSchedule::Build(c.spec, c.q_lens, c.kv_lens, c.workers,
                                 storage)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(status.message(),
                HasSubstr("the step has more than 4194304 work items"));
  }
  AttentionScheduleStorage storage;
  const auto most =
      AttentionSchedule::Build(MakeSpec(1, 1), {1}, {kLong}, 8, storage);
  ASSERT_TRUE(most.ok()) << most.status();
  EXPECT_EQ(most->work().size(), 4194304u);
}

TEST(AttentionScheduleTest, RefusesLengthsThatMakeNoSense) {
  const AttentionSpec spec = MakeSpec(4, 2);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const struct {
    Lens q_lens, kv_lens;
    int workers;
    const char* words;
  } kCases[] = {
      {{1, 1}, {1}, 1, "kv_lens.size()=1; need 2"},
      {{1, -1}, {1, 1}, 1, "sequence 1: q_len=-1; need 0 <= q_len"},
      {{1, 0}, {1, -5}, 1, "sequence 1: kv_len=-5; need 0 <= kv_len"},
      {{1}, {kMax}, 1, "sequence 0: kv_len=9223372036854775807"},
      {{kMax}, {1}, 1, "sequence 0: q_len=9223372036854775807"},
      {{2}, {1}, 1, "sequence 0: q_len=2, kv_len=1; need q_len <= kv_len"},
      {{1}, {1}, 0, "num_workers=0"},
  };
  AttentionScheduleStorage storage;
  for (const auto& c : kCases) {
    const absl::Status status =
        AttentionSchedule::Build(spec, c.q_lens, c.kv_lens, c.workers, storage)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.words;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
    EXPECT_THAT(status.message(), HasSubstr("attention_schedule: "));
  }
  EXPECT_THAT(AttentionSchedule::Build(AttentionSpec(), {}, {}, 1, storage)
                  .status()
                  .message(),
              HasSubstr("attention_schedule: kv layout is empty"));
}

}  // namespace
}  // namespace quern
