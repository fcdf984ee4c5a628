#include "quern/core/hwy_executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "hwy/contrib/thread_pool/thread_pool.h"
#include "quern/core/cpu_info.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

// Whether so many threads can live at once. This is asked before a pool is
// made, because the constructor of a pool whose thread cannot start unwinds
// past the other threads, which ends the process and cannot be caught.
bool CanStart(int threads) {
  std::mutex mutex;
  std::condition_variable wake;
  bool end = false;
  const auto wait = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    wake.wait(lock, [&] { return end; });
  };
  std::vector<std::thread> started;
  bool can = true;
  try {
    started.reserve(static_cast<size_t>(threads));
    while (static_cast<int>(started.size()) < threads) {
      started.emplace_back(wait);
    }
  } catch (const std::system_error&) {
    can = false;
  } catch (const std::bad_alloc&) {
    can = false;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    end = true;
  }
  wake.notify_all();
  for (std::thread& thread : started) thread.join();
  return can;
}

absl::Status NoThreads(int workers) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "hwy_executor: workers=", workers, "; the system refuses the threads"));
}

}  // namespace

// The pool has two ways to wait, and someone must choose: ParallelFor turns
// spinning on, and a watcher thread turns it off after kIdle without work. The
// watcher sleeps through idle times as well; during work it wakes every kIdle.
struct HwyExecutor::State {
  explicit State(int workers)
      : pool(static_cast<size_t>(workers)),
        may_spin(workers <= AvailableCpus()) {}

  hwy::ThreadPool pool;
  const bool may_spin;  // else a spinner would keep a worker off its CPU

  std::mutex mutex;       // held during ParallelFor and mode changes
  bool spinning = false;  // the pool's wait mode
  uint64_t regions = 0;   // ParallelFor calls so far
  bool stop = false;      // asks the watcher to end
  std::atomic<bool> is_idle{true};
  std::condition_variable wake_watcher;
  bool watching = false;  // whether the watcher has started
  std::condition_variable now_watching;
  std::thread watcher;

  void Watch() {
    std::unique_lock<std::mutex> lock(mutex);
    watching = true;
    now_watching.notify_one();
    while (!stop) {
      if (!spinning) {
        wake_watcher.wait(lock, [this] { return stop || spinning; });
        continue;
      }
      const uint64_t before = regions;
      wake_watcher.wait_for(lock, kIdle, [this] { return stop; });
      if (!stop && spinning && regions == before) SetSpinning(false);
    }
  }

  void SetSpinning(bool on) {
    pool.SetWaitMode(on ? hwy::PoolWaitMode::kSpin : hwy::PoolWaitMode::kBlock);
    spinning = on;
    is_idle.store(!on, std::memory_order_release);
  }
};

absl::StatusOr<std::unique_ptr<HwyExecutor>> HwyExecutor::Create(int workers) {
  QUERN_RETURN_IF_ERROR(
      CheckRange("hwy_executor", "workers", workers, 1, kMaxWorkers));
  if (workers > 1 && !CanStart(workers)) return NoThreads(workers);
  try {
    return absl::WrapUnique(new HwyExecutor(workers));
  } catch (const std::system_error&) {
    return NoThreads(workers);
  } catch (const std::bad_alloc&) {
    return NoThreads(workers);
  }
}

std::unique_ptr<HwyExecutor> HwyExecutor::CreateForThisMachine(
    Siblings siblings) {
  const int most =
      siblings == Siblings::kUsed ? AvailableCpus() : AvailableCores();
  for (int workers = std::min(most, kMaxWorkers); workers > 1; workers /= 2) {
    auto executor = Create(workers);
    if (executor.ok()) return *std::move(executor);
  }
  return absl::WrapUnique(new HwyExecutor(1));  // starts no thread
}

// Waits until all threads run, because a thread may allocate while it starts:
// with AddressSanitizer it does so three times, in pthread_getattr_np.
HwyExecutor::HwyExecutor(int workers)
    : state_(std::make_unique<State>(workers)) {
  State& state = *state_;
  if (workers == 1) return;
  if (state.may_spin) {
    state.watcher = std::thread([&state] { state.Watch(); });
  }
  // Ends when every worker has been there, whoever ran the tasks.
  state.pool.Run(0, static_cast<uint64_t>(workers), [](uint64_t, size_t) {});
  if (state.may_spin) {
    std::unique_lock<std::mutex> lock(state.mutex);
    state.now_watching.wait(lock, [&state] { return state.watching; });
  }
}

HwyExecutor::~HwyExecutor() {
  if (state_->watcher.joinable()) {
    {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      state_->stop = true;
    }
    state_->wake_watcher.notify_one();
    state_->watcher.join();
  }
}

int HwyExecutor::num_workers() const {
  return static_cast<int>(state_->pool.NumWorkers());
}

bool HwyExecutor::idle() const {
  return state_->is_idle.load(std::memory_order_acquire);
}

void HwyExecutor::ParallelFor(int64_t num_tasks,
                              absl::FunctionRef<void(int64_t, int)> fn) {
  if (num_tasks <= 0) return;
  State& state = *state_;
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (num_tasks == 1 || state.pool.NumWorkers() == 1) {
    for (int64_t task = 0; task < num_tasks; ++task) fn(task, 0);
    return;
  }
  ++state.regions;
  if (!state.spinning && state.may_spin) {
    state.SetSpinning(true);
    state.wake_watcher.notify_one();
  }
  state.pool.Run(0, static_cast<uint64_t>(num_tasks),
                 [fn](uint64_t task, size_t worker) {
                   fn(static_cast<int64_t>(task), static_cast<int>(worker));
                 });
}

}  // namespace quern
