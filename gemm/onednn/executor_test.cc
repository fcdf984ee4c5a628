#include "gemm/onednn/executor.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "core/executor.h"
#include "gtest/gtest.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "oneapi/dnnl/dnnl_threadpool.hpp"
#include "testing/workers.h"

namespace quern {
namespace {

TEST(OneDnnThreadpoolTest, RunsEveryTaskOnceWithItsNumber) {
  const auto executor = Workers(3);
  OneDnnThreadpool threads(*executor);
  EXPECT_EQ(threads.get_num_threads(), 3);
  EXPECT_EQ(threads.get_flags(), 0u);  // synchronous
  for (const int n : {0, 1, 2, 3, 7, 100}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(n));
    threads.parallel_for(n, [&](int i, int of) {
      EXPECT_EQ(of, n);
      ++runs[static_cast<size_t>(i)];
    });
    for (const auto& count : runs) EXPECT_EQ(count, 1) << "n=" << n;
  }
}

TEST(OneDnnThreadpoolTest, KnowsItsOwnTasks) {
  const auto executor = Workers(2);
  const auto other_executor = Workers(2);
  OneDnnThreadpool threads(*executor), same(*executor), other(*other_executor);
  EXPECT_FALSE(threads.get_in_parallel());
  std::atomic<int> inside{0};
  threads.parallel_for(8, [&](int, int) {
    inside += threads.get_in_parallel() && same.get_in_parallel() &&
              !other.get_in_parallel();
  });
  EXPECT_EQ(inside, 8);
  EXPECT_FALSE(threads.get_in_parallel());
  std::thread([&] { EXPECT_FALSE(threads.get_in_parallel()); }).join();
}

TEST(OneDnnThreadpoolTest, RunsNestedCallsInline) {
  const auto executor = Workers(2);
  InlineExecutor inline_executor;
  OneDnnThreadpool outer(*executor), inner(*executor), other(inline_executor);
  std::atomic<int> runs{0}, strangers{0};
  outer.parallel_for(2, [&](int, int) {
    const auto self = std::this_thread::get_id();
    inner.parallel_for(3, [&](int i, int n) {
      runs += n == 3 && 0 <= i && i < 3;
      strangers += std::this_thread::get_id() != self;
    });
    // Through another Executor and back.
    other.parallel_for(
        2, [&](int, int) { outer.parallel_for(2, [&](int, int) { ++runs; }); });
  });
  EXPECT_EQ(strangers, 0);
  EXPECT_EQ(runs, 2 * 3 + 2 * 2 * 2);
  EXPECT_FALSE(outer.get_in_parallel());
}

// Counts the tasks that it is given.
class CountingExecutor final : public Executor {
 public:
  int num_workers() const override { return 4; }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override {
    tasks += num_tasks;
    for (int64_t i = 0; i < num_tasks; ++i) fn(i, static_cast<int>(i % 4));
  }
  int64_t tasks = 0;
};

TEST(OneDnnThreadpoolTest, CarriesAMatmul) {
  constexpr int64_t kSize = 256;
  CountingExecutor executor;
  OneDnnThreadpool threads(executor);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  const dnnl::memory::desc desc({kSize, kSize}, dnnl::memory::data_type::f32,
                                dnnl::memory::format_tag::ab);
  std::vector<float> a(kSize * kSize, 1.0f), b(kSize * kSize, 2.0f),
      c(kSize * kSize, -1.0f);
  dnnl::memory src(desc, engine, a.data()), weights(desc, engine, b.data()),
      dst(desc, engine, c.data());
  dnnl_threadpool_interop_set_max_concurrency(4);
  const dnnl::matmul matmul(
      dnnl::matmul::primitive_desc(engine, desc, desc, desc));
  matmul.execute(
      dnnl::threadpool_interop::make_stream(engine, &threads),
      {{DNNL_ARG_SRC, src}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, dst}});
  EXPECT_EQ(c, std::vector<float>(kSize * kSize, 2.0f * kSize));
  EXPECT_GT(executor.tasks, 1);
}

}  // namespace
}  // namespace quern
