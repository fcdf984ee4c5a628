// gemm/linear.h and gemm/scaled_linear.h: that either implementation computes
// what the header says. The implementations have tests of their own.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/linear.h"
#include "gemm/linear_impl.h"
#include "gemm/scaled_linear.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/many_workers.h"
#include "testing/no_alloc.h"
#include "testing/reference_convert.h"
#include "testing/reference_gemm.h"

namespace quern {
namespace {

using BF = BFloat16;

class FrontDoorTest : public testing::TestWithParam<LinearImpl> {
 protected:
  bool packed() const { return GetParam() != LinearImpl::kOneDnn; }
  LinearImpl ran() const {
    return packed() ? LinearImpl::kPacked : LinearImpl::kOneDnn;
  }
  void ExpectExplains(const std::string& text) const {
    EXPECT_TRUE(absl::StartsWith(text, packed() ? "packed " : "oneDNN "))
        << text;
    EXPECT_TRUE(absl::StrContains(text, GetParam() == LinearImpl::kAuto
                                            ? "; auto: "
                                            : "; as the spec asks"))
        << text;
  }
};
INSTANTIATE_TEST_SUITE_P(Impl, FrontDoorTest,
                         testing::Values(LinearImpl::kAuto, LinearImpl::kPacked,
                                         LinearImpl::kOneDnn));

TEST_P(FrontDoorTest, LinearIsExactOnSmallIntegers) {
  TestRng rng;
  const int64_t n = 35, k = 70;
  for (const WeightOrder order : {WeightOrder::kNK, WeightOrder::kKN}) {
    const auto w = SmallIntegers<BF>(rng, n * k);
    const auto bias = SmallIntegers<float>(rng, n, -99, 99);
    LinearSpec spec;
    spec.n = n;
    spec.k = k;
    spec.c = DType::kF32;
    spec.order = order;
    spec.impl = GetParam();
    const bool nk = order == WeightOrder::kNK;
    ManyWorkers executor(3);
    auto plan =
        LinearPlan::Create(spec, DenseMatrix(w.data(), nk ? n : k, nk ? k : n),
                           DenseVector(bias.data(), n), executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->impl(), ran());
    ExpectExplains(plan->Explain(5));
    EXPECT_GE(plan->packed_bytes(), static_cast<size_t>(n * k * 2));
    LinearScratch scratch;
    ASSERT_TRUE(scratch.Reserve(*plan, 20, executor).ok());
    for (const int64_t m : {0, 1, 5, 20}) {
      const auto a = SmallIntegers<BF>(rng, m * k);
      std::vector<float> c(static_cast<size_t>(m * n));
      const auto in = DenseMatrix(a.data(), m, k);
      const auto out = DenseMatrix(c.data(), m, n);
      ASSERT_EQ(plan->CheckArgs(in, out), absl::OkStatus());
      const auto execute = [&] { plan->Execute(in, out, scratch, executor); };
      if (packed()) {
        EXPECT_NO_ALLOCATION(execute());
      } else {
        execute();
      }
      auto want = nk ? ReferenceLinear(m, n, k, ToDoubles(a), ToDoubles(w))
                     : ReferenceGemm(m, n, k, ToDoubles(a), ToDoubles(w));
      for (size_t i = 0; i < want.size(); ++i) {
        want[i] += ToDouble(bias[i % static_cast<size_t>(n)]);
      }
      EXPECT_TRUE(AllEqual(c, want)) << "m=" << m;
    }
    EXPECT_FALSE(
        plan->CheckArgs(DenseMatrix(w.data(), 1, k + 1), AnyTensorView()).ok());
  }
}

// Scales that are powers of two: both implementations are exact, and equal.
TEST_P(FrontDoorTest, ScaledLinearIsExact) {
  TestRng rng;
  const int64_t n = 35, k = 70, m = 19;
  for (const DType a_type : {DType::kI8, DType::kBF16}) {
    for (const auto granularity :
         {Int8Granularity::kPerToken, Int8Granularity::kPerTensor}) {
      for (const auto zeros : {Int8ZeroPoint::kNone, Int8ZeroPoint::kUsed}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(a_type) << " granularity " << int(granularity)
                     << " zero points " << int(zeros));
        const bool per_token = granularity == Int8Granularity::kPerToken;
        const bool used = zeros == Int8ZeroPoint::kUsed;
        ScaledLinearSpec spec;
        spec.n = n;
        spec.k = k;
        spec.a = a_type;
        spec.c = DType::kF32;
        spec.granularity = granularity;
        spec.zero_points = zeros;
        if (!per_token) {
          spec.a_scale = 0.25f;
          spec.a_zero_point = used ? -5 : 0;
        }
        spec.impl = GetParam();
        const auto w = SmallIntegers<int8_t>(rng, n * k, -128, 127);
        std::vector<float> w_scales;
        for (int64_t i = 0; i < n; ++i) {
          w_scales.push_back(i % 2 == 0 ? 0.5f : 2.0f);
        }
        ManyWorkers executor(3);
        auto plan = ScaledLinearPlan::Create(spec, DenseMatrix(w.data(), n, k),
                                             DenseVector(w_scales.data(), n),
                                             AnyTensorView(), executor);
        ASSERT_TRUE(plan.ok()) << plan.status();
        EXPECT_EQ(plan->impl(), ran());
        ExpectExplains(plan->Explain(m));

        // Codes and, for bf16, values that have exactly these codes: the
        // extremes of each row are -128 and 127, or -127 and 127.
        std::vector<int8_t> q = SmallIntegers<int8_t>(rng, m * k, -100, 100);
        std::vector<BF> x(q.size());
        std::vector<float> scales(static_cast<size_t>(m));
        std::vector<int32_t> zero_points(static_cast<size_t>(m));
        for (int64_t i = 0; i < m; ++i) {
          const auto row = static_cast<size_t>(i);
          scales[row] = per_token ? (i % 3 == 0 ? 1.0f : 4.0f) : 0.25f;
          zero_points[row] = !used ? 0 : per_token ? -1 : -5;
          q[static_cast<size_t>(i * k)] = 127;
          q[static_cast<size_t>(i * k + 1)] = used ? -128 : -127;
        }
        for (size_t i = 0; i < q.size(); ++i) {
          const size_t row = i / static_cast<size_t>(k);
          x[i] =
              FromDouble<BF>(double{scales[row]} * (q[i] - zero_points[row]));
        }
        std::vector<double> want(static_cast<size_t>(m * n));
        for (int64_t r = 0; r < m; ++r) {
          const auto row = static_cast<size_t>(r);
          for (int64_t c = 0; c < n; ++c) {
            int64_t dot = 0;
            for (int64_t i = 0; i < k; ++i) {
              dot += (q[static_cast<size_t>(r * k + i)] - zero_points[row]) *
                     w[static_cast<size_t>(c * k + i)];
            }
            want[static_cast<size_t>(r * n + c)] =
                static_cast<double>(dot) * double{scales[row]} *
                double{w_scales[static_cast<size_t>(c)]};
          }
        }

        std::vector<float> c(want.size());
        ScaledLinearArgs args;
        args.c = DenseMatrix(c.data(), m, n);
        if (a_type == DType::kI8) {
          args.a = DenseMatrix(q.data(), m, k);
          if (per_token) args.a_scales = DenseVector(scales.data(), m);
          if (per_token && used) {
            args.a_zero_points = DenseVector(zero_points.data(), m);
          }
        } else {
          args.a = DenseMatrix(x.data(), m, k);
        }
        LinearScratch scratch;
        ASSERT_TRUE(scratch.Reserve(*plan, m, executor).ok());
        ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
        plan->Execute(args, scratch, executor);
        EXPECT_TRUE(AllEqual(c, want));
      }
    }
  }
}

TEST_P(FrontDoorTest, RefusesWhatNeitherCanDo) {
  InlineExecutor executor;
  std::vector<BF> w(12);
  std::vector<int8_t> w8(12);
  std::vector<float> scales(4);
  LinearSpec spec;
  spec.n = 4;
  spec.k = 3;
  spec.b = DType::kF16;
  spec.impl = GetParam();
  const auto status = LinearPlan::Create(spec, DenseMatrix(w.data(), 4, 3),
                                         AnyTensorView(), executor)
                          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "weights is bf16; need f16"))
      << status;
  ScaledLinearSpec scaled;
  scaled.n = 4;
  scaled.impl = GetParam();
  const auto refused = [&](int64_t k, Int8ZeroPoint zero_points) {
    scaled.k = k;
    scaled.zero_points = zero_points;
    return std::string(ScaledLinearPlan::Create(scaled,
                                                DenseMatrix(w8.data(), 4, 3),
                                                DenseVector(scales.data(), 4),
                                                AnyTensorView(), executor)
                           .status()
                           .message());
  };
  EXPECT_THAT(refused(65794, Int8ZeroPoint::kUsed),
              testing::HasSubstr("k=65794; need 1 <= k <= 65793"));
  EXPECT_THAT(refused(131072, Int8ZeroPoint::kNone),
              testing::HasSubstr("k=131072; need 1 <= k <= 131071"));
}

}  // namespace
}  // namespace quern
