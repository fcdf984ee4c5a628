#include "quern/quant/fp8_quantize.h"

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
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Fp8QuantizeSpec Spec(Fp8Granularity granularity, DType dtype = DType::kBF16) {
  Fp8QuantizeSpec spec;
  spec.granularity = granularity;
  spec.dtype = dtype;
  return spec;
}

std::vector<uint8_t> Bits(const std::vector<Float8E4M3>& codes) {
  std::vector<uint8_t> bits;
  for (const Float8E4M3 code : codes) bits.push_back(code.bits);
  return bits;
}

// The header's formulas; f32 where it says so.
float ReferenceScale(const Fp8QuantizeSpec& spec, float max_abs) {
  if (!std::isfinite(max_abs)) return kNaN;
  if (spec.max_abs > 0) max_abs = std::min(max_abs, spec.max_abs);
  const float scale = std::max(max_abs / 448.0f, 1.0f / (448.0f * 512.0f));
  if (spec.format == Fp8ScaleFormat::kF32) return scale;
  int exponent = 0;
  const float mantissa = std::frexp(scale, &exponent);  // in [1/2, 1)
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}
uint8_t ReferenceCode(float x, float scale) {
  const float product = x * (1.0f / scale);
  if (std::isnan(product)) return 0x7f;
  return FromDouble<Float8E4M3>(
             double{std::max(std::min(product, 448.0f), -448.0f)})
      .bits;
}

