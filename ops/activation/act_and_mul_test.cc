#include "quern/ops/activation/act_and_mul.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/hwy_executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_activation.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr int64_t kWidths[] = {1, 7, 8, 15, 16, 17, 33, 256, 257, 769};

// Relative error: 10 units by act_and_mul.h, and one for the product with up.
const double kRelative = 11 * std::ldexp(1.0, -24);
// Absolute error where e^gate is a denormal: half a unit of 2^-149 in the
// exponential, multiplied by at most 128, and as much in the products.
const double kDenormal = 140 * std::ldexp(1.0, -149);

ActAndMulSpec Spec(int64_t d, DType x = DType::kF32, DType out = DType::kF32) {
  ActAndMulSpec spec;
  spec.d = d;
  spec.x_dtype = x;
  spec.out_dtype = out;
  return spec;
}

class ActAndMulTest : public IsaTest {
 protected:
  ActAndMulPlan Plan(const ActAndMulSpec& spec) {
    auto plan = ActAndMulPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(ActAndMulTest);

TEST_P(ActAndMulTest, AgreesWithTheReference) {
  TestRng rng;
  for (const DType x_dtype : kDTypes) {
    for (const DType out_dtype : kDTypes) {
      for (const int64_t d : kWidths) {
        SCOPED_TRACE(testing::Message() << d << " " << DTypeName(x_dtype) << " "
                                        << DTypeName(out_dtype));
        const int64_t rows = 3;
        const ActAndMulPlan plan = Plan(Spec(d, x_dtype, out_dtype));
        const AnyMatrix x(x_dtype,
                          ToDoubles(UniformReals(rng, rows * 2 * d, -9, 9)),
                          rows, 2 * d, 2 * d + 3, Edge::kEnd);
        const AnyMatrix out(out_dtype, rows, d, d + 1, Edge::kBegin, 1);
        ASSERT_EQ(plan.CheckArgs(x.view(), out.view()), absl::OkStatus());
        plan.Execute(x.view(), out.view(), executor_);
        EXPECT_TRUE(AllWithin(out.doubles(),
                              ReferenceSiluAndMul(rows, d, x.doubles()),
                              [&](double value, int64_t) {
                                return ResultBound(out_dtype, value, kRelative);
                              }));

        // Two views with other strides must give the same bits.
        std::vector<double> gates, ups;
        const auto all = x.doubles();
        for (int64_t i = 0; i < rows * 2 * d; ++i) {
          (i % (2 * d) < d ? gates : ups)
              .push_back(all[static_cast<size_t>(i)]);
        }
        const AnyMatrix gate(x_dtype, gates, rows, d, d + 2);
        const AnyMatrix up(x_dtype, ups, rows, d, d);
        const AnyMatrix split(out_dtype, rows, d, d);
        ASSERT_EQ(plan.CheckSplitArgs(gate.view(), up.view(), split.view()),
                  absl::OkStatus());
        plan.ExecuteSplit(gate.view(), up.view(), split.view(), executor_);
        EXPECT_EQ(split.bits(), out.bits());
      }
    }
  }
}

// Every bf16 is a gate once: all magnitudes, both infinities and NaN.
TEST_P(ActAndMulTest, IsAccurateForEveryMagnitude) {
  const int64_t d = 65536;
  std::vector<double> gates, want;
  for (uint32_t code = 0; code < 65536; ++code) {
    const double gate = ToDouble(FromBits<BFloat16>(code));
    gates.push_back(gate);
    want.push_back(gate < -1e30 ? -0.0 : ReferenceSilu(gate));
  }
  const ActAndMulPlan plan = Plan(Spec(d));
  const AnyMatrix gate(DType::kF32, gates, 1, d, d);
  const AnyMatrix up(DType::kF32, std::vector<double>(gates.size(), 1.0), 1, d,
                     d);
  const AnyMatrix out(DType::kF32, 1, d, d);
  plan.ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
  EXPECT_TRUE(AllWithin(out.doubles(), want, [](double value, int64_t) {
    return std::isfinite(value) ? std::abs(value) * kRelative + kDenormal : 0.0;
  }));
  // The result keeps the gate's sign even where it underflows to zero.
  const auto got = out.doubles();
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isnan(got[i])) {
      ASSERT_EQ(std::signbit(got[i]), std::signbit(gates[i])) << gates[i];
    }
  }
}

