// oneDNN's layers on more workers than this machine has: rows are divided too,
// in scratch of exactly WorkspaceBytes between guard pages, and the bits are
// those of one worker.

#include "quern/testing/many_workers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/onednn/linear.h"
#include "quern/gemm/onednn/scaled_linear.h"
#include "quern/gemm/onednn/scaled_linear_testutil.h"
#include "quern/gemm/onednn/scratch.h"
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

// fn(scratch) with a scratch of exactly that many bytes.
template <typename Fn>
void InScratch(int64_t bytes, const Fn& fn) {
  GuardBuffer<float> memory(bytes / 4);
  OneDnnScratch scratch(Workspace(memory.data(), static_cast<size_t>(bytes)));
  fn(scratch);
}

template <typename A, typename C>
OneDnnLinearPlan RandomPlan(Rng& rng, int64_t n, int64_t k) {
  OneDnnLinearSpec spec;
  spec.n = n;
  spec.k = k;
  spec.a = DTypeOf<A>;
  spec.c = DTypeOf<C>;
  const auto w = UniformReals<A>(rng, n * k);
  InlineExecutor executor;
  auto plan =
      OneDnnLinearPlan::Create(spec, DenseMatrix(w.data(), n, k), {}, executor);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

template <typename A, typename C>
void ExpectSameBits() {
  TestRng rng;
  const int64_t n = 300, k = 257;
  const OneDnnLinearPlan plan = RandomPlan<A, C>(rng, n, k);
  // From row to row of a and of c. Some strides ask oneDNN for more scratch,
  // and the rows then go through scratch without gaps.
  const int64_t a_strides[] = {k, 512, k + 4};
  const int64_t c_strides[] = {n + 3, 1024, n};
  size_t i = 0;
  for (const int64_t m : kRows) {
    const int64_t c_stride = c_strides[i % 3];
    const StridedMatrix<A> a(UniformReals<A>(rng, m * k), m, k,
                             a_strides[i % 3]);
    ++i;
    const auto run = [&](OneDnnScratch& scratch, Executor& executor) {
      StridedMatrix<C> c(m, n, c_stride);
      plan.Execute(a.view(), c.view(), scratch, executor);
      return c.ToDense();
    };
    InlineExecutor one;
    OneDnnScratch own;  // grows to what the strides ask for
    const auto want = run(own, one);
    for (const int workers : kWorkers) {
      Counter executor(workers);
      std::vector<C> c;
      InScratch(plan.WorkspaceBytes(m, workers).value(),
                [&](OneDnnScratch& scratch) { c = run(scratch, executor); });
      ASSERT_TRUE(AllBitsEqual(c, want))
          << m << " rows, " << workers << " workers, stride of c " << c_stride
          << ", " << plan.Explain(m);
    }
  }
}

TEST(OneDnnManyWorkersTest, BitsOfLinearsDoNotDependOnTheNumberOfWorkers) {
  ExpectSameBits<BFloat16, float>();
  ExpectSameBits<BFloat16, BFloat16>();
  ExpectSameBits<float, float>();
  ExpectSameBits<Float16, BFloat16>();
}

TEST(OneDnnManyWorkersTest, BitsOfScaledLinearsDoNotDependOnIt) {
  TestRng rng;
  for (const Mode& mode : AllModes()) {
    if (mode.bias != mode.zero_points || !mode.per_channel) continue;
    const Layer layer = RandomLayer(rng, 300, 1300, mode);
    const OneDnnScaledLinearPlan plan = Runner::Create<float>(layer);
    for (const int64_t m : kRows) {
      const Rows rows = RandomRows(rng, m, layer);
      const auto run = [&](Executor& executor) {
        std::vector<float> c;
        InScratch(plan.WorkspaceBytes(m, executor.num_workers()).value(),
                  [&](OneDnnScratch& scratch) {
                    c = Runner::Run<float>(plan, rows, executor, scratch, 5);
                  });
        return c;
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

// 256 rows of 4096 columns once were 16 tasks, whatever the workers.
TEST(OneDnnManyWorkersTest, RowsAreDividedWhereColumnsAreFew) {
  TestRng rng;
  const int64_t n = 1024, k = 64, m = 256;
  const auto tasks = [&](int workers, const auto& plan) {
    const auto a = UniformReals<float>(rng, m * k);
    std::vector<float> c(static_cast<size_t>(m * n));
    Counter executor(workers);
    OneDnnScratch scratch;
    plan.Execute(DenseMatrix(a.data(), m, k), DenseMatrix(c.data(), m, n),
                 scratch, executor);
    return executor.most_tasks;
  };
  const OneDnnLinearPlan plan = RandomPlan<float, float>(rng, n, k);
  EXPECT_GE(tasks(32, plan), 32) << plan.Explain(m);

  const Layer layer = RandomLayer(rng, n, k, Mode());
  const OneDnnScaledLinearPlan scaled = Runner::Create<float>(layer);
  const Rows rows = RandomRows(rng, m, layer);
  for (const int workers : {16, 32, 64, 128}) {
    Counter executor(workers);
    OneDnnScratch scratch;
    Runner::Run<float>(scaled, rows, executor, scratch);
    EXPECT_GE(executor.most_tasks, workers);
    // As many as before where columns alone are enough.
    if (workers == 16) {
      EXPECT_EQ(executor.most_tasks, 16);
    }
  }
}

}  // namespace
}  // namespace quern