class Fp8QuantizeTest : public IsaTest {
 protected:
  Fp8QuantizePlan Plan(const Fp8QuantizeSpec& spec) {
    auto plan = Fp8QuantizePlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(Fp8QuantizeTest);

TEST_P(Fp8QuantizeTest, ReproducesTheGoldenVectors) {
  std::vector<BFloat16> x;
  for (const uint32_t code :
       {0xc098, 0xc013, 0xbf8d, 0xbeaa, 0x0000, 0x3d91, 0x3f45, 0x3ff3, 0x4053,
        0x40d6, 0xbca4, 0x3f00, 0x38d2, 0xc0c0, 0x4020, 0x3f66}) {
    x.push_back(FromBits<BFloat16>(code));
  }
  const auto vx = DenseMatrix<const BFloat16>(x.data(), 1, 16);
  std::vector<Float8E4M3> q(16);
  std::vector<float> scales(2);
  const auto vq = DenseMatrix(q.data(), 1, 16);
  using Codes = std::vector<uint8_t>;

  Fp8QuantizeSpec spec = Spec(Fp8Granularity::kToken);
  Plan(spec).Execute(vx, vq, DenseMatrix(scales.data(), 1, 1), executor_);
  EXPECT_EQ(BitsOf(scales[0]), 0x3c749249u);
  EXPECT_EQ(Bits(q), (Codes{0xfa, 0xf2, 0xe9, 0xdb, 0x00, 0x49, 0x65, 0x70,
                            0x76, 0x7e, 0xbb, 0x60, 0x03, 0xfd, 0x72, 0x67}));
  spec.max_abs = 3;
  Plan(spec).Execute(vx, vq, DenseMatrix(scales.data(), 1, 1), executor_);
  EXPECT_EQ(BitsOf(scales[0]), 0x3bdb6db7u);
  EXPECT_EQ(Bits(q), (Codes{0xfe, 0xfb, 0xf2, 0xe4, 0x00, 0x53, 0x6e, 0x79,
                            0x7e, 0x7e, 0xc4, 0x69, 0x08, 0xfe, 0x7c, 0x70}));
  spec = Spec(Fp8Granularity::kGroup);
  spec.group = 8;
  Plan(spec).Execute(vx, vq, DenseMatrix(scales.data(), 1, 2), executor_);
  EXPECT_EQ(BitsOf(scales[0]), 0x3c2db6dbu);
  EXPECT_EQ(BitsOf(scales[1]), 0x3c749249u);
  EXPECT_EQ(Bits(q), (Codes{0xfe, 0xf6, 0xed, 0xe0, 0x00, 0x4d, 0x69, 0x73,
                            0x76, 0x7e, 0xbb, 0x60, 0x03, 0xfd, 0x72, 0x67}));
  spec.format = Fp8ScaleFormat::kPowerOfTwo;
  Plan(spec).Execute(vx, vq, DenseMatrix(scales.data(), 1, 2), executor_);
  EXPECT_EQ(scales, (std::vector<float>{0x1p-6f, 0x1p-6f}));
  EXPECT_EQ(Bits(q), (Codes{0xfa, 0xf1, 0xe9, 0xdb, 0x00, 0x49, 0x64, 0x6f,
                            0x75, 0x7d, 0xba, 0x60, 0x03, 0xfc, 0x72, 0x66}));
  const float scale = 0.02f;
  Plan(Spec(Fp8Granularity::kStatic))
      .ExecuteStatic(vx, DenseMatrix<const float>(&scale, 1, 1), vq, executor_);
  EXPECT_EQ(Bits(q), (Codes{0xf7, 0xee, 0xe6, 0xd8, 0x00, 0x46, 0x62, 0x6c,
                            0x72, 0x7a, 0xb8, 0x5c, 0x03, 0xf9, 0x70, 0x63}));
}

TEST_P(Fp8QuantizeTest, RoundsToNearestEvenAndSaturates) {
  const std::vector<float> x = {448,     449,     464,
                                465,     1e30f,   -kInf,
                                0x1p-9,  0x1p-10, 0x1.000002p-10f,
                                1.0625f, 1.1875f, 17,
                                19,      -0.0f};
  const auto n = static_cast<int64_t>(x.size());
  std::vector<Float8E4M3> q(x.size());
  const float one = 1;
  Plan(Spec(Fp8Granularity::kStatic, DType::kF32))
      .ExecuteStatic(DenseMatrix<const float>(x.data(), 1, n),
                     DenseMatrix<const float>(&one, 1, 1),
                     DenseMatrix(q.data(), 1, n), executor_);
  std::vector<double> got;
  for (const Float8E4M3 code : q) got.push_back(ToDouble(code));
  EXPECT_EQ(got, (std::vector<double>{448, 448, 448, 448, 448, -448, 0x1p-9, 0,
                                      0x1p-9, 1, 1.25, 16, 20, 0}));
  EXPECT_EQ(q.back().bits, 0x80);
}

// Every code, every tie between two and its neighbours in f32, at any place in
// a row whose scale is 1, given and found.
TEST_P(Fp8QuantizeTest, RoundsEveryTieToEven) {
  std::vector<float> x = {448, 0, -0.0f, 0x1p-149f, -0x1.8p-127f, 0x1p-30f};
  for (uint32_t code = 0; code < 0x7e; ++code) {
    const double low = ToDouble(Float8E4M3{static_cast<uint8_t>(code)});
    const double high = ToDouble(Float8E4M3{static_cast<uint8_t>(code + 1)});
    const float tie = static_cast<float>((low + high) / 2);
    for (const float v :
         {static_cast<float>(low), tie, std::nextafter(tie, 0.0f),
          std::nextafter(tie, 500.0f)}) {
      x.push_back(v);
      x.push_back(-v);
    }
  }
  const float one = 1;
  for (size_t shift = 0; shift < 3; ++shift) {
    x.insert(x.begin(), 0.0f);
    const auto n = static_cast<int64_t>(x.size());
    const auto vx = DenseMatrix<const float>(x.data(), 1, n);
    std::vector<Float8E4M3> q(x.size()), given(x.size());
    float scale = 0;
    Plan(Spec(Fp8Granularity::kToken, DType::kF32))
        .Execute(vx, DenseMatrix(q.data(), 1, n), DenseMatrix(&scale, 1, 1),
                 executor_);
    EXPECT_EQ(scale, 1);
    Plan(Spec(Fp8Granularity::kStatic, DType::kF32))
        .ExecuteStatic(vx, DenseMatrix<const float>(&one, 1, 1),
                       DenseMatrix(given.data(), 1, n), executor_);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(q[i].bits, ReferenceCode(x[i], 1)) << x[i];
      ASSERT_EQ(given[i].bits, ReferenceCode(x[i], 1)) << x[i];
    }
  }
}

TEST_P(Fp8QuantizeTest, QuantisesEveryBFloat16ByAnyScale) {
  std::vector<BFloat16> x;
  for (uint32_t code = 0; code < 65536; ++code) {
    x.push_back(FromBits<BFloat16>(code));
  }
  for (const float scale : {1.0f, 0.0213f, 3.3e-30f, 7e30f, 0x1p-125f}) {
    std::vector<Float8E4M3> q(x.size());
    Plan(Spec(Fp8Granularity::kStatic))
        .ExecuteStatic(DenseMatrix<const BFloat16>(x.data(), 64, 1024),
                       DenseMatrix<const float>(&scale, 1, 1),
                       DenseMatrix(q.data(), 64, 1024), executor_);
    for (size_t i = 0; i < x.size(); ++i) {
      const float v = static_cast<float>(ToDouble(x[i]));
      ASSERT_EQ(std::isnan(v) ? q[i].bits & 0x7f : q[i].bits,
                ReferenceCode(v, scale))
          << v << " by " << scale;
    }
  }
}

// Neighbours side by side, so that whole vectors are normal numbers of e4m3,
// which may have a faster way, or none is.
TEST_P(Fp8QuantizeTest, QuantisesEveryBFloat16BelowTheLargestOfItsRow) {
  const Fp8QuantizePlan plan = Plan(Spec(Fp8Granularity::kToken));
  // 0x1p0f, the whole binade above it, extremes of scales, and the largest.
  std::vector<uint32_t> largest = {0x2000, 0x3700, 0x43e0, 0x7ac0, 0x7f7f};
  for (uint32_t code = 0x3f80; code <= 0x4000; ++code) largest.push_back(code);
  for (const uint32_t most : largest) {
    std::vector<BFloat16> x;
    for (uint32_t code = 0; code <= most; ++code) {
      x.push_back(FromBits<BFloat16>(code));
      x.push_back(FromBits<BFloat16>(code | 0x8000));
    }
    const auto k = static_cast<int64_t>(x.size());
    std::vector<Float8E4M3> q(x.size());
    float scale = 0;
    plan.Execute(DenseMatrix<const BFloat16>(x.data(), 1, k),
                 DenseMatrix(q.data(), 1, k), DenseMatrix(&scale, 1, 1),
                 executor_);
    for (size_t i = 0; i < x.size(); ++i) {
      const float v = static_cast<float>(ToDouble(x[i]));
      ASSERT_EQ(q[i].bits, ReferenceCode(v, scale)) << v << " by " << scale;
    }
  }
}

template <typename T>
void Compare(const Fp8QuantizePlan& plan, Rng& rng, Executor& executor) {
  const Fp8QuantizeSpec& spec = plan.spec();
  for (const int64_t k : {1, 7, 16, 33, 64, 257, 1100}) {
    SCOPED_TRACE(k);
    const int64_t m = 5;
    const auto values = UniformReals<T>(rng, m * k, -3, 3);
    StridedMatrix<T> x(values, m, k, k + 3, Edge::kEnd);
    StridedMatrix<Float8E4M3> q(m, k, k + 1, Edge::kBegin, 1);
    const bool tensor = spec.granularity == Fp8Granularity::kTensor;
    const int64_t group =
        spec.granularity == Fp8Granularity::kGroup ? spec.group : k;
    const int64_t groups = (k + group - 1) / group;
    StridedMatrix<float> scales(tensor ? 1 : m, groups, groups + 2);
    const MatrixView<const T> vx = std::as_const(x).view();
    ASSERT_EQ(plan.CheckArgs(vx, q.view(), scales.view()), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.Execute(vx, q.view(), scales.view(), executor));
    float all = 0;
    for (const T v : values) {
      all = std::max(all, static_cast<float>(std::abs(ToDouble(v))));
    }
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        float max_abs = tensor ? all : 0;
        const int64_t g = j / group;
        for (int64_t c = g * group; c < std::min((g + 1) * group, k); ++c) {
          max_abs = std::max(
              max_abs, static_cast<float>(std::abs(ToDouble(*vx.At(i, c)))));
        }
        const float want = ReferenceScale(spec, max_abs);
        const float scale = *scales.view().At(tensor ? 0 : i, g);
        ASSERT_EQ(scale, want) << i << " " << j;
        ASSERT_EQ(
            q.view().At(i, j)->bits,
            ReferenceCode(static_cast<float>(ToDouble(*vx.At(i, j))), scale))
            << i << " " << j;
      }
    }
  }
}

