// The lives of objects: destroyed, remembered, and used by several threads.

#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/c/caught.h"
#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/norm_testutil.h"
#include "quern/core/dtype.h"

namespace quern {
namespace {

using ObjectTest = NormInC;

TEST_F(ObjectTest, RecognisesNullForeignAndDestroyedObjects) {
  alignas(16) char junk[4096] = {};
  for (void* const handle :
       {static_cast<void*>(nullptr), static_cast<void*>(junk),
        static_cast<void*>(junk + 1)}) {
    auto* const op = static_cast<quern_op*>(handle);
    EXPECT_EQ(quern_op_execute(op, operands_.data(), 3, nullptr, 0, nullptr),
              QUERN_INVALID_ARGUMENT);
    EXPECT_NE(MessageOf(op).find("need one that quern.h made"),
              std::string::npos);
    EXPECT_EQ(ExplanationOf(op), "");
  }
  EXPECT_EQ(quern_destroy(nullptr), QUERN_OK);
  EXPECT_EQ(quern_destroy(junk), QUERN_INVALID_ARGUMENT);

  quern_executor* pool = nullptr;
  ASSERT_C_OK(quern_executor_create_pool(library_.get(), 1, &pool),
              library_.get());
  ExpectRefused(Execute(reinterpret_cast<quern_executor*>(op_)), op_,
                QUERN_INVALID_ARGUMENT, "of kind operator; need executor");
  ASSERT_C_OK(quern_destroy(pool), pool);
  EXPECT_EQ(MessageOf(pool), "the object was destroyed; need one that exists");
  ExpectRefused(Execute(pool), op_, QUERN_FAILED_PRECONDITION,
                "the executor was destroyed");
  ASSERT_C_OK(quern_destroy(op_), op_);
  ExpectRefused(Execute(), op_, QUERN_FAILED_PRECONDITION,
                "the operator was destroyed");
  ExpectRefused(quern_destroy(op_), op_, QUERN_FAILED_PRECONDITION,
                "was destroyed already");
  EXPECT_EQ(ExplanationOf(op_), "");
}

// A slot is used again only after QUERN_REMEMBERED others.
TEST_F(ObjectTest, RemembersDestroyedObjects) {
  ASSERT_C_OK(quern_destroy(op_), op_);
  quern_executor* executor = nullptr;
  for (int i = 0; i < QUERN_REMEMBERED; ++i) {
    ASSERT_C_OK(quern_executor_create_pool(library_.get(), 1, &executor),
                library_.get());
    ASSERT_NE(static_cast<void*>(executor), static_cast<void*>(op_));
    ASSERT_C_OK(quern_destroy(executor), executor);
    ExpectRefused(Execute(), op_, QUERN_FAILED_PRECONDITION, "was destroyed");
  }
  ASSERT_C_OK(quern_executor_create_pool(library_.get(), 1, &executor),
              library_.get());
  EXPECT_EQ(static_cast<void*>(executor), static_cast<void*>(op_));
  EXPECT_EQ(MessageOf(executor), "");
  ExpectRefused(Execute(), op_, QUERN_INVALID_ARGUMENT, "of kind executor");
}

// Threads that run, change and destroy one operator: each call is done or
// refused.
TEST_F(ObjectTest, SurvivesThreadsThatCallAtOnce) {
  std::atomic<int> done{0}, refused{0}, other{0};
  const auto count = [&](quern_status status) {
    (status == QUERN_OK                    ? done
     : status == QUERN_FAILED_PRECONDITION ? refused
                                           : other)
        .fetch_add(1);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      std::vector<float> out(kRows * kHidden);
      TensorInC out_in_c(DType::kF32, out.data(), {kRows, kHidden});
      const quern_operand operands[] = {
          operands_[0], operands_[1], {"out", out_in_c.get(), 0}};
      for (int i = 0; i < 2000; ++i) {
        count(quern_op_execute(op_, operands, 3, nullptr, 0, nullptr));
        if (i % 16 == 0) MessageOf(op_);
      }
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < 1000; ++i) {
      count(quern_op_prepare(op_, operands_.data(), 3, nullptr));
    }
    count(quern_destroy(op_));
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(other.load(), 0);
  EXPECT_EQ(done.load() + refused.load(), 3 * 2000 + 1000 + 1);
  EXPECT_GT(done.load(), 0);
  ExpectRefused(Execute(), op_, QUERN_FAILED_PRECONDITION, "was destroyed");
}

// An executor that destroys the operator that runs on it.
TEST_F(ObjectTest, OutlivesItsOwnDestruction) {
  struct Context {
    quern_op* op;
    quern_library* library;
    quern_status op_destroyed, library_destroyed;
  } context = {op_, library_.get(), QUERN_INTERNAL, QUERN_INTERNAL};
  quern_executor_functions functions = {};
  functions.size = sizeof(functions);
  functions.context = &context;
  functions.num_workers = [](void*) -> int32_t { return 2; };
  functions.parallel_for = [](void* pointer, int64_t n, quern_task run,
                              void* task_context) {
    auto& c = *static_cast<Context*>(pointer);
    c.library_destroyed = quern_destroy(c.library);
    c.op_destroyed = quern_destroy(c.op);
    for (int64_t t = 0; t < n; ++t) run(task_context, t, 0);
  };
  quern_executor* mine = nullptr;
  ASSERT_C_OK(quern_executor_create_from(library_.get(), &functions, &mine),
              library_.get());
  ASSERT_C_OK(Execute(mine), op_);
  EXPECT_EQ(context.op_destroyed, QUERN_OK);
  EXPECT_EQ(context.library_destroyed, QUERN_FAILED_PRECONDITION);
  EXPECT_EQ(out_.ToVector(), InCpp());
}

// C cannot catch.
TEST(CaughtTest, MakesAStatusOfWhatIsThrown) {
  using c_abi::Caught;
  EXPECT_EQ(Caught([] { return absl::OkStatus(); }), absl::OkStatus());
  EXPECT_EQ(Caught([]() -> absl::Status { throw std::bad_alloc(); }),
            absl::ResourceExhaustedError("the system has no memory left"));
  EXPECT_EQ(Caught([]() -> absl::Status { throw std::runtime_error("why"); }),
            absl::InternalError("why"));
  EXPECT_EQ(Caught([]() -> absl::Status { throw 7; }),
            absl::InternalError("an exception that is no std::exception"));
}

}  // namespace
}  // namespace quern
