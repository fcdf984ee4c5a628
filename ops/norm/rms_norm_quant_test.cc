#include "quern/ops/norm/rms_norm_quant.h"

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
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/quant/fp8_quantize.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Quantised codes, int8 or fp8, between guard pages.
class Codes {
 public:
  Codes(DType dtype, int64_t rows, int64_t cols, int64_t stride)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        stride_(stride),
        bytes_(rows, cols, stride) {}
  AnyTensorView view() {
    return AnyTensorView(dtype_, static_cast<void*>(bytes_.view().data()), 2,
                         {rows_, cols_}, {stride_, 1});
  }
  template <typename T>
  MatrixView<T> as() {
    return {reinterpret_cast<T*>(bytes_.view().data()),
            {rows_, cols_},
            {stride_, 1}};
  }
  std::vector<uint8_t> bytes() const { return bytes_.ToDense(); }
  std::vector<double> doubles() const {
    std::vector<double> values;
    for (const uint8_t code : bytes()) {
      values.push_back(dtype_ == DType::kI8
                           ? static_cast<double>(FromBits<int8_t>(code))
                           : ToDouble(FromBits<Float8E4M3>(code)));
    }
    return values;
  }
  bool intact() const { return bytes_.PaddingIntact(); }

 private:
  DType dtype_;
  int64_t rows_, cols_, stride_;
  StridedMatrix<uint8_t> bytes_;
};

