// What precedes latent attention by SGLang's names, against the equations of
// product_ops.h in double.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/sglang/products/product_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr int64_t kM = 5, kHidden = 64, kQLora = 32, kKvLora = 32, kRope = 32;
constexpr int64_t kHeads = 5, kNope = 32, kPositions = 40;
constexpr int64_t kHead = kNope + kRope, kWidth = kKvLora + kRope;
constexpr double kEps = 1e-5;

class LatentOpsTest : public SglangProductsTest {
 protected:
  std::vector<float> Reals(int64_t count) {
    return UniformReals(rng_, count, -1, 1);
  }
  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(LatentOpsTest);

// Values, and the sums of magnitudes that their errors are relative to.
struct Bounded {
  Doubles values, sizes;
};
Bounded Times(const Bounded& x, int64_t n, int64_t k, const Doubles& w) {
  return {ReferenceLinear(kM, n, k, x.values, w),
          ReferenceLinear(kM, n, k, x.sizes, Magnitudes(w))};
}
// The first `span` columns of rows of `n`, normalised.
Bounded Normed(const Bounded& x, int64_t n, int64_t span,
               const std::vector<float>& weight) {
  Bounded out;
  for (int64_t m = 0; m < kM; ++m) {
    double squares = 0, sizes = 0;
    for (int64_t i = 0; i < span; ++i) {
      const auto at = static_cast<size_t>(m * n + i);
      squares += x.values[at] * x.values[at];
      sizes += x.sizes[at] * x.sizes[at];
    }
    const double rms = std::sqrt(squares / static_cast<double>(span) + kEps);
    const double more = std::sqrt(sizes / squares);
    for (int64_t i = 0; i < span; ++i) {
      const auto at = static_cast<size_t>(m * n + i);
      const double w = weight[static_cast<size_t>(i)];
      out.values.push_back(x.values[at] / rms * w);
      // The error of the root is that of the row's sums.
      out.sizes.push_back((x.sizes[at] + std::fabs(x.values[at]) * more) / rms *
                          std::fabs(w));
    }
  }
  return out;
}
// Element i of a head whose last kRope elements are x[0 .. kRope), rotated.
void Turn(const double* x, const float* row, double* out) {
  for (int64_t j = 0; j < kRope / 2; ++j) {
    const double c = double{row[j]}, s = double{row[kRope / 2 + j]};
    out[2 * j] = x[2 * j] * c - x[2 * j + 1] * s;
    out[2 * j + 1] = x[2 * j + 1] * c + x[2 * j] * s;
  }
}

TEST_P(LatentOpsTest, BothNamesHaveTheEquationsResults) {
  const auto x = Reals(kM * kHidden), q_a = Reals(kQLora * kHidden);
  const auto kv_a = Reals(kWidth * kHidden);
  const auto q_b = Reals(kHeads * kHead * kQLora);
  const auto kc = Reals(kHeads * kKvLora * kNope);
  const auto q_norm = Reals(kQLora), kv_norm = Reals(kKvLora);
  const auto table = Reals(kPositions * kRope);
  const std::vector<int32_t> at = {3, 0, 39, 17, 17};

  const Bounded rows = {ToDoubles(x), Magnitudes(ToDoubles(x))};
  const Bounded q = Times(Normed(Times(rows, kQLora, kHidden, ToDoubles(q_a)),
                                 kQLora, kQLora, q_norm),
                          kHeads * kHead, kQLora, ToDoubles(q_b));
  const Bounded latent = Times(rows, kWidth, kHidden, ToDoubles(kv_a));
  const Bounded normed = Normed(latent, kWidth, kKvLora, kv_norm);
  Doubles want_q, want_k, sizes_q, sizes_k;
  for (int64_t m = 0; m < kM; ++m) {
    const float* const row = table.data() + at[static_cast<size_t>(m)] * kRope;
    double turned[kRope];
    for (int64_t h = 0; h < kHeads; ++h) {
      const double* const head = q.values.data() + (m * kHeads + h) * kHead;
      const double* const size = q.sizes.data() + (m * kHeads + h) * kHead;
      for (int64_t n = 0; n < kKvLora; ++n) {
        double sum = 0, sum_of_sizes = 0;
        for (int64_t k = 0; k < kNope; ++k) {
          const double w =
              kc[static_cast<size_t>((h * kKvLora + n) * kNope + k)];
          sum += head[k] * w;
          sum_of_sizes += size[k] * std::fabs(w);
        }
        want_q.push_back(sum);
        sizes_q.push_back(sum_of_sizes);
      }
      Turn(head + kNope, row, turned);
      for (int64_t j = 0; j < kRope; ++j) {
        want_q.push_back(turned[j]);
        sizes_q.push_back(size[kNope + j] + size[kNope + (j ^ 1)]);
      }
    }
    for (int64_t i = 0; i < kKvLora; ++i) {
      want_k.push_back(normed.values[static_cast<size_t>(m * kKvLora + i)]);
      sizes_k.push_back(normed.sizes[static_cast<size_t>(m * kKvLora + i)]);
    }
    Turn(latent.values.data() + m * kWidth + kKvLora, row, turned);
    for (int64_t j = 0; j < kRope; ++j) {
      const auto from = static_cast<size_t>(m * kWidth + kKvLora);
      want_k.push_back(turned[j]);
      sizes_k.push_back(latent.sizes[from + static_cast<size_t>(j)] +
                        latent.sizes[from + static_cast<size_t>(j ^ 1)]);
    }
  }
  // Products of 64, 32 and 32 terms, and 20 roundings of norms and rotations.
  constexpr double kError = (64 + 32 + 32 + 20) * 0x1p-24;
  const double bound_q =
      kError * *std::max_element(sizes_q.begin(), sizes_q.end());
  const double bound_k =
      kError * *std::max_element(sizes_k.begin(), sizes_k.end());

  OwnTensor hidden = OwnTensor::Of(x, {kM, kHidden}, 3);
  OwnTensor w_q_a = OwnTensor::Of(q_a, {kQLora, kHidden});
  OwnTensor w_kv_a = OwnTensor::Of(kv_a, {kWidth, kHidden});
  OwnTensor w_q_b = OwnTensor::Of(q_b, {kHeads * kHead, kQLora});
  OwnTensor w_kc = OwnTensor::Of(kc, {kHeads, kKvLora, kNope});
  OwnTensor norm_q = OwnTensor::Of(q_norm, {kQLora});
  OwnTensor norm_kv = OwnTensor::Of(kv_norm, {kKvLora});
  OwnTensor positions = OwnTensor::Of(at, {kM});
  OwnTensor cache = OwnTensor::Of(table, {kPositions, kRope});
  auto stacked = q_a;
  stacked.insert(stacked.end(), kv_a.begin(), kv_a.end());
  OwnTensor w_both = OwnTensor::Of(stacked, {kQLora + kWidth, kHidden});
  const NamedOwn shared = {{"hidden_states", &hidden},
                           {"q_b_proj_weight", &w_q_b},
                           {"w_kc", &w_kc},
                           {"q_a_layernorm_weight", &norm_q},
                           {"kv_a_layernorm_weight", &norm_kv},
                           {"positions", &positions},
                           {"cos_sin_cache", &cache}};
  const NamedArgs scalars = {{"eps", kEps}, {"is_vnni", false}};
  NamedOwn apart = shared, fused = shared;
  apart.emplace_back("q_a_proj_weight", &w_q_a);
  apart.emplace_back("kv_a_proj_weight", &w_kv_a);
  fused.emplace_back("qkv_a_proj_weight", &w_both);
  NamedArgs ranks = scalars;
  ranks.emplace_back("q_lora_rank", kQLora);
  ranks.emplace_back("kv_lora_rank", kKvLora);
  ranks.emplace_back("qk_rope_head_dim", kRope);
  for (const char* provider : {"simd", "reference"}) {
    auto a = Call(provider, "qkv_proj_with_rope", apart, scalars);
    auto b = Call(provider, "qkv_proj_with_rope_fused_weight", fused, ranks);
    ASSERT_EQ(a.size(), 2u);
    ASSERT_EQ(b.size(), 2u);
    EXPECT_TRUE(AllClose(a[0].doubles(), want_q, bound_q));
    EXPECT_TRUE(AllClose(a[1].doubles(), want_k, bound_k));
    EXPECT_TRUE(AllEqual(b[0].doubles(), a[0].doubles()));
    EXPECT_TRUE(AllEqual(b[1].doubles(), a[1].doubles()));
  }
}

// Packed weights have the bits of plain ones, in bf16 and in both 8-bit forms.
TEST_P(LatentOpsTest, PackedWeightsHaveTheBitsOfPlainOnes) {
  const auto bf16 = [&](int64_t count) {
    return UniformReals<BFloat16>(rng_, count, -1, 1);
  };
  OwnTensor hidden = OwnTensor::Of(bf16(kM * kHidden), {kM, kHidden});
  OwnTensor norm_q = OwnTensor::Of(bf16(kQLora), {kQLora});
  OwnTensor norm_kv = OwnTensor::Of(bf16(kKvLora), {kKvLora});
  const std::vector<int64_t> at = {3, 0, 39, 17, 17};
  OwnTensor positions = OwnTensor::Of(at, {kM});
  OwnTensor cache =
      OwnTensor::Of(Reals(kPositions * kRope), {kPositions, kRope});
  OwnTensor quarter = OwnTensor::Of<float>({0.25f}, {1});
  const auto matrix = [&](int format, int64_t n, int64_t k) {
    const std::vector<int64_t> extents = {n, k};
    if (format == 0) return OwnTensor::Of(bf16(n * k), extents);
    if (format == 1) {
      return OwnTensor::Of(SmallIntegers<int8_t>(rng_, n * k, -127, 127),
                           extents);
    }
    return OwnTensor::Of(SmallIntegers<Float8E4M3>(rng_, n * k, -8, 8),
                         extents);
  };
  for (const int format : {0, 1, 2}) {
    SCOPED_TRACE(format);
    OwnTensor q_a = matrix(format, kQLora, kHidden);
    OwnTensor kv_a = matrix(format, kWidth, kHidden);
    OwnTensor q_b = matrix(format, kHeads * kHead, kQLora);
    // The matrices of the heads are never int8.
    const int of_heads = format == 2 ? 2 : 0;
    OwnTensor kc = matrix(of_heads, kHeads * kKvLora, kNope);
    kc.meta.extents = {kHeads, kKvLora, kNope};
    OwnTensor scale = OwnTensor::Of<float>({0.25f}, {1});
    OwnTensor blocks[] = {
        OwnTensor::Of(std::vector<float>(kQLora / 32, 0.5f), {kQLora / 32, 1}),
        OwnTensor::Of(std::vector<float>(kWidth / 32, 0.5f), {kWidth / 32, 1}),
        OwnTensor::Of(std::vector<float>(kHeads * kHead / 32, 0.5f),
                      {kHeads * kHead / 32, 1})};
    std::vector<OwnTensor> plain;
    for (const bool packed : {false, true}) {
      NamedArgs args = {{"eps", kEps}, {"is_vnni", packed}};
      NamedOwn tensors = {{"hidden_states", &hidden},
                          {"q_a_proj_weight", &q_a},
                          {"q_b_proj_weight", &q_b},
                          {"kv_a_proj_weight", &kv_a},
                          {"w_kc", &kc},
                          {"q_a_layernorm_weight", &norm_q},
                          {"kv_a_layernorm_weight", &norm_kv},
                          {"positions", &positions},
                          {"cos_sin_cache", &cache}};
      if (packed) {
        for (OwnTensor* w : {&q_a, &kv_a, &q_b, &kc}) *w = Packed(*w);
      }
      if (format == 1) {
        args.emplace_back("use_int8_w8a8", true);
        tensors.emplace_back("q_a_proj_scale", &quarter);
        tensors.emplace_back("q_b_proj_scale", &quarter);
        tensors.emplace_back("kv_a_proj_scale", &quarter);
      } else if (format == 2) {
        args.emplace_back("use_fp8_w8a16", true);
        args.emplace_back("block_n", 32);
        args.emplace_back("block_k", 64);
        tensors.emplace_back("q_a_proj_scale", &blocks[0]);
        tensors.emplace_back("kv_a_proj_scale", &blocks[1]);
        tensors.emplace_back("q_b_proj_scale", &blocks[2]);
        tensors.emplace_back("w_scale", &scale);
      }
      auto out = Call("simd", "qkv_proj_with_rope", tensors, args);
      ASSERT_EQ(out.size(), 2u);
      if (!packed) {
        plain = out;
      } else {
        EXPECT_EQ(out[0].bytes, plain[0].bytes);
        EXPECT_EQ(out[1].bytes, plain[1].bytes);
      }
    }
  }
}

}  // namespace
}  // namespace quern
