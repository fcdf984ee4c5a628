// gemm/epilogue.h, on weights of every format.

#include "quern/gemm/epilogue.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_activation.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

using BF = BFloat16;
using F16 = Float16;
using Act = LinearActivation;

constexpr double kUnit = 1.0 / (1 << 24);
const double kDenormal = 140 * std::ldexp(1.0, -149);

constexpr Act kActs[] = {
    Act::kNone,       Act::kSilu,       Act::kGelu,          Act::kGeluTanh,
    Act::kSiluAndMul, Act::kGeluAndMul, Act::kGeluTanhAndMul};

double GeluTanhArgument(double v) {
  return 2 * std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v);
}

double Activated(Act act, double v) {
  if (act == Act::kNone) return v;
  if (v == -std::numeric_limits<double>::infinity()) return -0.0;
  switch (act) {
    case Act::kSilu:
    case Act::kSiluAndMul:
      return ReferenceSilu(v);
    case Act::kGelu:
    case Act::kGeluAndMul:
      return ReferenceGelu(v);
    default:
      // ReferenceGeluTanh cancels where v is far below zero.
      return v / (1 + std::exp(-GeluTanhArgument(v)));
  }
}

// The relative bound that the header promises for act(v).
double BoundOf(Act act, double v) {
  switch (act) {
    case Act::kNone:
      return 0;
    case Act::kSilu:
    case Act::kSiluAndMul:
      return 10 * kUnit;
    case Act::kGelu:
    case Act::kGeluAndMul:
      return (16 + std::min(v * v / 2, 110.0)) * kUnit;
    default:
      return (10 + 4 * std::min(std::abs(GeluTanhArgument(v)), 110.0)) * kUnit;
  }
}

