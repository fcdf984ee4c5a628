#include "quern/attention/schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule_makespan.h"
#include "quern/attention/testing/schedule_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::HasSubstr;
using Lens = std::vector<int64_t>;

// The arguments of Build.
struct Request {
  AttentionSpec spec;
  Lens q_lens, kv_lens;
  std::vector<uint8_t> causal;
  AttentionTiles tiles;
  std::vector<PrefixGroup> groups = {};
  std::vector<int32_t> members = {};

  absl::StatusOr<AttentionSchedule> Build(
      int workers, AttentionScheduleStorage& storage) const {
    return AttentionSchedule::Build(spec,
                                    {q_lens, kv_lens, causal, groups, members},
                                    tiles, workers, storage);
  }
  // Written from the definition, not from the schedule's fields.
  bool Sees(size_t s, int64_t query, int64_t key) const {
    const int64_t position = kv_lens[s] - q_lens[s] + query;
    if (key > position) {
      if (causal.empty() || causal[s] != 0) return false;
      return spec.window_right == kNoWindow ||
             key - position <= spec.window_right;
    }
    return spec.window_left == kNoWindow || position - key <= spec.window_left;
  }
};

// One query of one sequence, for one KV head.
struct Row {
  int sequence, kv_head, query;
};

// Counts what the items and merges of a schedule do.
class Account {
 public:
  Account(const AttentionSchedule& schedule, const Request& request)
      : schedule_(schedule),
        request_(request),
        partials_(static_cast<size_t>(schedule.partial_rows()), kUnwritten) {
    for (size_t s = 0; s < request.q_lens.size(); ++s) {
      first_row_.push_back(rows_.size());
      for (int h = 0; h < request.spec.kv.kv_heads(); ++h) {
        for (int q = 0; q < request.q_lens[s]; ++q) {
          rows_.push_back({static_cast<int>(s), h, q});
          changes_.emplace_back(static_cast<size_t>(request.kv_lens[s]) + 1, 0);
        }
      }
    }
    written_.resize(rows_.size() * static_cast<size_t>(request.spec.group()));
  }

  void Add(const AttentionWork& work) {
    const AttentionBlock& block = work.block;
    const int64_t rows = Rows(block);
    ASSERT_LE(work.chunk_begin, work.chunk_end);
    if (work.partial == kNoPartial) {
      Write(block, 0, rows);
    } else {
      ASSERT_LT(work.chunk_begin, work.chunk_end);
      int64_t partial = work.partial;
      for (int32_t c = work.chunk_begin; c < work.chunk_end;) {
        const int32_t end = AttentionSchedule::PieceEnd(
            c, work.chunk_end, c == schedule_.FirstChunk(block));
        ASSERT_LT(c, end);
        // A piece is within a span; chunks are merged only where all of the
        // span before them is in the same piece.
        EXPECT_LE(end, (c / kSpan + 1) * kSpan);
        EXPECT_TRUE(end == c + 1 || c % kSpan == 0 ||
                    c == schedule_.FirstChunk(block));
        ASSERT_LE(partial + rows, schedule_.partial_rows());
        for (int64_t row = partial; row < partial + rows; ++row) {
          EXPECT_EQ(partials_[static_cast<size_t>(row)], kUnwritten);
          partials_[static_cast<size_t>(row)] = c;
        }
        partial += rows;
        c = end;
      }
    }
    for (const Row& row : Queries(block)) {
      std::vector<int>& changes = changes_.at(Index(row));
      const int64_t begin = std::max(work.chunk_begin * kChunk,
                                     schedule_.VisibleBegin(block, row.query));
      const int64_t end = std::min(work.chunk_end * kChunk,
                                   schedule_.VisibleEnd(block, row.query));
      if (begin >= end) continue;
      ++changes.at(static_cast<size_t>(begin));
      --changes.at(static_cast<size_t>(end));
    }
  }

