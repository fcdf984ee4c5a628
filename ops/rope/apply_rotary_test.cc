#include "quern/ops/rope/apply_rotary.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

class ApplyRotaryTest : public IsaTest {
 protected:
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(ApplyRotaryTest);

// View [batch, tokens, heads, head_dim] of a matrix that has one row for each
// token.
AnyTensorView Batched(const AnyMatrix& m, int64_t batch, int64_t heads,
                      int64_t head_dim) {
  const AnyTensorView v = m.view();
  return AnyTensorView(
      v.dtype(), v.mutable_data(), 4,
      {batch, v.extent(0) / batch, heads, head_dim},
      {v.extent(0) / batch * v.stride(0), v.stride(0), head_dim, 1});
}

TEST_P(ApplyRotaryTest, TurnsByWhatIsGiven) {
  TestRng rng;
  for (const RotaryStyle style : {RotaryStyle::kHalves, RotaryStyle::kPairs}) {
    for (const DType dtype : kDTypes) {
      for (const DType table_dtype : kDTypes) {
        for (const int64_t n : {2, 34, 80, 128, 540}) {
          SCOPED_TRACE(testing::Message()
                       << DTypeName(dtype) << DTypeName(table_dtype) << n);
          ApplyRotarySpec spec;
          spec.head_dim = n;
          spec.style = style;
          spec.dtype = dtype;
          spec.table_dtype = table_dtype;
          const auto plan = ApplyRotaryPlan::Create(spec);
          ASSERT_TRUE(plan.ok()) << plan.status();
          EXPECT_RAN_ON(*plan);
          const int64_t tokens = 3, heads = 2, batch = 2;
          const int64_t cols = heads * n;
          std::vector<double> cosines, sines;
          for (int64_t i = 0; i < tokens * n / 2; ++i) {
            const double angle = 0.37 * static_cast<double>(i * i % 101);
            cosines.push_back(std::cos(angle));
            sines.push_back(std::sin(angle));
          }
          const AnyMatrix c(table_dtype, cosines, tokens, n / 2, n / 2 + 1);
          const AnyMatrix s(table_dtype, sines, tokens, n / 2, n / 2);
          const AnyMatrix x(
              dtype, ToDoubles(UniformReals(rng, batch * tokens * cols, -3, 3)),
              batch * tokens, cols, cols + 3);
          const AnyMatrix out(dtype, batch * tokens, cols, cols + 1);
          const AnyTensorView xs = Batched(x, batch, heads, n);
          const AnyTensorView outs = Batched(out, batch, heads, n);
          ASSERT_EQ(plan->CheckArgs(xs, c.view(), s.view(), outs),
                    absl::OkStatus());
          EXPECT_NO_ALLOCATION(
              plan->Execute(xs, c.view(), s.view(), outs, executor_));
          const auto cs = c.doubles(), ss = s.doubles();
          const auto at = [&](size_t head, size_t j) {
            return head / 2 % 3 * static_cast<size_t>(n / 2) + j;
          };
          const auto want = Turned(
              x.doubles(), style, n,
              [&](size_t head, size_t j) { return cs[at(head, j)]; },
              [&](size_t head, size_t j) { return ss[at(head, j)]; });
          EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double v, int64_t) {
            return TurnedBound(dtype, v);
          }));

          // The first half again: without a batch, in place, on several
          // workers.
          ManyWorkers many(3);
          const AnyTensorView first(dtype, x.view().mutable_data(), 3,
                                    {tokens, heads, n},
                                    {x.view().stride(0), n, 1});
          ASSERT_EQ(plan->CheckArgs(first, c.view(), s.view(), first),
                    absl::OkStatus());
          plan->Execute(first, c.view(), s.view(), first, many);
          const auto got = x.bits(), all = out.bits();
          EXPECT_EQ(
              std::vector<uint32_t>(got.begin(), got.begin() + tokens * cols),
              std::vector<uint32_t>(all.begin(), all.begin() + tokens * cols));
        }
      }
    }
  }
}