// Bit for bit: the arithmetic is a maximum, two quotients and a product.
TEST_P(Fp8QuantizeTest, IsTheFormulaBitForBit) {
  TestRng rng;
  ManyWorkers many(3);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Fp8Granularity granularity :
         {Fp8Granularity::kTensor, Fp8Granularity::kToken,
          Fp8Granularity::kGroup}) {
      for (const Fp8ScaleFormat format :
           {Fp8ScaleFormat::kF32, Fp8ScaleFormat::kPowerOfTwo}) {
        Fp8QuantizeSpec spec = Spec(granularity, dtype);
        spec.format = format;
        if (granularity == Fp8Granularity::kGroup) spec.group = 24;
        if (format == Fp8ScaleFormat::kPowerOfTwo) {
          spec.stores = Stores::kStream;
        }
        const Fp8QuantizePlan plan = Plan(spec);
        if (dtype == DType::kF32) Compare<float>(plan, rng, many);
        if (dtype == DType::kBF16) Compare<BFloat16>(plan, rng, executor_);
        if (dtype == DType::kF16) Compare<Float16>(plan, rng, many);
      }
    }
  }
}

TEST_P(Fp8QuantizeTest, HasAScaleForZerosAndNoneForNaN) {
  const std::vector<float> x = {0, 0, -0.0f, 1, kNaN, 2, 1, kInf, 2, 1, 2, 3};
  for (const Fp8ScaleFormat format :
       {Fp8ScaleFormat::kF32, Fp8ScaleFormat::kPowerOfTwo}) {
    std::vector<Float8E4M3> q(12);
    std::vector<float> scales(4);
    Fp8QuantizeSpec spec = Spec(Fp8Granularity::kToken, DType::kF32);
    spec.format = format;
    Plan(spec).Execute(DenseMatrix<const float>(x.data(), 4, 3),
                       DenseMatrix(q.data(), 4, 3),
                       DenseMatrix(scales.data(), 4, 1), executor_);
    EXPECT_EQ(scales[0], format == Fp8ScaleFormat::kF32
                             ? 1.0f / (448.0f * 512.0f)
                             : 0x1p-17f);
    EXPECT_EQ(q[0].bits, 0);
    EXPECT_EQ(q[2].bits, 0x80);
    EXPECT_TRUE(std::isnan(scales[1]) && std::isnan(scales[2]));
    for (size_t i = 3; i < 9; ++i) EXPECT_EQ(q[i].bits & 0x7f, 0x7f) << i;
    EXPECT_EQ(ToDouble(q[11]), format == Fp8ScaleFormat::kF32 ? 448 : 384);
  }
}

