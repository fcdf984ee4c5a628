#ifndef QUERN_CORE_CONTENTION_H_
#define QUERN_CORE_CONTENTION_H_

// Whether a pool of threads has its CPUs to itself, as its workers have seen.
//
//   kQuiet      nothing was seen: idle workers spin, and every region is shared
//   kContended  a worker lost its CPU to another thread lately: idle workers
//               sleep, and only long regions wake them
//   kAlone      a worker lost its CPU while the caller waited for its task: the
//               caller runs every task itself
//
// What was seen counts for a multiple of the time that it took, so that
// looking again costs a fixed part of the time however busy the machine is: at
// most 1 / kSpinRatio of a CPU for workers that spin in vain, and at most 1 /
// kStallRatio of the caller's time for tasks that it waits for.
//
// Times are nanoseconds of any clock that does not go back. All functions may
// be called from any thread and are lock-free.

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace quern {

class Contention {
 public:
  enum class State : uint8_t { kQuiet, kContended, kAlone };

  static constexpr int64_t kSpinRatio = 20;
  static constexpr int64_t kStallRatio = 40;
  // The end of any effect: a machine that has become quiet is used again.
  static constexpr int64_t kLongestNs = 20'000'000'000;

  // A worker was off its CPU for `lost_ns` until `now_ns`; nobody waited.
  void NotePreempted(int64_t now_ns, int64_t lost_ns) {
    Extend(contended_until_, now_ns, lost_ns, kSpinRatio);
  }

  // The caller had waited `lost_ns` for the task of a worker that was off its
  // CPU.
  void NoteStalled(int64_t now_ns, int64_t lost_ns) {
    Extend(alone_until_, now_ns, lost_ns, kStallRatio);
    Extend(contended_until_, now_ns, lost_ns, kStallRatio);
  }

  // Whether At may be something else than kQuiet, without a clock.
  bool quiet() const { return quiet_.load(std::memory_order_relaxed); }

  State At(int64_t now_ns) {
    if (now_ns < alone_until_.load(std::memory_order_relaxed)) {
      return State::kAlone;
    }
    if (now_ns < contended_until_.load(std::memory_order_relaxed)) {
      return State::kContended;
    }
    // What another thread notes between the loads above and this store has no
    // effect until the next note, which is as good as a note that came later.
    quiet_.store(true, std::memory_order_relaxed);
    return State::kQuiet;
  }

 private:
  void Extend(std::atomic<int64_t>& until, int64_t now_ns, int64_t lost_ns,
              int64_t ratio) {
    const int64_t lost = std::clamp<int64_t>(lost_ns, 0, kLongestNs / ratio);
    const int64_t later = now_ns + lost * ratio;
    int64_t current = until.load(std::memory_order_relaxed);
    while (current < later && !until.compare_exchange_weak(
                                  current, later, std::memory_order_relaxed)) {
    }
    quiet_.store(false, std::memory_order_relaxed);
  }

  std::atomic<int64_t> contended_until_{INT64_MIN};
  std::atomic<int64_t> alone_until_{INT64_MIN};
  std::atomic<bool> quiet_{true};
};

}  // namespace quern

#endif  // QUERN_CORE_CONTENTION_H_
