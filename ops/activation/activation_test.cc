#include "quern/ops/activation/activation.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
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

constexpr double kUnit = 0x1p-24;
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr Activation kUnary[] = {Activation::kIdentity,  Activation::kSilu,
                                 Activation::kGelu,      Activation::kGeluTanh,
                                 Activation::kQuickGelu, Activation::kRelu2,
                                 Activation::kFatrelu,   Activation::kXielu};

ActivationSpec Spec(Activation activation, int64_t hidden,
                    DType x = DType::kF32, DType out = DType::kF32) {
  ActivationSpec spec;
  spec.activation = activation;
  spec.hidden = hidden;
  spec.x_dtype = x;
  spec.out_dtype = out;
  spec.params.threshold = 0.25f;
  return spec;
}

double Reference(const ActivationSpec& spec, double v) {
  const ActivationParams& p = spec.params;
  switch (spec.activation) {
    case Activation::kSilu:
      return ReferenceSilu(v);
    case Activation::kGelu:
      return ReferenceGelu(v);
    case Activation::kGeluTanh:
      // A sigmoid in place of 1 + tanh, which cancels for negative v.
      return v / (1 + std::exp(-2 * std::sqrt(2 / std::acos(-1.0)) *
                               (v + 0.044715 * v * v * v)));
    case Activation::kQuickGelu:
      return ReferenceQuickGelu(v);
    case Activation::kRelu2:
      return ReferenceRelu2(v);
    case Activation::kFatrelu:
      return ReferenceFatrelu(v, double{p.threshold});
    case Activation::kXielu:
      return ReferenceXielu(v, double{p.alpha_p}, double{p.alpha_n},
                            double{p.beta}, double{p.eps});
    default:
      return v;
  }
}

// The error bound that activation_spec.h states.
double Bound(const ActivationSpec& spec, double v, double y) {
  constexpr double kTiny = 140 * 0x1p-149;
  const ActivationParams& p = spec.params;
  const double size = std::abs(y);
  switch (spec.activation) {
    case Activation::kSilu:
      return size * 10 * kUnit + kTiny;
    case Activation::kGelu:
      return size * (16 + std::min(v * v / 2, 110.0)) * kUnit + kTiny;
    case Activation::kGeluTanh: {
      const double w = 1.6 * (std::abs(v) + 0.044715 * std::abs(v * v * v));
      return size * (10 + 4 * std::min(w, 110.0)) * kUnit + kTiny;
    }
    case Activation::kQuickGelu:
      return size * (10 + 1.3 * std::min(1.702 * std::abs(v), 128.0)) * kUnit +
             kTiny;
    case Activation::kRelu2:
      return size * kUnit + kTiny;
    case Activation::kXielu: {
      const double terms =
          v > 0 ? double{p.alpha_p} * v * v
                : (std::abs(std::expm1(v)) + std::abs(v)) * double{p.alpha_n};
      return (terms + double{p.beta} * std::abs(v) + size) * 8 * kUnit + kTiny;
    }
    default:
      return 0.0;
  }
}

