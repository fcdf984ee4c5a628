// SGLang's batched, gated, paired and gated feed-forward products by name,
// against products in double. Integers make all sums exact.

#include "quern/ops/registry/sglang/products/product_ops.h"

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

constexpr const char* kProviders[] = {"simd", "reference"};

class ProductOpsTest : public SglangProductsTest {
 protected:
  template <typename T>
  std::vector<T> Ints(int64_t count, int64_t least = -4, int64_t most = 4) {
    return SmallIntegers<T>(rng_, count, least, most);
  }

  // out[b] = x[b] * w[b]^T * scale.
  template <typename T, typename W>
  void ExpectExactBatch(int64_t batch, int64_t m, bool packed) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << " x " << DTypeName(DTypeOf<W>)
                 << " batch " << batch << " m " << m << packed);
    constexpr int64_t kN = 32, kK = 64;
    const bool scaled = SizeOf(DTypeOf<W>) == 1;
    const auto x = Ints<T>(batch * m * kK);
    const auto w = Ints<W>(batch * kN * kK);
    Doubles want;
    for (int64_t b = 0; b < batch; ++b) {
      const auto of = [&](const Doubles& all, int64_t count) {
        return Doubles(all.begin() + b * count, all.begin() + (b + 1) * count);
      };
      for (const double y : ReferenceLinear(m, kN, kK, of(ToDoubles(x), m * kK),
                                            of(ToDoubles(w), kN * kK))) {
        want.push_back(scaled ? y * 0.25 : y);
      }
    }
    OwnTensor mat1 = OwnTensor::Of(x, {batch, m, kK}, 5);
    OwnTensor mat2 = OwnTensor::Of(w, {batch, kN, kK});
    OwnTensor scale = OwnTensor::Of<float>({0.25f}, {1});
    if (packed) mat2 = Packed(mat2);
    for (const char* provider : kProviders) {
      OwnTensor out({DTypeOf<T>, {batch, m, kN}}, 7);
      out.turned = m % 2 != 0;
      NamedOwn tensors = {{"out", &out}, {"mat1", &mat1}, {"mat2", &mat2}};
      if (scaled) tensors.emplace_back("scale", &scale);
      Call(provider, "bmm_cpu", tensors, {{"is_vnni", packed}});
      EXPECT_TRUE(AllEqual(out.doubles(), ToDoubles(RoundedTo<T>(want))));
    }
  }

  template <typename T, typename W>
  void ExpectExactExpert(bool packed, bool routed);

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(ProductOpsTest);

TEST_P(ProductOpsTest, BatchIsExactOnSmallIntegers) {
  for (const bool packed : {false, true}) {
    // Fewer matrices than workers, as many, and more; rows of several parts.
    for (const int64_t batch : {1, 3, 5}) {
      ExpectExactBatch<BFloat16, BFloat16>(batch, 3, packed);
      ExpectExactBatch<Float16, Float16>(batch, 1, packed);
      ExpectExactBatch<BFloat16, Float8E4M3>(batch, 2, packed);
    }
    ExpectExactBatch<BFloat16, BFloat16>(2, 515, packed);
    ExpectExactBatch<BFloat16, BFloat16>(4, 257, packed);
  }
  ExpectExactBatch<float, float>(4, 3, false);
}

// A gate of weights that are 0 is 1/2. Others are off by the sigmoid's bound
// and the product's rounding, 11 units of 2^-24.
TEST_P(ProductOpsTest, GateMultipliesRows) {
  constexpr int64_t kM = 5, kK = 64, kD = 40;
  for (const bool packed : {false, true}) {
    for (const bool zero : {true, false}) {
      for (const bool biased : {false, true}) {
        const auto x = Ints<float>(kM * kK, -2, 2);
        auto w = Ints<float>(kK, -1, 1);
        if (zero) w.assign(kK, 0.0f);
        const float b = zero ? 0.0f : 1.5f;
        const auto y = Ints<float>(kM * kD, -9, 9);
        const Doubles gates =
            ReferenceLinear(kM, 1, kK, ToDoubles(x), ToDoubles(w));
        Doubles want;
        for (size_t i = 0; i < y.size(); ++i) {
          const double gate = gates[i / kD] + (biased ? double{b} : 0);
          want.push_back(double{y[i]} / (1 + std::exp(-gate)));
        }
        OwnTensor mat1 = OwnTensor::Of(x, {kM, kK}, 3);
        OwnTensor mat2 =
            packed ? OwnTensor::Of(w, {kK, 1}) : OwnTensor::Of(w, {1, kK});
        OwnTensor bias = OwnTensor::Of<float>({b}, {1});
        OwnTensor post = OwnTensor::Of(y, {kM, kD}, 2);
        NamedOwn tensors = {
            {"mat1", &mat1}, {"mat2", &mat2}, {"post_mul_mat", &post}};
        if (biased) tensors.emplace_back("bias", &bias);
        for (const char* provider : kProviders) {
          auto out = Call(provider, "fused_linear_sigmoid_mul", tensors,
                          {{"is_vnni", packed}});
          ASSERT_EQ(out.size(), 1u);
          EXPECT_TRUE(
              AllClose(out[0].doubles(), want, zero ? 0.0 : 9 * 11 * 0x1p-24));
        }
      }
    }
  }
}