// The error is measured on unrounded f32 results. A dense sweep of f32 gates
// finds errors that the bf16 gates do not show.
TEST_P(ActAndMulTest, IsAccurateBetweenTheBFloat16s) {
  const int64_t d = 200000;
  std::vector<double> gates, want;
  for (int64_t i = 0; i < d; ++i) {
    gates.push_back(
        ToDouble(FromDouble<float>(-110.0 + static_cast<double>(i) * 0.0011)));
    want.push_back(ReferenceSilu(gates.back()));
  }
  const ActAndMulPlan plan = Plan(Spec(d));
  const AnyMatrix gate(DType::kF32, gates, 1, d, d);
  const AnyMatrix up(DType::kF32, std::vector<double>(gates.size(), 1.0), 1, d,
                     d);
  const AnyMatrix out(DType::kF32, 1, d, d);
  plan.ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
  EXPECT_TRUE(AllWithin(out.doubles(), want, [](double value, int64_t) {
    return std::abs(value) * kRelative + kDenormal;
  }));
}

TEST_P(ActAndMulTest, PropagatesNaNAndHasALimitAtMinusInfinity) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : kDTypes) {
    const ActAndMulPlan plan = Plan(Spec(6, dtype, dtype));
    const AnyMatrix gate(dtype, {-kInf, kNaN, 1, kInf, 0, -kInf}, 1, 6, 6);
    const AnyMatrix up(dtype, {2, 1, kNaN, -1, 5, -3}, 1, 6, 6);
    const AnyMatrix out(dtype, 1, 6, 6);
    plan.ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
    const auto y = out.doubles();
    EXPECT_TRUE(y[0] == 0.0 && std::signbit(y[0])) << y[0];
    EXPECT_TRUE(std::isnan(y[1]));
    EXPECT_TRUE(std::isnan(y[2]));
    EXPECT_EQ(y[3], -kInf);
    EXPECT_EQ(y[4], 0.0);
    EXPECT_TRUE(y[5] == 0.0 && !std::signbit(y[5])) << y[5];

    // The clamps of swigluoai must not turn NaN into a number.
    ActAndMulSpec clamped = Spec(6, dtype, dtype);
    clamped.activation = Activation::kSwigluOai;
    Plan(clamped).ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
    EXPECT_TRUE(std::isnan(out.doubles()[1]));
    EXPECT_TRUE(std::isnan(out.doubles()[2]));
  }
}

// Where a dedicated bf16 kernel exists, its results must be the f32 results
// rounded afterwards, bit for bit and including denormals, for every gate and
// each kind of up.
TEST_P(ActAndMulTest, RoundsBFloat16ResultsOnce) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const double kUps[] = {1,    -1.5,      0x1p-126,   0x1.02p-130, -0x1p-133, 0,
                         -0.0, 0x1.8p100, 0x1.fep127, -kInf,       3.140625};
  const int64_t d = 65536;
  std::vector<double> gates, ups;
  for (uint32_t code = 0; code < 65536; ++code) {
    gates.push_back(ToDouble(FromBits<BFloat16>(code)));
    // Some blocks have a single denormal among ordinary numbers, others have
    // all kinds together.
    const uint32_t every = code & 1024 ? 37 : 1;
    ups.push_back(code % every == 0 ? kUps[code / every % 11] : 1.0);
  }
  const AnyMatrix gate(DType::kBF16, gates, 1, d, d);
  const AnyMatrix up(DType::kBF16, ups, 1, d, d);
  for (const Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    SCOPED_TRACE(ActivationName(activation));
    ActAndMulSpec spec = Spec(d, DType::kBF16, DType::kF32);
    spec.activation = activation;
    const AnyMatrix f32(DType::kF32, 1, d, d);
    Plan(spec).ExecuteSplit(gate.view(), up.view(), f32.view(), executor_);
    spec.out_dtype = DType::kBF16;
    for (const Stores stores : {Stores::kCached, Stores::kStream}) {
      spec.stores = stores;
      const AnyMatrix bf16(DType::kBF16, 1, d, d);
      Plan(spec).ExecuteSplit(gate.view(), up.view(), bf16.view(), executor_);
      const auto want = f32.doubles();
      const auto got = bf16.doubles();
      const auto bits = bf16.bits();
      for (size_t i = 0; i < got.size(); ++i) {
        if (std::isnan(want[i])) {
          ASSERT_TRUE(std::isnan(got[i])) << gates[i] << " " << ups[i];
        } else {
          ASSERT_EQ(bits[i], BitsOf(FromDouble<BFloat16>(want[i])))
              << gates[i] << " " << ups[i];
        }
      }
    }
  }
}

