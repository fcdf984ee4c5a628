// Executors of the C interface: pools, and the functions of a caller.

#include <cstdint>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/norm_testutil.h"

namespace quern {
namespace {

using ExecutorTest = NormInC;

TEST_F(ExecutorTest, RunsOnAPoolAndOnTheCallersFunctions) {
  quern_executor* pool = nullptr;
  ASSERT_C_OK(quern_executor_create_pool(library_.get(), 2, &pool),
              library_.get());
  ASSERT_C_OK(Execute(pool), op_);
  EXPECT_EQ(out_.ToVector(), InCpp());
  EXPECT_EQ(ExplanationOf(pool), "2 workers of a pool");

  out_.FillWithPoison();
  int forks = 0;
  quern_executor_functions functions = {};
  functions.size = sizeof(functions);
  functions.context = &forks;
  functions.num_workers = [](void*) -> int32_t { return 3; };
  functions.parallel_for = [](void* context, int64_t num_tasks, quern_task run,
                              void* task_context) {
    ++*static_cast<int*>(context);
    for (int64_t t = num_tasks; t-- > 0;) run(task_context, t, 2);
  };
  quern_executor* mine = nullptr;
  ASSERT_C_OK(quern_executor_create_from(library_.get(), &functions, &mine),
              library_.get());
  ASSERT_C_OK(Execute(mine), op_);
  EXPECT_EQ(out_.ToVector(), InCpp());
  EXPECT_GT(forks, 0);
}

TEST_F(ExecutorTest, SaysWhatABrokenExecutorDid) {
  quern_executor_functions functions = {};
  functions.size = sizeof(functions);
  functions.num_workers = [](void*) -> int32_t { return 2; };
  const auto expect = [&](const char* words) {
    quern_executor* mine = nullptr;
    ASSERT_C_OK(quern_executor_create_from(library_.get(), &functions, &mine),
                library_.get());
    ExpectRefused(Execute(mine), op_, QUERN_INTERNAL, words);
  };
  functions.parallel_for = [](void*, int64_t, quern_task, void*) {};
  expect("ran 0 of ");
  functions.parallel_for = [](void*, int64_t n, quern_task run, void* context) {
    for (int64_t t = 0; t < n; ++t) run(context, t, 2);
  };
  expect("by a worker from 0 to 1");
  functions.parallel_for = [](void*, int64_t n, quern_task run, void* context) {
    for (int64_t t = 0; t <= n; ++t) run(context, t, 0);
  };
  expect("a task or worker that does not exist");
  functions.parallel_for = [](void*, int64_t n, quern_task run, void* context) {
    for (int64_t t = 0; t < n; ++t) run(context, t == 1 ? 0 : t, 0);
  };
  expect("one of them twice");
}

}  // namespace
}  // namespace quern