  void Add(const AttentionMerge& merge) {
    const AttentionBlock& block = merge.block;
    const int64_t rows = Rows(block);
    ASSERT_LT(merge.row_begin, merge.row_end);
    ASSERT_LE(merge.row_end, rows);
    Write(block, merge.row_begin, merge.row_end);
    const absl::Span<const AttentionRun> runs = schedule_.Runs(merge);
    ASSERT_GE(runs.size(), 2u);
    int32_t chunk = schedule_.FirstChunk(block);
    for (const AttentionRun& run : runs) {
      EXPECT_EQ(run.chunk_begin, chunk);
      int64_t partial = run.partial;
      while (chunk < run.chunk_end) {
        for (int64_t row = merge.row_begin; row < merge.row_end; ++row) {
          auto& owner = partials_.at(static_cast<size_t>(partial + row));
          EXPECT_EQ(owner, chunk);
          owner = kMerged;
        }
        partial += run.rows;
        chunk = AttentionSchedule::PieceEnd(
            chunk, run.chunk_end, chunk == schedule_.FirstChunk(block));
      }
    }
  }

  // All keys that each row sees, once, and each output once; what was left was
  // merged.
  void Expect() const {
    for (const int64_t partial : partials_) EXPECT_EQ(partial, kMerged);
    EXPECT_THAT(written_, ::testing::Each(1));
    for (size_t i = 0; i < rows_.size(); ++i) {
      const Row& row = rows_[i];
      const auto s = static_cast<size_t>(row.sequence);
      int count = 0;
      for (int64_t t = 0; t < request_.kv_lens[s]; ++t) {
        count += changes_[i][static_cast<size_t>(t)];
        if (count == (request_.Sees(s, row.query, t) ? 1 : 0)) continue;
        FAIL() << "sequence " << s << " query " << row.query << " key " << t
               << " is computed " << count << " times";
      }
    }
  }

 private:
  static constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;
  static constexpr int64_t kSpan = AttentionSchedule::kSpanChunks;
  static constexpr int64_t kUnwritten = -1, kMerged = -2;

  std::vector<Row> Queries(const AttentionBlock& block) const {
    std::vector<Row> rows;
    const auto add = [&](int sequence, int begin, int end) {
      for (int q = begin; q < end; ++q) {
        rows.push_back({sequence, block.kv_head, q});
      }
    };
    if (block.prefix == kNoPrefix) {
      add(block.sequence, block.q_begin, block.q_end);
      return rows;
    }
    const PrefixGroup& prefix =
        schedule_.prefixes()[static_cast<size_t>(block.prefix)];
    for (const int32_t s : schedule_.Members(prefix)) {
      add(s, 0, static_cast<int>(request_.q_lens[static_cast<size_t>(s)]));
    }
    EXPECT_EQ(block.q_begin, 0);
    EXPECT_EQ(block.q_end, static_cast<int>(rows.size()));
    return rows;
  }
  int64_t Rows(const AttentionBlock& block) const {
    EXPECT_LT(block.q_begin, block.q_end);
    const int64_t rows = block.q_count() * request_.spec.group();
    EXPECT_LE(rows, schedule_.max_block_rows());
    EXPECT_TRUE(rows <= request_.tiles.block_rows || block.q_count() == 1);
    return rows;
  }
  void Write(const AttentionBlock& block, int64_t begin, int64_t end) {
    const int64_t group = request_.spec.group();
    for (int64_t row = begin; row < end; ++row) {
      const size_t index =
          Index({block.sequence, block.kv_head,
                 block.q_begin + static_cast<int>(row / group)});
      ++written_.at(index * static_cast<size_t>(group) +
                    static_cast<size_t>(row % group));
    }
  }

  // The index of `row` in rows_. A row that is not there fails the test.
  size_t Index(const Row& row) const {
    const auto s = static_cast<size_t>(row.sequence);
    const int64_t q_len = request_.q_lens.at(s);
    EXPECT_GE(row.kv_head, 0);
    EXPECT_LT(row.kv_head, request_.spec.kv.kv_heads());
    EXPECT_GE(row.query, 0);
    EXPECT_LT(row.query, q_len);
    const int64_t offset = row.kv_head * q_len + row.query;
    return first_row_.at(s) + static_cast<size_t>(offset);
  }

