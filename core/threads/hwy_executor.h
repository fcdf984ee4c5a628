#ifndef QUERN_CORE_THREADS_HWY_EXECUTOR_H_
#define QUERN_CORE_THREADS_HWY_EXECUTOR_H_

// The Executor for programs: threads that spin while there is work and sleep in
// the kernel while there is none (core/threads/worker_pool.h).
//
// On a machine that the process has to itself, workers spin between calls of
// ParallelFor, so that a fork-join costs less than a microsecond. When none has
// come for kIdle they sleep and cost nothing; the next ParallelFor wakes them
// (tens of microseconds, once).
//
// On a machine that others use too, ParallelFor returns when its tasks are done
// and never waits for a worker that has no task. A worker that has lost its CPU
// to other threads tells the pool (core/threads/contention.h): idle workers
// then sleep at once, short calls run on the calling thread alone, and after
// tasks that were held up all do, for 64 times as long as that took. Which
// thread runs a task changes no result.
//
// With more workers than this process has logical CPUs workers never spin.
//
// Worker threads block all signals but those of their own faults (SIGSEGV and
// its kind) and of profilers (SIGPROF).
//
// fork: the child of a process has no worker threads. In the child, an executor
// of the parent runs all tasks on the calling thread, and its destructor frees
// nothing. An executor that the child creates is like any other. A task must
// not fork, unless the child does nothing but exec or _exit.

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"

namespace quern {

class HwyExecutor final : public Executor {
 public:
  static constexpr int kMaxWorkers = 127;
  // Longer than the gaps between the operators of a model, short for a person.
  static constexpr std::chrono::milliseconds kIdle{10};

  // Which calls of ParallelFor are shared with workers: those that gain by it,
  // or, for tests of what several threads do at once, all of several tasks.
  enum class Sharing : uint8_t { kAdaptive, kAll };

  // `workers` threads, the caller of ParallelFor among them. All of them have
  // started when Create returns, so that none allocates afterwards.
  // InvalidArgument unless 1 <= workers <= kMaxWorkers; ResourceExhausted if
  // the system refuses the threads.
  static absl::StatusOr<std::unique_ptr<HwyExecutor>> Create(
      int workers, Sharing sharing = Sharing::kAdaptive);

  // One worker for each core that this process may use or, with kUsed, for each
  // logical CPU; at most kMaxWorkers; fewer, at least one, if the system
  // refuses the threads. Siblings share a core's arithmetic units and caches: a
  // second worker there gains nothing for kernels that keep either busy.
  enum class Siblings : uint8_t { kIdle, kUsed };
  static std::unique_ptr<HwyExecutor> CreateForThisMachine(
      Siblings siblings = Siblings::kIdle);

  // Ends the threads. No ParallelFor may be running.
  ~HwyExecutor() override;

  HwyExecutor(const HwyExecutor&) = delete;
  HwyExecutor& operator=(const HwyExecutor&) = delete;

  int num_workers() const override;

  // See Executor. Calls from several threads at once take turns.
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override;

  // Whether the workers sleep. For tests and statistics.
  bool idle() const;

 private:
  struct State;
  HwyExecutor();

  std::unique_ptr<State> state_;
};

}  // namespace quern

#endif  // QUERN_CORE_THREADS_HWY_EXECUTOR_H_
