// gemm/epilogue.h, through every plan that takes an epilogue.

#include "gemm/epilogue.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/packed_linear.h"
#include "gemm/packed_scaled_linear.h"
#include "gemm/scaled_linear.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/many_workers.h"
#include "testing/no_alloc.h"
#include "testing/reference_activation.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"

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

enum class Residual { kNone, kApart, kInPlace };

struct Shape {
  int64_t m, n, k;
  Act act = Act::kNone;
  Residual residual = Residual::kNone;
  int64_t padding = 0;
  WeightOrder order = WeightOrder::kNK;
  int64_t cols() const { return ColumnsOfC(act, n); }
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "m=" << s.m << " n=" << s.n << " k=" << s.k << " "
             << LinearActivationName(s.act) << " residual "
             << static_cast<int>(s.residual) << " padding=" << s.padding
             << (s.order == WeightOrder::kNK ? " [N, K]" : " [K, N]");
}

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

// The header's, relative.
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

class EpilogueTest : public IsaTest {
 protected:
  template <typename A, typename B, typename C>
  PackedLinearPlan Plan(const Shape& s, const std::vector<B>& w,
                        const std::vector<float>& bias) {
    PackedLinearSpec spec;
    spec.n = s.n;
    spec.k = s.k;
    spec.a = DTypeOf<A>;
    spec.b = DTypeOf<B>;
    spec.c = DTypeOf<C>;
    spec.order = s.order;
    spec.activation = s.act;
    const bool nk = s.order == WeightOrder::kNK;
    const int64_t rows = nk ? s.n : s.k, cols = nk ? s.k : s.n;
    const StridedMatrix<B> weights(w, rows, cols, cols + s.padding);
    const GuardBuffer<float> guarded(bias);
    AnyTensorView bias_view;
    if (!bias.empty()) bias_view = guarded.view();
    auto plan =
        PackedLinearPlan::Create(spec, weights.view(), bias_view, inline_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  PackedScaledLinearPlan Plan(const Shape& s, const std::vector<int8_t>& w,
                              const std::vector<float>& scales,
                              const std::vector<float>& bias) {
    PackedScaledLinearSpec spec;
    spec.n = s.n;
    spec.k = s.k;
    spec.a = DType::kI8;
    spec.order = s.order;
    spec.activation = s.act;
    spec.zero_points = Int8ZeroPoint::kUsed;
    const bool nk = s.order == WeightOrder::kNK;
    const int64_t rows = nk ? s.n : s.k, cols = nk ? s.k : s.n;
    const StridedMatrix<int8_t> weights(w, rows, cols, cols + s.padding);
    const GuardBuffer<float> guarded(bias), guarded_scales(scales);
    auto plan = PackedScaledLinearPlan::Create(
        spec, weights.view(), guarded_scales.view(), guarded.view(), inline_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  template <typename A, typename C, typename AnyPlan>
  std::vector<C> Run(const AnyPlan& plan, const Shape& s,
                     const std::vector<A>& a, const std::vector<C>& residual,
                     Executor& executor, const std::vector<float>& scales = {},
                     const std::vector<int32_t>& zero_points = {}) {
    const Edge edge = s.m % 2 == 0 ? Edge::kBegin : Edge::kEnd;
    const StridedMatrix<A> in(a, s.m, s.k, s.k + s.padding, edge);
    StridedMatrix<C> out(s.m, s.cols(), s.cols() + s.padding, edge, s.padding);
    AnyTensorView added;
    const bool any = !residual.empty();
    const StridedMatrix<C> apart(residual, any ? s.m : 0, s.cols(),
                                 s.cols() + 2 * s.padding, edge);
    if (any && s.residual == Residual::kApart) added = apart.view();
    if (any && s.residual == Residual::kInPlace) {
      for (int64_t r = 0; r < s.m; ++r) {
        std::copy_n(residual.data() + r * s.cols(), s.cols(),
                    out.view().Row(r));
      }
      added = out.view();
    }
    const int64_t bytes = plan.WorkspaceBytes(s.m, executor.num_workers());
    GuardBuffer<float> memory(bytes / 4);
    const Workspace workspace(memory.data(), static_cast<size_t>(bytes));
    const AnyTensorView x = in.view(), c = out.view();
    const GuardBuffer<float> row_scales(scales);
    const GuardBuffer<int32_t> zeros(zero_points);
    const AnyTensorView f = row_scales.view(), z = zeros.view();
    if constexpr (std::is_same_v<AnyPlan, PackedLinearPlan>) {
      EXPECT_EQ(plan.CheckArgs(x, c, added), absl::OkStatus());
      EXPECT_NO_ALLOCATION(plan.Execute(x, c, added, workspace, executor));
    } else {
      EXPECT_EQ(plan.CheckArgs(x, f, z, c, added), absl::OkStatus());
      EXPECT_NO_ALLOCATION(
          plan.Execute(x, f, z, c, added, workspace, executor));
    }
    return out.ToDense();
  }

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
  static std::vector<double> Product(const Shape& s,
                                     const std::vector<double>& a,
                                     const std::vector<double>& w) {
    return s.order == WeightOrder::kNK ? ReferenceLinear(s.m, s.n, s.k, a, w)
                                       : ReferenceGemm(s.m, s.n, s.k, a, w);
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
    auto v = Product(s, ToDoubles(a), ToDoubles(w));
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] += ToDouble(bias[i % static_cast<size_t>(s.n)]);
    }
    auto want_shape = s;
    want_shape.act = IsGated(s.act) ? s.act : Act::kNone;
    // Large positive gates are their own activation, in double as in f32.
    const auto want = Reference(want_shape, Decided(s, v), ToDoubles(residual));
    EXPECT_TRUE(
        AllEqual(Run(plan, s, a, residual, executor), RoundedTo<C>(want)));
  }

  void ExpectScaledExact(const Shape& s, Executor& executor) {
    SCOPED_TRACE(testing::Message() << "int8 " << s);
    TestRng rng;
    const int64_t most = s.k > 200 ? 1 : 2;
    auto a = SmallIntegers<int8_t>(rng, s.m * s.k, -most, most);
    const auto w = SmallIntegers<int8_t>(rng, s.n * s.k, -most, most);
    std::vector<float> scales, row_scales;
    for (int64_t j = 0; j < s.n; ++j) {
      scales.push_back(most == 1 || rng.Integer(0, 1) == 0 ? 1.0f : 0.5f);
    }
    std::vector<int32_t> zero_points;
    for (int64_t r = 0; r < s.m; ++r) {
      row_scales.push_back(rng.Integer(0, 1) == 0 ? 1.0f : 0.5f);
      zero_points.push_back(static_cast<int32_t>(rng.Integer(-9, 9)));
    }
    const auto bias = DecidedBias(rng, s, s.k * most * most);
    const auto residual = ResidualOf<BF>(rng, s);
    const auto plan = Plan(s, w, scales, bias);
    auto v = Product(s, ToDoubles(a), ToDoubles(w));
    for (size_t i = 0; i < v.size(); ++i) {
      const size_t j = i % static_cast<size_t>(s.n);
      v[i] = v[i] * double{row_scales[i / static_cast<size_t>(s.n)]} *
                 double{scales[j]} +
             double{bias[j]};
    }
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] =
          static_cast<int8_t>(a[i] + zero_points[i / static_cast<size_t>(s.k)]);
    }
    auto want_shape = s;
    want_shape.act = IsGated(s.act) ? s.act : Act::kNone;
    const auto want = Reference(want_shape, Decided(s, v), ToDoubles(residual));
    EXPECT_TRUE(
        AllEqual(Run(plan, s, a, residual, executor, row_scales, zero_points),
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
          s.padding = i % 4;
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
      Shape s{9, 70, 300, act, Residual::kApart};
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
      EXPECT_TRUE(AllWithin(Run(plan, s, a, residual, executor), want, bound));
    }
  }

  // act(v) for each v: k = 1, a = 1, weights v.
  std::vector<double> Sweep(Act act, const std::vector<float>& v) {
    Shape s{1, static_cast<int64_t>(v.size()), 1, act};
    const auto plan = Plan<float, float, float>(s, v, {});
    return ToDoubles(
        Run(plan, s, std::vector<float>{1.0f}, std::vector<float>(), inline_));
  }
  void ExpectAccurate(Act act, const std::vector<float>& v) {
    SCOPED_TRACE(std::string(LinearActivationName(act)));
    std::vector<double> want;
    for (const float x : v) want.push_back(Activated(act, double{x}));
    const auto got = Sweep(act, v);
    EXPECT_TRUE(AllWithin(got, want, [&](double value, int64_t flat) {
      if (!std::isfinite(value)) return 0.0;
      const double x = double{v[static_cast<size_t>(flat)]};
      const double relative = std::min(1.0, BoundOf(act, x));
      return relative * std::abs(value) + kDenormal;
    }));
    for (size_t i = 0; i < v.size(); ++i) {
      if (std::isnan(got[i]) || v[i] == 0) continue;
      ASSERT_EQ(std::signbit(got[i]), std::signbit(v[i])) << v[i];
    }
  }

  InlineExecutor inline_;
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
      const Shape s{7, 70, 10, act, residual, 3};
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
        ExpectExact<BF, BF, float>({m, n, 2100, Act::kSiluAndMul}, executor);
        ExpectScaledExact({m, n, 1100, Act::kSiluAndMul}, executor);
        ExpectExact<BF, BF, float>(
            {m, n, 2100, Act::kGelu, Residual::kInPlace, 1}, executor);
      }
    }
    for (const int64_t m : {257, 513}) {
      ExpectExact<BF, BF, BF>(
          {m, 72, 40, Act::kSiluAndMul, Residual::kApart, 3}, executor);
      ExpectScaledExact({m, 72, 40, Act::kNone, Residual::kInPlace}, executor);
    }
  }
}