// The second element of each pair has an angle of its own, or the same one:
// then the bits are those of rows with an angle for each pair.
TEST_P(ApplyRotaryTest, TurnsEachElementByItsAngle) {
  TestRng rng;
  constexpr int64_t kTokens = 3, kHeads = 5;
  for (const RotaryStyle style : {RotaryStyle::kHalves, RotaryStyle::kPairs}) {
    for (const DType dtype : kDTypes) {
      for (const int64_t n : {2, 34, 128, 540}) {
        for (const bool equal : {false, true}) {
          SCOPED_TRACE(testing::Message() << DTypeName(dtype) << n << equal);
          ApplyRotarySpec spec;
          spec.head_dim = n;
          spec.style = style;
          spec.dtype = dtype;
          spec.rows = RotaryRows::kEach;
          const auto plan = ApplyRotaryPlan::Create(spec);
          ASSERT_TRUE(plan.ok()) << plan.status();
          EXPECT_RAN_ON(*plan);
          const auto first = [&](int64_t j) {
            return style == RotaryStyle::kHalves ? j : 2 * j;
          };
          const auto second = [&](int64_t j) {
            return style == RotaryStyle::kHalves ? n / 2 + j : 2 * j + 1;
          };
          std::vector<double> c(static_cast<size_t>(kTokens * n)), s = c;
          std::vector<double> pair_c, pair_s;
          for (int64_t t = 0; t < kTokens; ++t) {
            for (int64_t j = 0; j < n / 2; ++j) {
              const double angle = 0.37 * static_cast<double>(t * t + j);
              const double other = equal ? angle : angle + 1;
              const auto a = static_cast<size_t>(t * n + first(j));
              const auto b = static_cast<size_t>(t * n + second(j));
              c[a] = std::cos(angle);
              s[a] = std::sin(angle);
              c[b] = std::cos(other);
              s[b] = std::sin(other);
              pair_c.push_back(c[a]);
              pair_s.push_back(s[a]);
            }
          }
          const AnyMatrix cos(DType::kF32, c, kTokens, n, n + 1);
          const AnyMatrix sin(DType::kF32, s, kTokens, n, n);
          const int64_t cols = kHeads * n;
          const AnyMatrix x(dtype,
                            ToDoubles(UniformReals(rng, kTokens * cols, -3, 3)),
                            kTokens, cols, cols + 3);
          const AnyMatrix out(dtype, kTokens, cols, cols + 1);
          const AnyTensorView xs = x.heads(kHeads, n, n);
          const AnyTensorView outs = out.heads(kHeads, n, n);
          ASSERT_EQ(plan->CheckArgs(xs, cos.view(), sin.view(), outs),
                    absl::OkStatus());
          EXPECT_NO_ALLOCATION(
              plan->Execute(xs, cos.view(), sin.view(), outs, executor_));
          const std::vector<double> in = x.doubles(), cs = cos.doubles(),
                                    ss = sin.doubles();
          std::vector<double> want = in;
          for (int64_t h = 0; h < kTokens * kHeads; ++h) {
            for (int64_t j = 0; j < n / 2; ++j) {
              const auto a = static_cast<size_t>(h * n + first(j));
              const auto b = static_cast<size_t>(h * n + second(j));
              const auto ta = static_cast<size_t>(h / kHeads * n + first(j));
              const auto tb = static_cast<size_t>(h / kHeads * n + second(j));
              want[a] = in[a] * cs[ta] - in[b] * ss[ta];
              want[b] = in[b] * cs[tb] + in[a] * ss[tb];
            }
          }
          EXPECT_TRUE(AllWithin(out.doubles(), want, [&](double v, int64_t) {
            return TurnedBound(dtype, v);
          }));
          if (equal) {
            spec.rows = RotaryRows::kPairs;
            const AnyMatrix few_c(DType::kF32, pair_c, kTokens, n / 2, n / 2);
            const AnyMatrix few_s(DType::kF32, pair_s, kTokens, n / 2, n / 2);
            const AnyMatrix again(dtype, kTokens, cols, cols);
            ApplyRotaryPlan::Create(spec)->Execute(
                xs, few_c.view(), few_s.view(), again.heads(kHeads, n, n),
                executor_);
            EXPECT_EQ(again.bits(), out.bits());
          }
          ManyWorkers many(3);
          ASSERT_EQ(plan->CheckArgs(xs, cos.view(), sin.view(), xs),
                    absl::OkStatus());
          plan->Execute(xs, cos.view(), sin.view(), xs, many);
          EXPECT_EQ(x.bits(), out.bits());
        }
      }
    }
  }
}

TEST(ApplyRotaryPlanTest, Refuses) {
  ApplyRotarySpec good;
  good.head_dim = 4;
  struct Bad {
    ApplyRotarySpec spec;
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
    std::string words;
  };
  std::vector<Bad> cases(4, {good});
  cases[0].spec.head_dim = 5;
  cases[0].words = "apply_rotary_emb: head_dim=5; need an even number";
  cases[1].spec.head_dim = 1026;
  cases[1].words = "head_dim=1026; need 2 <= head_dim <= 1024";
  cases[2].spec.dtype = DType::kI8;
  cases[2].code = absl::StatusCode::kUnimplemented;
  cases[2].words = "dtype is i8; need f32 or bf16 or f16";
  cases[3].spec.table_dtype = DType::kI8;
  cases[3].code = absl::StatusCode::kUnimplemented;
  cases[3].words = "table_dtype is i8; need";
  for (const Bad& c : cases) {
    const absl::Status status = ApplyRotaryPlan::Create(c.spec).status();
    EXPECT_EQ(status.code(), c.code);
    EXPECT_NE(status.message().find(c.words), std::string::npos) << status;
  }
  const auto plan = ApplyRotaryPlan::Create(good);
  ASSERT_TRUE(plan.ok());
  std::vector<float> data(64);
  const auto heads = [&](int64_t from) {
    return AnyTensorView(DType::kF32, static_cast<void*>(data.data() + from), 3,
                         {2, 1, 4}, {4, 4, 1});
  };
  const AnyTensorView c = DenseMatrix(data.data() + 16, 2, 2);
  const AnyTensorView s = DenseMatrix(data.data() + 20, 2, 2);
  EXPECT_EQ(plan->CheckArgs(heads(0), c, s, heads(8)), absl::OkStatus());
  const auto refused = [&](const absl::Status& status,
                           const std::string& words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(words), std::string::npos) << status;
  };
  refused(plan->CheckArgs(c, c, s, heads(8)),
          "x is [2, 2]; need [any, any, 4]");
  refused(plan->CheckArgs(heads(0), DenseMatrix(data.data() + 16, 3, 2), s,
                          heads(8)),
          "cos is [3, 2]; need [2, 2]");
  refused(plan->CheckArgs(heads(0), c, s, heads(1)), "out overlaps x");
  refused(plan->CheckArgs(heads(0), c, s, heads(21)), "out overlaps sin");
  refused(plan->CheckArgs(heads(0), c, s, heads(17)), "out overlaps cos");
}

}  // namespace
}  // namespace quern