class ActivationTest : public IsaTest {
 protected:
  ActivationPlan Plan(const ActivationSpec& spec) {
    auto plan = ActivationPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(ActivationTest);

TEST_P(ActivationTest, AgreesWithTheReference) {
  TestRng rng;
  for (const Activation activation : kUnary) {
    for (const DType x_dtype : kDTypes) {
      for (const DType out_dtype : kDTypes) {
        for (const int64_t hidden : {1, 7, 16, 17, 33, 256, 257, 521}) {
          SCOPED_TRACE(testing::Message()
                       << ActivationName(activation) << " " << hidden << " "
                       << DTypeName(x_dtype) << " " << DTypeName(out_dtype));
          const int64_t rows = 3;
          const ActivationSpec spec =
              Spec(activation, hidden, x_dtype, out_dtype);
          const ActivationPlan plan = Plan(spec);
          const AnyMatrix x(x_dtype,
                            ToDoubles(UniformReals(rng, rows * hidden, -9, 9)),
                            rows, hidden, hidden + 3, Edge::kEnd);
          const AnyMatrix out(out_dtype, rows, hidden, hidden + 1, Edge::kBegin,
                              1);
          ASSERT_EQ(plan.CheckArgs(x.view(), out.view()), absl::OkStatus());
          plan.Execute(x.view(), out.view(), executor_);
          const std::vector<double> values = x.doubles();
          std::vector<double> want;
          for (const double v : values) want.push_back(Reference(spec, v));
          EXPECT_TRUE(
              AllWithin(out.doubles(), want, [&](double value, int64_t i) {
                const double error =
                    Bound(spec, values[static_cast<size_t>(i)], value);
                return error +
                       ResultBound(out_dtype, std::abs(value) + error, 0.0);
              }));
        }
      }
    }
  }
}

// Every bf16 is an input once, so all magnitudes occur.
TEST_P(ActivationTest, IsAccurateForEveryMagnitude) {
  const int64_t hidden = 65536;
  std::vector<double> values;
  for (uint32_t code = 0; code < 65536; ++code) {
    values.push_back(ToDouble(FromBits<BFloat16>(code)));
  }
  const AnyMatrix x(DType::kF32, values, 1, hidden, hidden);
  for (const Activation activation : kUnary) {
    SCOPED_TRACE(ActivationName(activation));
    const ActivationSpec spec = Spec(activation, hidden);
    const AnyMatrix out(DType::kF32, 1, hidden, hidden);
    Plan(spec).Execute(x.view(), out.view(), executor_);
    const std::vector<double> got = out.doubles();
    for (size_t i = 0; i < got.size(); ++i) {
      const double v = values[i];
      if (std::isnan(v)) {
        ASSERT_TRUE(std::isnan(got[i])) << "code " << i;
      } else if (v < -1e4) {
        // Below -1e4 every activation has reached its limit, 0, except for
        // kXielu, which grows as (alpha_n - beta) |v| and gives NaN at
        // -infinity.
        if (activation == Activation::kXielu) {
          ASSERT_TRUE(std::isinf(v) ? std::isnan(got[i]) : got[i] > 0) << v;
        } else if (activation != Activation::kIdentity) {
          ASSERT_EQ(got[i], 0) << v;
        }
      } else if (Reference(spec, v) > 3.3e38) {
        ASSERT_GT(got[i], 3.3e38) << v;
      } else {
        const double want = Reference(spec, v);
        ASSERT_LE(std::abs(got[i] - want), Bound(spec, v, want)) << v;
      }
    }
  }
}

// The error of kQuickGelu is that of rounding 1.702 v, which is largest where
// 1.702 v is just beyond a power of two: -64 here.
TEST_P(ActivationTest, QuickGeluIsAccurateFarBelowZero) {
  TestRng rng;
  std::vector<double> values = ToDoubles(UniformReals(rng, 20000, -75, -18));
  for (const double v : ToDoubles(UniformReals(rng, 20000, -38.5, -37.6))) {
    values.push_back(v);
  }
  const auto hidden = static_cast<int64_t>(values.size());
  const AnyMatrix x(DType::kF32, values, 1, hidden, hidden);
  const AnyMatrix out(DType::kF32, 1, hidden, hidden);
  const ActivationSpec spec = Spec(Activation::kQuickGelu, hidden);
  Plan(spec).Execute(x.view(), out.view(), executor_);
  std::vector<double> want;
  for (const double v : values) want.push_back(Reference(spec, v));
  EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double y, int64_t i) {
    return Bound(spec, values[static_cast<size_t>(i)], y);
  }));
}

TEST_P(ActivationTest, ReproducesTheGoldenVectors) {
  using Codes = std::vector<uint32_t>;
  struct Case {
    Activation activation;
    Codes want;
  };
  const Codes codes = {0xc098, 0xc013, 0xbf8d, 0xbeaa, 0x0000,
                       0x3d91, 0x3f45, 0x3ff3, 0x4053, 0x40d6};
  std::vector<double> values;
  for (const uint32_t code : codes) {
    values.push_back(ToDouble(FromBits<BFloat16>(code)));
  }
  for (const Case& c :
       std::vector<Case>{{Activation::kIdentity, codes},
                         {Activation::kGeluTanh,
                          {0xb59b, 0xbcc9, 0xbe19, 0xbdfc, 0x0000, 0x3d19,
                           0x3f19, 0x3fec, 0x4053, 0x40d6}},
                         {Activation::kQuickGelu,
                          {0xbac0, 0xbd39, 0xbe16, 0xbdf6, 0x0000, 0x3d1a,
                           0x3f1b, 0x3fea, 0x4052, 0x40d6}},
                         {Activation::kRelu2,
                          {0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x3ba4,
                           0x3f18, 0x4067, 0x412e, 0x4233}},
                         {Activation::kXielu,
                          {0x3f23, 0xbcf1, 0xbe50, 0xbe01, 0xb557, 0x3d22,
                           0x3f5c, 0x4076, 0x4126, 0x421d}}}) {
    SCOPED_TRACE(ActivationName(c.activation));
    const AnyMatrix x(DType::kBF16, values, 1, 10, 10);
    const AnyMatrix out(DType::kBF16, 1, 10, 10);
    Plan(Spec(c.activation, 10, DType::kBF16, DType::kBF16))
        .Execute(x.view(), out.view(), executor_);
    EXPECT_EQ(out.bits(), c.want);
  }
}

