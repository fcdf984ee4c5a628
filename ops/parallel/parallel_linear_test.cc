#include "quern/ops/parallel/parallel_linear.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/parallel/dense_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

Doubles Reals(Rng& rng, int64_t count) {
  Doubles v;
  while (count-- > 0) v.push_back(rng.Uniform(-1, 1));
  return v;
}

void Append(const Doubles& from, Doubles& to) {
  to.insert(to.end(), from.begin(), from.end());
}

template <typename Plan, typename... More>
std::vector<double> Apply(const Plan& plan, const AnyMatrix& x,
                          const AnyMatrix& y, More&... communicator) {
  InlineExecutor executor;
  AlignedBuffer scratch = ScratchOf(plan, x.view().extent(0), executor);
  EXPECT_EQ(plan.CheckArgs(x.const_view(), y.view()), absl::OkStatus());
  plan.Execute(x.const_view(), y.view(), Workspace(scratch), communicator...,
               executor);
  return y.doubles();
}

TEST(ReplicatedLinear, IsALinearLayer) {
  TestRng rng;
  InlineExecutor executor;
  for (const DType dtype : kDTypes) {
    for (const BiasUse use : {BiasUse::kAdd, BiasUse::kSkip}) {
      const int64_t m = 3, n = 17, k = 60;
      const Doubles x = Integers(rng, m * k), w = Integers(rng, n * k);
      const Doubles b = Integers(rng, n);
      ReplicatedLinearSpec spec;
      spec.n = n;
      spec.k = k;
      spec.x = spec.w = spec.y = dtype;
      spec.bias = use;
      const auto plan = ReplicatedLinearPlan::Create(
          spec, AnyMatrix(dtype, w, n, k, k + 1).view(),
          AnyMatrix(dtype, b, 1, n, n).vector(), executor);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const bool add = use == BiasUse::kAdd;
      EXPECT_EQ(Apply(*plan, AnyMatrix(dtype, x, m, k, k + 3),
                      AnyMatrix(dtype, m, n, n + 1)),
                ReferenceLinear(m, n, k, x, w, add ? b : Doubles()));
      ASSERT_EQ(plan->bias().extent(0), add ? 0 : n);
      for (int64_t i = 0; i < plan->bias().extent(0); ++i) {
        EXPECT_EQ(*plan->bias().At(i), b[static_cast<size_t>(i)]);
      }
    }
  }
}

// Every rank has its columns of every output, or all columns with
// gather_output, whether Create got all weights or the rank's shard.
TEST(ColumnParallelLinear, IsExactOnSmallIntegers) {
  TestRng rng;
  const int64_t k = 60;
  const std::vector<std::vector<ColumnOutput>> merged = {
      {{20}}, {{8}, {12}, {4}}, QkvOutputs(3, 8, 4), QkvOutputs(3, 4, 2, 5)};
  for (const auto& outputs : merged) {
    int64_t n = 0;
    for (const ColumnOutput& output : outputs) n += output.size;
    for (const DType dtype : kDTypes) {
      for (const int64_t m : {0, 1, 5}) {
        const Doubles x = Integers(rng, m * k), w = Integers(rng, n * k);
        const Doubles b = Integers(rng, n);
        const Doubles all = ReferenceLinear(m, n, k, x, w, b);
        for (const int ranks : {1, 2, 4}) {
          for (const bool gather : {false, true}) {
            const bool replicates =
                outputs.size() == 3 && outputs[1].size == 6 && ranks == 4;
            if (gather && replicates) continue;  // refused
            for (const WeightPart part :
                 {WeightPart::kFull, WeightPart::kShard}) {
              RunRanks(ranks, [&](ThreadCommunicator& c) {
                InlineExecutor executor;
                ColumnParallelLinearSpec spec;
                spec.outputs = outputs;
                spec.k = k;
                spec.x = spec.w = spec.y = dtype;
                spec.gather_output = gather;
                spec.part = part;
                // The expected ranges, computed by hand.
                Doubles own_w, own_b, own_y;
                int64_t at = 0;
                for (const ColumnOutput& o : outputs) {
                  const int64_t heads = o.size / o.unit;
                  const int64_t count =
                      heads >= ranks ? o.size / ranks : o.unit;
                  const int64_t begin = heads >= ranks
                                            ? c.rank() * count
                                            : c.rank() * heads / ranks * o.unit;
                  Append(Rows(w, k, at + begin, count), own_w);
                  Append(Rows(b, 1, at + begin, count), own_b);
                  at += o.size;
                }
                const auto own = static_cast<int64_t>(own_b.size());
                const bool full = part == WeightPart::kFull;
                const AnyMatrix weights(dtype, full ? w : own_w, full ? n : own,
                                        k, k + 5);
                const AnyMatrix bias(DType::kF32, full ? b : own_b, 1,
                                     full ? n : own, n);
                const auto plan = ColumnParallelLinearPlan::Create(
                    spec, weights.const_view(), bias.vector(), c, executor);
                ASSERT_TRUE(plan.ok()) << plan.status();
                ASSERT_EQ(plan->columns(), gather ? n : own);
                const Doubles y =
                    Apply(*plan, AnyMatrix(dtype, x, m, k, k + 3),
                          AnyMatrix(dtype, m, plan->columns(), n + 1), c);
                EXPECT_EQ(y, gather
                                 ? all
                                 : ReferenceLinear(m, own, k, x, own_w, own_b))
                    << DTypeName(dtype) << " rank " << c.rank() << " of "
                    << ranks << ", gather " << gather;
              });
            }
          }
        }
      }
    }
  }
}

