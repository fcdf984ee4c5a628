#ifndef QUERN_TESTING_MANY_WORKERS_H_
#define QUERN_TESTING_MANY_WORKERS_H_

// An Executor that claims many workers and runs their tasks one after the
// other, last first: what a machine with many cores would divide, in an order
// it might have, on a machine with few.

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "quern/core/executor.h"

namespace quern {

class ManyWorkers final : public Executor {
 public:
  explicit ManyWorkers(int workers) : workers_(workers) {}
  int num_workers() const override { return workers_; }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override {
    for (int64_t task = num_tasks; task-- > 0;) {
      fn(task, static_cast<int>(task % workers_));
    }
  }

 private:
  int workers_;
};

}  // namespace quern

#endif  // QUERN_TESTING_MANY_WORKERS_H_