  const AttentionSchedule& schedule_;
  const Request& request_;
  std::vector<Row> rows_;  // every (sequence, kv_head, query), in that order
  std::vector<size_t> first_row_;  // where each sequence begins in rows_
  // [row][key]: how many times more a key is computed than the key before it.
  std::vector<std::vector<int>> changes_;
  std::vector<int> written_;       // [row, query head of the group]
  std::vector<int64_t> partials_;  // the first chunk of the piece
};

// Everything that a schedule must be, whatever the lengths.
void ExpectValid(const AttentionSchedule& schedule, const Request& request) {
  int64_t tokens = 0;
  ASSERT_EQ(schedule.sequences().size(), request.q_lens.size());
  for (size_t s = 0; s < request.q_lens.size(); ++s) {
    EXPECT_EQ(schedule.sequences()[s].q_offset, tokens);
    tokens += request.q_lens[s];
  }
  EXPECT_EQ(schedule.num_tokens(), tokens);
  Account account(schedule, request);
  std::vector<int> taken(schedule.work().size());
  double least = std::numeric_limits<double>::infinity();
  for (const AttentionShare& share : schedule.shares()) {
    EXPECT_LT(share.begin, share.end);
    EXPECT_LE(share.cost, least);
    least = share.cost;
    for (int32_t i = share.begin; i < share.end; ++i) {
      ++taken.at(static_cast<size_t>(i));
    }
    for (const AttentionWork& work : schedule.Work(share)) account.Add(work);
  }
  EXPECT_THAT(taken, ::testing::Each(1));
  for (const AttentionMerge& merge : schedule.merges()) account.Add(merge);
  account.Expect();
}

// Puts each sequence into one of two groups, or into none. The members of a
// group share as much as they can.
void AddGroups(TestRng& rng, Request& r) {
  constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;
  std::vector<int64_t> group_of;
  for (size_t s = 0; s < r.q_lens.size(); ++s) {
    group_of.push_back(rng.Integer(0, 5) == 0 ? 2 : rng.Integer(0, 1));
  }
  for (const int64_t g : {0, 1}) {
    PrefixGroup group = {static_cast<int32_t>(r.members.size()), 0, 2560};
    for (size_t s = 0; s < r.q_lens.size(); ++s) {
      const int64_t before = (r.kv_lens[s] - r.q_lens[s]) / kChunk * kChunk;
      if (group_of[s] != g || before <= 0) continue;
      r.members.push_back(static_cast<int32_t>(s));
      group.tokens = std::min(group.tokens, before);
    }
    group.end = static_cast<int32_t>(r.members.size());
    if (group.begin < group.end) r.groups.push_back(group);
  }
}

Request RandomRequest(TestRng& rng) {
  const auto one_of = [&](std::vector<int64_t> of) {
    return of.at(static_cast<size_t>(
        rng.Integer(0, static_cast<int64_t>(of.size()) - 1)));
  };
  Request r;
  const int64_t kv_heads = rng.Integer(1, 3);
  r.spec =
      ScheduleSpec(kv_heads * one_of({1, 2, 3, 4, 7, 8, 16, 40}), kv_heads);
  if (rng.Integer(0, 1) == 0) {
    r.spec.window_left = one_of({kNoWindow, 0, 1, 100, 255, 256, 700});
    r.spec.window_right = one_of({kNoWindow, 0, 1, 100, 256, 700});
  }
  r.tiles.block_rows = one_of({1, 16, 32, 64, 96});
  r.tiles.row_tile = std::min(r.tiles.block_rows, one_of({1, 4, 8, 16, 24}));
  const int64_t sequences = rng.Integer(0, 5);
  const bool flags = rng.Integer(0, 1) == 0;
  for (int64_t s = 0; s < sequences; ++s) {
    r.kv_lens.push_back(rng.Integer(0, 4) == 0 ? 0 : rng.Integer(1, 3000));
    const int64_t most = r.kv_lens.back() == 0 ? 3 : r.kv_lens.back();
    r.q_lens.push_back(rng.Integer(0, 1) == 0
                           ? std::min(most, int64_t{1})
                           : rng.Integer(0, std::min(most, int64_t{70})));
    if (flags) r.causal.push_back(rng.Integer(0, 1) == 0 ? 0 : 1);
  }
  if (r.spec.window_left == kNoWindow) AddGroups(rng, r);
  return r;
}

