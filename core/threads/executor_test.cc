// The contract of Executor, over every implementation in core/.

#include "quern/core/executor.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

// 0: InlineExecutor; else the workers of a HwyExecutor. 5: more than this
// machine may have.
class ExecutorTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (GetParam() == 0) {
      executor_ = std::make_unique<InlineExecutor>();
      return;
    }
    auto executor = HwyExecutor::Create(GetParam(), HwyExecutor::Sharing::kAll);
    ASSERT_TRUE(executor.ok()) << executor.status();
    executor_ = *std::move(executor);
    EXPECT_EQ(executor_->num_workers(), GetParam());
  }
  std::unique_ptr<Executor> executor_;
};
INSTANTIATE_TEST_SUITE_P(Workers, ExecutorTest, testing::Values(0, 1, 2, 3, 5));

TEST_P(ExecutorTest, RunsEveryTaskOnceAndShowsWhatItWrote) {
  for (const int64_t tasks : {0, 1, 2, 3, 4, 5, 6, 7, 11, 100, 1000}) {
    std::vector<int> runs(static_cast<size_t>(tasks), 0);  // no atomics
    executor_->ParallelFor(tasks, [&runs](int64_t task, int) {
      ++runs[static_cast<size_t>(task)];
    });
    EXPECT_EQ(runs, std::vector<int>(static_cast<size_t>(tasks), 1)) << tasks;
  }
}

TEST_P(ExecutorTest, RunsNothingOfANegativeCount) {
  bool ran = false;
  executor_->ParallelFor(-1, [&ran](int64_t, int) { ran = true; });
  EXPECT_FALSE(ran);
}

// Unsynchronised counters: a race here is one that tsan reports.
TEST_P(ExecutorTest, TasksOfOneWorkerNeverOverlap) {
  struct alignas(64) Scratch {
    int inside = 0;
    int64_t tasks = 0;
    bool overlapped = false;
  };
  std::vector<Scratch> scratch(static_cast<size_t>(executor_->num_workers()));
  std::atomic<bool> out_of_range{false};
  for (int repeat = 0; repeat < 20; ++repeat) {
    executor_->ParallelFor(100, [&](int64_t, int worker) {
      if (worker < 0 || worker >= executor_->num_workers()) {
        out_of_range = true;
        return;
      }
      Scratch& mine = scratch[static_cast<size_t>(worker)];
      mine.overlapped = mine.overlapped || mine.inside != 0;
      ++mine.inside;
      ++mine.tasks;
      --mine.inside;
    });
  }
  EXPECT_FALSE(out_of_range);
  int64_t tasks = 0;
  for (const Scratch& s : scratch) {
    EXPECT_FALSE(s.overlapped);
    tasks += s.tasks;
  }
  EXPECT_EQ(tasks, 20 * 100);
}

TEST_P(ExecutorTest, ManyRegionsInARowStayCorrect) {
  std::vector<int64_t> sums(64, 0);
  constexpr int64_t kRegions = 500;
  for (int64_t region = 0; region < kRegions; ++region) {
    executor_->ParallelFor(64, [&sums, region](int64_t task, int) {
      sums[static_cast<size_t>(task)] += region;
    });
  }
  for (const int64_t sum : sums) EXPECT_EQ(sum, kRegions * (kRegions - 1) / 2);
}

TEST_P(ExecutorTest, AllocatesNothing) {
  const auto nothing = [](int64_t, int) {};
  executor_->ParallelFor(100, nothing);  // threads have started
  EXPECT_NO_ALLOCATION(executor_->ParallelFor(100, nothing));
  EXPECT_NO_ALLOCATION(executor_->ParallelFor(1, nothing));
}

TEST(InlineExecutorTest, RunsInOrderOnTheCallingThread) {
  InlineExecutor executor;
  std::vector<int64_t> order;
  executor.ParallelFor(4, [&order](int64_t task, int worker) {
    EXPECT_EQ(worker, 0);
    order.push_back(task);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3}));
}

std::unique_ptr<HwyExecutor> MakeHwy(
    int workers,
    HwyExecutor::Sharing sharing = HwyExecutor::Sharing::kAdaptive) {
  auto executor = HwyExecutor::Create(workers, sharing);
  EXPECT_TRUE(executor.ok()) << executor.status();
  return *std::move(executor);
}

