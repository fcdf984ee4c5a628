#ifndef QUERN_C_OBJECTS_EXECUTOR_H_
#define QUERN_C_OBJECTS_EXECUTOR_H_

// Private to c/. The executor of one call.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "quern/c/object.h"
#include "quern/core/executor.h"
#include "quern/core/threads/hwy_executor.h"

namespace quern {
namespace c_abi {

class ExecutorObject final : public Object {
 public:
  explicit ExecutorObject(std::unique_ptr<HwyExecutor> pool)
      : pool_(std::move(pool)), workers_(pool_->num_workers()) {}
  ExecutorObject(const quern_executor_functions& functions, int workers)
      : functions_(functions), workers_(workers) {}

  std::string Explain() const override;
  // Null if the executor is functions().
  HwyExecutor* pool() const { return pool_.get(); }
  const quern_executor_functions& functions() const { return functions_; }
  int workers() const { return workers_; }

 private:
  std::unique_ptr<HwyExecutor> pool_;
  quern_executor_functions functions_ = {};
  int workers_;
};

// What becomes of tasks that the caller's functions leave out or repeat.
enum class BrokenForks : uint8_t {
  kReport,  // Verdict tells
  // Verdict tells, and each task is done once: those that were left out by the
  // calling thread. Indices that one operator writes and another reads, such as
  // those of experts, are then never uninitialised memory.
  kFinish,
};

// The caller's functions as an Executor, for one call. Tasks with a number or a
// worker out of range are not run.
class CallbackExecutor final : public Executor {
 public:
  CallbackExecutor(const ExecutorObject& object, BrokenForks broken_forks)
      : object_(object), finishes_(broken_forks == BrokenForks::kFinish) {}
  int num_workers() const override { return object_.workers(); }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override;
  // Internal if the functions did not keep their promise.
  absl::Status Verdict() const;

 private:
  // As many zeros as tasks; null if there is no memory for them.
  std::atomic<uint8_t>* NewMarks(int64_t num_tasks);

  const ExecutorObject& object_;
  const bool finishes_;
  bool broken_ = false;
  int64_t tasks_ = 0, ran_ = 0;
  std::unique_ptr<std::atomic<uint8_t>[]> marks_;
  int64_t marks_size_ = 0;
};

// What an executor handle, or null, means for one call.
class CallExecutor {
 public:
  absl::Status Take(const quern_executor* handle,
                    BrokenForks broken_forks = BrokenForks::kReport);
  Executor& get() { return *executor_; }
  // To be asked after the call.
  absl::Status Verdict() const {
    return callback_.has_value() ? callback_->Verdict() : absl::OkStatus();
  }

 private:
  Borrowed use_;
  InlineExecutor inline_;
  std::optional<CallbackExecutor> callback_;
  Executor* executor_ = &inline_;
};

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OBJECTS_EXECUTOR_H_
