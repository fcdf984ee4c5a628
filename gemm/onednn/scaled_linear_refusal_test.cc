#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/scaled_linear.h"
#include "quern/packing/vnni_pack.h"

namespace quern {
namespace {

using Spec = OneDnnScaledLinearSpec;
using Plan = OneDnnScaledLinearPlan;
using Activation = Spec::Activation;

const void* Const(const void* data) { return data; }

class Refusals : public testing::Test {
 protected:
  static void Expect(const absl::Status& status, const char* words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "onednn_scaled_linear: "));
    EXPECT_TRUE(absl::StrContains(status.message(), words))
        << status << "; expected words: " << words;
  }

  std::vector<int8_t> i8_ = std::vector<int8_t>(64);
  std::vector<float> f32_ = std::vector<float>(64);
  std::vector<int32_t> i32_ = std::vector<int32_t>(64);
  InlineExecutor executor_;
};

TEST_F(Refusals, CreateNamesWhatIsWrong) {
  const AnyTensorView w = DenseMatrix<const int8_t>(i8_.data(), 8, 4);
  const AnyTensorView s = DenseVector<const float>(f32_.data(), 8);
  const AnyTensorView none;
  const auto spec = [](int64_t n, int64_t k, DType c = DType::kF32) {
    Spec made;
    made.n = n;
    made.k = k;
    made.c = c;
    return made;
  };
  Spec kn = spec(8, 4);
  kn.order = WeightOrder::kKN;
  Spec zero_point = spec(8, Plan::kMaxKZeroPoint + 1);
  zero_point.activation = Activation::kPerTensor;
  zero_point.zero_points = true;
  const struct {
    const char* words;
    Spec spec;
    AnyTensorView weights, scales, bias;
  } refusals[] = {
      {"n=0; need 1 <= n <= 536870911", spec(0, 4), w, s, none},
      {"k=0; need 1 <= k <= 131071", spec(8, 0), w, s, none},
      {"k=131072; need 1 <= k <= 131071", spec(8, 131072), w, s, none},
      {"k=65794; need 1 <= k <= 65793", zero_point, w, s, none},
      {"c is i8; need f32, bf16 or f16", spec(8, 4, DType::kI8), w, s, none},
      {"weights is f32; need i8", spec(8, 4),
       DenseMatrix<const float>(f32_.data(), 8, 4), s, none},
      {"weights has rank 1; need 2", spec(8, 4),
       DenseVector<const int8_t>(i8_.data(), 32), s, none},
      {"weights.extent(1)=5; need 4", spec(8, 4),
       DenseMatrix<const int8_t>(i8_.data(), 8, 5), s, none},
      {"weights.extent(0)=7; need 8", spec(8, 4),
       DenseMatrix<const int8_t>(i8_.data(), 7, 4), s, none},
      {"weights.extent(1)=4; need 8", kn, w, s, none},
      {"weights.stride(0)=3; need 4 <= weights.stride(0) <= 536870911",
       spec(8, 4), MatrixView<const int8_t>(i8_.data(), {8, 4}, {3, 1}), s,
       none},
      {"weights has no data", spec(8, 4),
       DenseMatrix<const int8_t>(nullptr, 8, 4), s, none},
      {"weight_scales.extent(0)=7; need 1 or 8", spec(8, 4), w,
       DenseVector<const float>(f32_.data(), 7), none},
      {"weight_scales.extent(0)=0; need 1 or 8", spec(8, 4), w,
       DenseVector<const float>(f32_.data(), 0), none},
      {"weight_scales has rank 0; need 1", spec(8, 4), w, none, none},
      {"weight_scales is i32; need f32", spec(8, 4), w,
       DenseVector<const int32_t>(i32_.data(), 8), none},
      {"weight_scales has no data", spec(8, 4), w,
       DenseVector<const float>(nullptr, 8), none},
      {"bias has rank 2; need 1, or 0 for none", spec(8, 4), w, s, w},
      {"bias is i32; need f32", spec(8, 4), w, s,
       DenseVector<const int32_t>(i32_.data(), 8)},
      {"bias.extent(0)=1; need 8", spec(8, 4), w, s,
       DenseVector<const float>(f32_.data(), 1)},
      {"bias has no data", spec(8, 4), w, s,
       DenseVector<const float>(nullptr, 8)},
  };
  for (const auto& r : refusals) {
    Expect(
        Plan::Create(r.spec, r.weights, r.scales, r.bias, executor_).status(),
        r.words);
  }
}

