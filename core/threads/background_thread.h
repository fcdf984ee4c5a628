#ifndef QUERN_CORE_THREADS_BACKGROUND_THREAD_H_
#define QUERN_CORE_THREADS_BACKGROUND_THREAD_H_

// A thread for calls that their caller does not wait for at once: the Execute
// of a mixture's experts on a pool of the CPU, while a GPU computes the rest of
// the layer.
//
//   QUERN_ASSIGN_OR_RETURN(const auto background, BackgroundThread::Create());
//   // Each layer:
//   const bool started = background->Submit(
//       [&plan, args, workspace, &executor] {
//         plan.Execute(args, workspace, executor);
//       });
//   ...                    // other work; what args borrow stays as it is
//   background->Wait();    // args.out is written
//
// The thread is the caller of Executor::ParallelFor, and so one of the pool's
// workers: a pool of n workers uses n CPUs, and the thread that submits has
// another. Until Wait has returned, the call owns what it was given: the
// workspace, the outputs, and the executor's workers.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>

#include "absl/status/statusor.h"

namespace quern {

class BackgroundThread {
 public:
  // Room for the arguments of any Execute.
  static constexpr size_t kCallBytes = 1024;

  // The thread has started when Create returns, so that it allocates nothing
  // afterwards. ResourceExhausted if the system refuses the thread.
  static absl::StatusOr<std::unique_ptr<BackgroundThread>> Create();

  // Waits for a call that is pending, then ends the thread.
  ~BackgroundThread();

  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;

  // Copies `call` and has the thread run it: call() must not throw. Returns
  // true at once. Returns false, and neither keeps nor runs the call, where one
  // is pending: submitted and not waited for, whether it has ended or not.
  // Allocates nothing. May be called from any thread. What the calling thread
  // wrote before is visible to the call.
  template <typename Call>
  [[nodiscard]] bool Submit(const Call& call) noexcept {
    static_assert(std::is_trivially_copyable_v<Call> &&
                      std::is_trivially_destructible_v<Call>,
                  "capture views and references, nothing that owns memory");
    static_assert(sizeof(Call) <= kCallBytes, "capture less, or a pointer");
    static_assert(alignof(Call) <= alignof(std::max_align_t));
    return SubmitBytes(&call, sizeof(Call), [](const void* bytes) {
      (*static_cast<const Call*>(bytes))();
    });
  }

  // Blocks until the pending call has ended; what it wrote is then visible, and
  // none is pending. Returns false at once where none is. Allocates nothing.
  // May be called from any thread but from no call: several that wait for one
  // call all return.
  bool Wait() noexcept;

  // Whether a call is pending.
  bool pending() const noexcept;
  // Whether a call is pending that has ended, so that Wait would not block.
  bool ended() const noexcept;

 private:
  BackgroundThread() = default;

  bool SubmitBytes(const void* call, size_t bytes,
                   void (*run)(const void*)) noexcept;
  void Loop() noexcept;

  mutable std::mutex mutex_;
  std::condition_variable submitted_or_stopped_;
  std::condition_variable call_ended_;
  // Calls so far. The last one submitted is pending until it is waited for.
  uint64_t submitted_ = 0;
  uint64_t ended_ = 0;
  uint64_t waited_for_ = 0;
  bool stop_ = false;
  void (*run_)(const void*) = nullptr;
  alignas(std::max_align_t) unsigned char call_[kCallBytes];
  std::thread thread_;
};

}  // namespace quern

#endif  // QUERN_CORE_THREADS_BACKGROUND_THREAD_H_
