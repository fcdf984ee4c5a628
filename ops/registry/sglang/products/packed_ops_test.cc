// SGLang's 4-bit weights and patch embeddings by name: the bytes that packing
// makes, and products with them against products in double. All are exact.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

class PackedOpsTest : public SglangProductsTest {
 protected:
  // Codes and zero points of one matrix, and the words that hold them.
  struct Words {
    int64_t k, n, groups;
    bool gptq;
    std::vector<uint8_t> codes, zeros;  // [k, n], [groups, n]
    std::vector<float> scales;          // [groups, n]
    OwnTensor weight, qzeros, scale;
  };
  Words MakeWords(int64_t k, int64_t n, int64_t groups, bool gptq) {
    Words w = {k, n, groups, gptq, {}, {}, {}, {}, {}, {}};
    w.codes = SmallIntegers<uint8_t>(rng_, k * n, 0, 15);
    w.zeros =
        SmallIntegers<uint8_t>(rng_, groups * n, gptq ? 1 : 0, gptq ? 16 : 15);
    // A zero point that GPTQ's words alone have.
    if (gptq) w.zeros[0] = 16;
    for (int64_t i = 0; i < groups * n; ++i) {
      w.scales.push_back(i % 3 == 0 ? 0.5f : 2.0f);
    }
    // Where AWQ keeps each of eight neighbouring columns.
    constexpr int kAwq[] = {0, 4, 1, 5, 2, 6, 3, 7};
    std::vector<uint32_t> words(w.codes.size() / 8);
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t c = 0; c < n; ++c) {
        const int64_t word = gptq ? i / 8 * n + c : (i * n + c) / 8;
        const auto place = static_cast<uint32_t>(gptq ? i % 8 : kAwq[c % 8]);
        words[static_cast<size_t>(word)] |=
            uint32_t{w.codes[static_cast<size_t>(i * n + c)]} << 4 * place;
      }
    }
    std::vector<uint32_t> zeros(w.zeros.size() / 8);
    for (size_t i = 0; i < w.zeros.size(); ++i) {
      const auto place = static_cast<uint32_t>(gptq ? i % 8 : kAwq[i % 8]);
      zeros[i / 8] |= (w.zeros[i] - uint32_t{gptq}) << 4 * place;
    }
    const auto as_i32 = [](const std::vector<uint32_t>& from) {
      std::vector<int32_t> to(from.size());
      std::memcpy(to.data(), from.data(), 4 * from.size());
      return to;
    };
    w.weight = gptq ? OwnTensor::Of(as_i32(words), {k / 8, n})
                    : OwnTensor::Of(as_i32(words), {k, n / 8});
    w.qzeros = OwnTensor::Of(as_i32(zeros), {groups, n / 8});
    w.scale = OwnTensor::Of(w.scales, {groups, n});
    return w;
  }
  std::vector<OwnTensor> Convert(Words& w) {
    return CallDense(
        "convert_weight_packed_scale_zp",
        {{"weight", &w.weight}, {"qzeros", &w.qzeros}, {"scales", &w.scale}},
        {{"quant_method_4bit", w.gptq ? 1 : 0}});
  }
  static void ExpectSglangsBytes(const Words& w,
                                 const std::vector<OwnTensor>& packed);

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(PackedOpsTest);

// By the layout of SGLang's packing, one code after the other.
void PackedOpsTest::ExpectSglangsBytes(const Words& w,
                                       const std::vector<OwnTensor>& packed) {
  const int64_t group = w.k / w.groups, block = group < 128 ? group : 128;
  const int64_t depth = w.k / block;
  EXPECT_EQ(packed[0].meta.extents,
            (std::vector<int64_t>{w.n / 32, depth, 16 * block + 128}));
  EXPECT_EQ(packed[1].meta.extents,
            (std::vector<int64_t>{w.n / 32, w.groups, 32}));
  for (int64_t c = 0; c < w.n; ++c) {
    for (int64_t b = 0; b < depth; ++b) {
      int32_t sum = 0, stored = 0;
      const uint8_t* const at =
          packed[0].bytes.data() + (c / 32 * depth + b) * (16 * block + 128);
      for (int64_t i = 0; i < block; ++i) {
        const int64_t k = b * block + i, p = c % 32 / 16, in = c % 16;
        const int code = w.codes[static_cast<size_t>(k * w.n + c)];
        const int byte = at[i / 4 * 64 + (p * 8 + in % 8) * 4 + i % 4];
        ASSERT_EQ(in < 8 ? byte & 15 : byte >> 4, code) << c << " " << k;
        sum += code - w.zeros[static_cast<size_t>(k / group * w.n + c)];
      }
      std::memcpy(&stored, at + 16 * block + c % 32 * 4, 4);
      EXPECT_EQ(stored, sum);
    }
    for (int64_t g = 0; g < w.groups; ++g) {
      const auto at =
          static_cast<size_t>((c / 32 * w.groups + g) * 32 + c % 32);
      const auto from = static_cast<size_t>(g * w.n + c);
      float scale = 0;
      std::memcpy(&scale, packed[2].bytes.data() + 4 * at, 4);
      EXPECT_EQ(packed[1].bytes[at], w.zeros[from]);
      EXPECT_EQ(scale, w.scales[from]);
    }
  }
}

