#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "gemm/packed_linear.h"
#include "gtest/gtest.h"
#include "packing/vnni_pack.h"
#include "testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(PackedLinearPlanTest, RefusesABadSpec) {
  InlineExecutor executor;
  std::vector<BF> w(12);
  std::vector<float> bias(4);
  const AnyTensorView weights = DenseMatrix(w.data(), 4, 3);
  PackedLinearSpec good;
  good.n = 4;
  good.k = 3;
  ASSERT_TRUE(
      PackedLinearPlan::Create(good, weights, AnyTensorView(), executor).ok());
  const auto refuse = [&](auto change, const AnyTensorView& b,
                          absl::StatusCode code, const std::string& words) {
    PackedLinearSpec spec = good;
    change(spec);
    ExpectRefusal(PackedLinearPlan::Create(spec, weights, b, executor).status(),
                  code, words);
  };
  using Spec = PackedLinearSpec;
  const AnyTensorView none;
  refuse([](Spec& s) { s.n = 0; }, none, kInvalid,
         "packed_linear: n=0; need 1 <= n <= 2147483647");
  refuse([](Spec& s) { s.k = int64_t{1} << 31; }, none, kInvalid,
         "k=2147483648; need 1 <= k");
  refuse([](Spec& s) { s.k = -3; }, none, kInvalid, "k=-3");
  // Gate and up fit 2^63 bytes each, but not together.
  Spec huge;
  huge.n = PackedLinearPlan::kMaxExtent - 1;
  huge.k = PackedLinearPlan::kMaxExtent;
  huge.activation = LinearActivation::kSiluAndMul;
  ExpectRefusal(PackedLinearPlan::Create(
                    huge, MatrixView<BF>(w.data(), {huge.n, huge.k}, {0, 1}),
                    none, executor)
                    .status(),
                kInvalid, "packed weights have more than 2^63 bytes");
  refuse([](Spec& s) { s.a = DType::kI8; }, none,
         absl::StatusCode::kUnimplemented, "a is i8; need f32 or bf16 or f16");
  refuse([](Spec& s) { s.b = DType::kF8E4M3; }, none,
         absl::StatusCode::kUnimplemented, "b is f8e4m3");
  refuse([](Spec& s) { s.c = DType::kI32; }, none,
         absl::StatusCode::kUnimplemented, "c is i32");
  refuse([](Spec& s) { s.b = DType::kF16; }, none, kInvalid,
         "weights is bf16; need f16");
  refuse([](Spec& s) { s.n = 5; }, none, kInvalid,
         "weights is [4, 3]; need [5, 3]");
  refuse([](Spec& s) { s.order = WeightOrder::kKN; }, none, kInvalid,
         "weights is [4, 3]; need [3, 4]");
  refuse([](Spec&) {}, DenseVector(bias.data(), 3), kInvalid,
         "bias is [3]; need [4]");
  refuse([](Spec&) {}, DenseVector(w.data(), 4), kInvalid,
         "bias is bf16; need f32");
}

TEST(PackedLinearPlanTest, RefusesBadArguments) {
  InlineExecutor executor;
  std::vector<BF> w(12), a(6), c(8);
  const std::vector<BF> constant(8);
  PackedLinearSpec spec;
  spec.n = 4;
  spec.k = 3;
  const auto plan = PackedLinearPlan::Create(spec, DenseMatrix(w.data(), 4, 3),
                                             AnyTensorView(), executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const AnyTensorView in = DenseMatrix(a.data(), 2, 3);
  const AnyTensorView out = DenseMatrix(c.data(), 2, 4);
  EXPECT_EQ(plan->CheckArgs(in, out), absl::OkStatus());
  const auto refuse = [&](const AnyTensorView& x, const AnyTensorView& y,
                          const std::string& words) {
    ExpectRefusal(plan->CheckArgs(x, y), kInvalid, words);
  };
  refuse(DenseMatrix(a.data(), 3, 2), out, "a is [3, 2]; need [any, 3]");
  refuse(in, DenseMatrix(c.data(), 1, 4), "c is [1, 4]; need [2, 4]");
  refuse(in, DenseMatrix(constant.data(), 2, 4), "c is read-only");
  refuse(in, DenseMatrix(a.data(), 2, 4), "c overlaps a");
  refuse(in, MatrixView<BF>(c.data(), {2, 4}, {3, 1}), "c has stride 3");
  refuse(MatrixView<BF>(nullptr, {2, 3}, {3, 1}), out, "a is null");
}

}  // namespace
}  // namespace quern