std::vector<double> Decoded(const std::vector<uint32_t>& codes) {
  std::vector<double> values;
  for (const uint32_t code : codes) {
    values.push_back(ToDouble(FromBits<BFloat16>(code)));
  }
  return values;
}

const std::vector<uint32_t> kGoldenX = {0xc098, 0xc013, 0xbf8d, 0xbeaa, 0x0000,
                                        0x3d91, 0x3f45, 0x3ff3, 0x4053, 0x40d6};
const std::vector<uint32_t> kGoldenY = {0x3fa6, 0xbf33, 0x400d, 0x3f69, 0xbfda,
                                        0x4046, 0xbee6, 0x3f89, 0xc026, 0x3f17};

TEST_P(ActAndMulTest, ReproducesTheGoldenVectors) {
  using Codes = std::vector<uint32_t>;
  struct Case {
    ActAndMulSpec spec;
    Codes want;
  };
  std::vector<Case> cases;
  ActAndMulSpec spec = Spec(10, DType::kBF16, DType::kBF16);
  cases.push_back({spec,
                   {0xbd58, 0x3e16, 0xbf1b, 0xbe01, 0x8000, 0x3de8, 0xbe72,
                    0x3fe2, 0xc104, 0x407c}});
  spec.order = GateOrder::kGateSecond;
  cases.push_back({spec,
                   {0xc09b, 0x3f08, 0xc00c, 0xbe5d, 0x8000, 0x3e57, 0xbe0a,
                    0x3fc2, 0xbf18, 0x4022}});
  spec.order = GateOrder::kGateFirst;
  spec.activation = Activation::kGelu;
  cases.push_back({spec,
                   {0xb6d2, 0x3c8e, 0xbea8, 0xbde5, 0x8000, 0x3ded, 0xbe8a,
                    0x3ffd, 0xc109, 0x407c}});
  spec.activation = Activation::kGeluTanh;
  cases.push_back({spec,
                   {0xb5ca, 0x3c8c, 0xbea8, 0xbde5, 0x8000, 0x3ded, 0xbe8a,
                    0x3ffd, 0xc109, 0x407c}});
  spec.sparsity = 0.5;
  cases.push_back({spec,
                   {0x0000, 0x8000, 0x0000, 0x0000, 0x8000, 0x0000, 0xbdca,
                    0x3fbc, 0xc0ee, 0x406c}});
  spec.sparsity = 0;
  spec.activation = Activation::kFatrelu;
  spec.params.threshold = 0.5f;
  cases.push_back({spec,
                   {0x0000, 0x8000, 0x0000, 0x0000, 0x8000, 0x0000, 0xbeb1,
                    0x4002, 0xc109, 0x407c}});
  spec.activation = Activation::kSwigluOai;
  cases.push_back({spec,
                   {0xbb5c, 0xbc5f, 0xbef0, 0xbe6b, 0x8000, 0x3e1d, 0x3eab,
                    0x4072, 0xc0a8, 0x412a}});
  spec.order = GateOrder::kInterleaved;
  cases.push_back({spec, cases.back().want});
  for (const Case& c : cases) {
    SCOPED_TRACE(ActAndMulName(c.spec));
    Codes codes;
    for (size_t i = 0; i < 20; ++i) {
      const bool interleaved = c.spec.order == GateOrder::kInterleaved;
      const size_t at = interleaved ? i / 2 : i % 10;
      codes.push_back((interleaved ? i % 2 == 0 : i < 10) ? kGoldenX[at]
                                                          : kGoldenY[at]);
    }
    const AnyMatrix x(DType::kBF16, Decoded(codes), 1, 20, 20);
    const AnyMatrix out(DType::kBF16, 1, 10, 10);
    Plan(c.spec).Execute(x.view(), out.view(), executor_);
    EXPECT_EQ(out.bits(), c.want);
  }
}

