#include "examples/generate/rank_group.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/core/communicator.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"

namespace quern {
namespace {

// Returns what Agree returns on each rank, given each rank's own status.
std::vector<absl::Status> AgreeOn(const std::vector<absl::Status>& own) {
  std::vector<absl::Status> results(own.size());
  RunRanks(static_cast<int>(own.size()), [&](ThreadCommunicator& c) {
    const auto rank = static_cast<size_t>(c.rank());
    RankGroup group(&c);
    results[rank] = group.Agree(own[rank]);
    // The group must still be in step after any outcome.
    EXPECT_EQ(group.Gather(c.rank()).size(), own.size());
  });
  return results;
}

TEST(RankGroupTest, EveryRankGetsTheFirstFailure) {
  const absl::Status ok;
  const absl::Status missing = absl::NotFoundError("no such file");
  const absl::Status memory = absl::ResourceExhaustedError("");
  const absl::Status lengthy = absl::InternalError(std::string(100000, 'x'));
  const struct {
    std::vector<absl::Status> own;
    absl::Status want;
  } cases[] = {
      {{ok}, ok},
      {{missing}, missing},
      {{ok, ok, ok, ok}, ok},
      // A failure of the leader is reported without its rank, as for a single
      // rank.
      {{missing, ok}, missing},
      {{ok, missing, ok, memory},
       absl::NotFoundError("rank 1 of 4: no such file")},
      {{ok, ok, memory, missing},
       absl::ResourceExhaustedError("rank 2 of 4: ")},
      {{ok, ok, lengthy},
       absl::InternalError(
           absl::StrCat("rank 2 of 3: ", std::string(100000, 'x')))},
      // A failure that all ranks share is reported without a rank.
      {{missing, missing, missing}, missing},
      {{memory, missing}, memory},
  };
  for (const auto& c : cases) {
    for (const absl::Status& result : AgreeOn(c.own)) {
      EXPECT_EQ(result, c.want);
    }
  }
}

TEST(RankGroupTest, SharesWhatTheLeaderHas) {
  for (int leader = 0; leader < 3; ++leader) {
    RunRanks(3, [&](ThreadCommunicator& c) {
      RankGroup group(&c, leader);
      EXPECT_EQ(group.rank(), c.rank());
      EXPECT_EQ(group.size(), 3);
      EXPECT_EQ(group.leader(), leader);
      EXPECT_EQ(group.leads(), c.rank() == leader);
      int64_t value = 10 + c.rank();
      group.Share(value);
      EXPECT_EQ(value, 10 + leader);
      // Rank r shares r elements; rank 0 has none.
      std::vector<int32_t> values(static_cast<size_t>(c.rank()), c.rank());
      group.Share(values);
      EXPECT_EQ(values,
                std::vector<int32_t>(static_cast<size_t>(leader), leader));
      EXPECT_EQ(group.Gather(100 + c.rank()),
                (std::vector<int>{100, 101, 102}));
    });
  }
}

TEST(RankGroupTest, WithoutACommunicatorThereIsOneRank) {
  RankGroup group(nullptr);
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  EXPECT_TRUE(group.leads());
  EXPECT_TRUE(group.Agree(absl::OkStatus()).ok());
  EXPECT_EQ(group.Agree(absl::NotFoundError("x")), absl::NotFoundError("x"));
  std::vector<int> values = {1, 2};
  group.Share(values);
  EXPECT_EQ(values, (std::vector<int>{1, 2}));
  EXPECT_EQ(group.Gather(7), std::vector<int>{7});
}

}  // namespace
}  // namespace quern
