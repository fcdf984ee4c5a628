#include "ops/logits/logits.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/hwy_executor.h"
#include "core/tensor_view.h"
#include "gtest/gtest.h"
#include "ops/any_matrix_testutil.h"
#include "ops/index_view.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/no_alloc.h"
#include "testing/reference_convert.h"

namespace quern {
namespace {

// The header's 12 units of tanh; the quotient's rounding moves tanh by no more
// than its own share, and two products follow.
const double kRelative = 15 * std::ldexp(1.0, -24);

LogitsSpec Spec(int64_t vocab, float soft_cap = 0.0f, float scale = 1.0f) {
  LogitsSpec spec;
  spec.vocab = vocab;
  spec.hidden = 4;
  spec.soft_cap = soft_cap;
  spec.scale = scale;
  return spec;
}

class LogitsTest : public IsaTest {
 protected:
  LogitsPlan Plan(const LogitsSpec& spec) {
    auto plan = LogitsPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(LogitsTest);

TEST_P(LogitsTest, CapsThenScales) {
  TestRng rng;
  for (const int64_t vocab : {1, 7, 8, 15, 16, 17, 33, 769}) {
    for (const float cap : {30.0f, 1.5f}) {
      for (const float scale : {1.0f, 0.0625f, -3.0f}) {
        SCOPED_TRACE(testing::Message() << vocab << " " << cap << " " << scale);
        const auto logits = UniformReals(rng, 3 * vocab, -90, 90);
        StridedMatrix<float> m(logits, 3, vocab, vocab + 1);
        const LogitsPlan plan = Plan(Spec(vocab, cap, scale));
        ASSERT_EQ(plan.CheckArgs(m.view()), absl::OkStatus());
        plan.Execute(m.view(), executor_);
        std::vector<double> want;
        for (const float l : logits) {
          want.push_back(static_cast<double>(cap) *
                         std::tanh(static_cast<double>(l) / cap) * scale);
        }
        EXPECT_TRUE(AllWithin(m.ToDense(), want, [](double value, int64_t) {
          return std::abs(value) * kRelative;
        }));
      }
    }
  }
}

// Relative accuracy near 0 is what a difference of exponentials would lose.
TEST_P(LogitsTest, IsAccurateForEveryMagnitude) {
  std::vector<float> logits;
  std::vector<double> want;
  for (uint32_t code = 0; code < 65536; ++code) {
    const double logit = ToDouble(FromBits<BFloat16>(code));
    if (std::abs(logit) != 0.0 && std::abs(logit) < 1e-37) continue;
    logits.push_back(static_cast<float>(logit));
    want.push_back(std::tanh(logit));
  }
  for (double x = 1e-3; x < 12; x *= 1.0003) {
    logits.push_back(static_cast<float>(x));
    want.push_back(std::tanh(static_cast<double>(static_cast<float>(x))));
  }
  const int64_t n = static_cast<int64_t>(logits.size());
  Plan(Spec(n, 1.0f)).Execute(DenseMatrix(logits.data(), 1, n), executor_);
  EXPECT_TRUE(AllWithin(logits, want, [](double value, int64_t) {
    return std::isnan(value) ? 0.0 : std::abs(value) * kRelative;
  }));
}

TEST_P(LogitsTest, KeepsSignsNaNAndTheLimits) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> l = {-0.0f, kInf, -kInf,
                          std::numeric_limits<float>::quiet_NaN(), 3e38f};
  Plan(Spec(5, 20.0f, 0.5f)).Execute(DenseMatrix(l.data(), 1, 5), executor_);
  EXPECT_TRUE(std::signbit(l[0]) && l[0] == 0.0f);
  EXPECT_EQ(l[1], 10.0f);
  EXPECT_EQ(l[2], -10.0f);
  EXPECT_TRUE(std::isnan(l[3]));
  EXPECT_EQ(l[4], 10.0f);
}

TEST_P(LogitsTest, ScalesExactlyOrLeavesAlone) {
  TestRng rng;
  for (const int64_t vocab : {1, 15, 16, 17, 33}) {
    const auto logits = UniformReals(rng, 2 * vocab);
    StridedMatrix<float> m(logits, 2, vocab, vocab + 2);
    Plan(Spec(vocab)).Execute(m.view(), executor_);
    EXPECT_TRUE(AllBitsEqual(m.ToDense(), logits));
    Plan(Spec(vocab, 0.0f, 0.25f)).Execute(m.view(), executor_);
    std::vector<float> want;
    for (const float l : logits) want.push_back(l * 0.25f);
    EXPECT_TRUE(AllBitsEqual(m.ToDense(), want));
  }
}

TEST_P(LogitsTest, DoesNotDependOnWorkers) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3);
  ASSERT_TRUE(pool.ok());
  // Threads allocate while they start.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  const int64_t rows = 23, vocab = 4099;
  const LogitsPlan plan = Plan(Spec(vocab, 30.0f, 2.0f));
  std::vector<float> one = UniformReals(rng, rows * vocab, -50, 50);
  std::vector<float> many = one;
  EXPECT_NO_ALLOCATION(
      plan.Execute(DenseMatrix(one.data(), rows, vocab), executor_));
  EXPECT_NO_ALLOCATION(
      plan.Execute(DenseMatrix(many.data(), rows, vocab), **pool));
  EXPECT_TRUE(AllBitsEqual(one, many));
}

TEST_P(LogitsTest, SelectsRows) {
  TestRng rng;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    LogitsSpec spec = Spec(9);
    spec.hidden = 17;
    spec.hidden_dtype = dtype;
    const LogitsPlan plan = Plan(spec);
    const AnyMatrix hidden(dtype, ToDoubles(UniformReals(rng, 5 * 17)), 5, 17,
                           19);
    const AnyMatrix out(dtype, 3, 17, 18);
    const std::vector<int32_t> rows = {4, 0, 4};
    const IndexView view = DenseVector(rows.data(), 3);
    ASSERT_EQ(plan.CheckSelectArgs(hidden.const_view(), view, out.view()),
              absl::OkStatus());
    EXPECT_NO_ALLOCATION(
        plan.SelectRows(hidden.const_view(), view, out.view()));
    const auto from = hidden.bits(), to = out.bits();
    for (size_t i = 0; i < to.size(); ++i) {
      EXPECT_EQ(to[i], from[static_cast<size_t>(rows[i / 17]) * 17 + i % 17]);
    }
  }
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code,
                   const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(status.message().find(words), std::string::npos) << status;
}

