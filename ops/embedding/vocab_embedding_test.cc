#include "quern/ops/embedding/vocab_embedding.h"

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

VocabEmbeddingSpec Spec(int64_t vocab, int64_t hidden,
                        DType weight = DType::kF32, DType out = DType::kF32) {
  VocabEmbeddingSpec spec;
  spec.vocab = vocab;
  spec.hidden = hidden;
  spec.weight_dtype = weight;
  spec.out_dtype = out;
  return spec;
}

class VocabEmbeddingTest : public IsaTest {
 protected:
  VocabEmbeddingPlan Plan(const VocabEmbeddingSpec& spec) {
    auto plan = VocabEmbeddingPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  InlineExecutor executor_;
};
QUERN_INSTANTIATE_ISA_TEST(VocabEmbeddingTest);

// The product is exact in double. The oracle rounds it to f32 and then to the
// output's dtype.
TEST_P(VocabEmbeddingTest, GathersScalesAndConvertsExactly) {
  TestRng rng;
  const int64_t vocab = 5;
  const std::vector<int64_t> ids = {4, 0, 0, 3, -7, 2, 1};
  const int64_t tokens = static_cast<int64_t>(ids.size());
  for (const DType weight_dtype : kDTypes) {
    for (const DType out_dtype : kDTypes) {
      for (const int64_t hidden : {1, 7, 8, 15, 16, 17, 33, 769}) {
        const float scale = hidden % 2 == 0 ? 1.0f : 3.25f;
        SCOPED_TRACE(testing::Message()
                     << hidden << " " << DTypeName(weight_dtype) << " "
                     << DTypeName(out_dtype) << " times " << scale);
        VocabEmbeddingSpec spec = Spec(vocab, hidden, weight_dtype, out_dtype);
        spec.padding_id = -7;
        spec.scale = scale;
        const VocabEmbeddingPlan plan = Plan(spec);
        const AnyMatrix weight(weight_dtype,
                               ToDoubles(UniformReals(rng, vocab * hidden)),
                               vocab, hidden, hidden + 1, Edge::kBegin, 1);
        const AnyMatrix out(out_dtype, tokens, hidden, hidden + 2);
        const IndexView view = DenseVector(ids.data(), tokens);
        ASSERT_EQ(plan.CheckArgs(view, weight.const_view(), out.view()),
                  absl::OkStatus());
        plan.Execute(view, weight.const_view(), out.view(), executor_);
        std::vector<double> want;
        const auto table = weight.doubles();
        for (const int64_t id : ids) {
          for (int64_t i = 0; i < hidden; ++i) {
            want.push_back(
                id < 0 ? 0.0
                       : RoundThroughF32(
                             out_dtype,
                             static_cast<double>(scale) *
                                 table[static_cast<size_t>(id * hidden + i)]));
          }
        }
        EXPECT_TRUE(AllEqual(out.doubles(), want));
      }
    }
  }
}

// The codes include denormals, infinities, NaN and both zeros.
TEST_P(VocabEmbeddingTest, ConvertsEveryHalfPrecisionCode) {
  for (const DType weight_dtype : {DType::kBF16, DType::kF16}) {
    for (const DType out_dtype : kDTypes) {
      SCOPED_TRACE(testing::Message() << DTypeName(weight_dtype) << " to "
                                      << DTypeName(out_dtype));
      std::vector<double> values;
      WithType(weight_dtype, [&values](auto type) {
        for (uint32_t code = 0; code < 65536; ++code) {
          values.push_back(ToDouble(FromBits<decltype(type)>(code)));
        }
        return 0;
      });
      const AnyMatrix weight(weight_dtype, values, 256, 256, 256);
      const AnyMatrix out(out_dtype, 256, 256, 256);
      std::vector<int32_t> ids(256);
      for (size_t i = 0; i < 256; ++i) ids[i] = static_cast<int32_t>(i);
      Plan(Spec(256, 256, weight_dtype, out_dtype))
          .Execute(DenseVector(ids.data(), 256), weight.view(), out.view(),
                   executor_);
      const auto doubles = out.doubles();
      for (size_t i = 0; i < doubles.size(); ++i) {
        const double want = RoundThroughF32(out_dtype, values[i]);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(doubles[i])) << i;
        } else {
          ASSERT_EQ(doubles[i], want) << i;
          ASSERT_EQ(std::signbit(doubles[i]), std::signbit(want)) << i;
        }
      }
    }
  }
}