TEST_F(Refusals, CheckArgsNamesWhatIsWrong) {
  const AnyTensorView a = DenseMatrix<const int8_t>(i8_.data(), 3, 4);
  std::vector<float> out(64);
  const AnyTensorView c = DenseMatrix<float>(out.data(), 3, 8);
  const AnyTensorView f3 = DenseVector<const float>(f32_.data(), 3);
  const AnyTensorView f1 = DenseVector<const float>(f32_.data(), 1);
  const AnyTensorView z3 = DenseVector<const int32_t>(i32_.data(), 3);
  const AnyTensorView z1 = DenseVector<const int32_t>(i32_.data(), 1);
  const int32_t large[] = {128, -129};
  const AnyTensorView none;
  using Args = OneDnnScaledLinearArgs;
  const auto token = Activation::kPerToken, tensor = Activation::kPerTensor;
  const struct {
    const char* words;  // null: accepted
    Activation activation;
    bool zero_points;
    Args args;
  } cases[] = {
      {nullptr, token, false, {a, f3, none, c}},
      {nullptr, token, true, {a, f3, z3, c}},
      {nullptr, tensor, false, {a, f1, none, c}},
      {nullptr, tensor, true, {a, f1, z1, c}},
      {"a is f32; need i8", token, false, {c, f3, none, c}},
      {"c is i8; need f32", token, false, {a, f3, none, a}},
      {"a has rank 1",
       token,
       false,
       {DenseVector<const int8_t>(i8_.data(), 4), f3, none, c}},
      {"a.extent(1)=5; need 4",
       token,
       false,
       {DenseMatrix<const int8_t>(i8_.data(), 3, 5), f3, none, c}},
      {"a.stride(0)=3; need 4 <=",
       token,
       false,
       {MatrixView<const int8_t>(i8_.data(), {3, 4}, {3, 1}), f3, none, c}},
      {"a has no data",
       token,
       false,
       {DenseMatrix<const int8_t>(nullptr, 3, 4), f3, none, c}},
      {"c.extent(1)=7; need 8",
       token,
       false,
       {a, f3, none, DenseMatrix<float>(f32_.data(), 3, 7)}},
      {"c.extent(0)=2; need 3",
       token,
       false,
       {a, f3, none, DenseMatrix<float>(f32_.data(), 2, 8)}},
      {"c.stride(0)=7; need 8 <=",
       token,
       false,
       {a, f3, none, MatrixView<float>(f32_.data(), {3, 8}, {7, 1})}},
      {"c is read-only",
       token,
       false,
       {a, f3, none, DenseMatrix<const float>(f32_.data(), 3, 8)}},
      {"scales.extent(0)=1; need 3, as a has rows",
       token,
       false,
       {a, f1, none, c}},
      {"scales.extent(0)=3; need 1, as activations are per tensor",
       tensor,
       false,
       {a, f3, none, c}},
      {"scales is i32; need f32", token, false, {a, z3, none, c}},
      {"scales has rank 0; need 1", token, false, {a, none, none, c}},
      {"scales has no data",
       token,
       false,
       {a, DenseVector<const float>(nullptr, 3), none, c}},
      {"zero_points has rank 0; need 1", token, true, {a, f3, none, c}},
      {"zero_points has rank 1; need 0 for none", token, false, {a, f3, z3, c}},
      {"zero_points is f32; need i32", token, true, {a, f3, f3, c}},
      {"zero_points.extent(0)=1; need 3", token, true, {a, f3, z1, c}},
      {"zero_points.extent(0)=3; need 1", tensor, true, {a, f1, z3, c}},
      {"zero_points has no data",
       token,
       true,
       {a, f3, DenseVector<const int32_t>(nullptr, 3), c}},
      {"a.stride(1)=2; need 1",
       token,
       false,
       {AnyTensorView(DType::kI8, Const(i8_.data()), 2, {3, 4}, {8, 2}), f3,
        none, c}},
      {"scales.stride(0)=2; need 1",
       token,
       false,
       {a, AnyTensorView(DType::kF32, Const(f32_.data()), 1, {3}, {2}), none,
        c}},
      {"zero_points is not aligned to its elements of 4 bytes",
       token,
       true,
       {a, f3, AnyTensorView(DType::kI32, Const(i8_.data() + 1), 1, {3}, {1}),
        c}},
      {"scales overlaps c",
       token,
       false,
       {a, f3, none, DenseMatrix<float>(f32_.data() + 2, 3, 8)}},
      {"zero_points overlaps c",
       tensor,
       true,
       {a, f1, AnyTensorView(DType::kI32, Const(out.data() + 23), 1, {1}, {1}),
        c}},
      {"zero_points[0]=128; need -128 <= zero_points[0] <= 127",
       tensor,
       true,
       {a, f1, DenseVector<const int32_t>(&large[0], 1), c}},
      {"zero_points[0]=-129; need -128 <=",
       tensor,
       true,
       {a, f1, DenseVector<const int32_t>(&large[1], 1), c}},
  };
  for (const auto& r : cases) {
    Spec spec;
    spec.n = 8;
    spec.k = 4;
    spec.c = DType::kF32;
    spec.activation = r.activation;
    spec.zero_points = r.zero_points;
    const auto plan = Plan::Create(
        spec, DenseMatrix<const int8_t>(i8_.data(), 8, 4), f1, none, executor_);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const absl::Status status = plan->CheckArgs(r.args);
    if (r.words == nullptr) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      Expect(status, r.words);
    }
  }
}

}  // namespace
}  // namespace quern
