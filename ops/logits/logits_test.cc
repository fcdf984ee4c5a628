#include "quern/ops/logits/logits.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/index_view.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// Relative error: 12 units for tanh by logits.h, one for the quotient, whose
// rounding moves tanh by no more than its own share, and two for the products.
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

// The relative error is checked near 0 too, where a difference of exponentials
// would lose it.
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

// The expected logit of type T by logits.h: every step in double, then rounded
// to f32 and to T. Reference and kernel share only the library's tanh.
template <typename T>
double Step(double l, float soft_cap, float scale) {
  const auto round = [](double x) {
    return ToDouble(FromDouble<T>(ToDouble(FromDouble<float>(x))));
  };
  if (soft_cap > 0) {
    const double cap = soft_cap;
    l = round(l / cap);
    l = round(std::tanh(l));
    l = round(l * cap);
  }
  return scale == 1 ? l : round(l * scale);
}

// The codes include denormals, infinities, NaN and both zeros.
TEST_P(LogitsTest, RoundsEveryHalfPrecisionLogitAtEachStep) {
  struct Case {
    float soft_cap, scale;
  };
  for (const Case c : {Case{30, 1}, Case{50, 0.0625f}, Case{1, -3},
                       Case{0.7f, 1.1f}, Case{1e5f, 1e-3f}, Case{1e-30f, 1},
                       Case{0, 0.3f}, Case{0, 1}, Case{0, 0}}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(dtype) << " " << c.soft_cap << " " << c.scale);
      WithType(dtype, [&](auto type) {
        using T = decltype(type);
        LogitsSpec spec = Spec(257, c.soft_cap, c.scale);
        spec.logits_dtype = dtype;
        const LogitsPlan plan = Plan(spec);
        StridedMatrix<T> m(256, 257, 259);
        for (int64_t i = 0; i < 256 * 257; ++i) {
          *m.view().At(i / 257, i % 257) =
              FromBits<T>(static_cast<uint32_t>(i) & 0xFFFF);
        }
        ASSERT_EQ(plan.CheckArgs(m.view()), absl::OkStatus());
        plan.Execute(m.view(), executor_);
        for (int64_t i = 0; i < 256 * 257; ++i) {
          const T got = *m.view().At(i / 257, i % 257);
          const uint32_t code = static_cast<uint32_t>(i) & 0xFFFF;
          if (c.soft_cap == 0 && c.scale == 1) {
            ASSERT_EQ(BitsOf(got), code);
            continue;
          }
          const double want =
              Step<T>(ToDouble(FromBits<T>(code)), c.soft_cap, c.scale);
          if (std::isnan(want)) {
            ASSERT_TRUE(std::isnan(ToDouble(got))) << code;
          } else {
            ASSERT_EQ(BitsOf(got), BitsOf(FromDouble<T>(want)))
                << code << ": " << ToDouble(got) << " for " << want;
          }
        }
      });
    }
  }
}

// The matrix checks that the memory between and after the rows is unchanged.
TEST_P(LogitsTest, TakesStridedRowsOfAnyWidth) {
  TestRng rng;
  for (const DType dtype : kDTypes) {
    for (const int64_t vocab : {1, 2, 7, 31, 32, 33, 769}) {
      for (const int64_t rows : {0, 1, 3}) {
        SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << rows
                                        << " rows of " << vocab);
        LogitsSpec spec = Spec(vocab, 20.0f, 0.5f);
        spec.logits_dtype = dtype;
        const LogitsPlan plan = Plan(spec);
        const AnyMatrix m(dtype,
                          ToDoubles(UniformReals(rng, rows * vocab, -90, 90)),
                          rows, vocab, vocab + 3, Edge::kBegin, 1);
        const std::vector<double> logits = m.doubles();
        plan.Execute(m.view(), executor_);
        std::vector<double> want;
        for (const double l : logits) {
          want.push_back(WithType(dtype, [l](auto type) {
            return Step<decltype(type)>(l, 20.0f, 0.5f);
          }));
        }
        EXPECT_TRUE(
            AllWithin(m.doubles(), want, [dtype](double value, int64_t) {
              return dtype == DType::kF32 ? 2 * kRelative * std::abs(value)
                                          : 0.0;
            }));
      }
    }
  }
}

// The stride of a single row is not used, not even in a product that would
// overflow.
TEST_P(LogitsTest, IgnoresTheRowStrideOfOneRow) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const LogitsPlan plan = Plan(Spec(2, 0.0f, 2.0f));
  std::vector<float> l = {1, 2};
  const MatrixView<float> row(l.data(), {1, 2}, {kHuge, 1});
  ASSERT_EQ(plan.CheckArgs(row), absl::OkStatus());
  plan.Execute(row, executor_);
  EXPECT_EQ(l, (std::vector<float>{2, 4}));
  std::vector<float> x = {1, 2, 3, 4}, out(4);
  const MatrixView<const float> hidden(x.data(), {1, 4}, {kHuge, 1});
  const MatrixView<float> to(out.data(), {1, 4}, {-kHuge, 1});
  const int32_t zero = 0;
  const IndexView rows = DenseVector(&zero, 1);
  ASSERT_EQ(plan.CheckSelectArgs(hidden, rows, to), absl::OkStatus());
  plan.SelectRows(hidden, rows, to);
  EXPECT_EQ(out, x);
}

