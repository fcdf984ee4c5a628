// Tensors without elements, with the largest extents that the plans accept:
// size computations must not overflow (a sanitizer checks), and loops must end.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/activation.h"
#include "quern/ops/embedding/vocab_embedding.h"
#include "quern/ops/index_view.h"
#include "quern/ops/logits/logits.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/norm/rms_norm_quant.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rope/apply_rotary.h"
#include "quern/ops/rope/dual_chunk_rotary.h"
#include "quern/ops/rope/mrope.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/quant/fp8_quantize.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

constexpr int64_t kHuge = int64_t{1} << 62;
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// A view without memory whose strides would lead far away.
AnyTensorView Nothing(DType dtype, const std::vector<int64_t>& extents) {
  AnyTensorView::Dims dims{}, strides{};
  for (size_t d = 0; d < extents.size(); ++d) {
    dims[d] = extents[d];
    strides[d] = d + 1 < extents.size() ? kHuge : 1;
  }
  return AnyTensorView(dtype, static_cast<void*>(nullptr),
                       static_cast<int>(extents.size()), dims, strides);
}

class EmptyRowsTest : public testing::TestWithParam<DType> {
 protected:
  InlineExecutor executor_;
};
INSTANTIATE_TEST_SUITE_P(DTypes, EmptyRowsTest, testing::ValuesIn(kDTypes));

