#include "quern/core/threads/worker_pool.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#include "hwy/cache_control.h"
#include "hwy/contrib/thread_pool/futex.h"

namespace quern {
namespace {

// Looks between two readings of the clock: half a microsecond.
constexpr int kLooksPerReading = 16;

// How long a worker or the caller spins while others want its CPU. Waking a
// thread takes about as long.
constexpr int64_t kBriefNs = 20'000;

// How long the caller spins for the tasks of others on a quiet machine.
constexpr int64_t kPatientNs = 2'000'000;

// Longer than an interrupt, shorter than what another thread takes.
constexpr int64_t kGapNs = 200'000;

// A thread that takes longer to start had no CPU.
constexpr int64_t kSlowStartNs = 2'000'000;

// How long the caller works alone on a contended machine before it wakes
// workers. A shorter region is over before they have come. A region that is
// known to be longer is shared at once.
constexpr int64_t kWorthWakingNs = 50'000;

// For how many short regions a long one of as many tasks is remembered.
constexpr int kRemembered = 8;

// How long the system's word on its threads is good for.
constexpr int64_t kCrowdNs = 50'000'000;

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Nanoseconds of the last `window_ns` until `now_ns` in which the calling
// thread was off its CPU for the sake of another thread, and a new base for the
// next call. A hypervisor that takes the CPU is not counted: it takes it from
// one thread as from two. What was lost before the window may be counted, too.
int64_t LostNs(WorkerPool::Usage& base, int64_t now_ns, int64_t window_ns) {
  const WorkerPool::Usage before = base;
  base = WorkerPool::Usage::OfThisThread(now_ns);
  if (base.switches == before.switches) return 0;
  const int64_t off_cpu_ns =
      (base.now_ns - before.now_ns) - (base.cpu_ns - before.cpu_ns);
  return std::clamp<int64_t>(off_cpu_ns, 0, window_ns);
}

// How many threads of the machine run or wait for a CPU, the calling one among
// them; 0 where the system does not say. Allocates nothing.
int RunningThreads() {
  // "0.20 0.18 0.12 1/80 11206": 1 thread of 80 runs or waits.
  char text[128];
  const int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t bytes = read(file, text, sizeof(text) - 1);
  close(file);
  if (bytes <= 0) return 0;
  text[bytes] = '\0';
  int running = 0;
  return std::sscanf(text, "%*s %*s %*s %d/", &running) == 1 ? running : 0;
}

// While it lives, threads that the calling thread creates block all signals but
// those of their own faults and of profilers: handlers run on the program's
// threads, not in the middle of a kernel.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault :
         {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP, SIGPROF}) {
      sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

WorkerPool::Usage WorkerPool::Usage::OfThisThread(int64_t now_ns) {
  Usage usage;
  usage.now_ns = now_ns;
#ifdef RUSAGE_THREAD
  rusage now;
  if (getrusage(RUSAGE_THREAD, &now) != 0) return usage;
  usage.switches = now.ru_nivcsw;
  for (const timeval& part : {now.ru_utime, now.ru_stime}) {
    usage.cpu_ns +=
        int64_t{part.tv_sec} * 1'000'000'000 + int64_t{part.tv_usec} * 1000;
  }
#endif
  return usage;
}

namespace {

// Sleeps until the bell has another value. hwy::BlockUntilDifferent does so,
// too, but its debug assertion ends the process when a signal's handler
// interrupts the wait.
void BlockWhile(uint32_t value, const std::atomic<uint32_t>& bell) {
#if defined(__linux__)
  while (bell.load(std::memory_order_acquire) == value) {
    syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&bell),
            FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
#else
  hwy::BlockUntilDifferent(value, bell);
#endif
}

constexpr uint64_t kOneTask = uint64_t{1} << 32;
uint64_t RangeOf(uint64_t first, uint64_t end) { return first << 32 | end; }
bool IsEmpty(uint64_t range) { return range >> 32 >= (range & (kOneTask - 1)); }

}  // namespace

WorkerPool::WorkerPool(const Options& options)
    : options_(options),
      shares_(new Share[static_cast<size_t>(options.workers)]),
      reports_(new Report[static_cast<size_t>(options.workers)]) {}

bool WorkerPool::Start() {
  const BlockSignals blocked;
  try {
    threads_.reserve(static_cast<size_t>(workers_ - 1));
    for (int worker = 1; worker < workers_; ++worker) {
      threads_.emplace_back(
          [this, worker, created_ns = NowNs()] { Loop(worker, created_ns); });
    }
  } catch (const std::system_error&) {
    StopThreads();
    return false;
  } catch (const std::bad_alloc&) {
    StopThreads();
    return false;
  }
  // A thread may allocate while it starts: with AddressSanitizer it does so
  // three times, in pthread_getattr_np.
  while (!idle()) std::this_thread::yield();
  // The first region asks the system, once the new threads sleep.
  contention_.NoteCrowd(NowNs());
  return true;
}

void WorkerPool::StopThreads() {
  stop_.store(true);
  work_bell_.fetch_add(1);
  hwy::WakeAll(work_bell_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

WorkerPool::~WorkerPool() { StopThreads(); }

void WorkerPool::Loop(int worker, int64_t created_ns) {
  int64_t now = NowNs();
  if (now - created_ns > kSlowStartNs) {
    contention_.NotePreempted(now, Counted(now - created_ns));
  }
  Usage usage = Usage::OfThisThread(now);
  bool spins = false;  // the first wait begins asleep, as idle() promises
  while (true) {
    // When the worker last looked for tasks in vain.
    if (!spins || !AwaitWork(worker, usage, now)) {
      Sleep(worker);
      now = NowNs();
      usage = Usage::OfThisThread(now);
    }
    if (stop_.load()) return;
    const int64_t looked = now;
    Work(worker, usage);
    now = NowNs();
    if (now - looked > kGapNs) {
      const int64_t lost = LostNs(usage, now, now - looked);
      if (lost > kGapNs) contention_.NotePreempted(now, Counted(lost));
    }
    spins = may_spin_;
  }
}

void WorkerPool::Sleep(int worker) {
  const uint32_t bell = work_bell_.load();
  asleep_.fetch_add(1);
  if (!stop_.load() && !HasTasks(worker)) {
    BlockWhile(bell, work_bell_);
  }
  asleep_.fetch_sub(1);
}

// IsCrowd, as the system says. kUnknown where it says nothing, and where the
// process may use a part of the machine only: the count of threads is that of
// the whole machine.
WorkerPool::Crowd WorkerPool::AskTheSystem() const {
  if (options_.cpus != options_.cpus_online) return Crowd::kUnknown;
  // IsCrowd takes the caller for one that runs.
  const int awake =
      workers_ - 1 - asleep_.load() - (caller_sleeps_.load() ? 1 : 0);
  const int running = RunningThreads();
  if (running <= 0) return Crowd::kUnknown;
  return IsCrowd(running, awake, workers_, options_.cpus_online) ? Crowd::kYes
                                                                 : Crowd::kNo;
}

// How much of a loss counts. Where no stranger runs, the thread may have met
// one of its own pool on a CPU, which takes milliseconds to part; or a stranger
// that took the CPU has gone to sleep since.
int64_t WorkerPool::Counted(int64_t lost_ns) const {
  return AskTheSystem() == Crowd::kNo ? lost_ns / 4 : lost_ns;
}

bool WorkerPool::HasTasks(int worker) const {
  return !IsEmpty(shares_[static_cast<size_t>(worker)].range.load());
}

// Spins until the worker's share has tasks. Returns false when it is time to
// sleep. `now_ns` is the time of the call, and then of the last look.
bool WorkerPool::AwaitWork(int worker, Usage& usage, int64_t& now_ns) {
  const Share& share = shares_[static_cast<size_t>(worker)];
  const int64_t start = now_ns;
  while (true) {
    for (int look = 0; look < kLooksPerReading; ++look) {
      if (!IsEmpty(share.range.load(std::memory_order_acquire))) return true;
      hwy::Pause();
    }
    if (stop_.load(std::memory_order_relaxed)) return true;
    const int64_t before = now_ns;
    now_ns = NowNs();
    if (now_ns - before > kGapNs) {
      const int64_t lost = LostNs(usage, now_ns, now_ns - before);
      if (lost > 0) contention_.NotePreempted(now_ns, Counted(lost));
    }
    if (now_ns - start > (careful() ? kBriefNs : kIdleNs)) return false;
  }
}

// Claims and runs tasks of `share` until it has none. Returns how many.
int64_t WorkerPool::Drain(Share& share, int worker) {
  int64_t ran = 0;
  uint64_t range = share.range.load(std::memory_order_acquire);
  while (!IsEmpty(range)) {
    if (!share.range.compare_exchange_weak(range, range + kOneTask,
                                           std::memory_order_acq_rel,
                                           std::memory_order_acquire)) {
      continue;
    }
    (*share.fn)(share.offset + static_cast<int64_t>(range >> 32), worker);
    ++ran;
    range = share.range.load(std::memory_order_acquire);
  }
  return ran;
}

// The tasks of the worker's own share, then those of late workers.
void WorkerPool::Work(int worker, Usage& usage) {
  for (int i = 0; i < workers_; ++i) {
    const int victim = (worker + i) % workers_;
    const int64_t ran = Drain(shares_[static_cast<size_t>(victim)], worker);
    if (ran > 0) ReportDone(worker, ran, usage);
  }
}

void WorkerPool::ReportDone(int worker, int64_t ran, Usage& usage) {
  const int64_t since = waiting_since_ns_.load(std::memory_order_relaxed);
  if (since != 0) {
    const int64_t now = NowNs();
    const int64_t lost = LostNs(usage, now, now - since);
    if (lost > 0) contention_.NoteStalled(now, Counted(lost));
  }
  std::atomic<uint64_t>& done = reports_[static_cast<size_t>(worker)].done;
  done.store(done.load(std::memory_order_relaxed) + static_cast<uint64_t>(ran));
  if (caller_sleeps_.load()) {
    caller_bell_.fetch_add(1);
    hwy::WakeAll(caller_bell_);
  }
}

bool WorkerPool::AllReported() const {
  uint64_t done = 0;
  for (int worker = 1; worker < workers_; ++worker) {
    done += reports_[static_cast<size_t>(worker)].done.load();
  }
  return done == left_to_workers_;
}

void WorkerPool::AwaitReports() {
  for (int look = 0; look < kLooksPerReading; ++look) {
    if (AllReported()) return;
    hwy::Pause();
  }
  const int64_t start = NowNs();
  bool waits_long = false;
  while (true) {
    for (int look = 0; look < kLooksPerReading; ++look) {
      if (AllReported()) {
        if (waits_long) waiting_since_ns_.store(0, std::memory_order_relaxed);
        return;
      }
      hwy::Pause();
    }
    const int64_t now = NowNs();
    const bool patient = may_spin_ && !careful();
    const bool spins = now - start <= (patient ? kPatientNs : kBriefNs);
    if (!waits_long && (!spins || now - start > kGapNs)) {
      waiting_since_ns_.store(start, std::memory_order_relaxed);
      waits_long = true;
    }
    if (spins) continue;
    const uint32_t bell = caller_bell_.load();
    caller_sleeps_.store(true);
    if (!AllReported()) BlockWhile(bell, caller_bell_);
    caller_sleeps_.store(false);
  }
}

void WorkerPool::RunShared(int64_t first, int64_t end, const Fn& fn,
                           Length* length) {
  const auto tasks = static_cast<uint64_t>(end - first);
  const uint64_t shares = std::min(tasks, static_cast<uint64_t>(workers_));
  for (uint64_t w = shares; w-- > 0;) {
    Share& share = shares_[w];
    share.fn = &fn;
    share.offset = first;
    share.range.store(RangeOf(tasks * w / shares, tasks * (w + 1) / shares));
  }
  if (asleep_.load() > 0) {
    work_bell_.fetch_add(1);
    hwy::WakeAll(work_bell_);
  }
  const int64_t start = length == nullptr ? 0 : NowNs();
  const int64_t ran = Drain(shares_[0], 0);
  if (length != nullptr && ran > 0) {
    // The caller's own tasks tell, because waits have other reasons as well.
    const int64_t a_task = (NowNs() - start) / ran;
    Remember(*length, a_task > kWorthWakingNs / static_cast<int64_t>(tasks));
  }
  left_to_workers_ += tasks - static_cast<uint64_t>(ran);
  if (AllReported()) return;
  for (uint64_t w = 1; w < shares; ++w) {
    const int64_t taken = Drain(shares_[w], 0);
    left_to_workers_ -= static_cast<uint64_t>(taken);
  }
  AwaitReports();
}

WorkerPool::Length& WorkerPool::LengthOf(int64_t num_tasks) {
  Length& length = lengths_[static_cast<size_t>(num_tasks) % lengths_.size()];
  if (length.tasks != num_tasks) length = {num_tasks, 0};
  return length;
}

void WorkerPool::Remember(Length& length, bool worth_waking) {
  if (worth_waking) {
    length.score = kRemembered;
  } else if (length.score > 0) {
    --length.score;
  }
}

void WorkerPool::Run(int64_t num_tasks, Fn fn) {
  int64_t first = 0;
  int64_t start = 0;
  Length* length = nullptr;  // where it decides
  if (workers_ == 1 || num_tasks == 1) {
    for (; first < num_tasks; ++first) fn(first, 0);
    return;
  }
  if (!options_.share_all && (!may_spin_ || careful())) {
    start = NowNs();
    Contention::State state = contention_.At(start);
    // Asking the system costs less than workers that find out.
    if (state == Contention::State::kQuiet && AskTheSystem() == Crowd::kYes) {
      contention_.NoteCrowd(start + kCrowdNs);
      state = Contention::State::kContended;
    }
    if (state == Contention::State::kAlone) {
      while (first < num_tasks) fn(first++, 0);
    } else if (state == Contention::State::kContended || !may_spin_) {
      // If the region turns out to be long only after its first task, two long
      // tasks have run one after the other.
      length = &LengthOf(num_tasks);
      while (length->score == 0 && first < num_tasks &&
             NowNs() - start < kWorthWakingNs) {
        fn(first++, 0);
      }
      if (first > 0) Remember(*length, NowNs() - start > kWorthWakingNs);
    }
  }
  // The numbers within a region have 32 bits.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  while (first < num_tasks) {
    const int64_t end = first + std::min(num_tasks - first, kMost);
    RunShared(first, end, fn, length);
    first = end;
  }
}

}  // namespace quern