TEST_P(ProductOpsTest, InputProjectionIsTwoProducts) {
  constexpr int64_t kM = 3, kK = 64, kN0 = 64, kN1 = 16;
  for (const bool packed : {false, true}) {
    const auto x = Ints<BFloat16>(kM * kK);
    const auto a = Ints<BFloat16>(kN0 * kK);
    const auto b = Ints<BFloat16>(kN1 * kK);
    OwnTensor rows = OwnTensor::Of(x, {kM, kK}, 1);
    OwnTensor qkvz = OwnTensor::Of(a, {kN0, kK});
    OwnTensor ba = OwnTensor::Of(b, {kN1, kK});
    if (packed) {
      qkvz = Packed(qkvz);
      ba = Packed(ba);
    }
    for (const char* provider : kProviders) {
      auto out = Call(provider, "fused_input_proj_cpu",
                      {{"hidden_states", &rows},
                       {"qkvz_weight", &qkvz},
                       {"ba_weight", &ba}},
                      {{"is_vnni", packed}});
      ASSERT_EQ(out.size(), 2u);
      EXPECT_TRUE(AllEqual(out[0].doubles(),
                           ToDoubles(RoundedTo<BFloat16>(ReferenceLinear(
                               kM, kN0, kK, ToDoubles(x), ToDoubles(a))))));
      EXPECT_TRUE(AllEqual(out[1].doubles(),
                           ToDoubles(RoundedTo<BFloat16>(ReferenceLinear(
                               kM, kN1, kK, ToDoubles(x), ToDoubles(b))))));
    }
  }
}

// silu of a gate from 64 on is the gate, so that gate times up is an integer.
template <typename T, typename W>
void ProductOpsTest::ExpectExactExpert(bool packed, bool routed) {
  SCOPED_TRACE(testing::Message()
               << DTypeName(DTypeOf<T>) << " x " << DTypeName(DTypeOf<W>)
               << " packed " << packed << " routed " << routed);
  constexpr int64_t kM = 5, kHidden = 64, kInter = 32;
  const bool scaled = SizeOf(DTypeOf<W>) == 1;
  const auto x = Ints<T>(kM * kHidden, 1, 2);
  auto w1 = Ints<W>(2 * kInter * kHidden, -1, 1);
  for (size_t i = 0; i < w1.size() / 2; ++i) w1[i] = FromDouble<W>(1);
  const auto w2 = Ints<W>(kHidden * kInter, -2, 2);
  const auto fused = Ints<T>(kM * kHidden, -8, 8);
  const Doubles both =
      ReferenceLinear(kM, 2 * kInter, kHidden, ToDoubles(x), ToDoubles(w1));
  Doubles inner;
  for (int64_t m = 0; m < kM; ++m) {
    for (int64_t i = 0; i < kInter; ++i) {
      const auto at = static_cast<size_t>(m * 2 * kInter + i);
      inner.push_back(both[at] * both[at + kInter]);
    }
  }
  Doubles want = ReferenceLinear(kM, kHidden, kInter,
                                 ToDoubles(RoundedTo<T>(inner)), ToDoubles(w2));
  for (size_t i = 0; i < want.size(); ++i) {
    if (scaled) want[i] *= 0.5;
    if (routed) want[i] += 2.5 * ToDoubles(fused)[i];
  }
  OwnTensor rows = OwnTensor::Of(x, {kM, kHidden}, 3);
  OwnTensor gate_up = OwnTensor::Of(w1, {2 * kInter, kHidden});
  OwnTensor down = OwnTensor::Of(w2, {kHidden, kInter});
  OwnTensor experts = OwnTensor::Of(fused, {kM, kHidden}, 2);
  OwnTensor one = OwnTensor::Of<float>({1.0f, 1.0f}, {2, 1});
  OwnTensor half = OwnTensor::Of<float>({0.5f, 0.5f}, {2, 1});
  if (packed) {
    gate_up = Packed(gate_up);
    down = Packed(down);
  }
  NamedOwn tensors = {
      {"hidden_states", &rows}, {"w1", &gate_up}, {"w2", &down}};
  NamedArgs args = {{"is_vnni", packed}};
  if (routed) {
    tensors.emplace_back("fused_experts_out", &experts);
    args.emplace_back("routed_scaling_factor", 2.5);
  }
  if (scaled) {
    tensors.emplace_back("w1_scale", &one);
    tensors.emplace_back("w2_scale", &half);
    args.emplace_back("use_fp8_w8a16", true);
    args.emplace_back("block_n", 32);
    args.emplace_back("block_k", 128);
  }
  for (const char* provider : kProviders) {
    auto out = Call(provider, "shared_expert_cpu", tensors, args);
    ASSERT_EQ(out.size(), 1u);
    EXPECT_TRUE(AllEqual(out[0].doubles(), ToDoubles(RoundedTo<T>(want))));
  }
}