// The cutoff is a sum of d terms, and its error reaches the result
// undiminished.
TEST_P(ActAndMulTest, SparseGeluAgreesWithTheReference) {
  TestRng rng;
  for (const double sparsity : {0.2, 0.5, 0.95}) {
    for (const int64_t d : kWidths) {
      SCOPED_TRACE(testing::Message() << d << " " << sparsity);
      const int64_t rows = 2;
      ActAndMulSpec spec = Spec(d);
      spec.activation = Activation::kGeluTanh;
      spec.sparsity = sparsity;
      const AnyMatrix x(DType::kF32,
                        ToDoubles(UniformReals(rng, rows * 2 * d, -2, 3)), rows,
                        2 * d, 2 * d + 1);
      const AnyMatrix out(DType::kF32, rows, d, d);
      Plan(spec).Execute(x.view(), out.view(), executor_);
      const std::vector<double> values = x.doubles();
      std::vector<double> want;
      for (int64_t r = 0; r < rows; ++r) {
        const auto row = values.begin() + r * 2 * d;
        const std::vector<double> excess = ReferenceExcess(
            {row, row + d},
            static_cast<double>(static_cast<float>(NormalQuantile(sparsity))));
        for (int64_t i = 0; i < d; ++i) {
          want.push_back(ReferenceGeluTanh(excess[static_cast<size_t>(i)]) *
                         row[d + i]);
        }
      }
      // Bound on the error of mean and deviation: at most 16 additions in one
      // lane of a block of 256, log2(lanes) more to reduce the lanes, and a few
      // roundings, all of numbers up to 5; |gelu'| <= 1.13 and |up| <= 3.
      const double absolute = (16 + 6 + 8) * 5 * 3.4 * 0x1p-23;
      EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double value, int64_t) {
        return std::abs(value) * 40 * 0x1p-24 + absolute;
      }));
    }
  }
}

TEST_P(ActAndMulTest, SparseGeluKnowsItsLimits) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  ActAndMulSpec spec = Spec(4);
  spec.activation = Activation::kGelu;
  spec.sparsity = 1.0;
  const AnyMatrix x(DType::kF32,
                    {1, 2,    3, 4, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1,  //
                     1, kNaN, 3, 4, 1, 1, 1, 1},
                    3, 8, 8);
  const AnyMatrix out(DType::kF32, 3, 4, 4);
  Plan(spec).Execute(x.view(), out.view(), executor_);
  const auto y = out.doubles();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(y[i], 0.0);
  for (size_t i = 4; i < 12; ++i) EXPECT_TRUE(std::isnan(y[i])) << i;
}

TEST(NormalQuantileTest, InvertsTheDistribution) {
  EXPECT_NEAR(NormalQuantile(0.5), 0.0, 1e-15);
  EXPECT_EQ(static_cast<float>(NormalQuantile(0.95)), 1.64485363f);
  EXPECT_NEAR(NormalQuantile(0.05), -1.6448536269514722, 1e-14);
  EXPECT_TRUE(std::isinf(NormalQuantile(1.0)));
}

// Streaming stores write the same bits, from any alignment of the row.
TEST_P(ActAndMulTest, StreamsTheSameBits) {
  TestRng rng;
  for (const DType dtype : kDTypes) {
    for (const int64_t shift : {0, 1, 5}) {
      const int64_t rows = 3, d = 1033;
      const AnyMatrix x(dtype,
                        ToDoubles(UniformReals(rng, rows * 2 * d, -5, 5)), rows,
                        2 * d, 2 * d);
      ActAndMulSpec spec = Spec(d, dtype, dtype);
      spec.stores = Stores::kCached;
      const AnyMatrix cached(dtype, rows, d, d);
      Plan(spec).Execute(x.view(), cached.view(), executor_);
      spec.stores = Stores::kStream;
      const AnyMatrix streamed(dtype, rows, d, d + 1, Edge::kBegin, shift);
      Plan(spec).Execute(x.view(), streamed.view(), executor_);
      EXPECT_EQ(cached.bits(), streamed.bits());
    }
  }
}

