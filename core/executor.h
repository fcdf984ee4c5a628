#ifndef QUERN_CORE_EXECUTOR_H_
#define QUERN_CORE_EXECUTOR_H_

// How kernels obtain threads: they are handed an Executor, they never own one.
// core/threads/hwy_executor.h is the one for programs, InlineExecutor the one
// for tests and for callers that parallelise outside.

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace quern {

class Executor {
 public:
  virtual ~Executor() = default;

  // Upper bound (exclusive) on the `worker` passed to tasks, >= 1.
  virtual int num_workers() const = 0;

  // The parallel form of
  //
  //   for (int64_t task = 0; task < num_tasks; ++task) fn(task, worker);
  //
  // in any order and on any thread, the caller's among them. Returns when all
  // tasks have finished; what they wrote is then visible to the caller. Tasks
  // with equal `worker` never overlap, so per-worker scratch needs no lock.
  // fn must not throw, and must not wait for another task, because one thread
  // may run them all, one after the other. Not reentrant: fn must not call
  // ParallelFor.
  virtual void ParallelFor(
      int64_t num_tasks,
      absl::FunctionRef<void(int64_t task, int worker)> fn) = 0;
};

// Runs every task on the calling thread, in order.
class InlineExecutor final : public Executor {
 public:
  int num_workers() const override { return 1; }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override {
    for (int64_t task = 0; task < num_tasks; ++task) fn(task, 0);
  }
};

}  // namespace quern

#endif  // QUERN_CORE_EXECUTOR_H_