TEST_P(EpilogueTest, RealsStayWithinTheDerivedBound) {
  ExpectRealsWithinBound<float, float, float>();
  ExpectRealsWithinBound<BF, BF, BF>();
  ExpectRealsWithinBound<F16, F16, F16>();
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

// Neither threads, nor the rows beside it, nor where residual lies.
TEST_P(EpilogueTest, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  Shape s{37, 166, 1700, Act::kSiluAndMul, Residual::kApart};
  const auto w = UniformReals<BF>(rng, s.n * s.k);
  const auto a = UniformReals<BF>(rng, s.m * s.k);
  const auto residual = UniformReals<float>(rng, s.m * s.cols());
  const auto plan = Plan<BF, BF, float>(s, w, {});
  const auto batch = Run(plan, s, a, residual, inline_);
  for (const int workers : {2, 64}) {
    ManyWorkers executor(workers);
    s.residual = Residual::kInPlace;
    EXPECT_TRUE(AllBitsEqual(Run(plan, s, a, residual, executor), batch))
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
      EXPECT_TRUE(AllBitsEqual(Run(plan, one, row, added, executor), want))
          << "row " << first;
    }
  }
}

TEST_P(EpilogueTest, NaNStaysInItsRowAndElement) {
  TestRng rng;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Act act : kActs) {
    const Shape s{5, 70, 33, act, Residual::kApart};
    const auto w = SmallIntegers<float>(rng, s.n * s.k, 1, 8);
    auto a = SmallIntegers<float>(rng, s.m * s.k);
    auto residual = UniformReals<float>(rng, s.m * s.cols());
    const auto plan = Plan<float, float, float>(s, w, {});
    const auto clean = Run(plan, s, a, residual, inline_);
    a[static_cast<size_t>(2 * s.k + 32)] = nan;
    residual[static_cast<size_t>(3 * s.cols() + 34)] = nan;
    const auto out = Run(plan, s, a, residual, inline_);
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
  const auto plan = Plan<BF, BF, float>({0, 6, 2, Act::kSiluAndMul},
                                        std::vector<BF>(12, BF{}), {});
  const MatrixView<const BF> a(nullptr, {0, 2}, {2, 1});
  const MatrixView<float> c(nullptr, {0, 3}, {3, 1});
  EXPECT_EQ(plan.CheckArgs(a, c, c), absl::OkStatus());
  plan.Execute(a, c, c, Workspace(), inline_);
}

