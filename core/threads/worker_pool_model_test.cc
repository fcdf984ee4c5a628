// Walks through every interleaving of the protocol that
// core/threads/worker_pool.h states, with its steps as atomic ones: one caller,
// two workers, two regions of up to three tasks. What the model leaves out:
// memory orders, which tsan checks on the real pool; spinning, which is the
// first half of a sleep; the end of the pool; and the caller's early return
// where no worker has claimed a task. Each task is reported by itself, and
// every region has a share for each worker.

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "gtest/gtest.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

constexpr int kThreads = 3;  // thread 0 is the caller
constexpr int kMostTasks = 3;

enum Step : int8_t {
  // The caller's.
  kPublish,        // C1 and C2 of share `at`; then the next share
  kRing,           // looks for sleeping workers and wakes them
  kAwait,          // C4
  kReadBell,       // goes to sleep: reads the bell,
  kAnnounce,       //   announces itself,
  kLookAgain,      //   looks a last time,
  kCallerBlocked,  //   and sleeps until the bell has changed
  kReturned,
  // Everybody's: look at share `at`, claim, run, report.
  kLook,
  kClaim,
  kRun,
  kReport,
  kWakeCaller,
  // A worker's sleep.
  kWorkerReadBell,
  kWorkerAnnounce,
  kWorkerLookAgain,
  kWorkerBlocked,
};

struct Range {
  int8_t first = 0, end = 0;
  bool empty() const { return first >= end; }
};

struct Share {
  Range range;
  int8_t fn = -1;  // the region whose function it has
};

struct Thread {
  Step step = kWorkerReadBell;
  int8_t at = 0;  // the share it looks at, counted from its own
  Range seen;
  int8_t task = -1;
  int8_t bell = 0;
};

struct State {
  int8_t region = 0;
  std::array<Share, kThreads> shares;
  std::array<Thread, kThreads> threads;
  std::array<int8_t, kThreads> done{};  // [0]: what the caller ran
  int8_t published = 0;
  int8_t asleep = 0, work_bell = 0, caller_bell = 0;
  bool caller_sleeps = false;
  std::array<std::array<int8_t, kMostTasks>, 2> runs{};

  bool operator==(const State& other) const {
    return std::memcmp(this, &other, sizeof(State)) == 0;
  }
  template <typename H>
  friend H AbslHashValue(H h, const State& s) {
    return H::combine_contiguous(std::move(h),
                                 reinterpret_cast<const unsigned char*>(&s),
                                 sizeof(State));
  }

  bool AllReported() const { return done[0] + done[1] + done[2] == published; }
  bool Claimed() const {
    for (const Thread& t : threads) {
      if (t.step == kRun || t.step == kReport) return true;
    }
    return false;
  }
};

// States are compared as bytes.
static_assert(std::has_unique_object_representations_v<State>);

class Model {
 public:
  explicit Model(std::array<int, 2> tasks) : tasks_(tasks) {
    State start;
    start.threads[0].step = kPublish;
    Visit(start);
    while (!pending_.empty() && failure_.empty()) {
      const State state = pending_.back();
      pending_.pop_back();
      bool moved = false;
      for (int thread = 0; thread < kThreads && failure_.empty(); ++thread) {
        State next = state;
        if (!Move(next, thread)) continue;
        moved = true;
        Visit(next);
      }
      if (!moved && state.threads[0].step != kReturned) Fail("a deadlock");
    }
  }

  const std::string& failure() const { return failure_; }
  size_t states() const { return seen_.size(); }

 private:
  void Fail(const std::string& what) { failure_ = what; }

  void Visit(const State& state) {
    if (seen_.insert(state).second) pending_.push_back(state);
  }