TEST(AttentionScheduleTest, CoversEachPairOfAQueryAndAKeyOnce) {
  TestRng rng;
  int64_t merges = 0, prefixes = 0;
  for (int round = 0; round < 200; ++round) {
    const Request request = RandomRequest(rng);
    for (const int workers : {1, 2, 7, 64}) {
      AttentionScheduleStorage storage;
      const auto schedule = request.Build(workers, storage);
      ASSERT_TRUE(schedule.ok()) << schedule.status();
      ExpectValid(*schedule, request);
      if (HasFailure()) {
        FAIL() << "round " << round << ", " << workers << " workers\n"
               << schedule->DebugString();
      }
      merges += static_cast<int64_t>(schedule->merges().size());
      prefixes += static_cast<int64_t>(schedule->prefixes().size());
    }
  }
  EXPECT_GT(merges, 1000);
  EXPECT_GT(prefixes, 50);
}

TEST(AttentionScheduleTest, IsTheSameForTheSameArguments) {
  const AttentionSpec spec = ScheduleSpec(8, 2);
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
  ASSERT_EQ(a.shares.size(), b.shares.size());
  EXPECT_EQ(std::memcmp(a.shares.data(), b.shares.data(),
                        a.shares.size() * sizeof(AttentionShare)),
            0);
  EXPECT_EQ(first->DebugString(), second->DebugString());

  // A copy in another storage is the same schedule.
  AttentionScheduleStorage c;
  const AttentionSchedule copy = first->CopyTo(c);
  a = AttentionScheduleStorage();
  EXPECT_EQ(copy.DebugString(), second->DebugString());
}

TEST(AttentionScheduleTest, SplitsALongSequenceForSeveralWorkersOnly) {
  const AttentionSpec spec = ScheduleSpec(4, 1);
  AttentionScheduleStorage storage;
  const auto one =
      AttentionSchedule::Build(spec, {1}, {2000}, 1, storage).value();
  EXPECT_EQ(one.DebugString(),
            "1 sequences, 1 tokens, 1 kv_heads of 4 rows, 0 partial rows\n"
            "share of cost 24256\n"
            "  sequence 0 kv_head 0 queries [0, 1) chunks [0, 8)\n");
  const auto three =
      AttentionSchedule::Build(spec, {1}, {2000}, 3, storage).value();
  EXPECT_EQ(three.DebugString(),
            "1 sequences, 1 tokens, 1 kv_heads of 4 rows, 24 partial rows\n"
            "share of cost 9216\n"
            "  sequence 0 kv_head 0 queries [0, 1) chunks [0, 3) partial 0\n"
            "share of cost 8896\n"
            "  sequence 0 kv_head 0 queries [0, 1) chunks [5, 8) partial 12\n"
            "share of cost 6144\n"
            "  sequence 0 kv_head 0 queries [0, 1) chunks [3, 5) partial 4\n"
            "merge sequence 0 kv_head 0 queries [0, 1) rows [0, 2) of "
            "[0, 3) partial 0 [3, 5) partial 4 [5, 8) partial 12\n"
            "merge sequence 0 kv_head 0 queries [0, 1) rows [2, 4) of "
            "[0, 3) partial 0 [3, 5) partial 4 [5, 8) partial 12\n");
  // A block that is a small part of the step is left whole.
  const Lens q_lens(64, 1), kv_lens(64, 1000);
  const auto many =
      AttentionSchedule::Build(spec, q_lens, kv_lens, 2, storage).value();
  EXPECT_TRUE(many.merges().empty());
}

