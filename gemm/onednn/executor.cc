#include "gemm/onednn/executor.h"

#include <cstdint>
#include <functional>

#include "core/executor.h"

namespace quern {
namespace {

// The Executors whose tasks this thread is in, innermost first. One pointer is
// not enough: a task of one Executor may use another one.
class Frame {
 public:
  explicit Frame(const Executor* executor) : executor_(executor), outer_(top_) {
    top_ = this;
  }
  ~Frame() { top_ = outer_; }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  static bool Contains(const Executor* executor) {
    for (const Frame* frame = top_; frame != nullptr; frame = frame->outer_) {
      if (frame->executor_ == executor) return true;
    }
    return false;
  }

 private:
  static thread_local const Frame* top_;
  const Executor* const executor_;
  const Frame* const outer_;
};

thread_local const Frame* Frame::top_ = nullptr;

}  // namespace

bool OneDnnThreadpool::get_in_parallel() const {
  return Frame::Contains(&executor_);
}

void OneDnnThreadpool::parallel_for(int n,
                                    const std::function<void(int, int)>& fn) {
  if (n <= 1 || get_in_parallel()) {
    for (int i = 0; i < n; ++i) fn(i, n);
    return;
  }
  executor_.ParallelFor(n, [&](int64_t task, int) {
    const Frame frame(&executor_);
    fn(static_cast<int>(task), n);
  });
}

}  // namespace quern