// The scale of a power of two is itself; a mantissa above it goes up.
TEST_P(Fp8QuantizeTest, RoundsScalesUpByTheirBits) {
  Fp8QuantizeSpec spec = Spec(Fp8Granularity::kToken, DType::kF32);
  spec.format = Fp8ScaleFormat::kPowerOfTwo;
  // The second is 1 + 2^-23 of 448 once it is divided.
  const std::vector<float> x = {448, std::nextafter(448.0f, 449.0f), 447.9999f};
  std::vector<Float8E4M3> q(3);
  std::vector<float> scales(3);
  Plan(spec).Execute(DenseMatrix<const float>(x.data(), 3, 1),
                     DenseMatrix(q.data(), 3, 1),
                     DenseMatrix(scales.data(), 3, 1), executor_);
  EXPECT_EQ(scales, (std::vector<float>{1, 2, 1}));
}

TEST_P(Fp8QuantizeTest, TakesStaticScalesOfAnyBlock) {
  TestRng rng;
  const int64_t m = 5, k = 70;
  const auto x = UniformReals<float>(rng, m * k, -9, 9);
  for (const int64_t rows : {0, 1, 2}) {
    for (const int64_t cols : {0, 1, 32}) {
      Fp8QuantizeSpec spec = Spec(Fp8Granularity::kStatic, DType::kF32);
      spec.block_rows = rows;
      spec.block_cols = cols;
      const int64_t sm = rows == 0 ? 1 : (m + rows - 1) / rows;
      const int64_t sk = cols == 0 ? 1 : (k + cols - 1) / cols;
      const auto scales = UniformReals<float>(rng, sm * sk, 0.01, 0.1);
      std::vector<Float8E4M3> q(x.size());
      const Fp8QuantizePlan plan = Plan(spec);
      const auto vx = DenseMatrix<const float>(x.data(), m, k);
      const auto vs = DenseMatrix<const float>(scales.data(), sm, sk);
      ASSERT_EQ(plan.CheckStaticArgs(vx, vs, DenseMatrix(q.data(), m, k)),
                absl::OkStatus());
      plan.ExecuteStatic(vx, vs, DenseMatrix(q.data(), m, k), executor_);
      for (int64_t i = 0; i < m * k; ++i) {
        const int64_t si = rows == 0 ? 0 : i / k / rows;
        const int64_t sj = cols == 0 ? 0 : i % k / cols;
        ASSERT_EQ(q[static_cast<size_t>(i)].bits,
                  ReferenceCode(x[static_cast<size_t>(i)], *vs.At(si, sj)));
      }
    }
  }
}

