// vLLM's quantisers to fp8, its routes and its argmax, against their formulas
// in double.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/vllm/named_testutil.h"
#include "quern/ops/registry/vllm/rows_ops.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int64_t kRows = 5, kColumns = 70;
constexpr double kFloor = 1.0 / (448 * 512);

size_t At(int64_t i) { return static_cast<size_t>(i); }

class VllmFp8Test : public VllmOpFixture {
 protected:
  VllmFp8Test() { EXPECT_EQ(RegisterVllmRowsOps(registry_), absl::OkStatus()); }

  // Whether each code is x / scale, to the nearest e4m3, in [-448, 448]: half a
  // unit in the last place, and two roundings of the product.
  template <typename T>
  void ExpectCodes(const std::vector<T>& x,
                   const std::vector<Float8E4M3>& codes,
                   const std::vector<float>& scale_of_row) {
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      const double scale = double{scale_of_row[At(i / kColumns)]};
      const double want = std::clamp(ToDouble(x[At(i)]) / scale, -448.0, 448.0);
      const double unit =
          std::exp2(std::max(std::floor(std::log2(std::abs(want))), -6.0) - 3);
      ASSERT_TRUE(std::abs(ToDouble(codes[At(i)]) - want) <=
                  unit / 2 + 0x1p-22 * std::abs(want))
          << i << ": " << ToDouble(codes[At(i)]) << ", want " << want;
    }
  }

  template <typename T>
  void ExpectQuantised(const char* provider) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << " " << provider);
    auto x = UniformReals<T>(rng_, kRows * kColumns, -30, 30);
    std::fill_n(x.begin() + kColumns, kColumns, FromDouble<T>(0));
    std::vector<double> largest(kRows);
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      double& most = largest[At(i / kColumns)];
      most = std::max(most, std::abs(ToDouble(x[At(i)])));
    }
    std::vector<Float8E4M3> out(x.size());
    const AnyTensorView input = Over(x, {kRows, kColumns}),
                        codes = Over(out, {kRows, kColumns});

    std::vector<float> one = {0.03f};
    ASSERT_EQ(
        Try(provider, "static_scaled_fp8_quant",
            {{"out", codes}, {"input", input}, {"scale", Over(one, {1})}}),
        absl::OkStatus());
    ExpectCodes(x, out, std::vector<float>(kRows, 0.03f));

    // A scale for each row and 35 columns.
    std::vector<float> blocks = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, firsts;
    for (size_t i = 0; i < blocks.size(); i += 2) blocks[i + 1] = blocks[i];
    for (size_t i = 0; i < blocks.size(); i += 2) firsts.push_back(blocks[i]);
    ASSERT_EQ(Try(provider, "static_scaled_fp8_quant",
                  {{"out", codes},
                   {"input", input},
                   {"scale", Over(blocks, {kRows, 2})}},
                  {{"group_m", int64_t{1}}, {"group_n", int64_t{35}}}),
              absl::OkStatus());
    ExpectCodes(x, out, firsts);

    one = {0};
    ASSERT_EQ(
        Try(provider, "dynamic_scaled_fp8_quant",
            {{"out", codes}, {"input", input}, {"scale", Over(one, {1})}}),
        absl::OkStatus());
    const double all = *std::max_element(largest.begin(), largest.end());
    EXPECT_NEAR(double{one[0]}, all / 448, 0x1p-23 * all / 448);
    ExpectCodes(x, out, std::vector<float>(kRows, one[0]));

    std::vector<float> scales(kRows), bound = {11};
    for (const bool bounded : {false, true}) {
      std::vector<NamedTensor> tensors = {{"out", codes},
                                          {"input", input},
                                          {"scale", Over(scales, {kRows, 1})}};
      if (bounded) tensors.emplace_back("scale_ub", Over(bound, {1}));
      ASSERT_EQ(Try(provider, "dynamic_per_token_scaled_fp8_quant", tensors),
                absl::OkStatus());
      for (int64_t t = 0; t < kRows; ++t) {
        const double most =
            bounded ? std::min(largest[At(t)], 11.0) : largest[At(t)];
        const double want = std::max(most / 448, kFloor);
        EXPECT_NEAR(double{scales[At(t)]}, want, 0x1p-23 * want) << t;
      }
      ExpectCodes(x, out, scales);
    }

    std::vector<float> returned(kRows);
    ASSERT_EQ(Try(provider, "quantize_fp8e4m3_vec",
                  {{"input", input},
                   {"out0", codes},
                   {"out1", Over(returned, {kRows})}},
                  {{"channelwise", true}}, {"out0", "out1"}),
              absl::OkStatus());
    ExpectCodes(x, out, returned);
    one = {0.5f};
    std::vector<float> again = {0};
    ASSERT_EQ(Try(provider, "quantize_fp8e4m3_vec",
                  {{"input", input},
                   {"scale_opt", Over(one, {1})},
                   {"out0", codes},
                   {"out1", Over(again, {1})}},
                  {{"channelwise", false}}, {"out0", "out1"}),
              absl::OkStatus());
    EXPECT_EQ(again[0], 0.5f);
    ExpectCodes(x, out, std::vector<float>(kRows, 0.5f));
  }
};
QUERN_INSTANTIATE_ISA_TEST(VllmFp8Test);