TEST(AttentionScheduleTest, PacksTheQueriesOfAGroupIntoFullTiles) {
  const struct {
    int64_t group, q_len;
    AttentionTiles tiles;
    Lens block_rows;
  } kCases[] = {
      {4, 1, {64, 8}, {4}},            // decode
      {4, 8, {64, 8}, {32}},           // speculative
      {4, 16, {64, 8}, {64}},          //
      {4, 40, {64, 8}, {64, 64, 32}},  // prefill
      {3, 30, {32, 8}, {24, 24, 24, 18}},
      {3, 30, {32, 1}, {30, 30, 30}},
      {7, 9, {32, 8}, {28, 28, 7}},  // 28 of 32 are better than 21 of 24
      {71, 2, {64, 8}, {71, 71}},    // one query is never divided
      {1, 130, {128, 16}, {128, 2}},
  };
  for (const auto& c : kCases) {
    const Request request = {
        ScheduleSpec(c.group, 1), {c.q_len}, {c.q_len}, {}, c.tiles};
    AttentionScheduleStorage storage;
    const AttentionSchedule schedule = request.Build(1, storage).value();
    Lens rows;
    for (const AttentionWork& work : schedule.work()) {
      rows.push_back(work.block.q_count() * c.group);
    }
    EXPECT_EQ(rows, c.block_rows) << "group " << c.group;
  }
}

// 512 queries of 8 heads of 4 make 128 blocks of 128 rows: plenty for five
// workers, too few for 64.
TEST(AttentionScheduleTest, MakesSmallerBlocksForManyWorkers) {
  const struct {
    int workers;
    int64_t rows;
  } kCases[] = {{1, 128}, {5, 128}, {10, 64}, {11, 32}, {1000, 32}};
  for (const auto& c : kCases) {
    const Request request = {ScheduleSpec(32, 8), {512}, {512}, {}, {}};
    AttentionScheduleStorage storage;
    EXPECT_EQ(request.Build(c.workers, storage).value().max_block_rows(),
              c.rows)
        << c.workers << " workers";
  }
}

// A window of 300 on 100 000 keys: two chunks at most, however long the cache.
TEST(AttentionScheduleTest, LeavesOutWhatIsBeforeTheWindow) {
  Request request = {ScheduleSpec(4, 1), {1}, {100000}, {}, {}};
  request.spec.window_left = 299;
  AttentionScheduleStorage storage;
  const AttentionSchedule schedule = request.Build(1, storage).value();
  ASSERT_EQ(schedule.work().size(), 1u);
  EXPECT_EQ(schedule.work()[0].chunk_begin, 99700 / 256);
  EXPECT_EQ(schedule.work()[0].chunk_end, 391);
}

TEST(AttentionScheduleTest, AllocatesNothingAfterTheFirstStep) {
  const AttentionSpec spec = ScheduleSpec(8, 2);
  const Lens q_lens = {1, 30, 1}, kv_lens = {5000, 300, 3};
  AttentionScheduleStorage storage;
  ASSERT_TRUE(AttentionSchedule::Build(spec, q_lens, kv_lens, 4, storage).ok());
  ASSERT_FALSE(storage.merges.empty());
  EXPECT_NO_ALLOCATION(
      AttentionSchedule::Build(spec, q_lens, kv_lens, 4, storage).value());
}

