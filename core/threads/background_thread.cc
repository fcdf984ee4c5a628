#include "quern/core/threads/background_thread.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace quern {

absl::StatusOr<std::unique_ptr<BackgroundThread>> BackgroundThread::Create() {
  auto background = absl::WrapUnique(new BackgroundThread());
  try {
    background->thread_ =
        std::thread([self = background.get()] { self->Loop(); });
  } catch (const std::system_error&) {
    return absl::ResourceExhaustedError(
        "background_thread: the system refuses the thread");
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        "background_thread: no memory for the thread");
  }
  // A thread may allocate while it starts (HwyExecutor), so wait until it runs.
  if (background->Submit([] {})) background->Wait();
  return background;
}

BackgroundThread::~BackgroundThread() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  submitted_or_stopped_.notify_one();
  thread_.join();
}

bool BackgroundThread::SubmitBytes(const void* call, size_t bytes,
                                   void (*run)(const void*)) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (submitted_ != waited_for_) return false;
    std::memcpy(call_, call, bytes);
    run_ = run;
    ++submitted_;
  }
  submitted_or_stopped_.notify_one();
  return true;
}

bool BackgroundThread::Wait() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  if (submitted_ == waited_for_) return false;
  const uint64_t call = submitted_;
  call_ended_.wait(lock, [&] { return ended_ >= call; });
  // Another thread may have waited for it too, and submitted the next.
  if (waited_for_ < call) waited_for_ = call;
  return true;
}

bool BackgroundThread::pending() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return submitted_ != waited_for_;
}

bool BackgroundThread::ended() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return submitted_ != waited_for_ && ended_ == submitted_;
}

void BackgroundThread::Loop() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    submitted_or_stopped_.wait(lock,
                               [&] { return stop_ || ended_ != submitted_; });
    if (ended_ == submitted_) return;
    lock.unlock();
    run_(call_);  // nobody writes to it: the call is pending
    lock.lock();
    ++ended_;
    call_ended_.notify_all();
  }
}

}  // namespace quern