Shape ShapeOf(int64_t m, int64_t n, int64_t k, Act act,
              Residual residual = Residual::kNone, int64_t padding = 0) {
  return {m, n, k, padding, padding, true, act, residual};
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

template <typename A, typename C>
LinearSpec SpecFor(const Shape& s) {
  LinearSpec spec = SpecOf<A, C>(s.act);
  spec.residual = true;
  if (spec.a == DType::kI8) spec.zero_points = Int8ZeroPoint::kUsed;
  return spec;
}

class EpilogueTest : public LinearTest {
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

  // a is integers; as int8 it has scales and zero points for its rows.
  template <typename A, typename C>
  void ExpectExactFrom(WeightCase f, const Shape& s,
                       const std::vector<Executor*>& executors) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<A>) << " by " << f << " to "
                 << DTypeName(DTypeOf<C>) << " " << s);
    TestRng rng;
    const int64_t most = s.k > 200 ? 1 : 2;
    KnownWeights w = ExactWeights(rng, f, s, most, most == 1 ? 0 : 1);
    w.bias = DecidedBias(rng, s, s.k * most * most);
    auto a = SmallIntegers<A>(rng, s.m * s.k, -most, most);
    RowTerms rows;
    std::vector<double> exact_a = ToDoubles(a);
    if constexpr (std::is_same_v<A, int8_t>) {
      for (int64_t r = 0; r < s.m; ++r) {
        rows.scales.push_back(rng.Integer(0, 1) == 0 ? 1.0f : 0.5f);
        rows.zero_points.push_back(static_cast<int32_t>(rng.Integer(-9, 9)));
      }
      for (size_t i = 0; i < a.size(); ++i) {
        const size_t row = i / static_cast<size_t>(s.k);
        a[i] = static_cast<int8_t>(a[i] + rows.zero_points[row]);
      }
      exact_a = Dequantised(a, rows);
    }
    const auto residual = SmallIntegers<C>(
        rng, s.residual == Residual::kNone ? 0 : s.m * s.cols(), -99, 99);
    auto v = ProductOf(w, s.m, exact_a);
    for (int64_t i = 0; s.act != Act::kNone && i < s.m * s.n; ++i) {
      double& x = v[static_cast<size_t>(i)];
      if (i % s.n < s.cols() && x < 0) x = 0;
    }
    // Large gates are their own activation, in double as in f32.
    Shape decided = s;
    if (!IsGated(s.act)) decided.act = Act::kNone;
    const auto want = RoundedTo<C>(Reference(decided, v, ToDoubles(residual)));
    const auto plan = Plan(SpecFor<A, C>(s), w);
    for (Executor* executor : executors) {
      EXPECT_TRUE(AllEqual(
          RunLinear<A, C>(plan, s, a, *executor, rows, residual), want))
          << executor->num_workers() << " workers";
    }
  }
  template <typename A, typename C>
  void ExpectExact(WeightCase f, Shape s,
                   const std::vector<Executor*>& executors) {
    if (f.format > WeightFormat::kI8Channel) f.layout = WeightLayout::kNK;
    if (f.format == WeightFormat::kI8Channel) {
      ExpectExactFrom<int8_t, C>(f, s, executors);
    } else {
      ExpectExactFrom<A, C>(f, s, executors);
    }
  }

  // Calls fn at every remainder of panels, lines and tiles.
  template <typename F>
  void ForEachShape(const F& fn) {
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
          fn(s, i % 5 == 0 ? WeightLayout::kKN : WeightLayout::kNK);
          if (HasFailure()) return;
        }
      }
    }
  }

  template <typename A, typename C>
  void ExpectRealsWithinBound(WeightCase f) {
    TestRng rng;
    ManyWorkers executor(2);
    for (const Act act : kActs) {
      const Shape s = ShapeOf(9, 70, 320, act, Residual::kApart);
      SCOPED_TRACE(testing::Message()
                   << f << " to " << DTypeName(DTypeOf<C>) << " " << s);
      const KnownWeights w = RealWeights(rng, f, s);
      auto a = UniformReals<A>(rng, s.m * s.k);
      RowTerms rows;
      std::vector<double> exact_a = ToDoubles(a);
      if constexpr (std::is_same_v<A, int8_t>) {
        a = SmallIntegers<int8_t>(rng, s.m * s.k, -128, 127);
        rows.scales = UniformReals<float>(rng, s.m, 0.001, 0.01);
        rows.zero_points = SmallIntegers<int32_t>(rng, s.m, -99, 99);
        exact_a = Dequantised(a, rows);
      }
      const auto residual = UniformReals<C>(rng, s.m * s.cols());
      const auto v = ProductOf(w, s.m, exact_a);
      const auto sums = BoundsOf(w, s.m, exact_a);
      const auto bound = [&](double expected, int64_t flat) {
        const auto at =
            static_cast<size_t>(flat / s.cols() * s.n + flat % s.cols());
        // No activation is steeper than 1.13.
        double error =
            1.13 * sums[at] +
            1.01 * BoundOf(act, v[at]) * std::abs(Activated(act, v[at])) +
            kDenormal;
        double value = std::abs(Activated(act, v[at]));
        if (IsGated(act)) {
          const size_t up = at + static_cast<size_t>(s.cols());
          error = error * (std::abs(v[up]) + sums[up]) + sums[up] * value;
          value *= std::abs(v[up]);
        }
        // The product, the sum with residual, and c.
        error += kUnit * (value + error);
        error += kUnit * (std::abs(expected) + error);
        return error + RoundingBound<C>(std::abs(expected) + error);
      };
      const auto plan = Plan(SpecFor<A, C>(s), w);
      EXPECT_TRUE(
          AllWithin(RunLinear<A, C>(plan, s, a, executor, rows, residual),
                    Reference(s, v, ToDoubles(residual)), bound));
    }
  }

  // act(v) is as accurate as the header promises: k = 1, a = 1, weights v.
  void ExpectAccurate(Act act, const std::vector<float>& v) {
    SCOPED_TRACE(testing::Message() << LinearActivationName(act));
    std::vector<double> want;
    for (const float x : v) want.push_back(Activated(act, double{x}));
    const Shape s = ShapeOf(1, static_cast<int64_t>(v.size()), 1, act);
    KnownWeights w = EmptyWeights({WeightFormat::kF32}, s);
    w.codes = ToDoubles(v);
    const auto plan = Plan(SpecOf<float, float>(act), w);
    const auto got =
        ToDoubles(RunLinear<float, float>(plan, s, {1.0f}, inline_));
    EXPECT_TRUE(AllWithin(got, want, [&](double value, int64_t flat) {
      if (!std::isfinite(value)) return 0.0;
      const double bound = BoundOf(act, double{v[static_cast<size_t>(flat)]});
      return std::min(1.0, bound) * std::abs(value) + kDenormal;
    }));
    for (size_t i = 0; i < v.size(); ++i) {
      if (std::isnan(got[i]) || v[i] == 0) continue;
      ASSERT_EQ(std::signbit(got[i]), std::signbit(v[i])) << v[i];
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(EpilogueTest);

TEST_P(EpilogueTest, IsExactAtEveryRemainder) {
  for (const WeightCase& f : kEveryFormat) {
    ForEachShape([&](const Shape& s, WeightLayout layout) {
      ExpectExact<BF, float>({f.format, layout, f.zeros}, s, {&inline_});
    });
  }
}

TEST_P(EpilogueTest, RoundsOnceToEachOutputType) {
  for (const WeightCase& f : kEveryFormat) {
    for (const Act act : kActs) {
      for (const auto residual :
           {Residual::kNone, Residual::kApart, Residual::kInPlace}) {
        const Shape s = ShapeOf(7, 70, 10, act, residual, 3);
        ExpectExact<BF, BF>(f, s, {&inline_});
        ExpectExact<F16, F16>(f, s, {&inline_});
        ExpectExact<float, float>(f, s, {&inline_});
      }
    }
  }
}

// One panel, whose k must be divided, to more tasks than workers; several
// blocks of rows.
TEST_P(EpilogueTest, IsExactHoweverItIsDivided) {
  ManyWorkers two(2), five(5), many(64);
  const std::vector<Executor*> executors = {&two, &five, &many};
  for (const WeightCase& f : kEveryFormat) {
    if (f.format == WeightFormat::kF16) continue;
    const int64_t k = f.format == WeightFormat::kBF16 ? 2100 : 1100;
    for (const int64_t n : {6, 32, 100, 300}) {
      for (const int64_t m : {1, 16, 40}) {
        ExpectExact<BF, float>(f, ShapeOf(m, n, k, Act::kSiluAndMul),
                               executors);
      }
    }
    ExpectExact<BF, float>(
        f, ShapeOf(16, 100, k, Act::kGelu, Residual::kInPlace, 1), executors);
    for (const int64_t m : {257, 513}) {
      ExpectExact<BF, BF>(
          f, ShapeOf(m, 72, 40, Act::kSiluAndMul, Residual::kApart, 3),
          executors);
      ExpectExact<BF, BF>(f, ShapeOf(m, 72, 40, Act::kNone, Residual::kInPlace),
                          executors);
    }
  }
}

TEST_P(EpilogueTest, RealsStayWithinTheDerivedBound) {
  for (const WeightCase& f : kEveryFormat) {
    if (f.format == WeightFormat::kI8Channel) {
      ExpectRealsWithinBound<int8_t, float>(f);
      ExpectRealsWithinBound<int8_t, BF>(f);
    } else {
      ExpectRealsWithinBound<float, float>(f);
      ExpectRealsWithinBound<BF, BF>(f);
      ExpectRealsWithinBound<F16, F16>(f);
    }
  }
}

TEST_P(EpilogueTest, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  for (const WeightCase& f : kEveryFormat) {
    SCOPED_TRACE(testing::Message() << f);
    const Shape s = ShapeOf(37, 166, 1184, Act::kSiluAndMul, Residual::kApart);
    ExpectRowsAlone<BF>(Plan(SpecFor<BF, float>(s), RealWeights(rng, f, s)), s,
                        rng);
  }
}

TEST_P(EpilogueTest, NaNStaysInItsRowAndElement) {
  TestRng rng;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const WeightCase& f : kEveryFormat) {
    for (const Act act : kActs) {
      SCOPED_TRACE(testing::Message() << f << " " << LinearActivationName(act));
      const Shape s = ShapeOf(5, 70, 64, act, Residual::kApart);
      auto a = SmallIntegers<float>(rng, s.m * s.k);
      auto residual = UniformReals<float>(rng, s.m * s.cols());
      const auto plan = Plan(SpecFor<float, float>(s), RealWeights(rng, f, s));
      const auto run = [&] {
        return RunLinear<float, float>(plan, s, a, inline_, {}, residual);
      };
      const auto clean = run();
      a[static_cast<size_t>(2 * s.k + 63)] = nan;
      residual[static_cast<size_t>(3 * s.cols() + 34)] = nan;
      const auto out = run();
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
}

// Every bf16: all magnitudes, both infinities, NaN.
TEST_P(EpilogueTest, ActivationsAreAccurateForEveryMagnitude) {
  std::vector<float> v;
  for (uint32_t code = 0; code < 65536; ++code) {
    v.push_back(FromDouble<float>(ToDouble(FromBits<BF>(code))));
  }
  for (const Act act : {Act::kSilu, Act::kGelu, Act::kGeluTanh}) {
    ExpectAccurate(act, v);
  }
}

// The error is of the unrounded f32; a dense sweep finds more than bf16 has.
TEST_P(EpilogueTest, ActivationsAreAccurateBetweenTheBFloat16s) {
  std::vector<float> near, far;
  for (int i = 0; i < 100000; ++i) {
    near.push_back(-15.0f + static_cast<float>(i) * 0.00021f);
    far.push_back(-110.0f + static_cast<float>(i) * 0.0013f);
  }
  ExpectAccurate(Act::kSilu, far);
  ExpectAccurate(Act::kGelu, near);
  ExpectAccurate(Act::kGeluTanh, near);
}

TEST_P(EpilogueTest, NoRowsAreNoWork) {
  TestRng rng;
  const Shape s = ShapeOf(0, 6, 32, Act::kSiluAndMul);
  for (const WeightCase& f : kEveryFormat) {
    ExpectNoRowsAreNoWork<BF, float>(
        Plan(SpecFor<BF, float>(s), ExactWeights(rng, f, s)));
  }
}

}  // namespace
}  // namespace quern