// Each task waits for the others, which the contract forbids, because one
// thread may run them all. With kAll and as many tasks as workers no thread
// does, so this ends only if three threads run them.
TEST(HwyExecutorTest, RunsTasksOnAllWorkersAtOnce) {
  const auto executor = MakeHwy(3, HwyExecutor::Sharing::kAll);
  std::atomic<int> arrived{0};
  std::vector<std::thread::id> threads(3);
  std::vector<int> workers(3, -1);
  executor->ParallelFor(3, [&](int64_t task, int worker) {
    threads[static_cast<size_t>(task)] = std::this_thread::get_id();
    workers[static_cast<size_t>(task)] = worker;
    ++arrived;
    while (arrived.load() < 3) std::this_thread::yield();
  });
  EXPECT_EQ(std::set<std::thread::id>(threads.begin(), threads.end()).size(),
            3u);
  EXPECT_EQ(std::set<int>(workers.begin(), workers.end()),
            (std::set<int>{0, 1, 2}));
}

// A worker that is held up in a task keeps only that task; the caller runs the
// rest of its share.
TEST(HwyExecutorTest, TheCallerRunsTheShareOfALateWorker) {
  const auto executor = MakeHwy(2, HwyExecutor::Sharing::kAll);
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::atomic<int64_t> ran_by_worker{0};
    std::atomic<int64_t> left{100};
    executor->ParallelFor(100, [&](int64_t, int worker) {
      const int64_t now_left = --left;
      if (worker == 0) return;
      ++ran_by_worker;
      while (now_left > 0 && left.load() > 0) std::this_thread::yield();
    });
    EXPECT_LE(ran_by_worker, 1);
  }
}

// Workers that no CPU is free for: 16 on any machine of fewer cores, beside
// threads that never rest, each held up at random in a third of its tasks.
TEST(HwyExecutorTest, EveryTaskRunsOnceOnACrowdedMachine) {
  for (const HwyExecutor::Sharing sharing :
       {HwyExecutor::Sharing::kAll, HwyExecutor::Sharing::kAdaptive}) {
    const auto executor = MakeHwy(16, sharing);
    std::atomic<bool> stop{false};
    std::vector<std::thread> busy;
    for (int i = 0; i < 3; ++i) {
      busy.emplace_back([&stop] {
        while (!stop.load(std::memory_order_relaxed)) {
        }
      });
    }
    std::vector<int> runs(64, 0);  // no atomics
    constexpr int kRegions = 300;
    for (int region = 0; region < kRegions; ++region) {
      executor->ParallelFor(64, [&](int64_t task, int worker) {
        ++runs[static_cast<size_t>(task)];
        if (worker != 0 && (task * 7 + region) % 3 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(task % 50));
        }
      });
    }
    stop = true;
    for (std::thread& thread : busy) thread.join();
    EXPECT_EQ(runs, std::vector<int>(64, kRegions));
  }
}

// Two long tasks are shared where idle workers sleep, too, although the caller
// looks there whether it could do a region alone: it has seen regions of two
// tasks before. More workers than CPUs make any machine such a place.
TEST(HwyExecutorTest, LongRegionsOfTwoTasksAreShared) {
  const int workers =
      std::min(AvailableCpus() + 1, int{HwyExecutor::kMaxWorkers});
  const auto executor = MakeHwy(workers);
  int others = 0;
  for (int region = 0; region < 1000 && others == 0; ++region) {
    std::atomic<int> by_others{0};
    executor->ParallelFor(2, [&](int64_t, int worker) {
      if (worker != 0) ++by_others;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    });
    others = by_others;
  }
  EXPECT_GT(others, 0);
}

// Runs `child` in the child of a fork. Returns its exit status, or -1 if it had
// to be killed after 20 seconds.
int ExitStatusOfChild(const std::function<bool()>& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child() ? 0 : 1);
  for (int i = 0; i < 2000; ++i) {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return -1;
}

TEST(HwyExecutorTest, TheChildOfAForkRunsTasksItself) {
  auto executor = MakeHwy(3);
  executor->ParallelFor(100, [](int64_t, int) {});
  const auto child = [&executor] {
    const std::thread::id me = std::this_thread::get_id();
    std::vector<int> runs(100, 0);
    bool elsewhere = false;
    executor->ParallelFor(100, [&](int64_t task, int worker) {
      ++runs[static_cast<size_t>(task)];
      elsewhere |= std::this_thread::get_id() != me || worker != 0;
    });
    if (executor->num_workers() != 3) return false;
    executor.reset();
    return runs == std::vector<int>(100, 1) && !elsewhere;
  };
  EXPECT_EQ(ExitStatusOfChild(child), 0);
  std::atomic<int> runs{0};
  executor->ParallelFor(100, [&runs](int64_t, int) { ++runs; });
  EXPECT_EQ(runs, 100);
}