class RmsNormQuantTest : public IsaTest {
 protected:
  RmsNormQuantPlan Plan(const RmsNormQuantSpec& spec) {
    auto plan = RmsNormQuantPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  // The expected result: y by RmsNormPlan, and its codes by the plans of
  // quant/.
  void Compose(const RmsNormQuantSpec& spec, const AnyTensorView& y, Codes& q,
               std::vector<float>& scales) {
    const int64_t rows = y.extent(0);
    const bool fixed = spec.scale_of == NormScale::kStatic;
    if (spec.q_dtype == DType::kI8) {
      Int8QuantizeSpec int8;
      int8.dtype = DType::kF32;
      if (fixed) {
        int8.granularity = Int8Granularity::kPerTensor;
        int8.zero_points = Int8ZeroPoint::kUsed;
        int8.scale = spec.scale;
        int8.zero_point = spec.zero_point;
      }
      Int8QuantizePlan::Create(int8)->Execute(
          y, q.as<int8_t>(), DenseVector(scales.data(), fixed ? 0 : rows), {},
          executor_);
      return;
    }
    Fp8QuantizeSpec fp8;
    fp8.dtype = DType::kF32;
    fp8.max_abs = spec.max_abs;
    if (fixed) {
      fp8.granularity = Fp8Granularity::kStatic;
      const float scale = spec.scale;
      Fp8QuantizePlan::Create(fp8)->ExecuteStatic(
          y, DenseMatrix<const float>(&scale, 1, 1), q.as<Float8E4M3>(),
          executor_);
      return;
    }
    Fp8QuantizePlan::Create(fp8)->Execute(
        y, q.as<Float8E4M3>(), DenseMatrix(scales.data(), rows, 1), executor_);
  }

  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(RmsNormQuantTest);

// Runs all dtypes, kinds of weight, and widths around the length of a part:
// with and without a residual, on one worker and on many.
TEST_P(RmsNormQuantTest, HasTheBitsOfNormAndQuantiseInF32) {
  TestRng rng;
  struct Types {
    DType x, weight, residual;
  };
  constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16, kF16 = DType::kF16;
  for (const Types types :
       {Types{kF32, kF32, kF32}, Types{kF32, kBF16, kBF16},
        Types{kBF16, kBF16, kBF16}, Types{kBF16, kF32, kF32},
        Types{kF16, kF16, kF16}}) {
    for (const DType q_dtype : {DType::kI8, DType::kF8E4M3}) {
      for (const NormScale scale_of :
           {NormScale::kStatic, NormScale::kPerToken}) {
        for (const int64_t n : {1, 17, 511, 512, 769, 4096, 4097}) {
          SCOPED_TRACE(testing::Message()
                       << DTypeName(types.x) << DTypeName(types.residual)
                       << DTypeName(q_dtype) << (scale_of == NormScale::kStatic)
                       << " " << n);
          RmsNormQuantSpec spec;
          spec.norm.hidden = n;
          spec.norm.x_dtype = types.x;
          spec.norm.residual_dtype = types.residual;
          spec.norm.weight_dtype = types.weight;
          spec.norm.weight = n == 17    ? NormWeight::kOnePlus
                             : n == 511 ? NormWeight::kNone
                                        : NormWeight::kPlain;
          spec.norm.span = n == 769 ? 700 : 0;
          spec.norm.eps = n == 511 ? 0.5f : 1e-6f;
          spec.q_dtype = q_dtype;
          spec.scale_of = scale_of;
          if (scale_of == NormScale::kStatic) {
            spec.scale = 0.015f;
            spec.zero_point = q_dtype == DType::kI8 ? -3 : 0;
          } else if (q_dtype == DType::kF8E4M3 && n == 512) {
            spec.max_abs = 1.5f;
          }
          const RmsNormQuantPlan plan = Plan(spec);
          const int64_t rows = 3;
          const auto reals = [&](int64_t count) {
            return ToDoubles(UniformReals(rng, count, -3, 3));
          };
          const AnyMatrix x(types.x, reals(rows * n), rows, n, n + 3);
          const AnyMatrix r(types.residual, reals(rows * n), rows, n, n + 1);
          const AnyMatrix w(types.weight, reals(n), 1, n, n);
          const AnyTensorView weight = n == 511 ? AnyTensorView() : w.vector();
          Codes q(q_dtype, rows, n, n + 2), want(q_dtype, rows, n, n);
          std::vector<float> scales(3), want_scales(3);
          RmsNormSpec norm = spec.norm;
          norm.out_dtype = DType::kF32;
          const AnyMatrix y(DType::kF32, rows, n, n);
          RmsNormPlan::Create(norm)->Execute(x.view(), weight, y.view(),
                                             executor_);
          Compose(spec, y.const_view(), want, want_scales);
          RmsNormQuantArgs args = {x.const_view(), weight, q.view(),
                                   DenseVector(scales.data(), rows)};
          ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
          EXPECT_NO_ALLOCATION(plan.Execute(args, executor_));
          EXPECT_EQ(q.bytes(), want.bytes());
          EXPECT_EQ(scales, want_scales);
          EXPECT_TRUE(q.intact());

          // The sum takes the place of the residual, on several workers.
          const AnyMatrix sum(types.residual, rows, n, n);
          RmsNormPlan::Create(norm)->ExecuteAdd(
              {x.const_view(), weight, y.view(), r.const_view(), sum.view()},
              executor_);
          Compose(spec, y.const_view(), want, want_scales);
          ManyWorkers many(3);
          args.residual = args.residual_out = r.view();
          ASSERT_EQ(plan.CheckAddArgs(args), absl::OkStatus());
          EXPECT_NO_ALLOCATION(plan.ExecuteAdd(args, many));
          EXPECT_EQ(q.bytes(), want.bytes());
          EXPECT_EQ(scales, want_scales);
          EXPECT_EQ(r.bits(), sum.bits());
        }
      }
    }
  }
}

// An oracle that uses neither our norm nor our quantisation: scale * q must
// equal y within half a step of the code and the f32 errors of both.
TEST_P(RmsNormQuantTest, IsWithinOneRoundingOfTheDoubleReference) {
  TestRng rng;
  const int64_t rows = 4, n = 1000;
  for (const DType q_dtype : {DType::kI8, DType::kF8E4M3}) {
    RmsNormQuantSpec spec;
    spec.norm.hidden = n;
    spec.norm.x_dtype = spec.norm.residual_dtype = spec.norm.weight_dtype =
        DType::kBF16;
    spec.q_dtype = q_dtype;
    const RmsNormQuantPlan plan = Plan(spec);
    const AnyMatrix x(DType::kBF16,
                      ToDoubles(UniformReals(rng, rows * n, -3, 3)), rows, n,
                      n);
    const AnyMatrix w(DType::kBF16, ToDoubles(UniformReals(rng, n, -2, 2)), 1,
                      n, n);
    Codes q(q_dtype, rows, n, n);
    std::vector<float> scales(4);
    plan.Execute({x.const_view(), w.vector(), q.view(),
                  DenseVector(scales.data(), rows)},
                 executor_);
    const auto xs = x.doubles(), ws = w.doubles(), codes = q.doubles();
    for (int64_t t = 0; t < rows; ++t) {
      double squares = 0, largest = 0;
      std::vector<double> y;
      for (int64_t i = 0; i < n; ++i) {
        squares += std::pow(xs[static_cast<size_t>(t * n + i)], 2);
      }
      for (int64_t i = 0; i < n; ++i) {
        y.push_back(xs[static_cast<size_t>(t * n + i)] *
                    ws[static_cast<size_t>(i)] / std::sqrt(squares / n + 1e-6));
        largest = std::max(largest, std::abs(y.back()));
      }
      // The sum of squares has 80 additions, whose error the root halves; 8
      // more roundings follow.
      constexpr double kRelative = 48 * 0x1p-24;
      const double scale = double{scales[static_cast<size_t>(t)]};
      const double most = q_dtype == DType::kI8 ? 127 : 448;
      EXPECT_NEAR(scale, largest / most, largest / most * kRelative);
      for (int64_t i = 0; i < n; ++i) {
        const double want = y[static_cast<size_t>(i)] / scale;
        const double half =
            q_dtype == DType::kI8 ? 0.5 : RoundingBound<Float8E4M3>(want);
        ASSERT_NEAR(codes[static_cast<size_t>(t * n + i)], want,
                    half + std::abs(want) * 2 * kRelative)
            << t << ", " << i;
      }
    }
  }
}

TEST_P(RmsNormQuantTest, KeepsNaNInItsRowAndZerosZero) {
  for (const DType q_dtype : {DType::kI8, DType::kF8E4M3}) {
    RmsNormQuantSpec spec;
    spec.norm.hidden = 3;
    spec.q_dtype = q_dtype;
    const AnyMatrix x(DType::kF32, {1, kNaN, 2, 0, 0, 0, 1, 1, 1}, 3, 3, 3);
    const AnyMatrix w(DType::kF32, {1, 1, 1}, 1, 3, 3);
    Codes q(q_dtype, 3, 3, 3);
    std::vector<float> scales(3);
    Plan(spec).Execute(
        {x.const_view(), w.vector(), q.view(), DenseVector(scales.data(), 3)},
        executor_);
    const auto codes = q.doubles();
    EXPECT_TRUE(std::isnan(scales[0]));
    EXPECT_EQ(codes[3], 0);
    EXPECT_EQ(codes[5], 0);
    EXPECT_TRUE(scales[1] > 0);
    EXPECT_EQ(codes[6], q_dtype == DType::kI8 ? 127 : 448);
  }
}

TEST_P(RmsNormQuantTest, DoesNothingWithoutRows) {
  RmsNormQuantSpec spec;
  spec.norm.hidden = 4;
  const RmsNormQuantPlan plan = Plan(spec);
  const AnyMatrix w(DType::kF32, {1, 1, 1, 1}, 1, 4, 4);
  const RmsNormQuantArgs none = {DenseMatrix<float>(nullptr, 0, 4), w.vector(),
                                 DenseMatrix<int8_t>(nullptr, 0, 4),
                                 DenseVector<float>(nullptr, 0)};
  EXPECT_EQ(plan.CheckArgs(none), absl::OkStatus());
  plan.Execute(none, executor_);
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

TEST(RmsNormQuantPlanTest, Refuses) {
  RmsNormQuantSpec good;
  good.norm.hidden = 4;
  struct Case {
    RmsNormQuantSpec spec;
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
    std::string words;
  };
  std::vector<Case> cases(9, {good});
  cases[0].spec.norm.hidden = 0;
  cases[0].words = "rms_norm: hidden=0; need 1 <= hidden <= ";
  cases[1].spec.q_dtype = DType::kU8;
  cases[1].code = absl::StatusCode::kUnimplemented;
  cases[1].words = "rms_norm_quant: q_dtype is u8; need i8 or f8e4m3";
  cases[2].spec.scale = 2;
  cases[2].words = "scale=2, zero_point=0; need scale=1 and zero_point=0";
  cases[3].spec.max_abs = 2;
  cases[3].words = "max_abs=2; need 0 unless fp8 per token";
  cases[4].spec.scale_of = NormScale::kStatic;
  cases[4].spec.scale = 0;
  cases[4].words = "scale=0; need 2^-125 <= scale <= 2^118";
  cases[5].spec = cases[4].spec;
  cases[5].spec.q_dtype = DType::kF8E4M3;
  cases[5].words = "rms_norm_quant: scale=0; need 2^-125 <= scale <= 2^118";
  cases[6].spec = cases[4].spec;
  cases[6].spec.scale = 1;
  cases[6].spec.zero_point = 128;
  cases[6].words = "zero_point=128; need -128 <= zero_point <= 127";
  cases[7].spec = cases[6].spec;
  cases[7].spec.q_dtype = DType::kF8E4M3;
  cases[7].spec.zero_point = 1;
  cases[7].words = "zero_point=1; need 0 unless i8";
  cases[8].spec.q_dtype = DType::kF8E4M3;
  cases[8].spec.max_abs = -1;
  cases[8].words = "max_abs=-1; need a finite number >= 0";
  for (const Case& c : cases) {
    ExpectRefused(RmsNormQuantPlan::Create(c.spec).status(), c.code, c.words);
  }

  const auto plan = RmsNormQuantPlan::Create(good);
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(64);
  std::vector<int8_t> q(64);
  RmsNormQuantArgs args = {
      DenseMatrix(x.data(), 2, 4),      DenseVector(x.data() + 8, 4),
      DenseMatrix(q.data(), 2, 4),      DenseVector(x.data() + 12, 2),
      DenseMatrix(x.data() + 16, 2, 4), DenseMatrix(x.data() + 24, 2, 4)};
  EXPECT_EQ(plan->CheckAddArgs(args), absl::OkStatus());
  const auto refused = [&](RmsNormQuantArgs bad, const std::string& words) {
    ExpectRefused(plan->CheckAddArgs(bad), absl::StatusCode::kInvalidArgument,
                  words);
  };
  RmsNormQuantArgs bad = args;
  bad.x = DenseMatrix(x.data(), 2, 5);
  refused(bad, "rms_norm_quant: x is [2, 5]; need [any, 4]");
  bad = args;
  bad.q = DenseMatrix(q.data(), 3, 4);
  refused(bad, "q is [3, 4]; need [2, 4]");
  bad = args;
  bad.q = DenseMatrix(reinterpret_cast<int8_t*>(x.data()), 2, 4);
  refused(bad, "q overlaps x");
  bad = args;
  bad.scales = AnyTensorView();
  refused(bad, "scales");
  bad = args;
  bad.scales = DenseVector(x.data() + 7, 2);
  refused(bad, "scales overlaps x");
  bad = args;
  bad.scales = DenseVector(x.data() + 11, 2);
  refused(bad, "scales overlaps weight");
  bad = args;
  bad.residual_out = DenseMatrix(x.data() + 17, 2, 4);
  refused(bad, "residual_out overlaps residual");
  bad = args;
  bad.residual_out = DenseMatrix(x.data() + 8, 2, 4);
  refused(bad, "residual_out overlaps weight");
  bad = args;
  bad.residual = DenseMatrix(x.data() + 16, 1, 4);
  refused(bad, "residual is [1, 4]; need [2, 4]");
  bad = args;
  bad.residual = DenseMatrix(x.data() + 13, 2, 4);
  refused(bad, "scales overlaps residual");
  bad = args;
  bad.scales = DenseVector(x.data() + 31, 2);
  refused(bad, "scales overlaps residual_out");
  const auto as_codes = [&](int64_t at) {
    return DenseMatrix(reinterpret_cast<int8_t*>(x.data() + at), 2, 4);
  };
  bad = args;
  bad.q = as_codes(23);
  refused(bad, "q overlaps residual");
  bad = args;
  bad.q = as_codes(31);
  refused(bad, "q overlaps residual_out");
  bad = args;
  bad.q = as_codes(11);
  refused(bad, "q overlaps weight");
  bad = args;
  bad.q = as_codes(13);
  refused(bad, "scales overlaps q");
  bad = args;
  bad.x = DenseMatrix(x.data() + 30, 2, 4);
  refused(bad, "residual_out overlaps x");
}

}  // namespace
}  // namespace quern
