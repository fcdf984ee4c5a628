#include "quern/models/decoder/loading/cancellable_executor.h"

#include <atomic>
#include <cstdint>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/threads/hwy_executor.h"

namespace quern {
namespace {

TEST(CancellableExecutorTest, WithoutAFunctionItIsTheExecutor) {
  InlineExecutor inner;
  CancellableExecutor executor(inner, nullptr);
  int tasks = 0;
  executor.ParallelFor(5, [&](int64_t, int) { ++tasks; });
  EXPECT_EQ(tasks, 5);
  EXPECT_EQ(executor.Check(), absl::OkStatus());
}

TEST(CancellableExecutorTest, LaterTasksDoNothing) {
  InlineExecutor inner;
  int asked = 0;
  CancellableExecutor executor(
      inner, [&] { return ++asked == 4; }, absl::ZeroDuration());
  int tasks = 0;
  executor.ParallelFor(10, [&](int64_t, int) { ++tasks; });
  EXPECT_EQ(tasks, 3);
  EXPECT_EQ(asked, 4);  // never again once it has answered true
  EXPECT_TRUE(absl::IsCancelled(executor.Check()));
  executor.ParallelFor(10, [&](int64_t, int) { ++tasks; });
  EXPECT_EQ(tasks, 3);
  EXPECT_EQ(asked, 4);
}

TEST(CancellableExecutorTest, TheFunctionIsAskedOnceInAWhile) {
  InlineExecutor inner;
  int asked = 0;
  CancellableExecutor executor(
      inner, [&] { return ++asked < 0; }, absl::InfiniteDuration());
  int tasks = 0;
  executor.ParallelFor(1000, [&](int64_t, int) { ++tasks; });
  EXPECT_EQ(tasks, 1000);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(executor.Check(), absl::OkStatus());
  EXPECT_EQ(asked, 2);
}

TEST(CancellableExecutorTest, OnlyTheOwnerAsksAndAllWorkersStop) {
  const auto inner = HwyExecutor::Create(3);
  ASSERT_TRUE(inner.ok()) << inner.status();
  const std::thread::id owner = std::this_thread::get_id();
  std::atomic<int> tasks{0}, strangers{0};
  CancellableExecutor executor(
      **inner,
      [&] {
        if (std::this_thread::get_id() != owner) ++strangers;
        return tasks.load() >= 100;
      },
      absl::ZeroDuration());
  constexpr int64_t kTasks = 1 << 16;
  while (executor.Check().ok()) {
    executor.ParallelFor(kTasks, [&](int64_t, int) { ++tasks; });
  }
  EXPECT_EQ(strangers.load(), 0);
  const int before = tasks.load();
  executor.ParallelFor(kTasks, [&](int64_t, int) { ++tasks; });
  EXPECT_EQ(tasks.load(), before);
}

}  // namespace
}  // namespace quern
