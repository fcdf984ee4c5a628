#ifndef QUERN_CORE_THREADS_WORKER_POOL_H_
#define QUERN_CORE_THREADS_WORKER_POOL_H_

// The threads of HwyExecutor (core/threads/hwy_executor.h).
//
// A region is one call of Run: its tasks, divided into a share for each worker.
// A region ends when its tasks are done, not when its workers have come. The
// caller of Run is worker 0: it runs its own share, then what nobody has
// claimed of the others', then waits for the tasks that are claimed. A worker
// without a CPU therefore costs nothing unless it lost the CPU during a task.
//
// PROTOCOL
//
// Share w: `range` holds first << 32 | end, the tasks of the share that nobody
// has claimed, and `fn` the region's function. Report w: `done`, the number of
// tasks that worker w has ever finished.
//
//   caller                                 worker w
//   C1 share.fn = fn, for every share      W1 range = share.range, until not
//   C2 share.range = {first, end}             empty
//   C3 claims and runs tasks as W2 to W3   W2 compare-exchange: range to
//      do                                     range + {1, 0}: task `first` is
//   C4 waits until the sum of done is         claimed; on failure to W1
//      what was published less what it     W3 share.fn(first), and to W1
//      ran itself; returns                 W4 where W1 found nothing more: done
//                                             += the tasks that it ran
//
// Claims: a successful W2 replaces the value that is in `range` at that moment,
// so it claims a task of the region that is running at that moment, whichever
// region the worker read the value in. (An equal value of a later region is the
// same claim.) No counter of regions is needed.
//
// Lifetimes: a claim is made before W3 and reported after it, and C4 returns
// only when every claim of the region is reported. From W2 to W4 the region
// cannot end, so W3 reads the `fn` of its own region, and C1 of the next region
// writes `fn` while nobody reads it. Outside W2 to W4 a worker touches only
// members of the pool, which outlive the threads.
//
// Memory: C2 releases and W2 acquires what the caller wrote before the region
// (compare-exchanges continue the release sequence); W4 releases and C4
// acquires what tasks wrote.
//
// Sleep: a sleeper announces itself (`asleep_`, `caller_sleeps_`) before it
// looks a last time, and whoever makes work or reports it looks for sleepers
// afterwards, all sequentially consistent, so that one of the two sees the
// other. A wake-up that were lost all the same would cost speed, not progress,
// for a worker; the caller's is not lost by the same argument.
//
// core/threads/worker_pool_model_test.cc walks through every interleaving of
// these steps, with a report after each task.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "quern/core/threads/contention.h"

namespace quern {

class WorkerPool {
 public:
  using Fn = absl::FunctionRef<void(int64_t task, int worker)>;

  // How long an idle worker spins before it sleeps, where spinning is allowed
  // and the machine is quiet.
  static constexpr int64_t kIdleNs = 10'000'000;

  struct Options {
    int workers = 1;  // >= 1; one is the caller of Run
    // CPUs that the process may use. If they are fewer than workers, idle
    // workers sleep at once, and long regions alone wake them.
    int cpus = 1;
    // All CPUs of the machine. If the process may use each of them, the
    // system's count of threads that run says whether it is alone there.
    int cpus_online = 1;
    // Whether all regions of several tasks are shared with workers. Otherwise
    // those that gain by it are, as far as Contention can tell.
    bool share_all = false;
  };
  explicit WorkerPool(const Options& options);

  // Starts the threads and returns when all run. Returns false, with none
  // running, if the system refuses a thread. Call once.
  bool Start();

  // Ends the threads. No Run may be running. Not in the child of a fork, where
  // the threads do not exist: HwyExecutor leaves the pool alone there.
  ~WorkerPool();

  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int num_workers() const { return workers_; }

  // See Executor::ParallelFor. One call at a time.
  void Run(int64_t num_tasks, Fn fn);

  // Whether no worker uses a CPU.
  bool idle() const {
    return asleep_.load(std::memory_order_acquire) == workers_ - 1;
  }

  // What a thread has used until some time.
  struct Usage {
    static Usage OfThisThread(int64_t now_ns);
    int64_t now_ns = 0;
    int64_t cpu_ns = 0;
    int64_t switches = 0;  // how often it lost its CPU to another thread
  };

 private:
  // Whether regions of so many tasks were worth a wake-up of workers when they
  // were last seen on a contended machine: where `score` > 0.
  struct Length {
    int64_t tasks = 0;
    int score = 0;
  };
  // 128: two lines, because a core fetches lines in pairs.
  struct alignas(128) Share {
    std::atomic<uint64_t> range{0};
    const Fn* fn = nullptr;
    int64_t offset = 0;  // of the share's task 0 in the caller's numbers
  };
  struct alignas(128) Report {
    std::atomic<uint64_t> done{0};  // written by one worker alone
  };

  void Loop(int worker, int64_t created_ns);
  bool AwaitWork(int worker, Usage& usage, int64_t& now_ns);
  void Sleep(int worker);
  void Work(int worker, Usage& usage);
  int64_t Drain(Share& share, int worker);
  void ReportDone(int worker, int64_t ran, Usage& usage);
  void RunShared(int64_t first, int64_t end, const Fn& fn, Length* length);
  void AwaitReports();
  bool AllReported() const;
  bool HasTasks(int worker) const;
  // Whether what was seen of the machine counts, and is not kQuiet.
  bool careful() const { return !options_.share_all && !contention_.quiet(); }
  Length& LengthOf(int64_t num_tasks);
  static void Remember(Length& length, bool worth_waking);
  enum class Crowd : uint8_t { kNo, kYes, kUnknown };
  Crowd AskTheSystem() const;
  int64_t Counted(int64_t lost_ns) const;
  void StopThreads();

  const Options options_;
  const int workers_ = options_.workers;
  const bool may_spin_ = options_.workers <= options_.cpus;
  std::unique_ptr<Share[]> shares_;
  std::unique_ptr<Report[]> reports_;  // [0] is not used
  std::vector<std::thread> threads_;
  // Tasks published so far that the caller did not run itself. The caller's.
  uint64_t left_to_workers_ = 0;
  // The caller's, by tasks modulo the size, which is no divisor of usual
  // numbers of tasks.
  std::array<Length, 31> lengths_;

  alignas(128) std::atomic<int> asleep_{0};
  std::atomic<uint32_t> work_bell_{0};
  std::atomic<bool> stop_{false};
  Contention contention_;

  alignas(128) std::atomic<bool> caller_sleeps_{false};
  std::atomic<uint32_t> caller_bell_{0};
  // When the caller began to wait, once it has waited for long; else 0.
  std::atomic<int64_t> waiting_since_ns_{0};
};

}  // namespace quern

#endif  // QUERN_CORE_THREADS_WORKER_POOL_H_
