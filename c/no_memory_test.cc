// Calls during which the system has no memory left: each returns
// QUERN_RESOURCE_EXHAUSTED, throws nothing, and leaves its objects as they
// were.

#include <cstddef>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/attention_testutil.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/core/dtype.h"

namespace quern {
namespace {

// The allocations of this thread that succeed before all fail; negative: none
// fails.
thread_local int before_failure = -1;
thread_local bool failed = false;

void* Allocate(size_t bytes) {
  if (before_failure == 0) {
    failed = true;
    throw std::bad_alloc();
  }
  if (before_failure > 0) --before_failure;
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace
}  // namespace quern

void* operator new(size_t bytes) { return quern::Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace quern {
namespace {

// Makes all allocations of call() fail, then those after the first, until none
// is left that could. call returns a status, and undo() takes back what a call
// that succeeded has done. The numbers grow by a tenth beyond 50, because a
// call may allocate often.
template <typename Fn, typename Undo>
void FailEachAllocation(const Fn& call, const Undo& undo) {
  for (int n = 0;; n += 1 + n / 50 * 5) {
    before_failure = n;
    failed = false;
    const quern_status status = call();
    before_failure = -1;
    if (status == QUERN_OK) undo();
    if (!failed) {
      EXPECT_EQ(status, QUERN_OK);
      return;
    }
    EXPECT_TRUE(status == QUERN_OK || status == QUERN_RESOURCE_EXHAUSTED)
        << status << " with " << n << " allocations";
  }
}

TEST(LibraryWithoutMemoryTest, IsRefused) {
  quern_library* library = nullptr;
  char text[64] = "";
  FailEachAllocation(
      [&] {
        return quern_library_create(nullptr, &library, text, sizeof(text));
      },
      [&] {
        EXPECT_EQ(quern_destroy(library), QUERN_OK);
        library = nullptr;
      });
  EXPECT_EQ(library, nullptr);
  quern_library_options wrong = {};
  before_failure = 0;
  EXPECT_EQ(quern_library_create(&wrong, &library, text, sizeof(text)),
            QUERN_RESOURCE_EXHAUSTED);
  before_failure = -1;
  EXPECT_STREQ(text, "no memory left");
}

class NoMemoryTest : public AttentionInC {
 protected:
  // call() is refused, and its sentence finds no memory.
  template <typename Fn>
  void ExpectNoMemory(const void* object, const Fn& call) {
    before_failure = 0;
    const quern_status status = call();
    before_failure = -1;
    EXPECT_EQ(status, QUERN_RESOURCE_EXHAUSTED);
    EXPECT_EQ(MessageOf(object), "no memory left");
  }
};

TEST_F(NoMemoryTest, RefusesCallsOnOperators) {
  float x[2] = {3, 4}, out[2] = {};
  TensorInC x_tensor(DType::kF32, x, {1, 2}),
      out_tensor(DType::kF32, out, {1, 2});
  const quern_argument of[] = {quern_tensor_argument("x", x_tensor.get())};
  quern_op* op = nullptr;
  FailEachAllocation(
      [&] {
        return quern_op_create(library_.get(), "silu", nullptr, of, 1, &op);
      },
      [&] { EXPECT_C_OK(quern_destroy(op), op); });
  EXPECT_EQ(ExplanationOf(library_.get()).rfind("Quern ", 0), 0u);

  op = Make("silu", {of[0]});
  char text[64] = "";
  before_failure = 0;
  EXPECT_EQ(quern_explain(op, text, sizeof(text)), 0u);
  EXPECT_EQ(quern_ops(library_.get(), text, sizeof(text)), 0u);
  before_failure = -1;
  for (quern_op* const handle : {op, reinterpret_cast<quern_op*>(schedule_)}) {
    ExpectNoMemory(handle, [&] {
      return quern_op_execute(handle, nullptr, 1, nullptr, 0, nullptr);
    });
  }
  const quern_operand step[] = {{"x", x_tensor.get(), QUERN_READ_ONLY},
                                {"out", out_tensor.get(), 0}};
  EXPECT_C_OK(quern_op_execute(op, step, 2, nullptr, 0, nullptr), op);
  EXPECT_GT(out[1], out[0]);

  before_failure = 0;
  failed = false;
  const quern_status destroyed = quern_destroy(op);
  before_failure = -1;
  EXPECT_FALSE(failed) << "the end of an object allocated";
  EXPECT_EQ(destroyed, QUERN_OK);
  ExpectNoMemory(op, [&] { return quern_destroy(op); });
}

TEST_F(NoMemoryTest, RefusesCallsOnWeightsCachesAndSchedules) {
  std::vector<float> b(6 * 8, 0.5f);
  TensorInC codes(DType::kF32, b.data(), {6, 8});
  quern_linear_weights_options options = {};
  options.size = sizeof(options);
  options.n = 6;
  options.k = 8;
  quern_linear_source source = {};
  source.codes = codes.get();
  quern_linear_weights* weights = nullptr;
  FailEachAllocation(
      [&] {
        return quern_linear_weights_pack(library_.get(), &options, &source, 1,
                                         sizeof(source), nullptr, &weights);
      },
      [&] { EXPECT_C_OK(quern_destroy(weights), weights); });
  quern_kv_cache* cache = nullptr;
  FailEachAllocation([&] { return MakeCache(cache_options_, &cache); },
                     [&] { EXPECT_C_OK(quern_destroy(cache), cache); });
  quern_schedule* schedule = nullptr;
  FailEachAllocation(
      [&] {
        return quern_schedule_create(library_.get(), cache_, &schedule_options_,
                                     &schedule);
      },
      [&] { EXPECT_C_OK(quern_destroy(schedule), schedule); });
  const Lengths q_lens = {20, 3}, kv_lens = {20, 3};
  const quern_step step = StepOf(q_lens, kv_lens);
  FailEachAllocation([&] { return quern_schedule_build(schedule_, &step); },
                     [] {});
  EXPECT_EQ(ExplanationOf(schedule_).rfind("schedule of 2 sequences", 0), 0u);
  quern_executor* pool = nullptr;
  FailEachAllocation(
      [&] { return quern_executor_create_pool(library_.get(), 1, &pool); },
      [&] { EXPECT_C_OK(quern_destroy(pool), pool); });
}

}  // namespace
}  // namespace quern