// The inputs are the f32 that equal a 16-bit value, lie halfway to the next
// one, or lie next to halfway, including values beyond the range of f16.
TEST_P(VocabEmbeddingTest, RoundsToNearestEven) {
  for (const DType out_dtype : {DType::kBF16, DType::kF16}) {
    // Low bits of an f32 that the 16-bit type drops.
    const int dropped = out_dtype == DType::kBF16 ? 16 : 13;
    const uint32_t half = 1u << (dropped - 1);
    std::vector<double> values;
    for (uint32_t upper = 0; upper < (1u << (32 - dropped)); upper += 7) {
      for (const uint32_t lower :
           {0u, half - 1, half, half + 1, 2 * half - 1}) {
        values.push_back(ToDouble(FromBits<float>(upper << dropped | lower)));
      }
    }
    const int64_t hidden = static_cast<int64_t>(values.size());
    const AnyMatrix weight(DType::kF32, values, 1, hidden, hidden);
    const AnyMatrix out(out_dtype, 1, hidden, hidden);
    const std::vector<int32_t> ids = {0};
    Plan(Spec(1, hidden, DType::kF32, out_dtype))
        .Execute(DenseVector(ids.data(), 1), weight.view(), out.view(),
                 executor_);
    std::vector<double> want;
    for (const double value : values) {
      want.push_back(RoundThroughF32(out_dtype, value));
    }
    EXPECT_TRUE(AllEqual(out.doubles(), want)) << DTypeName(out_dtype);
  }
}

// With equal dtypes and a scale of 1, the bits are copied. A conversion would
// change a signalling NaN.
TEST_P(VocabEmbeddingTest, CopiesBits) {
  const std::vector<uint32_t> f32 = {0x7f800001, 0xffc01234, 1, 0x80000000};
  const std::vector<uint16_t> bf16 = {0x7f81, 0xffc5, 1, 0x8000};
  const std::vector<uint16_t> f16 = {0x7c01, 0xfe05, 1, 0x8000};
  const auto copies = [this](DType dtype, const auto& bits) {
    auto out = bits;
    std::fill(out.begin(), out.end(), 0x55);
    const int32_t id = 0;
    const VocabEmbeddingPlan plan = Plan(Spec(1, 4, dtype, dtype));
    plan.Execute(
        DenseVector(&id, 1),
        AnyTensorView(dtype, static_cast<const void*>(bits.data()), 2, {1, 4},
                      {4, 1}),
        AnyTensorView(dtype, static_cast<void*>(out.data()), 2, {1, 4}, {4, 1}),
        executor_);
    EXPECT_EQ(out, bits) << DTypeName(dtype);
  };
  copies(DType::kF32, f32);
  copies(DType::kBF16, bf16);
  copies(DType::kF16, f16);
}

TEST_P(VocabEmbeddingTest, DoesNotDependOnWorkers) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok());
  // The pool's threads allocate when they start, so they start before the
  // count.
  (*pool)->ParallelFor(3, [](int64_t, int) {});
  const int64_t vocab = 50, hidden = 769, tokens = 101;
  const VocabEmbeddingPlan plan =
      Plan(Spec(vocab, hidden, DType::kF32, DType::kBF16));
  const AnyMatrix weight(DType::kF32,
                         ToDoubles(UniformReals(rng, vocab * hidden)), vocab,
                         hidden, hidden);
  std::vector<int64_t> ids;
  for (int64_t t = 0; t < tokens; ++t) ids.push_back(rng.Integer(0, vocab - 1));
  const AnyMatrix one(DType::kBF16, tokens, hidden, hidden);
  const AnyMatrix many(DType::kBF16, tokens, hidden, hidden);
  const IndexView view = DenseVector(ids.data(), tokens);
  EXPECT_NO_ALLOCATION(
      plan.Execute(view, weight.view(), one.view(), executor_));
  EXPECT_NO_ALLOCATION(plan.Execute(view, weight.view(), many.view(), **pool));
  EXPECT_EQ(one.bits(), many.bits());
}

