#ifndef QUERN_MODELS_DECODER_LOADING_CANCELLABLE_EXECUTOR_H_
#define QUERN_MODELS_DECODER_LOADING_CANCELLABLE_EXECUTOR_H_

// An executor for long work that may be given up. Once a function of the
// caller has answered true, tasks that have not begun do nothing, so a region
// ends within the time of one task, and what it should have written is
// unspecified. The owner then asks Check, before it looks at any result.

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "quern/core/executor.h"

namespace quern {

class CancellableExecutor final : public Executor {
 public:
  // `executor` must outlive the result. `cancelled` may be null, which never
  // cancels. Only the thread that constructs the executor calls it: at each
  // Check, and among that thread's tasks once in `every`.
  CancellableExecutor(Executor& executor, std::function<bool()> cancelled,
                      absl::Duration every = absl::Milliseconds(20))
      : executor_(executor), cancelled_(std::move(cancelled)), every_(every) {}

  int num_workers() const override { return executor_.num_workers(); }

  void ParallelFor(
      int64_t num_tasks,
      absl::FunctionRef<void(int64_t task, int worker)> fn) override {
    if (!cancelled_) return executor_.ParallelFor(num_tasks, fn);
    executor_.ParallelFor(num_tasks, [&](int64_t task, int worker) {
      if (stopped_.load(std::memory_order_relaxed)) return;
      if (std::this_thread::get_id() == owner_ && AskNowAndThen()) return;
      fn(task, worker);
    });
  }

  // Cancelled if the function answers true, or has done so before.
  absl::Status Check() {
    if (!cancelled_) return absl::OkStatus();
    return stopped_.load(std::memory_order_relaxed) || Ask()
               ? absl::CancelledError("the caller has cancelled this")
               : absl::OkStatus();
  }

 private:
  // AskNowAndThen and Ask return whether the answer was true.
  bool AskNowAndThen() { return absl::Now() >= next_ && Ask(); }
  bool Ask() {
    const bool stop = cancelled_();
    if (stop) stopped_.store(true, std::memory_order_relaxed);
    next_ = absl::Now() + every_;
    return stop;
  }

  Executor& executor_;
  const std::function<bool()> cancelled_;
  const absl::Duration every_;
  const std::thread::id owner_ = std::this_thread::get_id();
  absl::Time next_ = absl::InfinitePast();  // the owner's
  std::atomic<bool> stopped_{false};
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_LOADING_CANCELLABLE_EXECUTOR_H_
