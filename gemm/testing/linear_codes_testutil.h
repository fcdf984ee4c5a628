#ifndef QUERN_GEMM_TESTING_LINEAR_CODES_TESTUTIL_H_
#define QUERN_GEMM_TESTING_LINEAR_CODES_TESTUTIL_H_

// Verdicts of the tests of weights that are codes with scales, against weights
// in double.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/testing/linear_weights_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/workers.h"

namespace quern {

// What a plan should multiply, [n, k], and the largest sum of magnitudes that
// it may form for each weight.
struct DecodedWeights {
  std::vector<double> values, magnitudes;
  std::vector<float> bias;  // empty for none
};

class LinearCodesTest : public IsaTest {
 protected:
  template <typename A, typename C>
  std::vector<C> Run(const LinearPlan& plan, int64_t m, const std::vector<A>& a,
                     Executor& executor, int64_t padding = 0) {
    EXPECT_RAN_ON(plan);
    return RunLinear<A, C>(plan, m, a, executor, padding);
  }

  // Expects the exact result. Inputs are small integers and scales must be
  // powers of two, so that no sum is rounded.
  template <typename A, typename C>
  void ExpectExact(const LinearPlan& plan, int64_t m, const DecodedWeights& w,
                   Rng& rng, Executor& executor, int64_t padding = 0) {
    const int64_t n = plan.n(), k = plan.k();
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

  // Expects c within a derived bound: each of k sums, and a product with a
  // scale and an addition for each of `groups`, is off by at most 2^-23 of the
  // magnitude, and the result is rounded once.
  template <typename A, typename C>
  void ExpectWithinBound(const LinearPlan& plan, int64_t m, int64_t groups,
                         const DecodedWeights& w, Rng& rng,
                         Executor& executor) {
    const int64_t n = plan.n(), k = plan.k();
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
              std::ldexp(static_cast<double>(k + 3 * groups), -23) *
              magnitude[static_cast<size_t>(flat)];
          return sums + UnitRoundoff<C>() * (std::abs(expected) + sums);
        }));
  }

  // Expects that the bits of a row depend neither on threads, nor on the rows
  // beside it, nor on whether codes are decoded in registers.
  template <typename A>
  void ExpectRowsAlone(const LinearPlan& plan, int64_t m, Rng& rng) {
    const int64_t n = plan.n(), k = plan.k();
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

  // Expects that `value` at the last k of one row of a changes that row of c
  // alone. `spoilt(c)` says whether an element of the row is as it must be.
  template <typename Spoilt>
  void ExpectStaysInItsRow(const LinearPlan& plan, double value, Rng& rng,
                           const Spoilt& spoilt) {
    const int64_t n = plan.n(), k = plan.k();
    for (const int64_t m : {3, 6}) {
      auto a = SmallIntegers<BFloat16>(rng, m * k);
      const auto clean = Run<BFloat16, float>(plan, m, a, inline_);
      a[static_cast<size_t>(2 * k - 1)] = FromDouble<BFloat16>(value);
      const auto got = Run<BFloat16, float>(plan, m, a, inline_);
      for (int64_t i = 0; i < m * n; ++i) {
        const float c = got[static_cast<size_t>(i)];
        if (i / n == 1) {
          EXPECT_TRUE(spoilt(c)) << i << ": " << c;
        } else {
          EXPECT_EQ(c, clean[static_cast<size_t>(i)]) << i;
        }
      }
    }
  }

  InlineExecutor inline_;
};

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_LINEAR_CODES_TESTUTIL_H_
