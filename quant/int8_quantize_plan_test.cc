// What Int8QuantizePlan refuses, and in which words.

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

void ExpectRefusals(
    const std::vector<std::pair<absl::Status, std::string>>& cases,
    absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  for (const auto& [status, words] : cases) {
    EXPECT_EQ(status.code(), code) << words;
    EXPECT_NE(status.message().find("int8_quantize: " + words),
              std::string::npos)
        << status << "\nlacks: " << words;
  }
}

Int8QuantizeSpec Spec(DType dtype, Int8Granularity granularity,
                      Int8ZeroPoint zero_points, float scale, int32_t zero) {
  Int8QuantizeSpec spec;
  spec.dtype = dtype;
  spec.granularity = granularity;
  spec.zero_points = zero_points;
  spec.scale = scale;
  spec.zero_point = zero;
  return spec;
}

TEST(Int8QuantizePlanTest, RefusesSpecsWithoutAMeaning) {
  constexpr auto kToken = Int8Granularity::kPerToken;
  constexpr auto kTensor = Int8Granularity::kPerTensor;
  constexpr auto kNone = Int8ZeroPoint::kNone;
  constexpr auto kUsed = Int8ZeroPoint::kUsed;
  constexpr DType kBF16 = DType::kBF16;
  const auto refusal = [](const Int8QuantizeSpec& spec) {
    return Int8QuantizePlan::Create(spec).status();
  };
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::string scales = "; need 2^-125 <= scale <= 2^118";
  ExpectRefusals(
      {{refusal(Spec(DType::kF8E4M3, kToken, kNone, 1, 0)),
        "dtype is f8e4m3; need f32 or bf16 or f16"},
       {refusal(Spec(DType::kI8, kTensor, kNone, 1, 0)), "dtype is i8; need "}},
      absl::StatusCode::kUnimplemented);
  ExpectRefusals({
      {refusal(Spec(kBF16, kToken, kNone, 2, 0)),
       "scale=2, zero_point=0; need 1 and 0 per token"},
      {refusal(Spec(kBF16, kToken, kUsed, 1, 3)),
       "scale=1, zero_point=3; need 1 and 0 per token"},
      {refusal(Spec(kBF16, kTensor, kNone, 0, 0)), "scale=0" + scales},
      {refusal(Spec(kBF16, kTensor, kNone, -1, 0)), "scale=-1" + scales},
      {refusal(Spec(kBF16, kTensor, kNone, inf, 0)), "scale=inf" + scales},
      {refusal(Spec(kBF16, kTensor, kNone, nan, 0)), "scale=nan" + scales},
      {refusal(Spec(kBF16, kTensor, kNone, 0x1p-126f, 0)), "scale=1.17549e-38"},
      {refusal(Spec(kBF16, kTensor, kNone, 0x1p119f, 0)), "scale=6.64614e+35"},
      {refusal(Spec(kBF16, kTensor, kUsed, 1, 128)),
       "zero_point=128; need -128 <= zero_point <= 127"},
      {refusal(Spec(kBF16, kTensor, kUsed, 1, -129)), "zero_point=-129; need"},
      {refusal(Spec(kBF16, kTensor, kNone, 1, 1)),
       "zero_point=1; need 0 without zero points"},
  });
  for (const DType dtype : {DType::kF8E4M3, DType::kI8}) {
    const absl::Status status = refusal(Spec(dtype, kToken, kNone, 1, 0));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_EQ(status.message(), "int8_quantize: dtype is " +
                                    std::string(DTypeName(dtype)) +
                                    "; need f32 or bf16 or f16");
  }
}