// The child has a copy of every lock, held for ever by a thread that it lacks.
TEST(HwyExecutorTest, AForkDuringParallelForHangsNoChild) {
  auto executor = MakeHwy(2, HwyExecutor::Sharing::kAll);
  std::atomic<bool> stop{false};
  std::atomic<int> regions{0};
  std::thread caller([&] {
    while (!stop.load()) {
      executor->ParallelFor(8, [](int64_t, int) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      });
      ++regions;
    }
  });
  while (regions.load() < 3) std::this_thread::yield();
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(ExitStatusOfChild([&executor] {
                int64_t sum = 0;
                executor->ParallelFor(
                    10, [&sum](int64_t task, int) { sum += task; });
                return sum == 45;
              }),
              0);
  }
  stop = true;
  caller.join();
}

#ifndef __SANITIZE_THREAD__
// tsan ends a child that starts threads.
TEST(HwyExecutorTest, TheChildOfAForkMayCreateItsOwn) {
  const auto before = MakeHwy(2);
  EXPECT_EQ(ExitStatusOfChild([] {
              const auto own = MakeHwy(3, HwyExecutor::Sharing::kAll);
              std::vector<int> runs(100, 0);
              own->ParallelFor(100, [&runs](int64_t task, int) {
                ++runs[static_cast<size_t>(task)];
              });
              return runs == std::vector<int>(100, 1);
            }),
            0);
}
#endif

// A signal that is sent to the process goes to a thread that does not block it.
TEST(HwyExecutorTest, WorkersBlockSignalsButTheirOwnFaults) {
  const auto executor = MakeHwy(4, HwyExecutor::Sharing::kAll);
  std::vector<sigset_t> masks(4);
  std::atomic<int> arrived{0};
  executor->ParallelFor(4, [&](int64_t, int worker) {
    pthread_sigmask(SIG_SETMASK, nullptr, &masks[static_cast<size_t>(worker)]);
    ++arrived;
    while (arrived.load() < 4) std::this_thread::yield();
  });
  for (size_t worker = 1; worker < 4; ++worker) {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGALRM, SIGUSR1,
                             SIGUSR2, SIGPIPE}) {
      EXPECT_EQ(sigismember(&masks[worker], signal), 1) << signal;
    }
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
      EXPECT_EQ(sigismember(&masks[worker], fault), 0) << fault;
    }
  }
  EXPECT_EQ(sigismember(&masks[0], SIGINT), 0);
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  EXPECT_EQ(sigismember(&now, SIGINT), 0);  // as before Create
}

// A handler that does not ask for SA_RESTART interrupts the caller's wait for
// a long task, which goes on.
TEST(HwyExecutorTest, ASignalDoesNotEndTheWaitForATask) {
  struct sigaction handler = {}, before = {};
  handler.sa_handler = [](int) {};
  ASSERT_EQ(sigaction(SIGUSR1, &handler, &before), 0);
  const auto executor = MakeHwy(2, HwyExecutor::Sharing::kAll);
  const pthread_t caller = pthread_self();
  std::atomic<bool> done{false};
  std::atomic<bool> begun{false};
  executor->ParallelFor(2, [&](int64_t, int worker) {
    if (worker == 0) {
      while (!begun.load()) std::this_thread::yield();
      return;
    }
    begun.store(true);
    for (int i = 0; i < 50; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      pthread_kill(caller, SIGUSR1);
    }
    done.store(true);
  });
  EXPECT_TRUE(done.load());
  ASSERT_EQ(sigaction(SIGUSR1, &before, nullptr), 0);
}