TEST(LogitsPlanTest, RefusesABadSpec) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const auto refused = [](const LogitsSpec& spec, absl::StatusCode code,
                          const std::string& words) {
    ExpectRefused(LogitsPlan::Create(spec).status(), code, words);
  };
  refused(Spec(0), kInvalid, "logits: vocab=0; need vocab >= 1");
  LogitsSpec spec = Spec(1);
  spec.hidden = 0;
  refused(spec, kInvalid, "hidden=0; need hidden >= 1");
  spec = Spec(1);
  spec.hidden_dtype = DType::kF16;
  refused(spec, absl::StatusCode::kUnimplemented,
          "hidden_dtype is f16; need f32 or bf16");
  for (const float cap : {-1.0f, kInf, kNaN}) {
    refused(Spec(1, cap), kInvalid, "need finite soft_cap >= 0");
  }
  for (const float scale : {kInf, -kInf, kNaN}) {
    refused(Spec(1, 0.0f, scale), kInvalid, "need a finite scale");
  }
}

TEST(LogitsPlanTest, RefusesBadArguments) {
  const auto plan = LogitsPlan::Create(Spec(3));
  ASSERT_TRUE(plan.ok());
  std::vector<float> x(20), out(20);
  const AnyTensorView hidden = DenseMatrix<const float>(x.data(), 5, 4);
  const AnyTensorView to = DenseMatrix(out.data(), 2, 4);
  std::vector<int64_t> rows = {0, 5};
  const auto refused = [](const absl::Status& status,
                          const std::string& words) {
    ExpectRefused(status, absl::StatusCode::kInvalidArgument, words);
  };
  refused(plan->CheckArgs(DenseMatrix(x.data(), 2, 4)),
          "logits is [2, 4]; need [any, 3]");
  const IndexView view = DenseVector(rows.data(), 2);
  refused(plan->CheckSelectArgs(hidden, view, to),
          "rows[1]=5; need 0 <= row < 5");
  rows[1] = -1;
  refused(plan->CheckSelectArgs(hidden, view, to), "rows[1]=-1");
  rows[1] = 1;
  refused(plan->CheckSelectArgs(hidden, view, DenseMatrix(x.data(), 2, 4)),
          "out overlaps hidden");
  refused(plan->CheckSelectArgs(
              hidden, VectorView<const int64_t>(nullptr, {2}, {1}), to),
          "rows is null");
  EXPECT_EQ(plan->CheckSelectArgs(hidden, view, to), absl::OkStatus());
}

}  // namespace
}  // namespace quern
