// What a fork-join costs: ParallelFor with tasks that do nothing.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "benchmark/benchmark.h"
#include "quern/core/threads/hwy_executor.h"

namespace quern {
namespace {

void ForkJoin(benchmark::State& state, int64_t tasks_per_worker) {
  auto executor = HwyExecutor::Create(static_cast<int>(state.range(0)));
  if (!executor.ok()) {
    state.SkipWithError(executor.status().ToString().c_str());
    return;
  }
  const int64_t tasks = tasks_per_worker * (*executor)->num_workers();
  std::atomic<int64_t> ran{0};
  const auto count = [&ran](int64_t, int) {
    ran.fetch_add(1, std::memory_order_relaxed);
  };
  (*executor)->ParallelFor(tasks, count);  // wakes the workers
  ran = 0;
  // The shortest of all: another program on the same cores does not change it.
  using Clock = std::chrono::steady_clock;
  Clock::duration shortest = std::chrono::hours(1);
  for (auto _ : state) {
    const Clock::time_point start = Clock::now();
    (*executor)->ParallelFor(tasks, count);
    shortest = std::min(shortest, Clock::now() - start);
  }
  if (ran.load() != state.iterations() * tasks) {
    state.SkipWithError("a task did not run exactly once");
  }
  state.counters["min_us"] =
      std::chrono::duration<double, std::micro>(shortest).count();
}

// One task each: no shared counters.
void BM_ForkJoinBusy(benchmark::State& state) { ForkJoin(state, 1); }
BENCHMARK(BM_ForkJoinBusy)->ArgName("workers")->Arg(1)->Arg(2)->UseRealTime();

// Eight tasks each, as kernels ask for: with work stealing.
void BM_ForkJoinBusyOf8TasksEach(benchmark::State& state) {
  ForkJoin(state, 8);
}
BENCHMARK(BM_ForkJoinBusyOf8TasksEach)
    ->ArgName("workers")
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime();

// The first ParallelFor after a pause, when the workers block in the kernel.
void BM_ForkJoinAfterIdling(benchmark::State& state) {
  auto executor = HwyExecutor::Create(2);
  if (!executor.ok()) {
    state.SkipWithError(executor.status().ToString().c_str());
    return;
  }
  for (auto _ : state) {
    state.PauseTiming();
    while (!(*executor)->idle()) {
      std::this_thread::sleep_for(HwyExecutor::kIdle / 2);
    }
    state.ResumeTiming();
    (*executor)->ParallelFor(2, [](int64_t, int) {});
  }
}
BENCHMARK(BM_ForkJoinAfterIdling)->Iterations(50)->UseRealTime();

}  // namespace
}  // namespace quern