TEST_P(PackedOpsTest, Int4IsExactWithScalesOfPowersOfTwo) {
  constexpr int64_t kM = 3;
  for (const bool gptq : {false, true}) {
    for (const int64_t groups : {1, 4}) {
      Words w = MakeWords(256, 64, groups, gptq);
      auto packed = Convert(w);
      ASSERT_EQ(packed.size(), 3u);
      ExpectSglangsBytes(w, packed);
      const auto x = SmallIntegers<BFloat16>(rng_, kM * w.k, -4, 4);
      const auto b = SmallIntegers<float>(rng_, w.n, -4, 4);
      Doubles weights(static_cast<size_t>(w.n * w.k));
      for (int64_t c = 0; c < w.n; ++c) {
        for (int64_t k = 0; k < w.k; ++k) {
          const auto g = static_cast<size_t>(k / (w.k / groups) * w.n + c);
          weights[static_cast<size_t>(c * w.k + k)] =
              double{w.scales[g]} *
              (w.codes[static_cast<size_t>(k * w.n + c)] - w.zeros[g]);
        }
      }
      const Doubles want =
          ReferenceLinear(kM, w.n, w.k, ToDoubles(x), weights, ToDoubles(b));
      OwnTensor rows = OwnTensor::Of(x, {kM, w.k}, 3);
      OwnTensor bias = OwnTensor::Of(b, {w.n});
      for (const char* provider : kProviders) {
        auto out = Call(provider, "int4_scaled_mm_cpu",
                        {{"x", &rows},
                         {"w", &packed[0]},
                         {"w_zeros", &packed[1]},
                         {"w_scales", &packed[2]},
                         {"bias", &bias}});
        ASSERT_EQ(out.size(), 1u);
        EXPECT_TRUE(
            AllEqual(out[0].doubles(), ToDoubles(RoundedTo<BFloat16>(want))));
      }
    }
  }
}

TEST_P(PackedOpsTest, Mxfp4IsExact) {
  constexpr int64_t kM = 3, kN = 64, kK = 96;
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const auto x = SmallIntegers<BFloat16>(rng_, kM * kK, -4, 4);
  const auto bytes = SmallIntegers<uint8_t>(rng_, kN * kK / 2, 0, 255);
  const auto exponents = SmallIntegers<uint8_t>(rng_, kN * kK / 32, 125, 129);
  Doubles weights;
  for (int64_t i = 0; i < kN * kK; ++i) {
    const int code = bytes[static_cast<size_t>(i / 2)] >> i % 2 * 4 & 15;
    weights.push_back(
        (code < 8 ? 1 : -1) * kValues[code % 8] *
        std::ldexp(1, exponents[static_cast<size_t>(i / 32)] - 127));
  }
  const Doubles want = ToDoubles(
      RoundedTo<BFloat16>(ReferenceLinear(kM, kN, kK, ToDoubles(x), weights)));
  for (const bool packed : {false, true}) {
    OwnTensor rows = OwnTensor::Of(x, {kM, kK}, 3);
    OwnTensor codes = OwnTensor::Of(bytes, {kN, kK / 2});
    OwnTensor scales = OwnTensor::Of(exponents, {kN, kK / 32});
    if (packed) {
      codes = Packed(codes);
      scales = CallDense("convert_scale_packed", {{"scale", &scales}})[0];
      for (size_t i = 0; i < exponents.size(); ++i) {
        const size_t n = i / 3, g = i % 3;
        EXPECT_EQ(scales.bytes[(n / 32 * 3 + g) * 32 + n % 32], exponents[i]);
      }
    }
    for (const char* provider : kProviders) {
      auto out = Call(provider, "mxfp4_scaled_mm_cpu",
                      {{"mat1", &rows}, {"mat2", &codes}, {"scales2", &scales}},
                      {{"is_vnni", packed}});
      ASSERT_EQ(out.size(), 1u);
      EXPECT_TRUE(AllEqual(out[0].doubles(), want));
    }
  }
}

TEST_P(PackedOpsTest, PatchesAreRowsOfAProduct) {
  constexpr int64_t kM = 3, kN = 32, kK = 3 * 2 * 4 * 8;
  const auto x = SmallIntegers<BFloat16>(rng_, kM * kK, -4, 4);
  const auto w = SmallIntegers<BFloat16>(rng_, kN * kK, -4, 4);
  const auto b = SmallIntegers<BFloat16>(rng_, kN, -4, 4);
  const Doubles want = ToDoubles(RoundedTo<BFloat16>(
      ReferenceLinear(kM, kN, kK, ToDoubles(x), ToDoubles(w), ToDoubles(b))));
  for (const bool packed : {false, true}) {
    OwnTensor patches = OwnTensor::Of(x, {kM, 3, 2, 4, 8});
    OwnTensor weight = OwnTensor::Of(w, {kN, 3, 2, 4, 8});
    OwnTensor bias = OwnTensor::Of(b, {kN});
    if (packed) {
      OwnTensor matrix = OwnTensor::Of(w, {kN, kK});
      weight = Packed(weight, "conv3d_embed_weight_pack");
      EXPECT_EQ(weight.meta.extents, (std::vector<int64_t>{kN, 3, 2, 4, 8}));
      // SGLang's blocks are those of the matrix.
      EXPECT_EQ(weight.bytes, Packed(matrix).bytes);
    }
    for (const char* provider : kProviders) {
      auto out =
          Call(provider, "conv3d_embed_cpu",
               {{"input", &patches}, {"weight", &weight}, {"bias", &bias}},
               {{"is_vnni", packed}});
      ASSERT_EQ(out.size(), 1u);
      EXPECT_TRUE(AllEqual(out[0].doubles(), want));
    }
  }
}

}  // namespace
}  // namespace quern