// The kernel may take a slower path for a vector that holds an unusual gate;
// that must not change the results of the other gates.
TEST_P(ActAndMulTest, AResultDoesNotDependOnItsNeighbours) {
  TestRng rng;
  const int64_t d = 65536;
  std::vector<double> gates, ups, gates_apart, ups_apart;
  const auto reals = UniformReals(rng, d, -5, 5);
  for (uint32_t code = 0; code < 65536; ++code) {
    gates.push_back(ToDouble(FromBits<BFloat16>(code)));
    ups.push_back(double{reals[code]});
    for (const double gate : {gates.back(), -1000.0, -1000.0}) {
      gates_apart.push_back(gate);
      ups_apart.push_back(ups.back());
    }
  }
  const auto run = [&](Activation activation, DType dtype,
                       const std::vector<double>& g,
                       const std::vector<double>& u) {
    const auto n = static_cast<int64_t>(g.size());
    ActAndMulSpec spec = Spec(n, dtype, dtype);
    spec.activation = activation;
    const AnyMatrix gate(dtype, g, 1, n, n);
    const AnyMatrix up(dtype, u, 1, n, n);
    const AnyMatrix out(dtype, 1, n, n);
    Plan(spec).ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
    return out.bits();
  };
  for (const Activation activation :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto together = run(activation, dtype, gates, ups);
      const auto apart = run(activation, dtype, gates_apart, ups_apart);
      // The NaN's payload is unspecified, because a product takes it from
      // either factor.
      const uint32_t sign = dtype == DType::kF32 ? 0x80000000u : 0x8000u;
      const uint32_t infinity = dtype == DType::kF32 ? 0x7f800000u : 0x7f80u;
      const auto is_nan = [&](uint32_t bits) {
        return (bits & ~sign) > infinity;
      };
      for (size_t i = 0; i < together.size(); ++i) {
        ASSERT_EQ(is_nan(together[i]), is_nan(apart[3 * i])) << gates[i];
        if (is_nan(together[i])) continue;
        ASSERT_EQ(together[i], apart[3 * i]) << gates[i] << " " << ups[i];
      }
    }
  }
}

TEST_P(ActAndMulTest, WorksInPlaceOnAnyNumberOfWorkers) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3);
  ASSERT_TRUE(pool.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  struct Shape {
    int64_t rows, d;
  };
  // In the second shape, several workers share a row.
  for (const auto& [rows, d] : {Shape{61, 333}, Shape{2, 20011}}) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << d);
      const ActAndMulPlan plan = Plan(Spec(d, dtype, dtype));
      const auto values = ToDoubles(UniformReals(rng, rows * 2 * d, -5, 5));
      const AnyMatrix x(dtype, values, rows, 2 * d, 2 * d);
      const AnyMatrix one(dtype, rows, d, d);
      const AnyMatrix many(dtype, rows, d, d);
      EXPECT_NO_ALLOCATION(plan.Execute(x.view(), one.view(), executor_));
      EXPECT_NO_ALLOCATION(plan.Execute(x.view(), many.view(), **pool));
      EXPECT_EQ(one.bits(), many.bits());

      for (const int64_t half : {0, 1}) {
        const AnyMatrix y(dtype, values, rows, 2 * d, 2 * d);
        const AnyTensorView v = y.view();
        const AnyTensorView out(
            dtype,
            static_cast<char*>(v.mutable_data()) +
                half * d * static_cast<int64_t>(SizeOf(dtype)),
            2, {rows, d}, {2 * d, 1});
        ASSERT_EQ(plan.CheckArgs(v, out), absl::OkStatus());
        EXPECT_NO_ALLOCATION(plan.Execute(v, out, **pool));
        std::vector<uint32_t> got;
        const auto bits = y.bits();
        for (int64_t i = 0; i < rows * 2 * d; ++i) {
          if (i % (2 * d) / d == half)
            got.push_back(bits[static_cast<size_t>(i)]);
        }
        EXPECT_EQ(got, one.bits());
      }
    }
  }
}