TEST(AttentionScheduleTest, RefusesMoreThanItHasMemoryFor) {
  constexpr int64_t kLong = AttentionSchedule::kMaxTokens;
  const struct {
    AttentionSpec spec;
    Lens q_lens, kv_lens;
    int workers;
    const char* words;
  } kCases[] = {
      {ScheduleSpec(32, 32), {kLong}, {kLong}, 1, "more than 4194304 blocks"},
      {ScheduleSpec(2147483647, 2147483647),
       {kLong, kLong},
       {kLong, kLong},
       1,
       "more than 4194304 blocks"},
      {ScheduleSpec(1, 1), Lens(5, kLong), Lens(5, kLong), 1,
       "more than 4194304 blocks"},
      {ScheduleSpec(2147483647, 1), {1}, {kLong}, 65536, "of partial results"},
  };
  for (const auto& c : kCases) {
    AttentionScheduleStorage storage;
    const absl::Status status =
        AttentionSchedule::Build(c.spec, c.q_lens, c.kv_lens, c.workers,
                                 storage)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
  }
}

// Blocks of prefixes count too, and every member has the runs of its prefix.
TEST(AttentionScheduleTest, RefusesPrefixesThatItHasNoMemoryFor) {
  constexpr int64_t kLong = AttentionSchedule::kMaxTokens;
  const auto expect_refused = [](const AttentionSpec& spec, size_t sequences,
                                 int64_t kv_len, int workers,
                                 const char* words) {
    Request request = {
        spec, Lens(sequences, 1), Lens(sequences, kv_len), {}, {}};
    for (size_t s = 0; s < sequences; ++s) {
      request.members.push_back(static_cast<int32_t>(s));
    }
    request.groups = {{0, static_cast<int32_t>(sequences), kv_len - 256}};
    AttentionScheduleStorage storage;
    const absl::Status status = request.Build(workers, storage).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(status.message(), HasSubstr(words));
  };
  constexpr int64_t kHeads = AttentionSchedule::kMaxBlocks / 4;
  expect_refused(ScheduleSpec(kHeads, kHeads), 4, 512, 1,
                 "more than 4194304 blocks");
  expect_refused(ScheduleSpec(1, 1), 128, kLong, AttentionSchedule::kMaxWorkers,
                 "the members of prefixes have more than 16777216 runs");
}

TEST(AttentionScheduleTest, TakesTheLongestSequencesAndTheMostWorkers) {
  constexpr int64_t kLong = AttentionSchedule::kMaxTokens;
  const Request request = {
      ScheduleSpec(8, 8), Lens(4, 1), Lens(4, kLong), {1, 0, 0, 1}, {}};
  AttentionScheduleStorage storage;
  const auto schedule = request.Build(AttentionSchedule::kMaxWorkers, storage);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  const AttentionMakespan makespan =
      SimulateMakespan(*schedule, AttentionSchedule::kMaxWorkers);
  EXPECT_LE(makespan.work, 1.1 * makespan.ideal);
}

// Groups are ignored with a window, because it hides the first keys of a prefix
// from some queries.
TEST(AttentionScheduleTest, IgnoresPrefixesWhereThereIsAWindow) {
  AttentionScheduleStorage storage, plain_storage;
  Request request = {ScheduleSpec(4, 2), {1, 2}, {600, 514}, {}, {},
                     {{0, 2, 512}},      {0, 1}};
  const auto shared = request.Build(2, storage);
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_EQ(shared->prefixes().size(), 1u);
  request.spec.window_left = 700;  // which hides nothing yet
  const auto windowed = request.Build(2, storage);
  ASSERT_TRUE(windowed.ok()) << windowed.status();
  EXPECT_TRUE(windowed->prefixes().empty());
  request.groups.clear();
  request.members.clear();
  const auto plain = request.Build(2, plain_storage);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(windowed->DebugString(), plain->DebugString());
}

TEST(AttentionScheduleTest, TakesMoreQueriesThanKeysWhereNotCausal) {
  AttentionScheduleStorage storage;
  const Request request = {ScheduleSpec(4, 2), {300, 5}, {20, 600}, {0, 0}, {}};
  const auto schedule = request.Build(2, storage);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  for (const AttentionWork& work : schedule->work()) {
    const int64_t kv_len = work.block.sequence == 0 ? 20 : 600;
    for (int64_t q = work.block.q_begin; q < work.block.q_end; ++q) {
      EXPECT_EQ(schedule->VisibleBegin(work.block, q), 0);
      EXPECT_EQ(schedule->VisibleEnd(work.block, q), kv_len);
    }
  }
}

