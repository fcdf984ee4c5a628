// oneDNN's layers on more workers than this machine has: rows are divided too,
// in scratch of exactly WorkspaceBytes between guard pages, and the bits are
// those of one worker.

#include "quern/testing/many_workers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/layers_testutil.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

constexpr int kWorkers[] = {2, 3, 7, 16, 17, 31, 64, 127, 256};
constexpr int64_t kRows[] = {1, 5, 33, 130, 256, 300};

// ManyWorkers, and the tasks of the largest of their regions.
class Counter final : public Executor {
 public:
  explicit Counter(int workers) : many_(workers) {}
  int num_workers() const override { return many_.num_workers(); }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override {
    most_tasks = std::max(most_tasks, num_tasks);
    many_.ParallelFor(num_tasks, fn);
  }
  int64_t most_tasks = 0;

 private:
  ManyWorkers many_;
};

template <typename A, typename C>
LinearPlan RandomPlan(Rng& rng, WeightFormat format, int64_t n, int64_t k) {
  InlineExecutor executor;
  return OneDnnPlan(SpecOf<A, C>(),
                    RealWeights(rng, {format}, {0, n, k}).Pack(executor));
}

template <typename A, typename C>
void ExpectSameBits(WeightFormat format) {
  TestRng rng;
  const int64_t n = 300, k = 257;
  const LinearPlan plan = RandomPlan<A, C>(rng, format, n, k);
  // Elements from row to row of a and of c. Some strides ask oneDNN for more
  // scratch, and the rows then go through scratch without gaps.
  const int64_t a_strides[] = {k, 512, k + 4};
  const int64_t c_strides[] = {n + 3, 1024, n};
  size_t i = 0;
  for (const int64_t m : kRows) {
    const int64_t c_stride = c_strides[i % 3];
    const StridedMatrix<A> a(UniformReals<A>(rng, m * k), m, k,
                             a_strides[i % 3]);
    ++i;
    // In a workspace of exactly that many bytes.
    const auto run = [&](Executor& executor) {
      StridedMatrix<C> c(m, n, c_stride);
      LinearArgs args;
      args.a = a.view();
      args.c = c.view();
      const auto bytes = plan.WorkspaceBytes(m, executor.num_workers());
      EXPECT_EQ(bytes.status(), absl::OkStatus());
      GuardBuffer<float> memory(*bytes / 4);
      plan.Execute(args, Workspace(memory.data(), static_cast<size_t>(*bytes)),
                   executor);
      return c.ToDense();
    };
    InlineExecutor one;
    const auto want = run(one);
    for (const int workers : kWorkers) {
      Counter executor(workers);
      const auto c = run(executor);
      ASSERT_TRUE(AllBitsEqual(c, want))
          << m << " rows, " << workers << " workers, stride of c " << c_stride
          << ", " << plan.Explain(m);
    }
  }
}

TEST(OneDnnManyWorkersTest, BitsOfLinearsDoNotDependOnTheNumberOfWorkers) {
  ExpectSameBits<BFloat16, float>(WeightFormat::kBF16);
  ExpectSameBits<BFloat16, BFloat16>(WeightFormat::kBF16);
  ExpectSameBits<float, float>(WeightFormat::kF32);
  ExpectSameBits<Float16, BFloat16>(WeightFormat::kF16);
}

TEST(OneDnnManyWorkersTest, BitsOfInt8DoNotDependOnIt) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    if (mode.bias != mode.zero_points || !mode.per_channel) continue;
    const Layer layer = RandomLayer(rng, 300, 1300, mode);
    const LinearPlan plan = PlanOf<float>(layer);
    for (const int64_t m : kRows) {
      const Rows rows = RandomRows(rng, m, layer);
      const auto run = [&](Executor& executor) {
        return RunRows<float>(plan, rows, executor, 5);
      };
      InlineExecutor one;
      const auto want = run(one);
      for (const int workers : kWorkers) {
        Counter executor(workers);
        ASSERT_TRUE(AllBitsEqual(run(executor), want))
            << mode << " " << m << " rows, " << workers << " workers";
      }
    }
  }
}

// A product of 256 rows and 4096 columns once had 16 tasks for any number of
// workers.
TEST(OneDnnManyWorkersTest, RowsAreDividedWhereColumnsAreFew) {
  TestRng rng;
  const int64_t n = 1024, k = 64, m = 256;
  const LinearPlan plan =
      RandomPlan<float, float>(rng, WeightFormat::kF32, n, k);
  Counter executor(32);
  RunLinear<float, float>(plan, {m, n, k}, UniformReals<float>(rng, m * k),
                          executor);
  EXPECT_GE(executor.most_tasks, 32) << plan.Explain(m);

  const Layer layer = RandomLayer(rng, n, k, Mode());
  const LinearPlan scaled = PlanOf<float>(layer);
  const Rows rows = RandomRows(rng, m, layer);
  for (const int workers : {16, 32, 64, 128}) {
    Counter counter(workers);
    RunRows<float>(scaled, rows, counter);
    EXPECT_GE(counter.most_tasks, workers);
    // Where columns alone are enough, there are no more tasks than of columns.
    if (workers == 16) {
      EXPECT_EQ(counter.most_tasks, 16);
    }
  }
}

}  // namespace
}  // namespace quern