TEST_P(ActAndMulTest, DoesNothingWithoutRows) {
  const ActAndMulPlan plan = Plan(Spec(4));
  const AnyTensorView x = DenseMatrix<const float>(nullptr, 0, 8);
  const AnyTensorView out = DenseMatrix<float>(nullptr, 0, 4);
  EXPECT_EQ(plan.CheckArgs(x, out), absl::OkStatus());
  plan.Execute(x, out, executor_);
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

TEST(ActAndMulPlanTest, RefusesABadSpec) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const auto refused = [](const ActAndMulSpec& spec, absl::StatusCode code,
                          const std::string& words) {
    ExpectRefused(ActAndMulPlan::Create(spec).status(), code, words);
  };
  refused(Spec(0), kInvalid, "silu_and_mul: d=0; need 1 <= d");
  refused(Spec(int64_t{1} << 59), kInvalid, "d=576460752303423488");
  refused(Spec(8, DType::kI8), kUnimplemented,
          "x_dtype is i8; need f32 or bf16 or f16");
  refused(Spec(8, DType::kF32, DType::kI8), kUnimplemented,
          "out_dtype is i8; need f32 or bf16 or f16");
  ActAndMulSpec spec = Spec(8);
  spec.sparsity = 0.5;
  refused(spec, kUnimplemented, "silu_and_mul: sparsity=0.5; need gelu");
  spec.activation = Activation::kGelu;
  spec.sparsity = 1.5;
  refused(spec, kInvalid,
          "gelu_and_mul_sparse: sparsity=1.5; need 0 <= sparsity <= 1");
  spec = Spec(8);
  spec.activation = Activation::kSwigluOai;
  spec.params.limit = 0;
  refused(spec, kInvalid, "swigluoai_and_mul: limit=0; need limit > 0");
  spec.params.limit = 1;
  spec.params.alpha = -1;
  refused(spec, kInvalid, "alpha=-1; need 2^-32 <= alpha <= 2^32");
  spec.activation = Activation::kFatrelu;
  spec.params.threshold = std::numeric_limits<float>::quiet_NaN();
  refused(spec, kInvalid, "fatrelu_and_mul: threshold=nan; need a number");
}

TEST(ActAndMulPlanTest, RefusesBadArguments) {
  const auto plan = ActAndMulPlan::Create(Spec(4));
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(64), out(64);
  const AnyTensorView vx = DenseMatrix<const float>(x.data(), 2, 8);
  const AnyTensorView vout = DenseMatrix(out.data(), 2, 4);
  const AnyTensorView gate = DenseMatrix<const float>(x.data(), 2, 4);
  const AnyTensorView up = DenseMatrix<const float>(x.data() + 8, 2, 4);
  const auto refused = [](const absl::Status& status,
                          const std::string& words) {
    ExpectRefused(status, absl::StatusCode::kInvalidArgument, words);
  };
  EXPECT_EQ(plan->CheckArgs(vx, vout), absl::OkStatus());
  EXPECT_EQ(plan->CheckSplitArgs(gate, up, vout), absl::OkStatus());
  refused(plan->CheckArgs(DenseMatrix<const float>(x.data(), 2, 7), vout),
          "x is [2, 7]; need [any, 8]");
  refused(plan->CheckArgs(vx, DenseMatrix(out.data(), 1, 4)),
          "out is [1, 4]; need [2, 4]");
  // A dense out in the memory of x is refused, because row 1 of out would lie
  // on the up half of row 0.
  refused(plan->CheckArgs(vx, DenseMatrix(x.data(), 2, 4)),
          "out overlaps the first half of x");
  refused(plan->CheckArgs(vx, MatrixView<float>(x.data() + 2, {2, 4}, {8, 1})),
          "out overlaps the first half of x");
  refused(plan->CheckArgs(vx, MatrixView<float>(x.data() + 5, {1, 4}, {8, 1})),
          "out is [1, 4]");
  refused(plan->CheckSplitArgs(gate, DenseMatrix<const float>(x.data(), 3, 4),
                               vout),
          "up is [3, 4]; need [2, 4]");
  refused(plan->CheckSplitArgs(gate, up, DenseMatrix(x.data() + 12, 2, 4)),
          "out overlaps up");
  // Interleaved pairs cannot be computed in place, because writing overtakes
  // reading.
  ActAndMulSpec pairs = Spec(4);
  pairs.order = GateOrder::kInterleaved;
  const auto interleaved = ActAndMulPlan::Create(pairs);
  ASSERT_TRUE(interleaved.ok()) << interleaved.status();
  refused(
      interleaved->CheckArgs(vx, MatrixView<float>(x.data(), {2, 4}, {8, 1})),
      "out overlaps x");
}

}  // namespace
}  // namespace quern
