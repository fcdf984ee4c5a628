#include "quern/tools/perf/rows/all_reduce.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "hwy/cache_control.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;

// A thread for each rank but 0, which is the caller's. Not an Executor, whose
// tasks need not run at the same time. The threads sleep, but between Wake and
// Rest, where they spin: a call then costs the caller one store.
class RankThreads {
 public:
  using Fn = absl::AnyInvocable<void(int rank, int64_t what)>;

  // fn is collective: no rank returns from it before all have entered it.
  RankThreads(int ranks, Fn fn)
      : fn_(std::move(fn)), may_spin_(ranks <= AvailableCpus()) {
    for (int rank = 1; rank < ranks; ++rank) {
      threads_.emplace_back([this, rank] { Serve(rank); });
    }
  }
  ~RankThreads() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      awake_ = false;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // fn(rank, what) on all ranks.
  void Call(int64_t what) {
    what_ = what;
    if (awake_.load(std::memory_order_relaxed)) {
      calls_.fetch_add(1, std::memory_order_release);
    } else {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        calls_.fetch_add(1, std::memory_order_release);
      }
      wake_.notify_all();
    }
    fn_(0, what);
  }
  void Wake() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      awake_ = true;
    }
    wake_.notify_all();
  }
  void Rest() { awake_ = false; }

 private:
  void Serve(int rank) {
    for (int64_t done = 0;; ++done) {
      const auto called = [this, done] {
        return calls_.load(std::memory_order_acquire) > done;
      };
      while (!called()) {
        if (awake_.load(std::memory_order_relaxed)) {
          if (may_spin_) {
            hwy::Pause();
          } else {
            std::this_thread::yield();
          }
          continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return called() || awake_ || stop_; });
        if (stop_) return;
      }
      fn_(rank, what_);
    }
  }

  Fn fn_;
  const bool may_spin_;  // else a spinner keeps a rank off its CPU
  // Written before calls_ grows; the last call was entered by all ranks.
  int64_t what_ = 0;
  alignas(64) std::atomic<int64_t> calls_{0};
  alignas(64) std::atomic<bool> awake_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::vector<std::thread> threads_;  // last: they use the rest
};

class AllReduce final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = absl::WrapUnique(new AllReduce());
    QUERN_ASSIGN_OR_RETURN(const int64_t ranks,
                           args.Int("ranks", 1, ThreadCommunicator::kMaxRanks));
    op->ranks_ = static_cast<int>(ranks);
    QUERN_ASSIGN_OR_RETURN(op->rows_, args.Int("rows", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(op->hidden_, args.Int("hidden", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(op->dtype_, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(op->group_,
                           ThreadCommunicator::CreateGroup(op->ranks_));
    return op;
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape =
        absl::StrCat("ranks=", ranks_, " rows=", rows_, " hidden=", hidden_);
    info.dtype = std::string(DTypeName(dtype_));
    info.isa = group_[0]->target();
    // Each rank's part in, and the sum out, in the same place.
    info.SetTraffic(0, 0, static_cast<double>(set_bytes()));
    info.flops = static_cast<double>(ranks_ - 1) * static_cast<double>(count());
    return info;
  }

  int64_t set_bytes() const override { return ranks_ * x_bytes(); }

  absl::Status Setup(int64_t sets, Executor&) override {
    for (int rank = 0; rank < ranks_; ++rank) {
      x_.push_back(std::make_unique<SetBuffer>());
      QUERN_RETURN_IF_ERROR(x_.back()->Create(sets, x_bytes()));
      // Sums of sums become infinite, which are summed as fast.
      WithType(dtype_, [this, rank](auto type) {
        FillReals<decltype(type)>(-1 - rank, 2, *x_.back());
      });
    }
    threads_ =
        std::make_unique<RankThreads>(ranks_, [this](int rank, int64_t what) {
          ThreadCommunicator& c = *group_[static_cast<size_t>(rank)];
          if (what == kMeet) return c.Barrier();
          c.AllReduceSum(Matrix(dtype_, X(rank).at(what), rows_, hidden_));
        });
    return absl::OkStatus();
  }

  // The workers of the driver's executor spin for a while after their last
  // task, on the CPUs that the ranks want.
  void BeginTimed() override {
    std::this_thread::sleep_for(HwyExecutor::kIdle * 3 / 2);
    threads_->Wake();
    threads_->Call(kMeet);
  }
  void EndTimed(Executor& executor) override {
    threads_->Rest();
    executor.ParallelFor(executor.num_workers(), [](int64_t, int) {});
  }

  void Run(int64_t set, Executor&) override { threads_->Call(set); }

  // ranks - 1 sums in f32, each of no more than all absolute values, and one
  // rounding to dtype; and the same bits on every rank.
  absl::StatusOr<double> Check(Executor& executor) override {
    std::vector<std::vector<double>> parts;
    for (int rank = 0; rank < ranks_; ++rank) {
      parts.push_back(Doubles(dtype_, X(rank), 0, count()));
    }
    Run(0, executor);
    // The small ones end before the other ranks do.
    threads_->Call(kMeet);
    return JudgeAll(
        "all_reduce", set_bytes() / element_bytes(), executor,
        [&](int64_t at, Verdict& verdict) {
          const auto rank = static_cast<int>(at / count());
          const int64_t i = at % count();
          double want = 0, reach = 0;
          for (const std::vector<double>& part : parts) {
            want += part[static_cast<size_t>(i)];
            reach += std::abs(part[static_cast<size_t>(i)]);
          }
          const double f32 = (ranks_ - 1) * 0x1p-24 * reach;
          const double got = At(rank, i);
          verdict.Add(at, got, want,
                      f32 + RelativeRoundoff(dtype_) * (std::abs(want) + f32) +
                          kSmallest);
          verdict.Add(at, got, At(0, i), 0);
        });
  }

 private:
  static constexpr int64_t kMeet = -1;          // a barrier
  static constexpr double kSmallest = 0x1p-25;  // half of the smallest f16

  int64_t count() const { return rows_ * hidden_; }
  int64_t element_bytes() const { return static_cast<int64_t>(SizeOf(dtype_)); }
  int64_t x_bytes() const { return count() * element_bytes(); }
  SetBuffer& X(int rank) { return *x_[static_cast<size_t>(rank)]; }
  double At(int rank, int64_t i) {
    return WithType(dtype_, [&](auto type) {
      return ToDouble(X(rank).at<decltype(type)>(0)[i]);
    });
  }

  int ranks_ = 1;
  int64_t rows_ = 0;
  int64_t hidden_ = 0;
  DType dtype_ = DType::kF32;
  std::vector<std::unique_ptr<ThreadCommunicator>> group_;
  std::vector<std::unique_ptr<SetBuffer>> x_;  // of each rank
  std::unique_ptr<RankThreads> threads_;       // last: they use the rest
};

}  // namespace

OpEntry AllReduceOp() {
  return {"all_reduce",
          "x = the sum of all ranks' x, in place; ranks are threads",
          {{"dtype", "bf16", "f32, bf16 or f16"},
           {"ranks", "2", "give --threads the same number, for the limits"},
           {"rows", "4096", "tokens"},
           {"hidden", "4096", "elements of a row"}},
          &AllReduce::Create};
}

}  // namespace quern