TEST(AttentionScheduleTest, RefusesLengthsThatMakeNoSense) {
  const AttentionSpec spec = ScheduleSpec(4, 2);
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
      {{1}, {1}, 0, "num_workers=0; need 1 <= num_workers <= 65536"},
      {{1}, {1}, 65537, "num_workers=65537"},
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
}

TEST(AttentionScheduleTest, RefusesASpecAndTilesThatMakeNoSense) {
  const AttentionSpec spec = ScheduleSpec(4, 2);
  AttentionScheduleStorage storage;
  const struct {
    std::vector<uint8_t> causal;
    AttentionTiles tiles;
    int64_t window_left, window_right;
    const char* words;
  } kOthers[] = {
      {{1}, {}, 0, 0, "causal.size()=1; need 2"},
      {{}, {0, 1}, 0, 0, "block_rows=0; need 1 <= block_rows"},
      {{}, {32, 0}, 0, 0, "row_tile=0; need 1 <= row_tile <= 32"},
      {{}, {32, 33}, 0, 0, "row_tile=33; need 1 <= row_tile <= 32"},
      {{}, {}, -2, 0, "window_left=-2; need window_left >= -1"},
      {{}, {}, 0, -2, "window_right=-2; need window_right >= -1"},
  };
  for (const auto& c : kOthers) {
    Request request = {spec, {1, 1}, {1, 1}, c.causal, c.tiles};
    request.spec.window_left = c.window_left;
    request.spec.window_right = c.window_right;
    const absl::Status status = request.Build(1, storage).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.words;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
  }
  EXPECT_THAT(
      AttentionSchedule::Build(AttentionSpec(), Lens(), Lens(), 1, storage)
          .status()
          .message(),
      HasSubstr("attention_schedule: kv layout is empty"));
}

TEST(AttentionScheduleTest, RefusesPrefixesThatAreNotShared) {
  const AttentionSpec spec = ScheduleSpec(4, 2);
  AttentionScheduleStorage storage;
  const struct {
    std::vector<PrefixGroup> groups;
    std::vector<int32_t> members;
    int64_t window_left;
    const char* words;
  } kPrefixes[] = {
      {{{0, 3, 256}},
       {0, 1},
       kNoWindow,
       "prefix group 0: members [0, 3); need 0 <= begin <= end <= 2"},
      {{{1, 0, 256}}, {0, 1}, kNoWindow, "members [1, 0); need 0 <= begin"},
      {{{-1, 1, 256}}, {0, 1}, kNoWindow, "members [-1, 1); need 0 <= begin"},
      {{{0, 2, 0}},
       {0, 1},
       kNoWindow,
       "tokens=0; need a multiple of 256 above 0"},
      {{{0, 2, 255}}, {0, 1}, kNoWindow, "tokens=255; need a multiple of 256"},
      {{{0, 2, 512}},
       {0, 1},
       kNoWindow,
       "tokens=512; need tokens <= 510, what all queries of sequence 1 see"},
      {{{0, 2, 256}}, {0, 2}, kNoWindow, "member 2; need 0 <= member < 2"},
      {{{0, 2, 256}}, {-1, 1}, kNoWindow, "member -1; need 0 <= member < 2"},
      {{{0, 1, 256}, {1, 2, 256}},
       {1, 1},
       kNoWindow,
       "sequence 1 is in prefix group 0 and again in 1"},
      {{{0, 2, 255}}, {0, 1}, 10, "tokens=255; need a multiple of 256"},
  };
  for (const auto& c : kPrefixes) {
    Request request = {spec, {1, 2}, {600, 512}, {}, {}, c.groups, c.members};
    request.spec.window_left = c.window_left;
    const absl::Status status = request.Build(1, storage).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.words;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
  }
}

}  // namespace
}  // namespace quern