  // One step of the thread. Returns false if it cannot move.
  bool Move(State& s, int thread) {
    Thread& t = s.threads[static_cast<size_t>(thread)];
    const int mine = (thread + t.at) % kThreads;
    Share& share = s.shares[static_cast<size_t>(mine)];
    switch (t.step) {
      case kPublish: {
        // The last share first; the caller's own is the last to be published.
        const int w = kThreads - 1 - t.at;
        if (t.at == 0) {
          s.published = static_cast<int8_t>(s.published + Tasks(s));
        }
        if (s.Claimed() && t.at == 0) Fail("fn is written under a claim");
        Share& target = s.shares[static_cast<size_t>(w)];
        target.fn = s.region;
        target.range = {static_cast<int8_t>(Tasks(s) * w / kThreads),
                        static_cast<int8_t>(Tasks(s) * (w + 1) / kThreads)};
        if (++t.at == kThreads) {
          t.at = 0;
          t.step = kRing;
        }
        return true;
      }
      case kRing:
        if (s.asleep > 0) ++s.work_bell;
        t.step = kLook;
        return true;
      case kAwait:
        if (!s.AllReported()) {
          if (!s.Claimed()) Fail("the caller waits, and nobody has a task");
          t.step = kReadBell;
          return true;
        }
        for (int task = 0; task < Tasks(s); ++task) {
          if (s.runs[static_cast<size_t>(s.region)]
                    [static_cast<size_t>(task)] != 1) {
            Fail("a region ended before its tasks");
          }
        }
        t.step = s.region == 1 ? kReturned : kPublish;
        t.at = 0;
        if (s.region == 0) s.region = 1;
        return true;
      case kReadBell:
        t.bell = s.caller_bell;
        t.step = kAnnounce;
        return true;
      case kAnnounce:
        s.caller_sleeps = true;
        t.step = kLookAgain;
        return true;
      case kLookAgain:
        t.step = s.AllReported() ? kAwait : kCallerBlocked;
        if (t.step == kAwait) s.caller_sleeps = false;
        if (t.step == kAwait) t.bell = 0;
        return true;
      case kCallerBlocked:
        if (t.bell == s.caller_bell) return false;
        s.caller_sleeps = false;
        t.bell = 0;
        t.step = kAwait;
        return true;
      case kReturned:
        return false;
      case kLook:
        t.seen = share.range;
        if (!t.seen.empty()) {
          t.step = kClaim;
          return true;
        }
        t.seen = {};
        if (++t.at == kThreads) {
          t.at = 0;
          t.step = thread == 0 ? kAwait : kWorkerReadBell;
        }
        return true;
      case kClaim:
        // Fails if another thread has claimed since the look. What was seen is
        // forgotten, so that states that differ in it alone are one.
        t.step =
            share.range.first == t.seen.first && share.range.end == t.seen.end
                ? kRun
                : kLook;
        if (t.step == kRun) t.task = share.range.first++;
        t.seen = {};
        return true;
      case kRun:
        if (share.fn != s.region) Fail("a task ran for another region");
        if (++s.runs[static_cast<size_t>(share.fn)]
                    [static_cast<size_t>(t.task)] > 1) {
          Fail("a task ran twice");
        }
        t.step = kReport;
        return true;
      case kReport:
        ++s.done[static_cast<size_t>(thread)];
        t.task = -1;
        t.step = thread == 0 ? kLook : kWakeCaller;
        return true;
      case kWakeCaller:
        if (s.caller_sleeps) ++s.caller_bell;
        t.step = kLook;
        return true;
      case kWorkerReadBell:
        t.bell = s.work_bell;
        t.step = kWorkerAnnounce;
        return true;
      case kWorkerAnnounce:
        ++s.asleep;
        t.step = kWorkerLookAgain;
        return true;
      case kWorkerLookAgain:
        if (s.shares[static_cast<size_t>(thread)].range.empty()) {
          t.step = kWorkerBlocked;
        } else {
          --s.asleep;
          t.step = kLook;
          t.bell = 0;
        }
        return true;
      case kWorkerBlocked:
        if (t.bell == s.work_bell) return false;
        --s.asleep;
        t.step = kLook;
        t.bell = 0;
        return true;
    }
    return false;
  }

  int Tasks(const State& s) const {
    return tasks_[static_cast<size_t>(s.region)];
  }

  const std::array<int, 2> tasks_;
  absl::flat_hash_set<State> seen_;
  std::vector<State> pending_;
  std::string failure_;
};

TEST(WorkerPoolModelTest, EveryInterleavingRunsEveryTaskOnceAndEnds) {
  std::vector<std::array<int, 2>> regions = {{2, 1}};
  if (!QuickTests()) regions = {{1, 3}, {3, 1}};
  for (const std::array<int, 2>& tasks : regions) {
    const Model model(tasks);
    EXPECT_EQ(model.failure(), "") << tasks[0] << " and " << tasks[1];
    EXPECT_GT(model.states(), 1000u);
  }
}

}  // namespace
}  // namespace quern