// The stride of a single row is not used, not even in a product that would
// overflow.
TEST_P(VocabEmbeddingTest, IgnoresTheRowStrideOfOneRow) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const VocabEmbeddingPlan plan = Plan(Spec(1, 2));
  const std::vector<float> weight = {1, 2};
  std::vector<float> out(2);
  const int32_t id = 0;
  const IndexView ids = DenseVector(&id, 1);
  const MatrixView<const float> table(weight.data(), {1, 2}, {kHuge, 1});
  const MatrixView<float> to(out.data(), {1, 2}, {-kHuge, 1});
  ASSERT_EQ(plan.CheckArgs(ids, table, to), absl::OkStatus());
  plan.Execute(ids, table, to, executor_);
  EXPECT_EQ(out, weight);
}

TEST_P(VocabEmbeddingTest, DoesNothingWithoutTokens) {
  const VocabEmbeddingPlan plan = Plan(Spec(1, 2));
  const float weight[] = {1, 2};
  const AnyTensorView table = DenseMatrix<const float>(weight, 1, 2);
  const AnyTensorView out = DenseMatrix<float>(nullptr, 0, 2);
  EXPECT_EQ(plan.CheckArgs(IndexView(), table, out), absl::OkStatus());
  plan.Execute(IndexView(), table, out, executor_);
}

TEST(VocabEmbeddingPlanTest, RefusesABadSpec) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  const auto refused = [](const VocabEmbeddingSpec& spec, absl::StatusCode code,
                          const std::string& words) {
    ExpectRefusal(VocabEmbeddingPlan::Create(spec).status(), code, words);
  };
  refused(Spec(0, 1), kInvalid, "vocab_embedding: vocab=0; need vocab >= 1");
  refused(Spec(1, 0), kInvalid, "hidden=0; need 1 <= hidden <= ");
  refused(Spec(1, 1, DType::kI8), kUnimplemented,
          "weight_dtype is i8; need f32 or bf16 or f16");
  refused(Spec(1, 1, DType::kF32, DType::kF8E4M3), kUnimplemented,
          "out_dtype is f8e4m3; need f32 or bf16 or f16");
  for (const float scale : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    VocabEmbeddingSpec spec = Spec(1, 1);
    spec.scale = scale;
    refused(spec, kInvalid, "; need a finite number");
  }
}

TEST(VocabEmbeddingPlanTest, RefusesBadArguments) {
  VocabEmbeddingSpec spec = Spec(3, 4);
  const auto plan = VocabEmbeddingPlan::Create(spec);
  spec.padding_id = 99;
  const auto padded = VocabEmbeddingPlan::Create(spec);
  ASSERT_TRUE(plan.ok() && padded.ok());
  std::vector<float> w(12), out(8);
  std::vector<int32_t> ids = {0, 2};
  const IndexView view = DenseVector(ids.data(), 2);
  const AnyTensorView vw = DenseMatrix<const float>(w.data(), 3, 4);
  const AnyTensorView vout = DenseMatrix(out.data(), 2, 4);
  const auto refused = [](const absl::Status& status,
                          const std::string& words) {
    ExpectRefusal(status, absl::StatusCode::kInvalidArgument, words);
  };
  EXPECT_EQ(plan->CheckArgs(view, vw, vout), absl::OkStatus());
  refused(plan->CheckArgs(view, DenseMatrix<const float>(w.data(), 2, 4), vout),
          "weight is [2, 4]; need [3, 4]");
  refused(plan->CheckArgs(view, vw, DenseMatrix(out.data(), 1, 4)),
          "out is [1, 4]; need [2, 4]");
  refused(plan->CheckArgs(view, vw, DenseMatrix(w.data() + 4, 2, 4)),
          "out overlaps weight");
  refused(
      plan->CheckArgs(VectorView<const int32_t>(nullptr, {2}, {1}), vw, vout),
      "ids is null; need 2");
  for (const int32_t id : {3, 99, -1, INT32_MIN, INT32_MAX}) {
    ids[1] = id;
    refused(plan->CheckArgs(view, vw, vout),
            "ids[1]=" + std::to_string(id) + "; need 0 <= id < 3");
    EXPECT_EQ(padded->CheckArgs(view, vw, vout).ok(), id == 99);
  }
}

}  // namespace
}  // namespace quern