TEST_P(Fp8QuantizeTest, ARowAloneHasTheBitsOfExecute) {
  TestRng rng;
  const auto x = UniformReals<BFloat16>(rng, 77);
  std::vector<Float8E4M3> q(77), row(77);
  float scale = 0;
  const Fp8QuantizePlan plan = Plan(Spec(Fp8Granularity::kToken));
  plan.Execute(DenseMatrix<const BFloat16>(x.data(), 1, 77),
               DenseMatrix(q.data(), 1, 77), DenseMatrix(&scale, 1, 1),
               executor_);
  EXPECT_EQ(plan.QuantizeRow(x.data(), 77, row.data()), scale);
  EXPECT_EQ(Bits(row), Bits(q));
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

TEST(Fp8QuantizePlanTest, Refuses) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto refused = [](const Fp8QuantizeSpec& spec, absl::StatusCode code,
                          const std::string& words) {
    ExpectRefused(Fp8QuantizePlan::Create(spec).status(), code, words);
  };
  refused(Spec(Fp8Granularity::kToken, DType::kI8),
          absl::StatusCode::kUnimplemented, "fp8_quantize: dtype is i8; need");
  refused(Spec(Fp8Granularity::kGroup), kInvalid, "group=0; need group >= 1");
  Fp8QuantizeSpec spec = Spec(Fp8Granularity::kToken);
  spec.max_abs = kInf;
  refused(spec, kInvalid, "max_abs=inf; need a finite number >= 0");
  spec = Spec(Fp8Granularity::kTensor);
  spec.max_abs = 1;
  refused(spec, kInvalid, "max_abs=1; need 0 unless per token");
  spec = Spec(Fp8Granularity::kStatic);
  spec.block_rows = -1;
  refused(spec, kInvalid, "block_rows=-1; need block_rows >= 0");

  std::vector<float> x(8), scales(2, 1.0f);
  std::vector<Float8E4M3> q(8);
  const auto vx = DenseMatrix<const float>(x.data(), 2, 4);
  const auto vq = DenseMatrix(q.data(), 2, 4);
  const auto plan =
      Fp8QuantizePlan::Create(Spec(Fp8Granularity::kToken, DType::kF32));
  ExpectRefused(plan->CheckArgs(vx, vq, DenseMatrix(scales.data(), 1, 1)),
                kInvalid, "scales is [1, 1]; need [2, 1]");
  ExpectRefused(plan->CheckArgs(vx, DenseMatrix(q.data(), 1, 4),
                                DenseMatrix(scales.data(), 2, 1)),
                kInvalid, "q is [1, 4]; need [2, 4]");
  ExpectRefused(plan->CheckArgs(vx, vq, DenseMatrix(x.data(), 2, 1)), kInvalid,
                "scales overlaps x");
  ExpectRefused(plan->CheckStaticArgs(
                    vx, DenseMatrix<const float>(scales.data(), 1, 1), vq),
                kInvalid, "scales are dynamic; need Execute");
  const auto fixed =
      Fp8QuantizePlan::Create(Spec(Fp8Granularity::kStatic, DType::kF32));
  scales[0] = 0;
  ExpectRefused(fixed->CheckStaticArgs(
                    vx, DenseMatrix<const float>(scales.data(), 1, 1), vq),
                kInvalid, "scales[0, 0]=0; need 2^-125 <= scale <= 2^125");
  EXPECT_EQ(plan->CheckArgs(DenseMatrix<const float>(nullptr, 0, 4),
                            DenseMatrix<Float8E4M3>(nullptr, 0, 4),
                            DenseMatrix<float>(nullptr, 0, 1)),
            absl::OkStatus());
}

}  // namespace
}  // namespace quern