TEST_P(EmptyRowsTest, OfTheWidestActivations) {
  constexpr int64_t kCols = kMaxRowElements;
  const AnyTensorView x = Nothing(GetParam(), {0, kCols});
  const AnyTensorView both = Nothing(GetParam(), {0, 2 * kCols});
  ActivationSpec one;
  one.hidden = kCols;
  one.x_dtype = one.out_dtype = GetParam();
  const auto unary = ActivationPlan::Create(one);
  ASSERT_TRUE(unary.ok()) << unary.status();
  ASSERT_EQ(unary->CheckArgs(x, x), absl::OkStatus());
  unary->Execute(x, x, executor_);
  ActAndMulSpec two;
  two.d = kCols;
  two.x_dtype = two.out_dtype = GetParam();
  const auto gated = ActAndMulPlan::Create(two);
  ASSERT_TRUE(gated.ok()) << gated.status();
  ASSERT_EQ(gated->CheckArgs(both, x), absl::OkStatus());
  gated->Execute(both, x, executor_);
  ASSERT_EQ(gated->CheckSplitArgs(x, x, x), absl::OkStatus());
  gated->ExecuteSplit(x, x, x, executor_);

  ++one.hidden;
  EXPECT_EQ(ActivationPlan::Create(one).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(EmptyRowsTest, OfTheWidestNorms) {
  constexpr int64_t kCols = kMaxRowElements;
  const AnyTensorView x = Nothing(GetParam(), {0, kCols});
  RmsNormQuantSpec spec;
  spec.norm.hidden = kCols;
  spec.norm.weight = NormWeight::kNone;
  spec.norm.x_dtype = spec.norm.weight_dtype = spec.norm.out_dtype =
      spec.norm.residual_dtype = GetParam();
  const auto norm = RmsNormPlan::Create(spec.norm);
  ASSERT_TRUE(norm.ok()) << norm.status();
  ASSERT_EQ(norm->CheckArgs(x, AnyTensorView(), x), absl::OkStatus());
  norm->Execute(x, AnyTensorView(), x, executor_);
  const RmsNormArgs args = {x, AnyTensorView(), x, x, x};
  ASSERT_EQ(norm->CheckAddArgs(args), absl::OkStatus());
  norm->ExecuteAdd(args, executor_);

  const auto quant = RmsNormQuantPlan::Create(spec);
  ASSERT_TRUE(quant.ok()) << quant.status();
  const RmsNormQuantArgs quant_args = {x,
                                       AnyTensorView(),
                                       Nothing(DType::kI8, {0, kCols}),
                                       Nothing(DType::kF32, {0}),
                                       x,
                                       x};
  ASSERT_EQ(quant->CheckAddArgs(quant_args), absl::OkStatus());
  quant->Execute(quant_args, executor_);
  quant->ExecuteAdd(quant_args, executor_);

  ++spec.norm.hidden;
  EXPECT_EQ(RmsNormPlan::Create(spec.norm).status().code(),
            absl::StatusCode::kInvalidArgument);
  RmsNormGatedSpec gated;
  gated.hidden = spec.norm.hidden;
  EXPECT_EQ(RmsNormGatedPlan::Create(gated).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(EmptyRowsTest, OfTheWidestLogitsAndTables) {
  constexpr int64_t kCols = kMaxRowElements;
  LogitsSpec spec;
  spec.vocab = kCols;
  spec.hidden = 1;
  spec.scale = 2;
  spec.logits_dtype = GetParam();
  const auto logits = LogitsPlan::Create(spec);
  ASSERT_TRUE(logits.ok()) << logits.status();
  const AnyTensorView x = Nothing(GetParam(), {0, kCols});
  ASSERT_EQ(logits->CheckArgs(x), absl::OkStatus());
  logits->Execute(x, executor_);
  ++spec.vocab;
  EXPECT_EQ(LogitsPlan::Create(spec).status().code(),
            absl::StatusCode::kInvalidArgument);
  VocabEmbeddingSpec table;
  table.vocab = 1;
  table.hidden = kCols + 1;
  EXPECT_EQ(VocabEmbeddingPlan::Create(table).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(EmptyRowsTest, OfRotaryHeads) {
  RotaryEmbeddingSpec spec;
  spec.head_dim = 64;
  spec.rot_dim = 32;
  spec.max_positions = 8;
  spec.dtype = GetParam();
  const auto rope = RotaryEmbeddingPlan::Create(spec);
  MropeSpec mrope_spec;
  mrope_spec.rotary = spec;
  mrope_spec.sections = {8, 8};
  const auto mrope = MropePlan::Create(mrope_spec);
  DualChunkRotarySpec dual_spec;
  dual_spec.rotary = spec;
  dual_spec.chunk = 4;
  const auto dual = DualChunkRotaryPlan::Create(dual_spec);
  ASSERT_TRUE(rope.ok() && mrope.ok() && dual.ok());
  const IndexView none;
  const AnyTensorView x = Nothing(GetParam(), {0, kHuge, 64});
  ASSERT_EQ(rope->CheckQkArgs(none, x, x), absl::OkStatus());
  rope->Execute(none, x, x, executor_);
  rope->ExecuteQk(none, x, x, executor_);
  ASSERT_EQ(mrope->CheckQkArgs(none, x, x), absl::OkStatus());
  mrope->Execute(none, x, x, executor_);
  mrope->ExecuteQk(none, x, x, executor_);
  const AnyTensorView y = Nothing(GetParam(), {0, kHuge / 5, 64});
  const DualChunkRotaryArgs args = {
      none, y, y, Nothing(GetParam(), {0, kHuge / 5 * 5, 64}), y};
  ASSERT_EQ(dual->CheckArgs(args), absl::OkStatus());
  dual->Execute(args, executor_);
}

TEST_P(EmptyRowsTest, OfTurnedBatches) {
  ApplyRotarySpec spec;
  spec.head_dim = 64;
  spec.dtype = GetParam();
  const auto plan = ApplyRotaryPlan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<float> ones(2 * 32, 1.0f);
  for (const auto& extents : {std::vector<int64_t>{kHuge, 0, kHuge, 64},
                              std::vector<int64_t>{kHuge, 2, 0, 64}}) {
    const AnyTensorView x = Nothing(GetParam(), extents);
    const AnyTensorView table = DenseMatrix(ones.data(), extents[1], 32);
    ASSERT_EQ(plan->CheckArgs(x, table, table, x), absl::OkStatus());
    plan->Execute(x, table, table, x, executor_);
  }
}

TEST_P(EmptyRowsTest, OfCodes) {
  for (const auto& shape :
       {std::vector<int64_t>{kHuge, 0}, std::vector<int64_t>{0, kHuge},
        std::vector<int64_t>{3, 0}}) {
    const AnyTensorView x = Nothing(GetParam(), shape);
    const auto q8 = Nothing(DType::kF8E4M3, shape).As<Float8E4M3, 2>();
    std::vector<float> ones(4, 1.0f);
    for (const Fp8Granularity granularity :
         {Fp8Granularity::kStatic, Fp8Granularity::kTensor,
          Fp8Granularity::kToken, Fp8Granularity::kGroup}) {
      Fp8QuantizeSpec spec;
      spec.dtype = GetParam();
      spec.granularity = granularity;
      spec.group = 1;
      const auto plan = Fp8QuantizePlan::Create(spec);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const bool token = granularity == Fp8Granularity::kToken;
      const bool group = granularity == Fp8Granularity::kGroup;
      if (token && shape[0] == kHuge) continue;  // needs kHuge scales
      const MatrixView<float> scales(
          ones.data(), {token || group ? shape[0] : 1, group ? shape[1] : 1},
          {1, 1});
      if (granularity == Fp8Granularity::kStatic) {
        ASSERT_EQ(plan->CheckStaticArgs(x, scales, q8), absl::OkStatus());
        plan->ExecuteStatic(x, scales, q8, executor_);
      } else {
        ASSERT_EQ(plan->CheckArgs(x, q8, scales), absl::OkStatus());
        plan->Execute(x, q8, scales, executor_);
      }
    }
    Int8QuantizeSpec spec;
    spec.dtype = GetParam();
    spec.granularity = Int8Granularity::kPerTensor;
    const auto plan = Int8QuantizePlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto q = Nothing(DType::kI8, shape).As<int8_t, 2>();
    ASSERT_EQ(plan->CheckArgs(x, q, {}, {}), absl::OkStatus());
    plan->Execute(x, q, {}, {}, executor_);
  }
}

}  // namespace
}  // namespace quern
