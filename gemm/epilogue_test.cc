// gemm/epilogue.h, through the packed plans.

#include "gemm/epilogue.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue_testutil.h"
#include "gemm/packed_plan_testutil.h"
#include "gemm/packed_scaled_linear.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/isa_test.h"
#include "testing/many_workers.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"

namespace quern {
namespace {

using BF = BFloat16;
using F16 = Float16;
using Act = LinearActivation;

constexpr Act kActs[] = {
    Act::kNone,       Act::kSilu,       Act::kGelu,          Act::kGeluTanh,
    Act::kSiluAndMul, Act::kGeluAndMul, Act::kGeluTanhAndMul};

Shape ShapeOf(int64_t m, int64_t n, int64_t k, Act act,
              Residual residual = Residual::kNone, int64_t padding = 0) {
  Shape s{m, n, k, padding, padding};
  s.act = act;
  s.residual = residual;
  return s;
}

// c in double, from the results of the layer.
std::vector<double> Reference(const Shape& s, const std::vector<double>& v,
                              const std::vector<double>& residual) {
  std::vector<double> c;
  for (int64_t r = 0; r < s.m; ++r) {
    const double* row = v.data() + r * s.n;
    for (int64_t j = 0; j < s.cols(); ++j) {
      double x = Activated(s.act, row[j]);
      if (IsGated(s.act)) x *= row[s.cols() + j];
      if (!residual.empty()) x += residual[c.size()];
      c.push_back(x);
    }
  }
  return c;
}

template <typename T>
std::vector<T> ResidualOf(Rng& rng, const Shape& s) {
  return SmallIntegers<T>(
      rng, s.residual == Residual::kNone ? 0 : s.m * s.cols(), -99, 99);
}

class EpilogueTest : public PackedPlanTest {
 protected:
  // Bias so far from zero that each activation is v or, in every third column,
  // 0, exactly; the reference is rounded once.
  static std::vector<float> DecidedBias(Rng& rng, const Shape& s,
                                        int64_t reach) {
    auto bias = SmallIntegers<float>(rng, s.n, -9, 9);
    for (int64_t j = 0; s.act != Act::kNone && j < s.cols(); ++j) {
      bias[static_cast<size_t>(j)] =
          static_cast<float>(j % 3 == 1 ? -reach - 200 : reach + 40 + (j % 5));
    }
    return bias;
  }
  static std::vector<double> Decided(const Shape& s, std::vector<double> v) {
    for (int64_t i = 0; s.act != Act::kNone && i < s.m * s.n; ++i) {
      double& x = v[static_cast<size_t>(i)];
      if (i % s.n < s.cols() && x < 0) x = 0;
    }
    return v;
  }
  template <typename A, typename B, typename C>
  void ExpectExact(const Shape& s, Executor& executor) {
    SCOPED_TRACE(testing::Message() << DTypeName(DTypeOf<C>) << " " << s);
    TestRng rng;
    const int64_t most = s.k > 200 ? 1 : 2;
    const auto a = SmallIntegers<A>(rng, s.m * s.k, -most, most);
    const auto w = SmallIntegers<B>(rng, s.n * s.k, -most, most);
    const auto bias = DecidedBias(rng, s, s.k * most * most);
    const auto residual = ResidualOf<C>(rng, s);
    const auto plan = Plan<A, B, C>(s, w, bias);
    auto v = ReferenceProduct(s, ToDoubles(a), ToDoubles(w));
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] += ToDouble(bias[i % static_cast<size_t>(s.n)]);
    }
    auto want_shape = s;
    want_shape.act = IsGated(s.act) ? s.act : Act::kNone;
    // Large positive gates are their own activation, in double as in f32.
    const auto want = Reference(want_shape, Decided(s, v), ToDoubles(residual));
    EXPECT_TRUE(
        AllEqual(Run(plan, s, a, executor, {}, residual), RoundedTo<C>(want)));
  }

