#ifndef QUERN_CORE_THREADS_CONTENTION_H_
#define QUERN_CORE_THREADS_CONTENTION_H_

// Whether a pool of threads has its CPUs to itself, as its workers have seen.
//
//   kQuiet      idle workers spin, and every region is shared
//   kContended  workers lose their CPUs to other threads: idle workers sleep,
//               and only long regions wake them
//   kAlone      the caller waits for workers that have lost their CPUs during a
//               task: it runs every task itself
//
// Losses are held against a budget, 1 / kAllowed of the time: what any machine
// loses to its system changes nothing. (Two vCPUs of a Zen 3 lose 1 to 3 % of
// the time while nothing else runs, in pieces of 0.3 to 2 ms. 2026.) When
// losses have overdrawn the budget by more than a burst, the state lasts for
// kRatio times what is overdrawn. Therefore workers spin in vain for at most
// the larger part of the time, and the caller waits in vain for at most as
// much, however busy the machine is and for however long.
//
// Times are nanoseconds of any clock that does not go back. All functions may
// be called from any thread and are lock-free.

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace quern {

// Whether threads would wait for CPUs if all `workers` of a pool were busy. Of
// `running` threads that the system counts on its `cpus`, one is the caller and
// `awake` are other workers of the pool.
constexpr bool IsCrowd(int running, int awake, int workers, int cpus) {
  return running - 1 - awake + workers > cpus;
}

class Contention {
 public:
  enum class State : uint8_t { kQuiet, kContended, kAlone };

  static constexpr int64_t kAllowed = 16;
  static constexpr int64_t kRatio = 64;
  // Two threads of one pool that begin on one CPU take some 4 ms to part.
  static constexpr int64_t kPreemptedBurstNs = 10'000'000;
  static constexpr int64_t kStalledBurstNs = 6'000'000;
  // The end of any state: a machine that has become quiet is used again.
  static constexpr int64_t kLongestNs = 20'000'000'000;

  // A worker was off its CPU for `lost_ns` until `now_ns`; nobody waited.
  void NotePreempted(int64_t now_ns, int64_t lost_ns) {
    Spend(preempted_, kPreemptedBurstNs, now_ns, lost_ns);
  }

  // The caller had waited `lost_ns` for the task of a worker that was off its
  // CPU.
  void NoteStalled(int64_t now_ns, int64_t lost_ns) {
    Spend(preempted_, kPreemptedBurstNs, now_ns, lost_ns);
    Spend(stalled_, kStalledBurstNs, now_ns, lost_ns);
  }

  // The system says that threads wait for CPUs: kContended until `until_ns`, at
  // no cost to the budget. No state becomes shorter by it.
  void NoteCrowd(int64_t until_ns) {
    Prolong(preempted_, until_ns);
    quiet_.store(false, std::memory_order_relaxed);
  }

  // False if At may be something else than kQuiet. Needs no clock.
  bool quiet() const { return quiet_.load(std::memory_order_relaxed); }

  State At(int64_t now_ns) {
    if (now_ns < stalled_.until.load(std::memory_order_relaxed)) {
      return State::kAlone;
    }
    if (now_ns < preempted_.until.load(std::memory_order_relaxed)) {
      return State::kContended;
    }
    // What another thread notes between the loads above and this store has no
    // effect until the next note, which is as good as a note that came later.
    quiet_.store(true, std::memory_order_relaxed);
    return State::kQuiet;
  }

 private:
  struct Budget {
    // When the budget will have made up for all losses so far.
    std::atomic<int64_t> even_at{INT64_MIN};
    // The end of the state that they have brought about.
    std::atomic<int64_t> until{INT64_MIN};
  };

  static void Prolong(Budget& budget, int64_t until_ns) {
    int64_t before = budget.until.load(std::memory_order_relaxed);
    while (before < until_ns &&
           !budget.until.compare_exchange_weak(before, until_ns,
                                               std::memory_order_relaxed)) {
    }
  }

  void Spend(Budget& budget, int64_t burst_ns, int64_t now_ns,
             int64_t lost_ns) {
    const int64_t lost = std::clamp<int64_t>(lost_ns, 0, kLongestNs / kRatio);
    int64_t before = budget.even_at.load(std::memory_order_relaxed);
    int64_t even_at;
    do {
      even_at = std::min(std::max(before, now_ns) + lost * kAllowed,
                         now_ns + kLongestNs);
    } while (!budget.even_at.compare_exchange_weak(before, even_at,
                                                   std::memory_order_relaxed));
    const int64_t overdrawn = (even_at - now_ns) / kAllowed;
    if (overdrawn <= burst_ns) return;
    Prolong(budget, now_ns + std::min(overdrawn * kRatio, kLongestNs));
    quiet_.store(false, std::memory_order_relaxed);
  }

  Budget preempted_;
  Budget stalled_;
  std::atomic<bool> quiet_{true};
};

}  // namespace quern

#endif  // QUERN_CORE_THREADS_CONTENTION_H_
