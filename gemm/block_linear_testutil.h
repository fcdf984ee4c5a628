#ifndef QUERN_GEMM_BLOCK_LINEAR_TESTUTIL_H_
#define QUERN_GEMM_BLOCK_LINEAR_TESTUTIL_H_

// What the tests of the linears on quantised weights share: Execute in guarded
// and poisoned memory, and verdicts against weights in double.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gtest/gtest.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/many_workers.h"
#include "testing/no_alloc.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"
#include "testing/workers.h"

namespace quern {

// What a plan should multiply, [n, k], and the largest sum of magnitudes that
// it may form for each of them.
struct BlockWeights {
  std::vector<double> values, magnitudes;
  std::vector<float> bias;  // empty for none
};

class BlockLinearTest : public IsaTest {
 protected:
  // c for m rows of a, whose rows and c's have `padding` after them.
  template <typename A, typename C, typename Plan>
  std::vector<C> Run(const Plan& plan, int64_t m, const std::vector<A>& a,
                     Executor& executor, int64_t padding = 0) {
    EXPECT_RAN_ON(plan);
    const int64_t n = plan.spec().n, k = plan.spec().k;
    const Edge edge = m % 2 == 0 ? Edge::kBegin : Edge::kEnd;
    const StridedMatrix<A> in(a, m, k, k + padding, edge, padding % 3);
    StridedMatrix<C> out(m, n, n + padding, edge, padding % 3);
    const int64_t bytes = plan.WorkspaceBytes(m, executor.num_workers());
    GuardBuffer<float> memory(bytes / 4);
    const Workspace workspace(memory.data(), static_cast<size_t>(bytes));
    const AnyTensorView x = in.view(), c = out.view();
    EXPECT_EQ(plan.CheckArgs(x, c), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.Execute(x, c, workspace, executor));
    return out.ToDense();
  }

  // Where every sum is exact: small integers and scales that are powers of two.
  template <typename A, typename C, typename Plan>
  void ExpectExact(const Plan& plan, int64_t m, const BlockWeights& w, Rng& rng,
                   Executor& executor, int64_t padding = 0) {
    const int64_t n = plan.spec().n, k = plan.spec().k;
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<A>) << " to " << DTypeName(DTypeOf<C>)
                 << " m=" << m << " n=" << n << " k=" << k << " "
                 << plan.Explain(m));
    const auto a = SmallIntegers<A>(rng, m * k, -4, 4);
    auto want = ReferenceLinear(m, n, k, ToDoubles(a), w.values);
    for (size_t i = 0; !w.bias.empty() && i < want.size(); ++i) {
      want[i] += w.bias[i % w.bias.size()];
    }
    EXPECT_TRUE(
        AllEqual(Run<A, C>(plan, m, a, executor, padding), RoundedTo<C>(want)));
  }

  // k sums, a product with a scale and an addition for each of `blocks`, each
  // off by at most 2^-23 of the magnitude; one rounding of what is then there.
  template <typename A, typename C, typename Plan>
  void ExpectWithinBound(const Plan& plan, int64_t m, int64_t blocks,
                         const BlockWeights& w, Rng& rng, Executor& executor) {
    const int64_t n = plan.spec().n, k = plan.spec().k;
    SCOPED_TRACE(testing::Message() << "m=" << m << " n=" << n << " k=" << k
                                    << " " << plan.Explain(m));
    const auto a = UniformReals<A>(rng, m * k);
    const auto da = ToDoubles(a);
    const std::vector<double> bias =
        w.bias.empty() ? std::vector<double>(static_cast<size_t>(n))
                       : ToDoubles(w.bias);
    const auto want = ReferenceLinear(m, n, k, da, w.values, bias);
    const auto magnitude = ReferenceLinear(m, n, k, Magnitudes(da),
                                           w.magnitudes, Magnitudes(bias));
    EXPECT_TRUE(AllWithin(
        Run<A, C>(plan, m, a, executor), want,
        [&](double expected, int64_t flat) {
          const double sums =
              std::ldexp(static_cast<double>(k + 3 * blocks), -23) *
              magnitude[static_cast<size_t>(flat)];
          return sums + UnitRoundoff<C>() * (std::abs(expected) + sums);
        }));
  }

  // Neither threads, nor the rows beside it, nor whether it was decoded in
  // registers change a row.
  template <typename A, typename Plan>
  void ExpectRowsAlone(const Plan& plan, int64_t m, Rng& rng) {
    const int64_t n = plan.spec().n, k = plan.spec().k;
    const auto a = UniformReals<A>(rng, m * k);
    const auto batch = Run<A, float>(plan, m, a, inline_);
    const auto workers = Workers(2);
    EXPECT_TRUE(AllBitsEqual(Run<A, float>(plan, m, a, *workers), batch));
    for (const int count : {3, 64}) {
      ManyWorkers executor(count);
      EXPECT_TRUE(AllBitsEqual(Run<A, float>(plan, m, a, executor), batch))
          << count << " workers";
    }
    ManyWorkers many(5);
    for (const int64_t rows : {1, 2, 3, 4, 5, 9, 16, 17}) {
      for (const int64_t first : {int64_t{0}, int64_t{3}, m - rows}) {
        const std::vector<A> some(a.begin() + first * k,
                                  a.begin() + (first + rows) * k);
        const std::vector<float> want(batch.begin() + first * n,
                                      batch.begin() + (first + rows) * n);
        EXPECT_TRUE(
            AllBitsEqual(Run<A, float>(plan, rows, some, many, 3), want))
            << rows << " rows from " << first;
      }
    }
  }

  InlineExecutor inline_;
};

}  // namespace quern

#endif  // QUERN_GEMM_BLOCK_LINEAR_TESTUTIL_H_