TEST(ColumnParallelLinear, KeepsItsPartOfASkippedBias) {
  InlineExecutor executor;
  auto group = ThreadCommunicator::CreateGroup(2);
  ASSERT_TRUE(group.ok());
  ColumnParallelLinearSpec spec;
  spec.outputs = {{4}, {2}};
  spec.k = 1;
  spec.bias = BiasUse::kSkip;
  const AnyMatrix w(DType::kBF16, Doubles(6, 0.0), 6, 1, 1);
  const AnyMatrix b(DType::kBF16, {1, 2, 3, 4, 5, 6}, 1, 6, 6);
  const float want[2][3] = {{1, 2, 5}, {3, 4, 6}};
  for (const auto& c : *group) {
    const auto plan = ColumnParallelLinearPlan::Create(
        spec, w.const_view(), b.vector(), *c, executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(
        AllEqual(plan->bias(), DenseVector<const float>(want[c->rank()], 3)));
    EXPECT_EQ(Apply(*plan, AnyMatrix(DType::kBF16, {1}, 1, 1, 1),
                    AnyMatrix(DType::kBF16, 1, 3, 3), *c),
              Doubles(3, 0.0));
  }
}

TEST(ColumnParallelLinear, ReplicatesHeadsOfWhichThereAreTooFew) {
  InlineExecutor executor;
  const int64_t head_dim = 4, k = 8;
  ColumnParallelLinearSpec spec;
  spec.outputs = QkvOutputs(head_dim, 8, 2, 3);
  spec.k = k;
  const int64_t n = 8 * 4 + 2 * 4 + 2 * 3;
  const AnyMatrix w(DType::kBF16, Doubles(static_cast<size_t>(n * k), 1.0), n,
                    k, k);
  for (const int ranks : {1, 2, 4, 8}) {
    auto group = ThreadCommunicator::CreateGroup(ranks);
    ASSERT_TRUE(group.ok());
    for (const auto& c : *group) {
      const auto plan = ColumnParallelLinearPlan::Create(
          spec, w.const_view(), AnyTensorView(), *c, executor);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const int64_t kv_rank = ranks >= 2 ? c->rank() / (ranks / 2) : 0;
      const int64_t kv_heads = ranks >= 2 ? 1 : 2;
      EXPECT_EQ(plan->Shard(0).begin, c->rank() * (32 / ranks));
      EXPECT_EQ(plan->Shard(0).count, 32 / ranks);
      EXPECT_EQ(plan->Shard(1).begin, kv_rank * 4);
      EXPECT_EQ(plan->Shard(1).count, kv_heads * 4);
      EXPECT_EQ(plan->Shard(2).begin, kv_rank * 3);
      EXPECT_EQ(plan->Shard(2).count, kv_heads * 3);
    }
  }
}

TEST(RowParallelLinear, IsExactOnSmallIntegers) {
  TestRng rng;
  const int64_t n = 19, k = 60;
  for (const DType dtype : kDTypes) {
    for (const int64_t m : {0, 1, 5}) {
      const Doubles x = Integers(rng, m * k), w = Integers(rng, n * k);
      const Doubles b = Integers(rng, n);
      for (const int ranks : {1, 2, 4}) {
        for (const bool parallel : {false, true}) {
          for (const BiasUse use : {BiasUse::kAdd, BiasUse::kSkip}) {
            for (const bool reduce : {true, false}) {
              if (!reduce && use == BiasUse::kAdd) continue;  // refused
              // Full weights go with a divided x, and a shard with a whole x.
              const bool full = parallel;
              RunRanks(ranks, [&](ThreadCommunicator& c) {
                InlineExecutor executor;
                RowParallelLinearSpec spec;
                spec.n = n;
                spec.k = k;
                spec.x = spec.w = spec.y = dtype;
                spec.input_is_parallel = parallel;
                spec.reduce_results = reduce;
                spec.bias = use;
                spec.part = full ? WeightPart::kFull : WeightPart::kShard;
                const int64_t own = k / ranks, begin = c.rank() * own;
                const Doubles own_w = Columns(w, k, begin, own);
                const Doubles own_x = Columns(x, k, begin, own);
                const AnyMatrix weights(dtype, full ? w : own_w, n,
                                        full ? k : own, k + 1);
                const auto plan = RowParallelLinearPlan::Create(
                    spec, weights.const_view(),
                    AnyMatrix(dtype, b, 1, n, n).vector(), c, executor);
                ASSERT_TRUE(plan.ok()) << plan.status();
                const Doubles y = Apply(*plan,
                                        AnyMatrix(dtype, parallel ? own_x : x,
                                                  m, parallel ? own : k, k + 3),
                                        AnyMatrix(dtype, m, n, n + 2), c);
                const bool add = use == BiasUse::kAdd;
                EXPECT_EQ(y, reduce ? ReferenceLinear(m, n, k, x, w,
                                                      add ? b : Doubles())
                                    : ReferenceLinear(m, n, own, own_x, own_w))
                    << DTypeName(dtype) << " rank " << c.rank() << " of "
                    << ranks << ", parallel " << parallel;
                ASSERT_EQ(plan->bias().extent(0), add ? 0 : n);
                for (int64_t i = 0; i < plan->bias().extent(0); ++i) {
                  EXPECT_EQ(*plan->bias().At(i), b[static_cast<size_t>(i)]);
                }
              });
            }
          }
        }
      }
    }
  }
}

// A feed-forward block over ranks. The part of h on each rank must have the
// bits that a single rank computes. y must be within rounding errors of the
// reference, and have the same bits on all ranks, with more workers, and when
// repeated.
TEST(ParallelLinear, ABlockOverRanksIsTheBlock) {
  TestRng rng;
  const int64_t hidden = 200, inner = 88, max_m = 7;
  for (const DType dtype : kDTypes) {
    const double unit = dtype == DType::kF32    ? 0x1p-24
                        : dtype == DType::kBF16 ? 0x1p-8
                                                : 0x1p-11;
    const AnyMatrix x(dtype, Reals(rng, max_m * hidden), max_m, hidden,
                      hidden + 3);
    const AnyMatrix up_w(dtype, Reals(rng, 2 * inner * hidden), 2 * inner,
                         hidden, hidden);
    const AnyMatrix down_w(dtype, Reals(rng, hidden * inner), hidden, inner,
                           inner);
    ColumnParallelLinearSpec up;
    up.outputs = {{inner}, {inner}};
    up.k = hidden;
    up.x = up.w = up.y = dtype;
    up.activation = LinearActivation::kSiluAndMul;
    RowParallelLinearSpec down;
    down.n = hidden;
    down.k = inner;
    down.x = down.w = down.y = dtype;

    Doubles whole_h;  // of the run with one rank
    for (const int ranks : {1, 2, 4}) {
      std::vector<std::vector<uint32_t>> results(static_cast<size_t>(ranks) *
                                                 2);
      RunRanks(ranks, [&](ThreadCommunicator& c) {
        for (const int workers : {1, 2}) {
          auto executor =
              HwyExecutor::Create(workers, HwyExecutor::Sharing::kAll);
          ASSERT_TRUE(executor.ok());
          const auto up_plan = ColumnParallelLinearPlan::Create(
              up, up_w.const_view(), AnyTensorView(), c, **executor);
          const auto down_plan = RowParallelLinearPlan::Create(
              down, down_w.const_view(), AnyTensorView(), c, **executor);
          ASSERT_TRUE(up_plan.ok() && down_plan.ok());
          const int64_t own = inner / ranks;
          ASSERT_EQ(up_plan->columns(), own);
          const AnyMatrix h(dtype, max_m, own, own + 1);
          const AnyMatrix y(dtype, max_m, hidden, hidden + 1);
          AlignedBuffer up_scratch = ScratchOf(*up_plan, max_m, **executor);
          AlignedBuffer down_scratch = ScratchOf(*down_plan, max_m, **executor);
          up_plan->Execute(x.const_view(), h.view(), Workspace(up_scratch), c,
                           **executor);
          down_plan->Execute(h.const_view(), y.view(), Workspace(down_scratch),
                             c, **executor);
          if (ranks == 1) whole_h = h.doubles();
          EXPECT_EQ(h.doubles(), Columns(whole_h, inner, c.rank() * own, own));
          results[static_cast<size_t>(2 * c.rank() + workers - 1)] = y.bits();

          const Doubles want =
              ReferenceLinear(max_m, hidden, inner, whole_h, down_w.doubles());
          const Doubles magnitude =
              ReferenceLinear(max_m, hidden, inner, Magnitudes(whole_h),
                              Magnitudes(down_w.doubles()));
          // Error terms: f32 sums of products and of ranks; the rounding of
          // each rank's part, together at most the unit of the magnitude; the
          // last rounding.
          EXPECT_TRUE(
              AllWithin(y.doubles(), want, [&](double value, int64_t i) {
                const double mag = magnitude[static_cast<size_t>(i)];
                const double sums =
                    mag * static_cast<double>(inner + ranks) * 0x1p-23;
                return sums + 1.01 * unit * (mag + std::abs(value) + sums) +
                       0x1p-24;
              }));
        }
      });
      for (const auto& bits : results) EXPECT_EQ(bits, results[0]);
    }
  }
}

// Several threads of a rank may share its plan, each in its own group.
TEST(ParallelLinear, PlansMayBeShared) {
  TestRng rng;
  const int64_t n = 64, k = 48, m = 4;
  InlineExecutor executor;
  const AnyMatrix x(DType::kBF16, Reals(rng, m * k / 2), m, k / 2, k / 2);
  const AnyMatrix w(DType::kBF16, Reals(rng, n * k), n, k, k);
  RowParallelLinearSpec spec;
  spec.n = n;
  spec.k = k;
  std::vector<RowParallelLinearPlan> plans;
  auto group = ThreadCommunicator::CreateGroup(2);
  ASSERT_TRUE(group.ok());
  for (const auto& c : *group) {
    auto plan = RowParallelLinearPlan::Create(spec, w.const_view(),
                                              AnyTensorView(), *c, executor);
    ASSERT_TRUE(plan.ok());
    plans.push_back(*std::move(plan));
  }
  std::vector<Doubles> results(4);
  std::vector<std::thread> groups;
  for (int g = 0; g < 2; ++g) {
    groups.emplace_back([&, g] {
      RunRanks(2, [&, g](ThreadCommunicator& c) {
        for (int run = 0; run < 20; ++run) {
          results[static_cast<size_t>(2 * g + c.rank())] =
              Apply(plans[static_cast<size_t>(c.rank())], x,
                    AnyMatrix(DType::kBF16, m, n, n), c);
        }
      });
    });
  }
  for (std::thread& thread : groups) thread.join();
  for (const Doubles& y : results) EXPECT_EQ(y, results[0]);
}

TEST(ParallelLinear, ExecuteAllocatesNothing) {
  const int64_t n = 64, k = 48, m = 4;
  RunRanks(2, [&](ThreadCommunicator& c) {
    InlineExecutor executor;
    const Doubles ones(static_cast<size_t>(n * k), 1.0);
    const AnyMatrix w(DType::kBF16, ones, n, k, k);
    ColumnParallelLinearSpec column;
    column.outputs = {{32}, {32}};
    column.k = k;
    column.gather_output = true;
    const auto up = ColumnParallelLinearPlan::Create(
        column, w.const_view(), AnyTensorView(), c, executor);
    RowParallelLinearSpec row;
    row.n = n;
    row.k = k;
    row.input_is_parallel = false;
    const auto down = RowParallelLinearPlan::Create(
        row, w.const_view(), AnyTensorView(), c, executor);
    ASSERT_TRUE(up.ok() && down.ok());
    const AnyMatrix x(DType::kBF16, Doubles(static_cast<size_t>(m * k), 1.0), m,
                      k, k);
    const AnyMatrix y(DType::kBF16, m, n, n), z(DType::kBF16, m, n, n);
    AlignedBuffer up_scratch = ScratchOf(*up, m, executor);
    AlignedBuffer down_scratch = ScratchOf(*down, m, executor);
    const auto run = [&] {
      up->Execute(x.const_view(), y.view(), Workspace(up_scratch), c, executor);
      down->Execute(x.const_view(), z.view(), Workspace(down_scratch), c,
                    executor);
    };
    ExpectNoAllocation(c, run);
  });
}

}  // namespace
}  // namespace quern