TEST_P(ActivationTest, WorksInPlaceOnAnyNumberOfWorkersAndStreams) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  const int64_t rows = 61, hidden = 1033;
  for (const DType dtype : kDTypes) {
    ActivationSpec spec = Spec(Activation::kGelu, hidden, dtype, dtype);
    const ActivationPlan plan = Plan(spec);
    const AnyMatrix x(dtype, ToDoubles(UniformReals(rng, rows * hidden, -5, 5)),
                      rows, hidden, hidden);
    const AnyMatrix one(dtype, rows, hidden, hidden);
    EXPECT_NO_ALLOCATION(plan.Execute(x.view(), one.view(), executor_));
    spec.stores = Stores::kStream;
    const AnyMatrix many(dtype, rows, hidden, hidden + 1);
    Plan(spec).Execute(x.view(), many.view(), **pool);
    EXPECT_EQ(one.bits(), many.bits());
    ASSERT_EQ(plan.CheckArgs(x.view(), x.view()), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.Execute(x.view(), x.view(), **pool));
    EXPECT_EQ(one.bits(), x.bits());
  }
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

TEST(ActivationPlanTest, Refuses) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto refused = [](const ActivationSpec& spec, absl::StatusCode code,
                          const std::string& words) {
    ExpectRefused(ActivationPlan::Create(spec).status(), code, words);
  };
  refused(Spec(Activation::kRelu2, 0), kInvalid,
          "relu2: hidden=0; need 1 <= hidden");
  refused(Spec(Activation::kSwigluOai, 8), kInvalid,
          "swigluoai: has two inputs; need ActAndMulPlan");
  refused(Spec(Activation::kGelu, 8, DType::kI8),
          absl::StatusCode::kUnimplemented,
          "gelu: x_dtype is i8; need f32 or bf16 or f16");
  ActivationSpec xielu = Spec(Activation::kXielu, 8);
  xielu.params.eps = 1.0f;
  refused(xielu, kInvalid, "xielu: eps=1; need eps <= 0");
  xielu.params.eps = -1.0f;
  xielu.params.alpha_n = std::numeric_limits<float>::infinity();
  refused(xielu, kInvalid, "xielu: alpha_n=inf; need a finite alpha_n");

  const auto plan = ActivationPlan::Create(Spec(Activation::kSilu, 4));
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(64);
  const AnyTensorView vx = DenseMatrix<const float>(x.data(), 2, 4);
  ExpectRefused(plan->CheckArgs(vx, DenseMatrix(x.data() + 32, 1, 4)), kInvalid,
                "silu: out is [1, 4]; need [2, 4]");
  ExpectRefused(plan->CheckArgs(vx, DenseMatrix(x.data() + 1, 2, 4)), kInvalid,
                "out overlaps x");
  EXPECT_EQ(plan->CheckArgs(DenseMatrix<const float>(nullptr, 0, 4),
                            DenseMatrix<float>(nullptr, 0, 4)),
            absl::OkStatus());
  InlineExecutor executor;
  plan->Execute(DenseMatrix<const float>(nullptr, 0, 4),
                DenseMatrix<float>(nullptr, 0, 4), executor);
}

// With softplus(log(e^0.8 - 1)) = 0.8, alpha_n is 0.8 + beta.
TEST(XieluParamsTest, MakesTheAlphasEffective) {
  const float stored = std::log(std::expm1(0.8f));
  const ActivationParams p =
      XieluParams(stored, std::log(std::expm1(0.3f)), 0.5f);
  EXPECT_NEAR(p.alpha_p, 0.8f, 1e-6f);
  EXPECT_NEAR(p.alpha_n, 0.8f, 1e-6f);
  EXPECT_EQ(XieluParams(30.0f, 30.0f).alpha_p, 30.0f);
}

}  // namespace
}  // namespace quern
