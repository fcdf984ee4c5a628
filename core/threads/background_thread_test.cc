#include "quern/core/threads/background_thread.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

std::unique_ptr<BackgroundThread> Background() {
  auto background = BackgroundThread::Create();
  EXPECT_TRUE(background.ok()) << background.status();
  return *std::move(background);
}

void Sleep() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

TEST(BackgroundThreadTest, RunsTheCallOnAnotherThreadAndShowsWhatItWrote) {
  const auto background = Background();
  const std::thread::id self = std::this_thread::get_id();
  int64_t sum = 0;  // no atomic
  std::thread::id other = self;
  for (int64_t i = 1; i <= 1000; ++i) {
    ASSERT_TRUE(background->Submit([&sum, &other, i] {
      sum += i;
      other = std::this_thread::get_id();
    }));
    ASSERT_TRUE(background->Wait());
    ASSERT_EQ(sum, i * (i + 1) / 2);
    ASSERT_NE(other, self);
  }
}

TEST(BackgroundThreadTest, SubmitDoesNotWait) {
  const auto background = Background();
  std::atomic<bool> go{false};
  ASSERT_TRUE(background->Submit([&go] {
    while (!go) Sleep();
  }));
  EXPECT_TRUE(background->pending());
  EXPECT_FALSE(background->ended());
  go = true;
  EXPECT_TRUE(background->Wait());
  EXPECT_FALSE(background->pending());
}

TEST(BackgroundThreadTest, RefusesACallWhileOneIsPending) {
  const auto background = Background();
  EXPECT_FALSE(background->pending());
  EXPECT_FALSE(background->ended());
  EXPECT_FALSE(background->Wait());  // for nothing, at once
  std::atomic<bool> go{false};
  std::atomic<int> refused{0};
  bool within = true;
  const auto second = [&refused] { ++refused; };
  ASSERT_TRUE(background->Submit([&go, &within, &background, second] {
    while (!go) Sleep();
    within = background->Submit(second);
  }));
  EXPECT_FALSE(background->Submit(second));  // it runs
  go = true;
  while (!background->ended()) Sleep();
  EXPECT_FALSE(background->Submit(second));  // it has ended
  EXPECT_TRUE(background->pending());
  EXPECT_TRUE(background->Wait());
  EXPECT_FALSE(background->Wait());
  EXPECT_FALSE(within);
  EXPECT_EQ(refused, 0);
  EXPECT_TRUE(background->Submit(second));
  EXPECT_TRUE(background->Wait());
  EXPECT_EQ(refused, 1);
}

TEST(BackgroundThreadTest, CopiesTheCall) {
  const auto background = Background();
  std::array<unsigned char, BackgroundThread::kCallBytes - 8> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<unsigned char>(i * 7);
  }
  bool equal = false;
  const auto call = [bytes, result = &equal] {
    *result = true;
    for (size_t i = 0; i < bytes.size(); ++i) {
      *result = *result && bytes[i] == static_cast<unsigned char>(i * 7);
    }
  };
  static_assert(sizeof(call) == BackgroundThread::kCallBytes);
  ASSERT_TRUE(background->Submit(call));
  bytes.fill(0);
  EXPECT_TRUE(background->Wait());
  EXPECT_TRUE(equal);
}

TEST(BackgroundThreadTest, AllocatesNothing) {
  const auto background = Background();
  int runs = 0;
  // The thread has started, and has blocked once.
  ASSERT_TRUE(background->Submit([&runs] { ++runs; }));
  EXPECT_TRUE(background->Wait());
  bool submitted = false, waited = false;
  EXPECT_NO_ALLOCATION(submitted = background->Submit([&runs] { ++runs; });
                       waited = background->Wait());
  EXPECT_TRUE(submitted);
  EXPECT_TRUE(waited);
  EXPECT_EQ(runs, 2);
}

TEST(BackgroundThreadTest, ItsEndWaitsForThePendingCall) {
  std::atomic<bool> ran{false};
  {
    const auto background = Background();
    ASSERT_TRUE(background->Submit([&ran] {
      Sleep();
      ran = true;
    }));
  }
  EXPECT_TRUE(ran);
}

// Several threads submit and wait. Their calls never overlap, and none that was
// accepted is lost.
TEST(BackgroundThreadTest, ServesSeveralThreads) {
  const auto background = Background();
  std::atomic<int64_t> accepted{0};
  int64_t runs = 0;  // no atomic: calls never overlap
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        if (background->Submit([&runs] { ++runs; })) ++accepted;
        background->Wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(background->Wait());
  EXPECT_EQ(runs, accepted);
  EXPECT_GT(accepted, 0);
}

// See HwyExecutorTest.ItsThreadsHaveStartedWhenCreateReturns.
TEST(BackgroundThreadTest, HasStartedWhenCreateReturns) {
  for (int i = 0; i < 100; ++i) {
    const auto background = Background();
    EXPECT_NO_ALLOCATION(
        std::this_thread::sleep_for(std::chrono::microseconds(300)));
  }
}

// The pool that a call works on may be another thread's too: calls of
// ParallelFor take turns.
TEST(BackgroundThreadTest, LendsAPoolToTheCall) {
  const auto background = Background();
  const auto executor =
      HwyExecutor::Create(2, HwyExecutor::Sharing::kAll).value();
  std::vector<int> theirs(1000), ours(1000);
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(background->Submit([&executor, &theirs] {
      executor->ParallelFor(1000, [&theirs](int64_t task, int) {
        ++theirs[static_cast<size_t>(task)];
      });
    }));
    executor->ParallelFor(1000, [&ours](int64_t task, int) {
      ++ours[static_cast<size_t>(task)];
    });
    EXPECT_TRUE(background->Wait());
  }
  EXPECT_EQ(theirs, std::vector<int>(1000, 20));
  EXPECT_EQ(ours, std::vector<int>(1000, 20));
}

}  // namespace
}  // namespace quern
