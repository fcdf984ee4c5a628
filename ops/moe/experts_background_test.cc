// Experts on a pool of the CPU while their caller does something else.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/background_thread.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr int64_t kTokens = 9, kHidden = 64, kInter = 48, kExperts = 5;
constexpr int64_t kTopK = 2;

ExpertsPlan MakePlan(TestRng& rng) {
  InlineExecutor executor;
  ExpertsSpec spec;
  spec.top_k = kTopK;
  spec.out = DType::kF32;
  ExpertWeights weights;
  for (int64_t e = 0; e < kExperts; ++e) {
    Shape up{0, 2 * kInter, kHidden};
    up.act = spec.activation;
    const Shape down{0, kHidden, kInter};
    const WeightCase format = {WeightFormat::kBF16};
    weights.gate_up.push_back(RealWeights(rng, format, up).Pack(executor));
    weights.down.push_back(RealWeights(rng, format, down).Pack(executor));
  }
  return ExpertsPlan::Create(spec, weights).value();
}

// One layer's arguments and their memory.
struct Layer {
  explicit Layer(TestRng& rng)
      : x(UniformReals<BFloat16>(rng, kTokens * kHidden)),
        weights(UniformReals<float>(rng, kTokens * kTopK)),
        out(static_cast<size_t>(kTokens * kHidden)) {
    for (int64_t i = 0; i < kTokens * kTopK; ++i) {
      ids.push_back(static_cast<int32_t>(rng.Integer(0, kExperts - 1)));
    }
    args.x = DenseMatrix<const BFloat16>(x.data(), kTokens, kHidden);
    args.ids = DenseMatrix<const int32_t>(ids.data(), kTokens, kTopK);
    args.weights = DenseMatrix<const float>(weights.data(), kTokens, kTopK);
    args.out = DenseMatrix(out.data(), kTokens, kHidden);
  }
  std::vector<BFloat16> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> out;
  ExpertsArgs args;
};

TEST(ExpertsBackgroundTest, HaveTheBitsOfExecute) {
  TestRng rng;
  const ExpertsPlan plan = MakePlan(rng);
  const auto background = BackgroundThread::Create().value();
  for (const int workers : {1, 2, 3}) {
    const auto pool = Workers(workers);
    const int64_t bytes = plan.WorkspaceBytes(kTokens, workers).value();
    AlignedBuffer memory = AlignedBuffer::Create(bytes).value();
    const Workspace workspace(memory);
    // Threads and their first waits allocate.
    ASSERT_TRUE(background->Submit([] {}));
    EXPECT_TRUE(background->Wait());
    for (int round = 0; round < 10; ++round) {
      Layer here(rng);
      EXPECT_EQ(plan.CheckArgs(here.args), absl::OkStatus());
      plan.Execute(here.args, workspace, *pool);
      const std::vector<float> want = here.out;
      here.out.assign(want.size(), -1.0f);
      Executor& executor = *pool;
      bool submitted = false, refused = false;
      {
        const NoAllocScope no_allocation;
        submitted =
            background->Submit([&plan, args = here.args, workspace, &executor] {
              plan.Execute(args, workspace, executor);
            });
        refused = !background->Submit([] {});
        background->Wait();
      }
      EXPECT_TRUE(submitted);
      EXPECT_TRUE(refused);
      EXPECT_TRUE(AllBitsEqual(here.out, want)) << workers << " workers";
    }
  }
}

// Two layers at once, each with a workspace, on one pool: the calls of
// ParallelFor take turns.
TEST(ExpertsBackgroundTest, TwoThreadsMayShareAPool) {
  TestRng rng;
  const ExpertsPlan plan = MakePlan(rng);
  const auto first = BackgroundThread::Create().value();
  const auto second = BackgroundThread::Create().value();
  const auto pool = Workers(2);
  Executor& executor = *pool;
  const int64_t bytes = plan.WorkspaceBytes(kTokens, 2).value();
  AlignedBuffer a_memory = AlignedBuffer::Create(bytes).value();
  AlignedBuffer b_memory = AlignedBuffer::Create(bytes).value();
  const Workspace a_workspace(a_memory), b_workspace(b_memory);
  for (int round = 0; round < 10; ++round) {
    Layer a(rng), b(rng);
    plan.Execute(a.args, a_workspace, executor);
    plan.Execute(b.args, b_workspace, executor);
    const std::vector<float> want_a = a.out, want_b = b.out;
    a.out.assign(want_a.size(), 0.0f);
    b.out.assign(want_b.size(), 0.0f);
    ASSERT_TRUE(first->Submit([&plan, args = a.args, a_workspace, &executor] {
      plan.Execute(args, a_workspace, executor);
    }));
    ASSERT_TRUE(second->Submit([&plan, args = b.args, b_workspace, &executor] {
      plan.Execute(args, b_workspace, executor);
    }));
    EXPECT_TRUE(first->Wait());
    EXPECT_TRUE(second->Wait());
    EXPECT_TRUE(AllBitsEqual(a.out, want_a));
    EXPECT_TRUE(AllBitsEqual(b.out, want_b));
  }
}

}  // namespace
}  // namespace quern