TEST(Int8QuantizePlanTest, RefusesArgumentsThatDoNotFit) {
  const auto token = Int8QuantizePlan::Create(Spec(
      DType::kF32, Int8Granularity::kPerToken, Int8ZeroPoint::kUsed, 1, 0));
  const auto symmetric = Int8QuantizePlan::Create(Spec(
      DType::kF32, Int8Granularity::kPerToken, Int8ZeroPoint::kNone, 1, 0));
  const auto tensor = Int8QuantizePlan::Create(Spec(
      DType::kF32, Int8Granularity::kPerTensor, Int8ZeroPoint::kUsed, 1, 0));
  ASSERT_TRUE(token.ok() && symmetric.ok() && tensor.ok());
  std::vector<float> memory(200);
  std::vector<int8_t> codes(100);
  std::vector<int32_t> zeros(10);
  const auto x = DenseMatrix<const float>(memory.data(), 5, 8);
  const auto q = DenseMatrix(codes.data(), 5, 8);
  const auto s = DenseVector(memory.data() + 100, 5);
  const auto z = DenseVector(zeros.data(), 5);
  const VectorView<float> no_s;
  const VectorView<int32_t> no_z;
  const auto bytes_of = [](void* p) { return static_cast<int8_t*>(p); };
  const AnyTensorView strided(DType::kF32, memory.data(), 2, {5, 8}, {16, 2});
  const int64_t huge = int64_t{1} << 62;
  EXPECT_TRUE(token->CheckArgs(x, q, s, z).ok());
  EXPECT_TRUE(symmetric->CheckArgs(x, q, s, no_z).ok());
  EXPECT_TRUE(tensor->CheckArgs(x, q, no_s, no_z).ok());
  ExpectRefusals({
      {token->CheckArgs(q, q, s, z), "x is i8; need f32"},
      {token->CheckArgs(DenseVector(memory.data(), 40), q, s, z),
       "x is [40]; need [any, any]"},
      {token->CheckArgs(x, DenseMatrix(codes.data(), 4, 8), s, z),
       "q is [4, 8]; need [5, 8]"},
      {token->CheckArgs(x, DenseMatrix(codes.data(), 5, 7), s, z),
       "q is [5, 7]; need [5, 8]"},
      {token->CheckArgs(x, q, DenseVector(memory.data() + 100, 4), z),
       "size of scales=4; need 5, as x has rows"},
      {token->CheckArgs(x, q, s, no_z), "size of zero_points=0; need 5"},
      {symmetric->CheckArgs(x, q, s, z),
       "size of zero_points=5; need 0, as there are none"},
      {tensor->CheckArgs(x, q, s, no_z),
       "size of scales=5; need 0, as the spec has the scale"},
      {token->CheckArgs(MatrixView<float>(memory.data(), {5, 8}, {-8, 1}), q, s,
                        z),
       "x has stride -8 in dimension 0; need 0 or more"},
      {token->CheckArgs(x, {codes.data(), {5, 8}, {-8, 1}}, s, z),
       "q has stride -8 in dimension 0; need 0 or more"},
      {token->CheckArgs(x, {codes.data(), {5, 8}, {7, 1}}, s, z),
       "q has stride 7 in dimension 0; need 8 or more"},
      {token->CheckArgs(strided, q, s, z),
       "x has stride 2 in dimension 1; need 1"},
      {token->CheckArgs(MatrixView<float>(nullptr, {5, 8}, {8, 1}), q, s, z),
       "x is null; need [any, any]"},
      {token->CheckArgs(x, {nullptr, {5, 8}, {8, 1}}, s, z),
       "q is null; need [5, 8]"},
      {token->CheckArgs(x, q, {nullptr, {5}, {1}}, z),
       "scales is null; need [5]"},
      {token->CheckArgs(AnyTensorView(DType::kF32, bytes_of(memory.data()) + 2,
                                      2, {5, 8}, {8, 1}),
                        q, s, z),
       "x is not aligned to its elements of 4 bytes"},
      {token->CheckArgs(x, {codes.data(), {5, 8}, {huge, 1}}, s, z),
       "q is [5, 8] with stride 4611686018427387904 in dimension 0; need fewer "
       "than 2^63 bytes"},
      {token->CheckArgs(x, DenseMatrix(bytes_of(memory.data() + 39), 5, 8), s,
                        z),
       "q overlaps x; need no element in common"},
      {token->CheckArgs(x, q, DenseVector(memory.data() + 39, 5), z),
       "scales overlaps x"},
      {token->CheckArgs(x, DenseMatrix(bytes_of(memory.data() + 104), 5, 8), s,
                        z),
       "scales overlaps q"},
      {token->CheckArgs(x, DenseMatrix(bytes_of(zeros.data()), 5, 8), s, z),
       "zero_points overlaps q"},
  });
}

}  // namespace
}  // namespace quern
