#include "quern/ops/recurrent/delta_gates.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kTokens = 5;
// One block of a row and a tail.
constexpr int64_t kHeads = 259;

struct Values {
  explicit Values(Rng& rng)
      : a(Reals(rng, kTokens * kHeads)),
        b(Reals(rng, kTokens * kHeads)),
        a_log(Reals(rng, kHeads)),
        dt_bias(Reals(rng, kHeads)) {}
  static Doubles Reals(Rng& rng, int64_t count) {
    return ToDoubles(UniformReals(rng, count, -4, 4));
  }
  Doubles a, b, a_log, dt_bias;
};

struct Gates {
  absl::Status status;  // of CheckArgs; g and beta are empty where it refuses
  Doubles g, beta;
};

class DeltaGatesTest : public IsaTest {
 protected:
  // `stride` is that of the rows of a and b.
  Gates Run(DType dtype, const Values& values, int64_t stride = kHeads + 3) {
    DeltaGatesSpec spec;
    spec.heads = kHeads;
    spec.dtype = spec.log_dtype = spec.bias_dtype = spec.beta_dtype = dtype;
    const auto plan = DeltaGatesPlan::Create(spec);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_RAN_ON(*plan);
    const AnyMatrix a(dtype, values.a, kTokens, kHeads, kHeads + 3);
    const AnyMatrix b(dtype, values.b, kTokens, kHeads, kHeads + 3);
    const AnyMatrix a_log(dtype, values.a_log, 1, kHeads, kHeads);
    const AnyMatrix dt_bias(dtype, values.dt_bias, 1, kHeads, kHeads);
    const AnyMatrix g(DType::kF32, kTokens, kHeads, kHeads + 3);
    const AnyMatrix beta(dtype, kTokens, kHeads, kHeads + 3);
    const auto rows = [&](const AnyMatrix& m) {
      return AnyTensorView(dtype, m.const_view().data(), 2, {kTokens, kHeads},
                           {stride, 1});
    };
    DeltaGatesArgs args;
    args.a = rows(a);
    args.b = rows(b);
    args.a_log = a_log.vector();
    args.dt_bias = dt_bias.vector();
    args.g = g.view();
    args.beta = beta.view();
    const absl::Status status = plan->CheckArgs(args);
    if (!status.ok()) return {status, {}, {}};
    InlineExecutor executor;
    EXPECT_NO_ALLOCATION(plan->Execute(args, executor));
    return {status, g.doubles(), beta.doubles()};
  }
};
QUERN_INSTANTIATE_ISA_TEST(DeltaGatesTest);

TEST_P(DeltaGatesTest, AreTheFormula) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    SCOPED_TRACE(DTypeName(dtype));
    const Values values(rng);
    const auto rounded = [&](const Doubles& v, int64_t i) {
      return RoundThroughF32(dtype, v[static_cast<size_t>(i)]);
    };
    Gates want;
    for (int64_t i = 0; i < kTokens * kHeads; ++i) {
      const double x =
          rounded(values.a, i) + rounded(values.dt_bias, i % kHeads);
      want.g.push_back(-std::exp(rounded(values.a_log, i % kHeads)) *
                       std::log1p(std::exp(x)));
      want.beta.push_back(1 / (1 + std::exp(-rounded(values.b, i))));
    }
    const Gates got = Run(dtype, values);
    ASSERT_EQ(got.status, absl::OkStatus());
    // The C library's functions are within 2^-40 here.
    EXPECT_TRUE(AllWithin(got.g, want.g, [](double y, int64_t) {
      return ResultBound(DType::kF32, std::abs(y), std::ldexp(1.0, -40));
    }));
    EXPECT_TRUE(AllWithin(got.beta, want.beta, [&](double y, int64_t) {
      // beta is rounded to f32 and then to the dtype.
      return ResultBound(dtype, std::abs(y), std::ldexp(1.0, -24));
    }));
  }
}

TEST_P(DeltaGatesTest, KeepNaNWhereItBelongs) {
  TestRng rng;
  for (const DType dtype : kFloats) {
    SCOPED_TRACE(DTypeName(dtype));
    Values values(rng);
    const auto at = [](int64_t t, int64_t h) {
      return static_cast<size_t>(t * kHeads + h);
    };
    values.a[at(1, 2)] = values.a[at(3, 257)] = kNaN;
    values.b[at(2, 3)] = values.b[at(4, 258)] = kNaN;
    values.a_log[100] = values.a_log[256] = kNaN;
    values.dt_bias[0] = values.dt_bias[255] = kNaN;
    const Gates got = Run(dtype, values);
    ASSERT_EQ(got.status, absl::OkStatus());
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const bool g = std::isnan(values.a[at(t, h)]) ||
                       std::isnan(values.a_log[at(0, h)]) ||
                       std::isnan(values.dt_bias[at(0, h)]);
        EXPECT_EQ(std::isnan(got.g[at(t, h)]), g) << t << " " << h;
        EXPECT_EQ(std::isnan(got.beta[at(t, h)]),
                  std::isnan(values.b[at(t, h)]))
            << t << " " << h;
      }
    }
  }
}

TEST_P(DeltaGatesTest, RefuseRowsThatOverlap) {
  TestRng rng;
  const Values values(rng);
  EXPECT_EQ(Run(DType::kF32, values, kHeads).status, absl::OkStatus());
  for (const int64_t stride : {int64_t{0}, kHeads - 1}) {
    ExpectRefusal(Run(DType::kF32, values, stride).status,
                  absl::StrCat("rows of a are ", stride, " apart; need ",
                               kHeads, " or more"));
  }
}

}  // namespace
}  // namespace quern