TEST_P(VllmFp8Test, IsWithinHalfAUnit) {
  for (const char* provider : {"simd", "reference"}) {
    ExpectQuantised<float>(provider);
    ExpectQuantised<BFloat16>(provider);
    ExpectQuantised<Float16>(provider);
  }
}

// A row without a largest number has the scale NaN, bounded or not.
TEST_P(VllmFp8Test, NanStaysInItsRow) {
  for (const char* provider : {"simd", "reference"}) {
    std::vector<float> x(3 * 8, 1), scales(3), bound = {0.5f};
    x[9] = std::nanf("");
    std::vector<Float8E4M3> out(x.size());
    ASSERT_EQ(Try(provider, "dynamic_per_token_scaled_fp8_quant",
                  {{"out", Over(out, {3, 8})},
                   {"input", Over(x, {3, 8})},
                   {"scale", Over(scales, {3, 1})},
                   {"scale_ub", Over(bound, {1})}}),
              absl::OkStatus());
    EXPECT_TRUE(std::isnan(scales[1]));
    EXPECT_EQ(scales[0], 0.5f / 448);
    for (size_t i = 0; i < out.size(); ++i) {
      EXPECT_EQ(std::isnan(ToDouble(out[i])), i / 8 == 1) << i;
    }
  }
}

TEST_P(VllmFp8Test, Refuses) {
  std::vector<float> x(16), scale = {0}, bound = {-1}, scales(2);
  std::vector<Float8E4M3> out(16);
  const NamedTensor codes = {"out", Over(out, {2, 8})},
                    input = {"input", Over(x, {2, 8})};
  ExpectRefusal(Try("simd", "static_scaled_fp8_quant",
                    {codes, input, {"scale", Over(scale, {1})}}),
                "scale");
  ExpectRefusal(Try("simd", "dynamic_per_token_scaled_fp8_quant",
                    {codes,
                     input,
                     {"scale", Over(scales, {2, 1})},
                     {"scale_ub", Over(bound, {1})}}),
                "scale_ub[0]=-1");
  ExpectRefusal(Try("simd", "dynamic_scaled_fp8_quant",
                    {codes, input, {"scale", Over(scales, {2})}}),
                "scale is f32[2]; need [1]");
  ExpectRefusal(
      Try("simd", "quantize_fp8e4m3_vec", {input}, {{"channelwise", false}}),
      "scale_opt is missing; need it where channelwise is false");
}