TEST(HwyExecutorTest, ConcurrentCallersTakeTurns) {
  const auto executor = MakeHwy(2, HwyExecutor::Sharing::kAll);
  int inside = 0;  // guarded by taking turns alone: tsan would object
  int64_t regions = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        executor->ParallelFor(2, [&](int64_t task, int) {
          if (task != 0) return;
          EXPECT_EQ(inside, 0);
          ++inside;
          ++regions;
          --inside;
        });
        executor->ParallelFor(1, [&](int64_t, int) { ++regions; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(regions, 4 * 50 * 2);
}

TEST(HwyExecutorTest, RefusesTooFewAndTooManyWorkers) {
  for (const int workers : {-1, 0, HwyExecutor::kMaxWorkers + 1}) {
    const auto executor = HwyExecutor::Create(workers);
    EXPECT_EQ(executor.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(executor.status().message(),
              "hwy_executor: workers=" + std::to_string(workers) +
                  "; need 1 <= workers <= 127");
  }
}

TEST(HwyExecutorTest, FitsThisMachine) {
  const auto executor = HwyExecutor::CreateForThisMachine();
  EXPECT_EQ(executor->num_workers(),
            std::min(AvailableCores(), HwyExecutor::kMaxWorkers));
  const auto with_siblings =
      HwyExecutor::CreateForThisMachine(HwyExecutor::Siblings::kUsed);
  EXPECT_EQ(with_siblings->num_workers(),
            std::min(AvailableCpus(), HwyExecutor::kMaxWorkers));
}

// A thread that starts with AddressSanitizer allocates three times, and one
// that started late was once counted as what a kernel had allocated (2026).
// Without a sanitizer a start allocates nothing, and this shows nothing.
TEST(HwyExecutorTest, ItsThreadsHaveStartedWhenCreateReturns) {
  for (int i = 0; i < 100; ++i) {
    const auto executor = MakeHwy(2 + i % 2);
    EXPECT_NO_ALLOCATION(
        std::this_thread::sleep_for(std::chrono::microseconds(300)));
  }
}

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) +
           1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

bool BecomesIdle(const HwyExecutor& executor) {
  for (int i = 0; i < 1000 && !executor.idle(); ++i) {
    std::this_thread::sleep_for(HwyExecutor::kIdle);
  }
  return executor.idle();
}

TEST(HwyExecutorTest, BurnsNothingWhenIdleAndWakesAgain) {
  for (const int workers : {2, AvailableCpus() + 1}) {
    const auto executor = MakeHwy(workers);
    EXPECT_TRUE(executor->idle());
    for (int round = 0; round < 3; ++round) {
      std::atomic<int64_t> runs{0};
      executor->ParallelFor(10, [&runs](int64_t, int) { ++runs; });
      EXPECT_EQ(runs, 10);
      ASSERT_TRUE(BecomesIdle(*executor));
    }
    const double before = CpuSeconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    // One spinning worker would have used 0.3 s.
    EXPECT_LT(CpuSeconds() - before, 0.05) << workers;
  }
}

TEST(HwyExecutorTest, SpinsOnlyWhereThereIsACpuForEveryWorker) {
  const int cpus = AvailableCpus();
  const auto crowded = MakeHwy(cpus + 1);
  crowded->ParallelFor(100, [](int64_t, int) {});
  EXPECT_TRUE(crowded->idle());
  if (cpus < 2) GTEST_SKIP() << "one CPU: no other worker to spin";
  // kAll, because others may want the CPUs while this runs.
  const auto roomy = MakeHwy(2, HwyExecutor::Sharing::kAll);
  bool spun = false;
  for (int i = 0; i < 20000 && !spun; ++i) {
    roomy->ParallelFor(2, [](int64_t, int) {});
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    spun = !roomy->idle();
  }
  EXPECT_TRUE(spun);
}

TEST(HwyExecutorTest, EndsWhileSpinningAndWhileIdle) {
  for (int i = 0; i < 20; ++i) {
    const auto unused = MakeHwy(2);
    const auto spinning = MakeHwy(2);
    spinning->ParallelFor(2, [](int64_t, int) {});
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Sanitizers map terabytes, which a limit would forbid.
TEST(HwyExecutorTest, SaysSoWhereThreadsCannotStart) {
  const int64_t mapped = [] {
    std::ifstream statm("/proc/self/statm");
    int64_t pages = 0;
    statm >> pages;
    return pages * 4096;
  }();
  ASSERT_GT(mapped, 0);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit tight = before;
  // Some stacks, but not those of 127 threads.
  tight.rlim_cur = static_cast<rlim_t>(mapped) + (rlim_t{100} << 20);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  void* const beyond = mmap(nullptr, size_t{200} << 20, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (beyond != MAP_FAILED) {
    munmap(beyond, size_t{200} << 20);
    ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
    GTEST_SKIP() << "RLIMIT_AS binds nobody here, as under an emulator";
  }
  const absl::Status many = HwyExecutor::Create(127).status();
  const int fallback = HwyExecutor::CreateForThisMachine()->num_workers();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_EQ(many.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(many.message(),
            "hwy_executor: workers=127; the system refuses the threads");
  EXPECT_GE(fallback, 1);
  const auto after = HwyExecutor::Create(3);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ((*after)->num_workers(), 3);
}
#endif

}  // namespace
}  // namespace quern