TEST_P(LogitsTest, DoesNotDependOnWorkers) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  const int64_t rows = 23, vocab = 4099;
  for (const DType dtype : kDTypes) {
    LogitsSpec spec = Spec(vocab, 30.0f, 2.0f);
    spec.logits_dtype = dtype;
    const LogitsPlan plan = Plan(spec);
    const auto values = ToDoubles(UniformReals(rng, rows * vocab, -50, 50));
    const AnyMatrix one(dtype, values, rows, vocab, vocab);
    const AnyMatrix many(dtype, values, rows, vocab, vocab);
    EXPECT_NO_ALLOCATION(plan.Execute(one.view(), executor_));
    EXPECT_NO_ALLOCATION(plan.Execute(many.view(), **pool));
    EXPECT_EQ(one.bits(), many.bits());
  }
}

// SelectRows copies bytes, so NaN payloads and invalid codes are kept.
TEST_P(LogitsTest, SelectsRowsOfAnyDType) {
  TestRng rng;
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3, DType::kF8E5M2,
        DType::kI32, DType::kI8, DType::kU8}) {
    for (const int64_t width : {1, 3, 17, 64}) {
      SCOPED_TRACE(testing::Message() << width << " of " << DTypeName(dtype));
      LogitsSpec spec = Spec(9);
      spec.hidden = width;
      spec.hidden_dtype = dtype;
      const LogitsPlan plan = Plan(spec);
      const auto size = static_cast<int64_t>(SizeOf(dtype));
      StridedMatrix<uint8_t> hidden(5, width * size, (width + 2) * size);
      StridedMatrix<uint8_t> out(3, width * size, (width + 1) * size);
      for (int64_t i = 0; i < 5 * width * size; ++i) {
        *hidden.view().At(i / (width * size), i % (width * size)) =
            static_cast<uint8_t>(rng.Integer(0, 255));
      }
      const AnyTensorView from(dtype,
                               static_cast<const void*>(hidden.view().Row(0)),
                               2, {5, width}, {width + 2, 1});
      const AnyTensorView to(dtype, static_cast<void*>(out.view().Row(0)), 2,
                             {3, width}, {width + 1, 1});
      const std::vector<int32_t> rows = {4, 0, 4};
      const IndexView view = DenseVector(rows.data(), 3);
      ASSERT_EQ(plan.CheckSelectArgs(from, view, to), absl::OkStatus());
      EXPECT_NO_ALLOCATION(plan.SelectRows(from, view, to));
      for (int64_t r = 0; r < 3; ++r) {
        for (int64_t i = 0; i < width * size; ++i) {
          ASSERT_EQ(*out.view().At(r, i),
                    *hidden.view().At(rows[static_cast<size_t>(r)], i));
        }
      }
    }
  }
}

TEST_P(LogitsTest, SharesWhatItMadeWithItsCopies) {
  LogitsSpec spec = Spec(1, 2.0f);
  spec.logits_dtype = DType::kBF16;
  auto plan = std::make_unique<LogitsPlan>(Plan(spec));
  const LogitsPlan copy = *plan;
  plan.reset();
  const AnyMatrix m(DType::kBF16, {100.0}, 1, 1, 1);
  copy.Execute(m.view(), executor_);
  EXPECT_EQ(m.doubles(), std::vector<double>{2.0});
}

TEST(LogitsPlanTest, RefusesABadSpec) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const auto refused = [](const LogitsSpec& spec, absl::StatusCode code,
                          const std::string& words) {
    ExpectRefusal(LogitsPlan::Create(spec).status(), code, words);
  };
  refused(Spec(0), kInvalid,
          "logits: vocab=0; need 1 <= vocab <= 576460752303423487");
  LogitsSpec spec = Spec(1);
  spec.hidden = 0;
  refused(spec, kInvalid, "hidden=0; need hidden >= 1");
  spec = Spec(1);
  spec.logits_dtype = DType::kI32;
  refused(spec, absl::StatusCode::kUnimplemented,
          "logits: logits_dtype is i32; need f32 or bf16 or f16");
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
    ExpectRefusal(status, absl::StatusCode::kInvalidArgument, words);
  };
  refused(plan->CheckArgs(DenseMatrix(x.data(), 2, 4)),
          "logits is [2, 4]; need [any, 3]");
  const AnyMatrix bf16(DType::kBF16, 2, 3, 3), f32(DType::kF32, 2, 3, 3);
  refused(plan->CheckArgs(bf16.view()), "logits is bf16; need f32");
  refused(plan->CheckArgs(f32.const_view()), "logits");
  EXPECT_EQ(plan->CheckArgs(f32.view()), absl::OkStatus());
  const IndexView view = DenseVector(rows.data(), 2);
  refused(plan->CheckSelectArgs(bf16.const_view(), view, to),
          "hidden is bf16; need f32");
  refused(plan->CheckSelectArgs(hidden, view, hidden), "out");
  refused(plan->CheckSelectArgs(hidden, view, DenseMatrix(out.data(), 3, 4)),
          "out is [3, 4]; need [2, 4]");
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
