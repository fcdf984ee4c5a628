#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/linear.h"
#include "quern/packing/vnni_pack.h"

namespace quern {
namespace {

const void* Const(const void* data) { return data; }

const void* Misaligned(const std::vector<float>& v) {
  return reinterpret_cast<const uint8_t*>(v.data()) + 2;
}

struct Refusal {
  const char* words;
  OneDnnLinearSpec spec;
  AnyTensorView weights;
  AnyTensorView bias;
};

TEST(OneDnnLinearRefusalTest, CreateNamesWhatIsWrong) {
  std::vector<float> f32(64);
  std::vector<int8_t> i8(64);
  const auto spec = [](int64_t n, int64_t k, DType a = DType::kF32,
                       DType c = DType::kF32) {
    OneDnnLinearSpec s;
    s.n = n;
    s.k = k;
    s.a = a;
    s.c = c;
    return s;
  };
  const AnyTensorView w = DenseMatrix<const float>(f32.data(), 8, 4);
  const AnyTensorView none;
  OneDnnLinearSpec kn = spec(8, 4);
  kn.order = WeightOrder::kKN;
  const Refusal refusals[] = {
      {"n=0; need 1 <= n <= 536870911", spec(0, 4), w, none},
      {"n=-1; need 1 <=", spec(-1, 4), w, none},
      {"k=0; need 1 <= k", spec(8, 0), w, none},
      {"k=536870912; need 1 <= k", spec(8, 1 << 29), w, none},
      {"a is u8; need f32, bf16 or f16", spec(8, 4, DType::kU8), w, none},
      {"c is i8; need f32, bf16 or f16", spec(8, 4, DType::kF32, DType::kI8), w,
       none},
      {"weights is i8; need f32, bf16 or f16", spec(8, 4),
       DenseMatrix<const int8_t>(i8.data(), 8, 4), none},
      {"weights has rank 1; need 2", spec(8, 4),
       DenseVector<const float>(f32.data(), 32), none},
      {"weights.extent(1)=5; need 4", spec(8, 4),
       DenseMatrix<const float>(f32.data(), 8, 5), none},
      {"weights.extent(0)=7; need 8", spec(8, 4),
       DenseMatrix<const float>(f32.data(), 7, 4), none},
      {"weights.extent(1)=4; need 8", kn, w, none},
      {"weights.stride(0)=3; need 4 <= weights.stride(0) <= 536870911",
       spec(8, 4), MatrixView<const float>(f32.data(), {8, 4}, {3, 1}), none},
      {"weights has no data", spec(8, 4),
       DenseMatrix<const float>(nullptr, 8, 4), none},
      {"weights.stride(1)=2; need 1", spec(8, 4),
       AnyTensorView(DType::kF32, Const(f32.data()), 2, {8, 4}, {8, 2}), none},
      {"weights is not aligned to its elements of 4 bytes", spec(8, 4),
       AnyTensorView(DType::kF32, Misaligned(f32), 2, {8, 4}, {4, 1}), none},
      {"bias.stride(0)=2; need 1", spec(8, 4), w,
       AnyTensorView(DType::kF32, Const(f32.data()), 1, {8}, {2})},
      {"bias has rank 2; need 1, or 0 for none", spec(8, 4), w, w},
      {"bias is i8; need f32", spec(8, 4), w,
       DenseVector<const int8_t>(i8.data(), 8)},
      {"bias.extent(0)=7; need 8", spec(8, 4), w,
       DenseVector<const float>(f32.data(), 7)},
      {"bias has no data", spec(8, 4), w, DenseVector<const float>(nullptr, 8)},
  };
  InlineExecutor executor;
  for (const Refusal& refusal : refusals) {
    const absl::Status status =
        OneDnnLinearPlan::Create(refusal.spec, refusal.weights, refusal.bias,
                                 executor)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "onednn_linear: "));
    EXPECT_TRUE(absl::StrContains(status.message(), refusal.words))
        << status << "; expected words: " << refusal.words;
  }
}

TEST(OneDnnLinearRefusalTest, CheckArgsNamesWhatIsWrong) {
  std::vector<float> f32(64);
  std::vector<BFloat16> bf16(64);
  OneDnnLinearSpec spec;
  spec.n = 8;
  spec.k = 4;
  spec.a = spec.c = DType::kF32;
  InlineExecutor executor;
  const auto plan = OneDnnLinearPlan::Create(
      spec, DenseMatrix<const float>(f32.data(), 8, 4), {}, executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const AnyTensorView a = DenseMatrix<const float>(f32.data(), 3, 4);
  std::vector<float> out(64);
  const AnyTensorView c = DenseMatrix<float>(out.data(), 3, 8);
  EXPECT_TRUE(plan->CheckArgs(a, c).ok());
  const struct {
    const char* words;
    AnyTensorView a, c;
  } refusals[] = {
      {"a is bf16; need f32", DenseMatrix<const BFloat16>(bf16.data(), 3, 4),
       c},
      {"c is bf16; need f32", a, DenseMatrix<BFloat16>(bf16.data(), 3, 8)},
      {"a has rank 1", DenseVector<const float>(f32.data(), 4), c},
      {"a.extent(1)=5; need 4", DenseMatrix<const float>(f32.data(), 3, 5), c},
      {"c.extent(1)=7; need 8", a, DenseMatrix<float>(f32.data(), 3, 7)},
      {"c.extent(0)=2; need 3", a, DenseMatrix<float>(f32.data(), 2, 8)},
      {"c.stride(0)=7; need 8 <=", a,
       MatrixView<float>(f32.data(), {3, 8}, {7, 1})},
      {"a has no data", DenseMatrix<const float>(nullptr, 3, 4), c},
      {"a.stride(1)=2; need 1",
       AnyTensorView(DType::kF32, Const(f32.data()), 2, {3, 4}, {8, 2}), c},
      {"a is not aligned to its elements of 4 bytes",
       AnyTensorView(DType::kF32, Const(Misaligned(f32)), 2, {3, 4}, {4, 1}),
       c},
      {"a overlaps c", a, DenseMatrix<float>(f32.data() + 11, 3, 8)},
      {"c is read-only", a, DenseMatrix<const float>(f32.data(), 3, 8)},
  };
  for (const auto& refusal : refusals) {
    const absl::Status status = plan->CheckArgs(refusal.a, refusal.c);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), refusal.words))
        << status << "; expected words: " << refusal.words;
  }
}

}  // namespace
}  // namespace quern
