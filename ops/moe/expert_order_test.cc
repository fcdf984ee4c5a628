#include "quern/ops/moe/expert_order.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/refusal.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using Ints = std::vector<int32_t>;

struct Order {
  Ints offsets;
  Ints order;  // as long as there are routes; -7 where nothing was written
  friend bool operator==(const Order& a, const Order& b) {
    return a.offsets == b.offsets && a.order == b.order;
  }
};

// Expert after expert, route after route.
Order Reference(int64_t experts, const Ints& ids, const Ints* map) {
  Order want;
  want.offsets.push_back(0);
  for (int64_t e = 0; e < experts; ++e) {
    for (size_t r = 0; r < ids.size(); ++r) {
      const int32_t expert = ids[r] == -1 || map == nullptr
                                 ? ids[r]
                                 : (*map)[static_cast<size_t>(ids[r])];
      if (expert == e) want.order.push_back(static_cast<int32_t>(r));
    }
    want.offsets.push_back(static_cast<int32_t>(want.order.size()));
  }
  want.order.resize(ids.size(), -7);
  return want;
}

ExpertOrderPlan Plan(int64_t experts) {
  ExpertOrderSpec spec;
  spec.experts = experts;
  const auto plan = ExpertOrderPlan::Create(spec);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

// With poison between the rows of ids, pages that fault behind everything, and
// the workspace that the plan asks for.
Order Sort(int64_t experts, int64_t top_k, const Ints& ids, const Ints* map,
           Executor& executor) {
  const ExpertOrderPlan plan = Plan(experts);
  const auto routes = static_cast<int64_t>(ids.size());
  const int64_t tokens = top_k == 0 ? 0 : routes / top_k;
  const StridedMatrix<int32_t> view(ids, tokens, top_k, top_k + 1);
  const GuardBuffer<int32_t> all(map == nullptr ? Ints() : *map);
  GuardBuffer<int32_t> offsets(experts + 1);
  GuardBuffer<int32_t> order(Ints(ids.size(), -7));
  const int64_t bytes = *plan.WorkspaceBytes(1, executor.num_workers());
  GuardBuffer<uint8_t> memory(bytes);
  ExpertOrderArgs args;
  args.ids = view.view();
  if (map != nullptr) args.map = all.view();
  args.offsets = offsets.view();
  args.order = order.view();
  EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
  const Workspace workspace(memory.data(), static_cast<size_t>(bytes));
  EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
  return {offsets.ToVector(), order.ToVector()};
}

TEST(ExpertOrderTest, ListsTheRoutesOfEachExpertInOrder) {
  InlineExecutor executor;
  // Three tokens of two slots; expert 1 has none, and the last token names
  // expert 3 twice.
  const Order got = Sort(4, 2, {2, 0, 0, -1, 3, 3}, nullptr, executor);
  EXPECT_EQ(got.offsets, (Ints{0, 2, 2, 3, 5}));
  EXPECT_EQ(got.order, (Ints{1, 2, 0, 4, 5, -7}));
}

TEST(ExpertOrderTest, MapsExpertsToThoseOfTheRank) {
  InlineExecutor executor;
  const Ints map = {-1, 1, -1, 0};
  const Order got = Sort(2, 2, {3, 0, 1, 2, -1, 3}, &map, executor);
  EXPECT_EQ(got.offsets, (Ints{0, 2, 3}));
  EXPECT_EQ(got.order, (Ints{0, 5, 2, -7, -7, -7}));
}

TEST(ExpertOrderTest, NoTokensAndNoSlotsAreEmptyLists) {
  InlineExecutor executor;
  for (const int64_t top_k : {0, 1, 4}) {
    const Order got = Sort(3, top_k, {}, nullptr, executor);
    EXPECT_EQ(got.offsets, (Ints{0, 0, 0, 0}));
  }
  // All of another rank.
  const Order got = Sort(1, 1, {-1, -1}, nullptr, executor);
  EXPECT_EQ(got.offsets, (Ints{0, 0}));
  EXPECT_EQ(got.order, (Ints{-7, -7}));
}

// Beyond 4096 routes for each, parts of the tokens are counted by workers.
TEST(ExpertOrderTest, AgreesWithTheReferenceForAnyNumberOfWorkers) {
  TestRng rng;
  const auto pool = Workers(3);
  for (const int64_t experts : {1, 2, 15, 16, 17, 128, 257}) {
    for (const int64_t top_k : {1, 3, 8}) {
      for (const int64_t tokens : {1, 2, 64, 1367, 4097, 6001}) {
        Ints ids = SmallIntegers<int32_t>(rng, tokens * top_k, -1, experts - 1);
        if (tokens == 6001) std::fill(ids.begin(), ids.end(), 0);  // one expert
        const Order want = Reference(experts, ids, nullptr);
        for (const int workers : {1, 2, 5, 64}) {
          ManyWorkers executor(workers);
          ASSERT_TRUE(Sort(experts, top_k, ids, nullptr, executor) == want)
              << experts << " " << top_k << " " << tokens << " " << workers;
        }
        ASSERT_TRUE(Sort(experts, top_k, ids, nullptr, *pool) == want);
        if (experts > 17) continue;
        Ints map = SmallIntegers<int32_t>(rng, experts, -1, 3);
        ManyWorkers executor(2);
        ASSERT_TRUE(Sort(4, top_k, ids, &map, executor) ==
                    Reference(4, ids, &map));
      }
    }
  }
}

// And for 15 more experts, so that workers share no cache line.
TEST(ExpertOrderTest, AsksForFourBytesForEachExpertAndWorker) {
  for (const int workers : {1, 2, 64}) {
    EXPECT_EQ(*Plan(16).WorkspaceBytes(1, workers), 16 * 4 * workers);
    EXPECT_EQ(*Plan(17).WorkspaceBytes(1, workers), 32 * 4 * workers);
  }
}

TEST(ExpertOrderTest, RefusesABadSpec) {
  ExpertOrderSpec spec;
  for (const int64_t experts : {int64_t{0}, int64_t{-1}, int64_t{65537}}) {
    spec.experts = experts;
    ExpectRefusal(ExpertOrderPlan::Create(spec).status(),
                  "need 1 <= experts <= 65536");
  }
}

TEST(ExpertOrderTest, RefusesBadArguments) {
  const ExpertOrderPlan plan = Plan(4);
  Ints ids = {0, 1, 2, 3, -1, 3}, map = {0, 1, -1}, offsets(5), order(6);
  ExpertOrderArgs good;
  good.ids = DenseMatrix<const int32_t>(ids.data(), 3, 2);
  good.offsets = DenseVector(offsets.data(), 5);
  good.order = DenseVector(order.data(), 6);
  EXPECT_EQ(plan.CheckArgs(good), absl::OkStatus());
  const auto refused = [&](const ExpertOrderArgs& args,
                           const std::string& words) {
    ExpectRefusal(plan.CheckArgs(args), words);
  };
  ExpertOrderArgs bad = good;
  bad.ids = MatrixView<const int32_t>(nullptr, {3, 2}, {2, 1});
  refused(bad, "ids");
  bad = good;
  bad.offsets = DenseVector(offsets.data(), 4);
  refused(bad, "offsets is [4]; need [5]");
  bad = good;
  bad.order = DenseVector(order.data(), 5);
  refused(bad, "order is [5]; need [6]");
  bad = good;
  bad.order = DenseVector(ids.data(), 6);
  refused(bad, "order overlaps ids");
  bad = good;
  bad.offsets = DenseVector(order.data() + 1, 5);
  refused(bad, "overlaps");
  // Experts are in [0, 4), and in [0, 3) of a map.
  for (const int32_t id : {4, -2, std::numeric_limits<int32_t>::min()}) {
    ids[5] = id;
    refused(good, "expert_order: ids[2][1]=" + std::to_string(id) +
                      "; need 0 <= id < 4");
  }
  ids[5] = 3;
  bad = good;
  bad.map = DenseVector<const int32_t>(map.data(), 3);
  refused(bad, "ids[1][1]=3; need 0 <= id < 3");
  ids[3] = ids[5] = 2;
  EXPECT_EQ(plan.CheckArgs(bad), absl::OkStatus());
  map[1] = 4;
  refused(bad, "map[1]=4; need 0 <= expert < 4");
  map[1] = -2;
  refused(bad, "map[1]=-2");
  bad.map = DenseVector<const int32_t>(nullptr, 3);
  refused(bad, "map");
  bad = good;
  bad.map = DenseVector<const int32_t>(offsets.data(), 4);
  std::fill(offsets.begin(), offsets.end(), 0);
  refused(bad, "overlaps");
  // Views of no memory: nothing is read of them.
  bad = good;
  bad.ids =
      MatrixView<const int32_t>(ids.data(), {int64_t{1} << 31, 1}, {0, 1});
  refused(bad, "need fewer than 2^31 routes");
}

#ifdef NDEBUG
// Debug builds check and abort. Others skip the route.
TEST(ExpertOrderTest, SkipsAnIdOutOfRangeThatNobodyChecked) {
  const ExpertOrderPlan plan = Plan(2);
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  const Ints ids = {1, 2, kMost, 0, kLeast, -2};
  Ints map = {5, 0, kLeast};
  GuardBuffer<int32_t> offsets(3), order(Ints(6, -7));
  const int64_t bytes = *plan.WorkspaceBytes(1, 1);
  GuardBuffer<uint8_t> memory(bytes);
  const Workspace workspace(memory.data(), static_cast<size_t>(bytes));
  ExpertOrderArgs args;
  args.ids = DenseMatrix<const int32_t>(ids.data(), 6, 1);
  args.offsets = offsets.view();
  args.order = order.view();
  InlineExecutor executor;
  plan.Execute(args, workspace, executor);
  EXPECT_EQ(offsets.ToVector(), (Ints{0, 1, 2}));
  EXPECT_EQ(order.ToVector(), (Ints{3, 0, -7, -7, -7, -7}));
  args.map = DenseVector<const int32_t>(map.data(), 3);
  plan.Execute(args, workspace, executor);
  EXPECT_EQ(offsets.ToVector(), (Ints{0, 1, 1}));
  EXPECT_EQ(order[0], 0);
}
#endif

}  // namespace
}  // namespace quern
