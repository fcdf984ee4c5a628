#ifndef QUERN_CORE_HWY_EXECUTOR_H_
#define QUERN_CORE_HWY_EXECUTOR_H_

// An Executor on Highway's ThreadPool.
//
// While there is work the workers spin, so that a fork-join costs about a
// microsecond. When no ParallelFor has come for kIdle they block in the kernel
// and cost nothing; the next ParallelFor wakes them (tens of microseconds,
// once). With more workers than this process has logical CPUs they never
// spin: a spinner would keep a worker that has a task off its CPU.

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"

namespace quern {

class HwyExecutor final : public Executor {
 public:
  // Highway's pool is meant for one cluster of cores and ends at 127 threads.
  static constexpr int kMaxWorkers = 127;
  // Longer than the gaps between the operators of a model, short for a person.
  static constexpr std::chrono::milliseconds kIdle{10};

  // `workers` threads, the caller of ParallelFor among them. All of them have
  // started when Create returns, so that none allocates afterwards.
  // InvalidArgument unless 1 <= workers <= kMaxWorkers; ResourceExhausted if
  // the system refuses the threads.
  static absl::StatusOr<std::unique_ptr<HwyExecutor>> Create(int workers);

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

  // Whether the workers wait without using the CPU. For tests and statistics.
  bool idle() const;

 private:
  struct State;
  explicit HwyExecutor(int workers);

  std::unique_ptr<State> state_;
};

}  // namespace quern

#endif  // QUERN_CORE_HWY_EXECUTOR_H_
