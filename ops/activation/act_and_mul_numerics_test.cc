// Results of ActAndMulPlan number by number: their accuracy, specials, one
// rounding to bf16, and golden vectors.

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/stores.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/act_and_mul_testutil.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_activation.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

class ActAndMulNumericsTest : public ActAndMulFixture {};
QUERN_INSTANTIATE_ISA_TEST(ActAndMulNumericsTest);

// Every bf16 is a gate once: all magnitudes, both infinities and NaN.
TEST_P(ActAndMulNumericsTest, IsAccurateForEveryMagnitude) {
  const int64_t d = 65536;
  std::vector<double> gates, want;
  for (uint32_t code = 0; code < 65536; ++code) {
    const double gate = ToDouble(FromBits<BFloat16>(code));
    gates.push_back(gate);
    want.push_back(gate < -1e30 ? -0.0 : ReferenceSilu(gate));
  }
  const ActAndMulPlan plan = Plan(ActAndMulSpecOf(d));
  const AnyMatrix gate(DType::kF32, gates, 1, d, d);
  const AnyMatrix up(DType::kF32, std::vector<double>(gates.size(), 1.0), 1, d,
                     d);
  const AnyMatrix out(DType::kF32, 1, d, d);
  plan.ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
  EXPECT_TRUE(AllWithin(out.doubles(), want, [](double value, int64_t) {
    return std::isfinite(value)
               ? std::abs(value) * kActAndMulRelative + kActAndMulDenormal
               : 0.0;
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
TEST_P(ActAndMulNumericsTest, IsAccurateBetweenTheBFloat16s) {
  const int64_t d = 200000;
  std::vector<double> gates, want;
  for (int64_t i = 0; i < d; ++i) {
    gates.push_back(
        ToDouble(FromDouble<float>(-110.0 + static_cast<double>(i) * 0.0011)));
    want.push_back(ReferenceSilu(gates.back()));
  }
  const ActAndMulPlan plan = Plan(ActAndMulSpecOf(d));
  const AnyMatrix gate(DType::kF32, gates, 1, d, d);
  const AnyMatrix up(DType::kF32, std::vector<double>(gates.size(), 1.0), 1, d,
                     d);
  const AnyMatrix out(DType::kF32, 1, d, d);
  plan.ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
  EXPECT_TRUE(AllWithin(out.doubles(), want, [](double value, int64_t) {
    return std::abs(value) * kActAndMulRelative + kActAndMulDenormal;
  }));
}

TEST_P(ActAndMulNumericsTest, PropagatesNaNAndHasALimitAtMinusInfinity) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : kActAndMulTypes) {
    const ActAndMulPlan plan = Plan(ActAndMulSpecOf(6, dtype, dtype));
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
    ActAndMulSpec clamped = ActAndMulSpecOf(6, dtype, dtype);
    clamped.activation = Activation::kSwigluOai;
    Plan(clamped).ExecuteSplit(gate.view(), up.view(), out.view(), executor_);
    EXPECT_TRUE(std::isnan(out.doubles()[1]));
    EXPECT_TRUE(std::isnan(out.doubles()[2]));
  }
}

// Where a dedicated bf16 kernel exists, its results must be the f32 results
// rounded afterwards, bit for bit and including denormals, for every gate and
// each kind of up.
TEST_P(ActAndMulNumericsTest, RoundsBFloat16ResultsOnce) {
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
    ActAndMulSpec spec = ActAndMulSpecOf(d, DType::kBF16, DType::kF32);
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

TEST_P(ActAndMulNumericsTest, ReproducesTheGoldenVectors) {
  using Codes = std::vector<uint32_t>;
  struct Case {
    ActAndMulSpec spec;
    Codes want;
  };
  std::vector<Case> cases;
  ActAndMulSpec spec = ActAndMulSpecOf(10, DType::kBF16, DType::kBF16);
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

}  // namespace
}  // namespace quern
