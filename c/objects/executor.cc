#include "quern/c/objects/executor.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/c/library.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace c_abi {
namespace {

// As many as AttentionSchedule::Build takes.
constexpr int32_t kMaxWorkers = 1 << 16;

// Sums of these tell whether each task ran once.
uint64_t HashOf(int64_t task) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  const uint64_t x = (static_cast<uint64_t>(task) + 1) * kOdd;
  return (x ^ (x >> 32)) * kOdd;
}

struct Fork {
  absl::FunctionRef<void(int64_t, int)> fn;
  int64_t num_tasks;
  int workers;
  std::atomic<uint8_t>* begun;  // of each task, or null
  std::atomic<int64_t> ran{0};
  std::atomic<uint64_t> hashes{0};
  std::atomic<bool> out_of_range{false};
};

extern "C" void RunTask(void* fork_pointer, int64_t task, int32_t worker) {
  Fork& fork = *static_cast<Fork*>(fork_pointer);
  if (task < 0 || task >= fork.num_tasks || worker < 0 ||
      worker >= fork.workers ||
      (fork.begun != nullptr && fork.begun[task].exchange(1) != 0)) {
    fork.out_of_range.store(true, std::memory_order_relaxed);
    return;
  }
  fork.fn(task, worker);
  fork.hashes.fetch_add(HashOf(task), std::memory_order_relaxed);
  fork.ran.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

std::string ExecutorObject::Explain() const {
  return absl::StrCat(workers_, pool_ != nullptr
                                    ? " workers of a pool"
                                    : " workers of the caller's functions");
}

std::atomic<uint8_t>* CallbackExecutor::NewMarks(int64_t num_tasks) {
  if (marks_size_ < num_tasks) {
    // The operator that forks is noexcept.
    marks_.reset(new (std::nothrow)
                     std::atomic<uint8_t>[static_cast<size_t>(num_tasks)]);
    marks_size_ = marks_ == nullptr ? 0 : num_tasks;
    if (marks_ == nullptr) return nullptr;
  }
  for (int64_t i = 0; i < num_tasks; ++i) {
    marks_[static_cast<size_t>(i)].store(0, std::memory_order_relaxed);
  }
  return marks_.get();
}

void CallbackExecutor::ParallelFor(int64_t num_tasks,
                                   absl::FunctionRef<void(int64_t, int)> fn) {
  if (num_tasks <= 0) return;
  std::atomic<uint8_t>* const marks = finishes_ ? NewMarks(num_tasks) : nullptr;
  if (finishes_ && marks == nullptr) {
    // Without marks, only the calling thread is known to run each task once.
    for (int64_t task = 0; task < num_tasks; ++task) fn(task, 0);
    return;
  }
  Fork fork{fn, num_tasks, object_.workers(), marks};
  object_.functions().parallel_for(object_.functions().context, num_tasks,
                                   &RunTask, &fork);
  const int64_t ran = fork.ran.load();
  uint64_t hashes = fork.hashes.load();
  for (int64_t task = 0; task < num_tasks; ++task) hashes -= HashOf(task);
  for (int64_t i = 0; fork.begun != nullptr && i < num_tasks; ++i) {
    if (fork.begun[i].load() == 0) fn(i, 0);
  }
  if (broken_ ||
      (ran == num_tasks && hashes == 0 && !fork.out_of_range.load())) {
    return;
  }
  broken_ = true;
  tasks_ = num_tasks;
  ran_ = ran;
}

absl::Status CallbackExecutor::Verdict() const {
  if (!broken_) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "the executor's parallel_for ran ", ran_, " of ", tasks_,
      " tasks, one of them twice, or asked for a task or worker that does not "
      "exist; need each "
      "task once, by a worker from 0 to ",
      object_.workers() - 1));
}

absl::Status CallExecutor::Take(const quern_executor* handle,
                                BrokenForks broken_forks) {
  if (handle == nullptr) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(use_.Take(handle, Kind::kExecutor, Mode::kUse));
  const auto& object = use_.As<ExecutorObject>();
  if (object.pool() != nullptr) {
    executor_ = object.pool();
  } else {
    executor_ = &callback_.emplace(object, broken_forks);
  }
  return absl::OkStatus();
}

namespace {

using Made = absl::StatusOr<std::unique_ptr<Object>>;

Made MakePool(int32_t workers) {
  if (workers == 0) {
    return std::make_unique<ExecutorObject>(
        HwyExecutor::CreateForThisMachine());
  }
  QUERN_ASSIGN_OR_RETURN(auto pool, HwyExecutor::Create(workers));
  return std::make_unique<ExecutorObject>(std::move(pool));
}

Made MakeFrom(const quern_executor_functions* functions) {
  constexpr char kFunction[] = "quern_executor_create_from";
  QUERN_RETURN_IF_ERROR(CheckNotNull(kFunction, "functions", functions));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_executor_functions", functions->size,
                                  sizeof(quern_executor_functions)));
  if (functions->num_workers == nullptr || functions->parallel_for == nullptr) {
    return InvalidArgument(kFunction, "num_workers or parallel_for is null");
  }
  const int32_t workers = functions->num_workers(functions->context);
  QUERN_RETURN_IF_ERROR(
      CheckRange(kFunction, "num_workers", workers, 1, kMaxWorkers));
  return std::make_unique<ExecutorObject>(*functions, workers);
}

}  // namespace
}  // namespace c_abi
}  // namespace quern

using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;

extern "C" {

quern_status quern_executor_create_pool(quern_library* library, int32_t workers,
                                        quern_executor** executor) {
  return MakeObject(library, "quern_executor_create_pool", Kind::kExecutor,
                    executor,
                    [&](Library&) { return quern::c_abi::MakePool(workers); });
}

quern_status quern_executor_create_from(
    quern_library* library, const quern_executor_functions* functions,
    quern_executor** executor) {
  return MakeObject(
      library, "quern_executor_create_from", Kind::kExecutor, executor,
      [&](Library&) { return quern::c_abi::MakeFrom(functions); });
}

}  // extern "C"
