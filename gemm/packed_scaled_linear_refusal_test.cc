#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/packed_scaled_linear.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "quant/int8_quantize.h"
#include "testing/refusal.h"

namespace quern {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(PackedScaledLinearPlanTest, RefusesABadSpec) {
  InlineExecutor executor;
  std::vector<int8_t> w(12);
  std::vector<float> scales(4), bias(4);
  const AnyTensorView weights = DenseMatrix(w.data(), 4, 3);
  const AnyTensorView four = DenseVector(scales.data(), 4), none;
  PackedScaledLinearSpec good;
  good.n = 4;
  good.k = 3;
  using Spec = PackedScaledLinearSpec;
  const auto refuse = [&](auto change, const AnyTensorView& s,
                          const AnyTensorView& b, absl::StatusCode code,
                          const std::string& words) {
    Spec spec = good;
    change(spec);
    ExpectRefusal(
        PackedScaledLinearPlan::Create(spec, weights, s, b, executor).status(),
        code, words);
  };
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  ASSERT_TRUE(
      PackedScaledLinearPlan::Create(good, weights, four, none, executor).ok());
  refuse([](Spec& s) { s.n = 0; }, four, none, kInvalid,
         "packed_scaled_linear: n=0; need 1 <= n");
  refuse([](Spec& s) { s.k = 131072; }, four, none, kInvalid,
         "k=131072; need 1 <= k <= 131071");
  refuse(
      [](Spec& s) {
        s.k = 65794;
        s.zero_points = Int8ZeroPoint::kUsed;
      },
      four, none, kInvalid, "k=65794; need 1 <= k <= 65793");
  refuse([](Spec& s) { s.a = DType::kU8; }, four, none, kUnimplemented,
         "a is u8");
  refuse([](Spec& s) { s.c = DType::kI8; }, four, none, kUnimplemented,
         "c is i8");
  refuse([](Spec& s) { s.order = WeightOrder::kKN; }, four, none, kInvalid,
         "weights is [4, 3]; need [3, 4]");
  refuse([](Spec&) {}, DenseVector(scales.data(), 3), none, kInvalid,
         "weight_scales is [3]; need [4]");
  refuse([](Spec&) {}, none, none, kInvalid, "weight_scales");
  refuse([](Spec&) {}, four, DenseVector(bias.data(), 2), kInvalid,
         "bias is [2]; need [4]");
  refuse([](Spec& s) { s.a_scale = 2; }, four, none, kInvalid, "scale");
  refuse([](Spec& s) { s.a_zero_point = 3; }, four, none, kInvalid,
         "zero_point");
}

TEST(PackedScaledLinearPlanTest, RefusesBadArguments) {
  InlineExecutor executor;
  std::vector<int8_t> w(12), q(6);
  std::vector<float> scales(4);
  std::vector<int32_t> zero_points(2);
  std::vector<BFloat16> a(6), c(8);
  const AnyTensorView s2 = DenseVector(scales.data(), 2), none;
  const AnyTensorView z2 = DenseVector(zero_points.data(), 2);
  const AnyTensorView out = DenseMatrix(c.data(), 2, 4);
  PackedScaledLinearSpec spec;
  spec.n = 4;
  spec.k = 3;
  spec.zero_points = Int8ZeroPoint::kUsed;
  const auto make = [&] {
    auto plan = PackedScaledLinearPlan::Create(
        spec, DenseMatrix(w.data(), 4, 3), DenseVector(scales.data(), 4), none,
        executor);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  };
  const auto refuse = [](const absl::Status& status, const std::string& words) {
    ExpectRefusal(status, kInvalid, words);
  };
  const auto fused = make();
  const AnyTensorView in = DenseMatrix(a.data(), 2, 3);
  EXPECT_EQ(fused.CheckArgs(in, none, none, out), absl::OkStatus());
  refuse(fused.CheckArgs(in, s2, none, out), "a_scales is given; need none");
  refuse(fused.CheckArgs(in, none, z2, out), "a_zero_points is given");
  refuse(fused.CheckArgs(DenseMatrix(q.data(), 2, 3), none, none, out),
         "a is i8; need bf16");
  refuse(fused.CheckArgs(in, none, none, DenseMatrix(a.data(), 2, 4)),
         "c overlaps a");
  refuse(fused.CheckArgs(in, none, none, DenseMatrix(c.data(), 1, 4)),
         "c is [1, 4]; need [2, 4]");

  spec.a = DType::kI8;
  const auto given = make();
  const AnyTensorView quantised = DenseMatrix(q.data(), 2, 3);
  EXPECT_EQ(given.CheckArgs(quantised, s2, z2, out), absl::OkStatus());
  refuse(given.CheckArgs(quantised, none, z2, out), "a_scales");
  refuse(given.CheckArgs(quantised, DenseVector(scales.data(), 3), z2, out),
         "a_scales is [3]; need [2]");
  refuse(given.CheckArgs(quantised, s2, none, out), "a_zero_points");
}

}  // namespace
}  // namespace quern