class VllmArgmaxTest : public VllmLoopFixture {
 protected:
  VllmArgmaxTest() {
    EXPECT_EQ(RegisterVllmRowsOps(registry_), absl::OkStatus());
  }
};

TEST_F(VllmArgmaxTest, ArgmaxIsTheFirstOfTheLargest) {
  constexpr int64_t kVocab = 1003;
  const float inf = std::numeric_limits<float>::infinity();
  auto logits = UniformReals<float>(rng_, 6 * kVocab);
  const auto row = [&](int64_t t) { return logits.begin() + t * kVocab; };
  std::fill_n(row(1), kVocab, -inf);
  std::fill_n(row(2), kVocab, std::nanf(""));
  row(3)[700] = row(3)[41] = 5;
  row(4)[40] = std::nanf("");
  row(5)[kVocab - 1] = inf;
  std::vector<int64_t> out(6, -1);
  ASSERT_EQ(
      Try("reference", "greedy_argmax",
          {{"logits", Over(logits, {6, kVocab})}, {"out", Over(out, {6})}}, {},
          {"out"}),
      absl::OkStatus());
  row(4)[40] = -2;
  EXPECT_EQ(out[0], std::max_element(row(0), row(1)) - row(0));
  EXPECT_EQ(out[1], 0);
  EXPECT_EQ(out[2], 0);
  EXPECT_EQ(out[3], 41);
  EXPECT_EQ(out[4], std::max_element(row(4), row(5)) - row(4));
  EXPECT_EQ(out[5], kVocab - 1);
}

TEST_P(VllmFp8Test, RoutesByScoreAndBias) {
  constexpr int64_t kTokens = 4, kExperts = 24, kTopK = 5;
  auto logits = UniformReals<float>(rng_, kTokens * kExperts, -4, 4);
  auto bias = UniformReals<float>(rng_, kExperts, -2, 2);
  std::vector<float> hidden(kTokens * 8);
  for (const std::string score : {"sigmoid", "sqrtsoftplus"}) {
    for (const bool apply : {false, true}) {
      std::vector<float> weights(kTokens * kTopK);
      std::vector<int32_t> ids(kTokens * kTopK);
      ASSERT_EQ(Try("simd", "biased_topk_cpu",
                    {{"hidden_states", Over(hidden, {kTokens, 8})},
                     {"gating_output", Over(logits, {kTokens, kExperts})},
                     {"correction_bias", Over(bias, {kExperts})},
                     {"out0", Over(weights, {kTokens, kTopK})},
                     {"out1", Over(ids, {kTokens, kTopK})}},
                    {{"topk", kTopK},
                     {"renormalize", true},
                     {"scoring_func", score},
                     {"routed_scaling_factor", 2.5},
                     {"apply_routed_scaling_factor_on_output", apply}},
                    {"out0", "out1"}),
                absl::OkStatus());
      for (int64_t t = 0; t < kTokens; ++t) {
        std::vector<double> s;
        for (int64_t e = 0; e < kExperts; ++e) {
          const double l = double{logits[At(t * kExperts + e)]};
          s.push_back(score == "sigmoid" ? 1 / (1 + std::exp(-l))
                                         : std::sqrt(std::log1p(std::exp(l))));
        }
        std::vector<int32_t> order(kExperts);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
          return s[At(a)] + double{bias[At(a)]} >
                 s[At(b)] + double{bias[At(b)]};
        });
        double sum = 0;
        for (int64_t j = 0; j < kTopK; ++j) sum += s[At(order[At(j)])];
        for (int64_t j = 0; j < kTopK; ++j) {
          EXPECT_EQ(ids[At(t * kTopK + j)], order[At(j)]) << t << ", " << j;
          const double want = s[At(order[At(j)])] / sum * (apply ? 2.5 : 1.0);
          EXPECT_NEAR(double{weights[At(t * kTopK + j)]}, want, 0x1p-18 * want);
        }
      }
    }
  }
}

}  // namespace
}  // namespace quern
