#include "quern/core/threads/hwy_executor.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

#include "absl/functional/function_ref.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/worker_pool.h"

namespace quern {
namespace {

static_assert(std::chrono::nanoseconds(HwyExecutor::kIdle).count() ==
              WorkerPool::kIdleNs);

// How many forks lie between this process and the one that called
// CountForks first. A global, because only a handler of fork can tell a child
// at no cost to every ParallelFor: getpid is a system call.
std::atomic<int64_t> g_forks{0};

void CountForks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    g_forks.fetch_add(1, std::memory_order_relaxed);
  });
  (void)registered;
}

WorkerPool::Options OptionsOf(int workers, HwyExecutor::Sharing sharing) {
  WorkerPool::Options options;
  options.workers = workers;
  options.cpus = AvailableCpus();
  options.cpus_online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  options.share_all = sharing == HwyExecutor::Sharing::kAll;
  return options;
}

}  // namespace

struct HwyExecutor::State {
  explicit State(const WorkerPool::Options& options) : pool(options) {
    CountForks();
    forks = g_forks.load(std::memory_order_relaxed);
  }

  // Whether this process is a child of the one that has the threads.
  bool forked() const {
    return g_forks.load(std::memory_order_relaxed) != forks;
  }

  std::mutex mutex;  // held during ParallelFor
  WorkerPool pool;
  int64_t forks = 0;
};

HwyExecutor::HwyExecutor() = default;

absl::StatusOr<std::unique_ptr<HwyExecutor>> HwyExecutor::Create(
    int workers, Sharing sharing) {
  QUERN_RETURN_IF_ERROR(
      CheckRange("hwy_executor", "workers", workers, 1, kMaxWorkers));
  auto executor = absl::WrapUnique(new HwyExecutor());
  executor->state_ = std::make_unique<State>(OptionsOf(workers, sharing));
  if (!executor->state_->pool.Start()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "hwy_executor: workers=", workers, "; the system refuses the threads"));
  }
  return executor;
}

std::unique_ptr<HwyExecutor> HwyExecutor::CreateForThisMachine(
    Siblings siblings) {
  const int most =
      siblings == Siblings::kUsed ? AvailableCpus() : AvailableCores();
  for (int workers = std::min(most, kMaxWorkers); workers > 1; workers /= 2) {
    auto executor = Create(workers);
    if (executor.ok()) return *std::move(executor);
  }
  return *Create(1);  // starts no thread
}

HwyExecutor::~HwyExecutor() {
  // The child of a fork cannot join the threads of its parent, and the mutex
  // may be locked for ever. There is no state where Create found no memory.
  if (state_ != nullptr && state_->forked()) state_.release();
}

int HwyExecutor::num_workers() const { return state_->pool.num_workers(); }

bool HwyExecutor::idle() const {
  return state_->forked() || state_->pool.idle();
}

void HwyExecutor::ParallelFor(int64_t num_tasks,
                              absl::FunctionRef<void(int64_t, int)> fn) {
  if (num_tasks <= 0) return;
  State& state = *state_;
  if (state.forked()) {
    for (int64_t task = 0; task < num_tasks; ++task) fn(task, 0);
    return;
  }
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.pool.Run(num_tasks, fn);
}

}  // namespace quern