  void ExpectScaledExact(const Shape& s, Executor& executor) {
    SCOPED_TRACE(testing::Message() << "int8 " << s);
    TestRng rng;
    const int64_t most = s.k > 200 ? 1 : 2;
    auto a = SmallIntegers<int8_t>(rng, s.m * s.k, -most, most);
    const auto w = SmallIntegers<int8_t>(rng, s.n * s.k, -most, most);
    std::vector<float> scales;
    RowTerms rows;
    for (int64_t j = 0; j < s.n; ++j) {
      scales.push_back(most == 1 || rng.Integer(0, 1) == 0 ? 1.0f : 0.5f);
    }
    for (int64_t r = 0; r < s.m; ++r) {
      rows.scales.push_back(rng.Integer(0, 1) == 0 ? 1.0f : 0.5f);
      rows.zero_points.push_back(static_cast<int32_t>(rng.Integer(-9, 9)));
    }
    const auto bias = DecidedBias(rng, s, s.k * most * most);
    const auto residual = ResidualOf<BF>(rng, s);
    PackedScaledLinearSpec spec;
    spec.n = s.n;
    spec.k = s.k;
    spec.a = DType::kI8;
    spec.order = s.order;
    spec.activation = s.act;
    spec.zero_points = Int8ZeroPoint::kUsed;
    const auto plan = ScaledPlan(spec, w, scales, bias, s.padding);
    auto v = ReferenceProduct(s, ToDoubles(a), ToDoubles(w));
    for (size_t i = 0; i < v.size(); ++i) {
      const size_t j = i % static_cast<size_t>(s.n);
      v[i] = v[i] * double{rows.scales[i / static_cast<size_t>(s.n)]} *
                 double{scales[j]} +
             double{bias[j]};
    }
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<int8_t>(
          a[i] + rows.zero_points[i / static_cast<size_t>(s.k)]);
    }
    auto want_shape = s;
    want_shape.act = IsGated(s.act) ? s.act : Act::kNone;
    const auto want = Reference(want_shape, Decided(s, v), ToDoubles(residual));
    EXPECT_TRUE(AllEqual(Run(plan, s, a, executor, rows, residual),
                         RoundedTo<BF>(want)));
  }

  // Calls fn at every remainder of panels, lines and tiles.
  void ForEachShape(const std::function<void(const Shape&)>& fn) {
    int64_t i = 0;
    for (const int64_t columns : {1, 15, 16, 17, 33, 130}) {
      for (const int64_t k : {1, 33, 67}) {
        for (const int64_t m : {1, 2, 3, 15, 29}) {
          ++i;
          Shape s{m, columns, k};
          s.act = kActs[i % 7];
          if (IsGated(s.act)) s.n = 2 * columns;
          s.residual = static_cast<Residual>(i % 3);
          s.padding = s.shift = i % 4;
          s.order = i % 5 == 0 ? WeightOrder::kKN : WeightOrder::kNK;
          fn(s);
          if (HasFailure()) return;
        }
      }
    }
  }

  template <typename A, typename B, typename C>
  void ExpectRealsWithinBound() {
    TestRng rng;
    ManyWorkers executor(2);
    for (const Act act : kActs) {
      const Shape s = ShapeOf(9, 70, 300, act, Residual::kApart);
      SCOPED_TRACE(testing::Message() << DTypeName(DTypeOf<C>) << " " << s);
      const auto a = UniformReals<A>(rng, s.m * s.k);
      const auto w = UniformReals<B>(rng, s.n * s.k);
      const auto bias = UniformReals<float>(rng, s.n);
      const auto residual = UniformReals<C>(rng, s.m * s.cols());
      const auto plan = Plan<A, B, C>(s, w, bias);
      const auto da = ToDoubles(a), dw = ToDoubles(w), db = ToDoubles(bias);
      const auto v = ReferenceLinear(s.m, s.n, s.k, da, dw, db);
      const auto size = ReferenceLinear(s.m, s.n, s.k, Magnitudes(da),
                                        Magnitudes(dw), Magnitudes(db));
      const auto want = Reference(s, v, ToDoubles(residual));
      const auto bound = [&](double expected, int64_t flat) {
        const auto at =
            static_cast<size_t>(flat / s.cols() * s.n + flat % s.cols());
        // k + 1 sums, each off by at most 2 units of the magnitude.
        const double sums = 2 * kUnit * static_cast<double>(s.k + 1);
        // No activation is steeper than 1.13.
        double error =
            1.13 * sums * size[at] +
            1.01 * BoundOf(act, v[at]) * std::abs(Activated(act, v[at])) +
            kDenormal;
        double value = std::abs(Activated(act, v[at]));
        if (IsGated(act)) {
          const size_t up = at + static_cast<size_t>(s.cols());
          const double up_error = sums * size[up];
          error = error * (std::abs(v[up]) + up_error) + up_error * value;
          value *= std::abs(v[up]);
        }
        // The product, the sum with residual, and c.
        error += kUnit * (value + error);
        error += kUnit * (std::abs(expected) + error);
        return error + RoundingBound<C>(std::abs(expected) + error);
      };
      EXPECT_TRUE(
          AllWithin(Run(plan, s, a, executor, {}, residual), want, bound));
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(EpilogueTest);

TEST_P(EpilogueTest, IsExactAtEveryRemainderOfBF16) {
  ForEachShape([&](const Shape& s) { ExpectExact<BF, BF, float>(s, inline_); });
}
TEST_P(EpilogueTest, IsExactAtEveryRemainderOfF32) {
  ForEachShape(
      [&](const Shape& s) { ExpectExact<float, float, float>(s, inline_); });
}
TEST_P(EpilogueTest, IsExactAtEveryRemainderOfInt8) {
  ForEachShape([&](const Shape& s) { ExpectScaledExact(s, inline_); });
}

TEST_P(EpilogueTest, RoundsOnceToEachOutputType) {
  for (const Act act : kActs) {
    for (const auto residual :
         {Residual::kNone, Residual::kApart, Residual::kInPlace}) {
      const Shape s = ShapeOf(7, 70, 10, act, residual, 3);
      ExpectExact<BF, BF, BF>(s, inline_);
      ExpectExact<F16, F16, F16>(s, inline_);
    }
  }
}

// One panel, whose k must be divided, to more tasks than workers; several
// blocks of rows.
TEST_P(EpilogueTest, IsExactHoweverItIsDivided) {
  for (const int workers : {2, 5, 64}) {
    ManyWorkers executor(workers);
    for (const int64_t n : {6, 32, 100, 300}) {
      for (const int64_t m : {1, 16, 40}) {
        ExpectExact<BF, BF, float>(ShapeOf(m, n, 2100, Act::kSiluAndMul),
                                   executor);
        ExpectScaledExact(ShapeOf(m, n, 1100, Act::kSiluAndMul), executor);
        ExpectExact<BF, BF, float>(
            ShapeOf(m, n, 2100, Act::kGelu, Residual::kInPlace, 1), executor);
      }
    }
    for (const int64_t m : {257, 513}) {
      ExpectExact<BF, BF, BF>(
          ShapeOf(m, 72, 40, Act::kSiluAndMul, Residual::kApart, 3), executor);
      ExpectScaledExact(ShapeOf(m, 72, 40, Act::kNone, Residual::kInPlace),
                        executor);
    }
  }
}

TEST_P(EpilogueTest, RealsStayWithinTheDerivedBound) {
  ExpectRealsWithinBound<float, float, float>();
  ExpectRealsWithinBound<BF, BF, BF>();
  ExpectRealsWithinBound<F16, F16, F16>();
}

// Neither threads, nor the rows beside it, nor where residual lies.
TEST_P(EpilogueTest, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  Shape s = ShapeOf(37, 166, 1700, Act::kSiluAndMul, Residual::kApart);
  const auto w = UniformReals<BF>(rng, s.n * s.k);
  const auto a = UniformReals<BF>(rng, s.m * s.k);
  const auto residual = UniformReals<float>(rng, s.m * s.cols());
  const auto plan = Plan<BF, BF, float>(s, w, {});
  const auto batch = Run(plan, s, a, inline_, {}, residual);
  for (const int workers : {2, 64}) {
    ManyWorkers executor(workers);
    s.residual = Residual::kInPlace;
    EXPECT_TRUE(AllBitsEqual(Run(plan, s, a, executor, {}, residual), batch))
        << workers << " workers";
    for (const int64_t first : {0, 5, 36}) {
      Shape one = s;
      one.m = 1;
      one.padding = 3;
      const std::vector<BF> row(a.begin() + first * s.k,
                                a.begin() + (first + 1) * s.k);
      const auto begin = first * s.cols(), end = begin + s.cols();
      const std::vector<float> want(batch.begin() + begin, batch.begin() + end);
      const std::vector<float> added(residual.begin() + begin,
                                     residual.begin() + end);
      EXPECT_TRUE(AllBitsEqual(Run(plan, one, row, executor, {}, added), want))
          << "row " << first;
    }
  }
}

TEST_P(EpilogueTest, NaNStaysInItsRowAndElement) {
  TestRng rng;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Act act : kActs) {
    const Shape s = ShapeOf(5, 70, 33, act, Residual::kApart);
    const auto w = SmallIntegers<float>(rng, s.n * s.k, 1, 8);
    auto a = SmallIntegers<float>(rng, s.m * s.k);
    auto residual = UniformReals<float>(rng, s.m * s.cols());
    const auto plan = Plan<float, float, float>(s, w, {});
    const auto clean = Run(plan, s, a, inline_, {}, residual);
    a[static_cast<size_t>(2 * s.k + 32)] = nan;
    residual[static_cast<size_t>(3 * s.cols() + 34)] = nan;
    const auto out = Run(plan, s, a, inline_, {}, residual);
    for (int64_t i = 0; i < s.m * s.cols(); ++i) {
      const float value = out[static_cast<size_t>(i)];
      if (i / s.cols() == 2 || i == 3 * s.cols() + 34) {
        EXPECT_TRUE(std::isnan(value)) << i;
      } else {
        EXPECT_EQ(value, clean[static_cast<size_t>(i)]) << i;
      }
    }
  }
}

TEST_P(EpilogueTest, NoRowsAreNoWork) {
  const auto plan = Plan<BF, BF, float>(ShapeOf(0, 6, 2, Act::kSiluAndMul),
                                        std::vector<BF>(12, BF{}), {});
  const MatrixView<const BF> a(nullptr, {0, 2}, {2, 1});
  const MatrixView<float> c(nullptr, {0, 3}, {3, 1});
  EXPECT_EQ(plan.CheckArgs(a, c, c), absl::OkStatus());
  plan.Execute(a, c, c, Workspace(), inline_);
}

}  // namespace
}  // namespace quern