TEST_P(ProductOpsTest, SharedExpertIsExactWhereSiluIs) {
  for (const bool packed : {false, true}) {
    for (const bool routed : {false, true}) {
      ExpectExactExpert<BFloat16, BFloat16>(packed, routed);
      ExpectExactExpert<Float16, Float16>(packed, routed);
      ExpectExactExpert<BFloat16, Float8E4M3>(packed, routed);
    }
  }
  ExpectExactExpert<float, float>(false, true);
}

// W8A8: rows of 127 and whole numbers are their own codes. Of the second
// product's rows, which are quantised anew, each number is off by half a step.
TEST_P(ProductOpsTest, SharedExpertOfInt8) {
  constexpr int64_t kM = 3, kHidden = 64, kInter = 32;
  for (const bool packed : {false, true}) {
    auto x = Ints<float>(kM * kHidden, 1, 2);
    for (int64_t m = 0; m < kM; ++m) x[static_cast<size_t>(m * kHidden)] = 127;
    auto w1 = Ints<int8_t>(2 * kInter * kHidden, -1, 1);
    for (size_t i = 0; i < w1.size() / 2; ++i) w1[i] = 1;
    const auto w2 = Ints<int8_t>(kHidden * kInter, -2, 2);
    const Doubles both =
        ReferenceLinear(kM, 2 * kInter, kHidden, ToDoubles(x), ToDoubles(w1));
    Doubles inner;
    double most = 0;
    for (int64_t m = 0; m < kM; ++m) {
      for (int64_t i = 0; i < kInter; ++i) {
        const auto at = static_cast<size_t>(m * 2 * kInter + i);
        inner.push_back(both[at] * both[at + kInter]);
        most = std::fmax(most, std::fabs(inner.back()));
      }
    }
    const Doubles want =
        ReferenceLinear(kM, kHidden, kInter, inner, ToDoubles(w2));
    OwnTensor rows = OwnTensor::Of(x, {kM, kHidden});
    OwnTensor gate_up = OwnTensor::Of(w1, {2 * kInter, kHidden});
    OwnTensor down = OwnTensor::Of(w2, {kHidden, kInter});
    OwnTensor one = OwnTensor::Of<float>({1.0f}, {1});
    OwnTensor ones =
        OwnTensor::Of(std::vector<float>(2 * kInter, 1.0f), {2 * kInter});
    if (packed) {
      gate_up = Packed(gate_up);
      down = Packed(down);
    }
    for (const char* provider : kProviders) {
      auto out = Call(provider, "shared_expert_cpu",
                      {{"hidden_states", &rows},
                       {"w1", &gate_up},
                       {"w2", &down},
                       {"w1_scale", &ones},
                       {"w2_scale", &one}},
                      {{"use_int8_w8a8", true}, {"is_vnni", packed}});
      ASSERT_EQ(out.size(), 1u);
      EXPECT_TRUE(
          AllClose(out[0].doubles(), want, kInter * 2 * 0.51 * most / 127));
    }
  }
}

}  // namespace
}  // namespace quern