void ExpectRefusal(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(std::string(status.message()).find(words), std::string::npos)
      << status << "\nlacks: " << words;
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

TEST(EpilogueRefusalTest, RefusesABadActivation) {
  InlineExecutor executor;
  std::vector<BF> w(15);
  std::vector<int8_t> w8(15);
  const float one = 1;
  const auto create = [&](Act act, LinearImpl impl) {
    LinearSpec spec;
    spec.n = 5;
    spec.k = 3;
    spec.activation = act;
    spec.impl = impl;
    return LinearPlan::Create(spec, DenseMatrix(w.data(), 5, 3),
                              AnyTensorView(), executor)
        .status();
  };
  const auto create_scaled = [&](Act act, LinearImpl impl) {
    ScaledLinearSpec spec;
    spec.n = 5;
    spec.k = 3;
    spec.activation = act;
    spec.impl = impl;
    return ScaledLinearPlan::Create(spec, DenseMatrix(w8.data(), 5, 3),
                                    DenseVector(&one, 1), AnyTensorView(),
                                    executor)
        .status();
  };
  ExpectRefusal(create(Act::kSiluAndMul, LinearImpl::kAuto), kInvalid,
                "packed_linear: n=5 is odd; activation silu_and_mul needs");
  ExpectRefusal(create_scaled(Act::kGeluAndMul, LinearImpl::kAuto), kInvalid,
                "packed_scaled_linear: n=5 is odd; activation gelu_and_mul");
  ExpectRefusal(create(static_cast<Act>(7), LinearImpl::kAuto), kInvalid,
                "packed_linear: activation=7; need 0 <= activation <= 6");
  ExpectRefusal(create(Act::kGelu, LinearImpl::kOneDnn), kUnimplemented,
                "linear: activation is gelu; oneDNN");
  ExpectRefusal(create_scaled(Act::kSilu, LinearImpl::kOneDnn), kUnimplemented,
                "scaled_linear: activation is silu; oneDNN");
}

TEST(EpilogueRefusalTest, RefusesABadResidual) {
  InlineExecutor executor;
  std::vector<BF> w(12), a(6), c(16), apart(8);
  std::vector<float> f32(8);
  const AnyTensorView in = DenseMatrix(a.data(), 2, 3);
  const AnyTensorView out = DenseMatrix(c.data(), 2, 4);
  LinearSpec spec;
  spec.n = 4;
  spec.k = 3;
  const auto create = [&] {
    auto plan = LinearPlan::Create(spec, DenseMatrix(w.data(), 4, 3),
                                   AnyTensorView(), executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  };
  const LinearPlan plan = create();
  EXPECT_EQ(plan.CheckArgs(in, out, out), absl::OkStatus());
  EXPECT_EQ(plan.CheckArgs(in, out, DenseMatrix(apart.data(), 2, 4)),
            absl::OkStatus());
  const auto refuse = [&](const AnyTensorView& residual,
                          const std::string& words) {
    ExpectRefusal(plan.CheckArgs(in, out, residual), kInvalid, words);
  };
  refuse(DenseMatrix(f32.data(), 2, 4), "residual is f32; need bf16");
  refuse(DenseMatrix(apart.data(), 4, 2), "residual is [4, 2]; need [2, 4]");
  refuse(DenseVector(apart.data(), 8), "residual is [8]; need [2, 4]");
  refuse(MatrixView<const BF>(nullptr, {2, 4}, {4, 1}), "residual is null");
  refuse(DenseMatrix(c.data() + 1, 2, 4), "c overlaps residual");
  refuse(MatrixView<BF>(c.data(), {2, 4}, {5, 1}), "c overlaps residual");

  spec.activation = Act::kSiluAndMul;
  ExpectRefusal(create().CheckArgs(in, out), kInvalid,
                "c is [2, 4]; need [2, 2]");
  EXPECT_EQ(create().CheckArgs(in, DenseMatrix(c.data(), 2, 2)),
            absl::OkStatus());
  spec.activation = Act::kNone;
  spec.impl = LinearImpl::kOneDnn;
  const LinearPlan onednn = create();
  EXPECT_EQ(onednn.CheckArgs(in, out), absl::OkStatus());
  ExpectRefusal(onednn.CheckArgs(in, out, out), kUnimplemented,
                "linear: residual is given; oneDNN");
}

TEST(EpilogueRefusalTest, ScaledLinearRefusesABadResidual) {
  InlineExecutor executor;
  std::vector<int8_t> w(12);
  std::vector<BF> a(6), c(9);
  const float one = 1;
  ScaledLinearSpec spec;
  spec.n = 4;
  spec.k = 3;
  ScaledLinearArgs args;
  args.a = DenseMatrix(a.data(), 2, 3);
  args.c = DenseMatrix(c.data(), 2, 4);
  for (const auto impl : {LinearImpl::kPacked, LinearImpl::kOneDnn}) {
    spec.impl = impl;
    const auto plan = ScaledLinearPlan::Create(
        spec, DenseMatrix(w.data(), 4, 3), DenseVector(&one, 1),
        AnyTensorView(), executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    args.residual = AnyTensorView();
    EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
    args.residual = args.c;
    if (impl == LinearImpl::kOneDnn) {
      ExpectRefusal(plan->CheckArgs(args), kUnimplemented,
                    "scaled_linear: residual is given; oneDNN");
      continue;
    }
    EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
    args.residual = DenseMatrix(c.data() + 1, 2, 4);
    ExpectRefusal(plan->CheckArgs(args), kInvalid, "c overlaps residual");
  }
}

// The front doors hand activation and residual on.
TEST(EpilogueFrontDoorTest, AddsToCAfterTheActivation) {
  InlineExecutor executor;
  const std::vector<float> w = {50, -200, 3, 4};  // gate: 50, -200; up: 3, 4
  const std::vector<float> a = {1};
  std::vector<float> c = {7, 9};
  const auto out = DenseMatrix(c.data(), 1, 2);
  LinearSpec spec;
  spec.n = 4;
  spec.k = 1;
  spec.a = spec.b = spec.c = DType::kF32;
  spec.activation = Act::kSiluAndMul;
  auto plan = LinearPlan::Create(spec, DenseMatrix(w.data(), 4, 1),
                                 AnyTensorView(), executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  LinearScratch scratch;
  ASSERT_TRUE(scratch.Reserve(*plan, 1, executor).ok());
  plan->Execute(DenseMatrix(a.data(), 1, 1), out, out, scratch, executor);
  EXPECT_EQ(c, (std::vector<float>{157, 9}));

  const std::vector<int8_t> w8 = {50, -128, 3, 4}, q = {2};
  const float half = 0.5f;
  ScaledLinearSpec scaled;
  scaled.n = 4;
  scaled.k = 1;
  scaled.a = DType::kI8;
  scaled.c = DType::kF32;
  scaled.granularity = Int8Granularity::kPerTensor;
  scaled.activation = Act::kSiluAndMul;
  auto scaled_plan = ScaledLinearPlan::Create(
      scaled, DenseMatrix(w8.data(), 4, 1), DenseVector(&half, 1),
      AnyTensorView(), executor);
  ASSERT_TRUE(scaled_plan.ok()) << scaled_plan.status();
  ASSERT_TRUE(scratch.Reserve(*scaled_plan, 1, executor).ok());
  ScaledLinearArgs args;
  args.a = DenseMatrix(q.data(), 1, 1);
  args.c = args.residual = out;
  scaled_plan->Execute(args, scratch, executor);
  EXPECT_EQ(c, (std::vector<float>{307, 9}));
}

}  // namespace
}  // namespace quern
