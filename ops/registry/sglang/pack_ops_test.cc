// What SGLang's operators that move and convert write: known bytes, formulas in
// double, and what they refuse.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/algorithms/checksum.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_int8_quantize.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr const char* kProviders[] = {"simd", "reference"};

uint64_t HashOfBytes(const std::vector<uint8_t>& bytes) {
  return Fnv1a(bytes.data(), bytes.size());
}

class SglangPackOpsTest : public OpFixture {
 protected:
  SglangPackOpsTest() {
    EXPECT_EQ(RegisterSglangPackOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangQuantOps(registry_), absl::OkStatus());
  }

  static AnyTensorView Dense(DType dtype, void* data,
                             const std::vector<int64_t>& extents) {
    AnyTensorView::Dims e{}, s{};
    int64_t stride = 1;
    for (size_t d = extents.size(); d-- > 0;) {
      e[d] = extents[d];
      s[d] = stride;
      stride *= e[d];
    }
    return AnyTensorView(dtype, data, static_cast<int>(extents.size()), e, s);
  }
  // The bytes that an operator makes of weights, whose extents are given.
  std::vector<uint8_t> Packed(const std::string& provider, const char* op,
                              DType dtype, std::vector<uint8_t>& weight,
                              const std::vector<int64_t>& extents) {
    const NamedArgs args = {{"weight", TensorMeta{dtype, extents}}};
    const auto out = registry_.InferShapes(op, args);
    EXPECT_TRUE(out.ok()) << out.status();
    size_t bytes = SizeOf((*out)[0].dtype);
    for (const int64_t e : (*out)[0].extents) bytes *= static_cast<size_t>(e);
    std::vector<uint8_t> packed(bytes, 0xee);
    Run(Make(provider, op, args),
        {{"weight", Dense(dtype, weight.data(), extents)},
         {"out", Dense((*out)[0].dtype, packed.data(), (*out)[0].extents)}});
    return packed;
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(SglangPackOpsTest);

// Hashes of what SGLang's own packing makes of these weights.
TEST_P(SglangPackOpsTest, HasTheBytesOfSglang) {
  std::vector<uint8_t> int8, words, nibbles;
  for (int n = 0; n < 64; ++n) {
    for (int k = 0; k < 64; ++k) {
      int8.push_back(static_cast<uint8_t>((7 * n + 3 * k) % 251 - 125));
    }
  }
  for (int n = 0; n < 48; ++n) {
    for (int k = 0; k < 32; ++k) {
      const int word = (257 * n + 31 * k + 5) % 65536;
      words.push_back(static_cast<uint8_t>(word & 255));
      words.push_back(static_cast<uint8_t>(word >> 8));
    }
  }
  for (int n = 0; n < 32; ++n) {
    for (int k = 0; k < 32; ++k) {
      nibbles.push_back(static_cast<uint8_t>((13 * n + 29 * k + 7) % 256));
    }
  }
  for (const char* provider : kProviders) {
    for (const char* op : {"convert_weight_packed", "pack_vnni"}) {
      SCOPED_TRACE(std::string(provider) + " " + op);
      const auto packed = Packed(provider, op, DType::kI8, int8, {64, 64});
      EXPECT_EQ(packed.size(), 4352u);
      EXPECT_EQ(HashOfBytes(packed), 0x43784b3c3eb2cb20u);
      EXPECT_EQ(
          HashOfBytes(Packed(provider, op, DType::kBF16, words, {48, 32})),
          0xadd982634baa74ceu);
      EXPECT_EQ(
          HashOfBytes(Packed(provider, op, DType::kU8, nibbles, {32, 32})),
          0x86576dc924db8105u);
    }
  }
}

TEST_P(SglangPackOpsTest, ExpertsFollowEachOther) {
  std::vector<uint8_t> two(2 * 32 * 64);
  for (uint8_t& byte : two) byte = static_cast<uint8_t>(rng_.Next());
  std::vector<uint8_t> first(two.begin(), two.begin() + 32 * 64);
  std::vector<uint8_t> second(two.begin() + 32 * 64, two.end());
  for (const char* provider : kProviders) {
    const auto pack = [&](std::vector<uint8_t>& w,
                          const std::vector<int64_t>& extents) {
      return Packed(provider, "convert_weight_packed", DType::kI8, w, extents);
    };
    std::vector<uint8_t> want = pack(first, {32, 64});
    const std::vector<uint8_t> rest = pack(second, {32, 64});
    want.insert(want.end(), rest.begin(), rest.end());
    EXPECT_EQ(pack(two, {2, 32, 64}), want);
  }
}

TEST_P(SglangPackOpsTest, FewColumnsBecomeF32) {
  const auto w = SmallIntegers<BFloat16>(rng_, 3 * 5);
  std::vector<uint8_t> bytes(w.size() * 2);
  std::memcpy(bytes.data(), w.data(), bytes.size());
  const auto packed =
      Packed("reference", "convert_weight_packed", DType::kBF16, bytes, {3, 5});
  ASSERT_EQ(packed.size(), 60u);
  for (size_t n = 0; n < 3; ++n) {
    for (size_t k = 0; k < 5; ++k) {
      float got = 0;
      std::memcpy(&got, packed.data() + (k * 3 + n) * 4, 4);
      EXPECT_EQ(static_cast<double>(got), ToDouble(w[n * 5 + k]));
    }
  }
  const OpDispatcher ops(registry_, OpPolicy());
  const auto made = ops.Make("convert_weight_packed",
                             {{"weight", TensorMeta{DType::kBF16, {3, 5}}}});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->provider, "reference");
  EXPECT_RAN_ON(*Make("simd", "convert_weight_packed",
                      {{"weight", TensorMeta{DType::kI8, {32, 32}}}})
                     .op);
}

TEST_P(SglangPackOpsTest, CompensationIs128TimesTheColumnSums) {
  std::vector<uint8_t> w(96 * 64);
  for (uint8_t& byte : w) byte = static_cast<uint8_t>(rng_.Next());
  std::fill_n(w.begin(), 64, 0x80);  // a column of -128
  for (const char* provider : kProviders) {
    std::vector<uint8_t> packed =
        Packed(provider, "convert_weight_packed", DType::kI8, w, {96, 64});
    // What is stored is not read.
    for (size_t block = 0; block < 3; ++block) {
      std::fill_n(
          packed.begin() + static_cast<ptrdiff_t>(block * 32 * 68 + 32 * 64),
          128, uint8_t{0x55});
    }
    std::vector<int32_t> got(96);
    Run(Make(provider, "s8s8_compensation",
             {{"packed", TensorMeta{DType::kI8, {96, 68}}}}),
        {{"packed", Dense(DType::kI8, packed.data(), {96, 68})},
         {"out", DenseVector(got.data(), 96)}});
    for (size_t n = 0; n < 96; ++n) {
      int64_t sum = 0;
      for (size_t k = 0; k < 64; ++k) {
        sum += static_cast<int8_t>(w[n * 64 + k]);
      }
      EXPECT_EQ(got[n], 128 * sum) << n;
    }
  }
}

TEST_P(SglangPackOpsTest, CopyRoundsToNearestEven) {
  std::vector<float> x = UniformReals<float>(rng_, 67, -1e5, 1e5);
  for (const float special : Extremes<float>()) x.push_back(special);
  for (const float special : Specials<float>()) x.push_back(special);
  const auto n = static_cast<int64_t>(x.size());
  const std::vector<BFloat16> narrow = RoundedTo<BFloat16>(ToDoubles(x));
  for (const char* provider : kProviders) {
    GuardBuffer<BFloat16> got(n);
    Run(Make(provider, "copy_stub",
             {{"out", TensorMeta{DType::kBF16, {n}}},
              {"input", TensorMeta{DType::kF32, {n}}}}),
        {{"out", got.view()},
         {"input", DenseVector<const float>(x.data(), n)}});
    EXPECT_TRUE(AllEqual(got.ToVector(), ToDoubles(narrow)));
    GuardBuffer<float> wide(n);
    Run(Make(provider, "copy_stub",
             {{"out", TensorMeta{DType::kF32, {n}}},
              {"input", TensorMeta{DType::kBF16, {n}}}}),
        {{"out", wide.view()},
         {"input", DenseVector<const BFloat16>(narrow.data(), n)}});
    EXPECT_TRUE(AllEqual(wide.ToVector(), ToDoubles(narrow)));
  }
}

TEST_P(SglangPackOpsTest, CodesAreShiftedBy128) {
  constexpr int64_t kRows = 5, kCols = 33;
  std::vector<float> x = UniformReals<float>(rng_, kRows * kCols, -3, 3);
  std::fill_n(x.begin() + kCols, kCols, 0.0f);
  x[2 * kCols] = 127;  // a scale of 1
  std::fill_n(x.begin() + 3 * kCols, kCols, 1e-9f);
  x[4 * kCols] = std::numeric_limits<float>::infinity();
  for (const char* provider : kProviders) {
    SCOPED_TRACE(provider);
    GuardBuffer<uint8_t> q(kRows * kCols);
    GuardBuffer<float> scales(kRows);
    Run(Make(provider, "per_token_quant_int8_cpu",
             {{"mat1", TensorMeta{DType::kF32, {1, kRows, kCols}}}}),
        {{"mat1", DenseTensor<const float, 3>(x.data(), {1, kRows, kCols})},
         {"out0", DenseTensor<uint8_t, 3>(q.data(), {1, kRows, kCols})},
         {"out1", scales.view()}});
    for (int64_t m = 0; m < kRows; ++m) {
      const auto* const row = x.data() + m * kCols;
      const std::vector<double> values =
          ToDoubles(std::vector<float>(row, row + kCols));
      if (m == 4) {
        EXPECT_NE(scales[m], scales[m]);
        for (int64_t i = 0; i < kCols; ++i) EXPECT_EQ(q[m * kCols + i], 128);
        continue;
      }
      const ReferenceInt8Terms terms = ReferenceInt8Symmetric(values);
      EXPECT_NEAR(static_cast<double>(scales[m]), terms.scale,
                  terms.scale * 0x1p-23);
      for (int64_t i = 0; i < kCols; ++i) {
        EXPECT_LE(Int8StepsOff(values[static_cast<size_t>(i)],
                               static_cast<double>(scales[m]), 0,
                               q[m * kCols + i] - 128),
                  0.5 + 0x1p-16);
      }
    }
    EXPECT_EQ(scales[1], 1.0f);
    EXPECT_EQ(scales[2], 1.0f);
    EXPECT_EQ(q[2 * kCols], 255);
  }
}

TEST_P(SglangPackOpsTest, RefusesByName) {
  const OpDispatcher ops(registry_, OpPolicy());
  const auto refusal = [&](const char* op, const NamedArgs& args) {
    return ops.Make(op, args).status();
  };
  const auto pack = [&](DType dtype, const std::vector<int64_t>& extents) {
    return refusal("convert_weight_packed",
                   {{"weight", TensorMeta{dtype, extents}}});
  };
  ExpectRefusal(pack(DType::kF32, {32, 32}), absl::StatusCode::kUnimplemented,
                "dtype=f32");
  ExpectRefusal(pack(DType::kI8, {48, 32}), "need n % 32 == 0");
  ExpectRefusal(pack(DType::kBF16, {48, 33}), "k % 32 == 0");
  ExpectRefusal(pack(DType::kBF16, {48}), "weight has rank 1; need [n, k]");
  ExpectRefusal(refusal("s8s8_compensation",
                        {{"packed", TensorMeta{DType::kI8, {32, 64}}}}),
                "k=60");
  ExpectRefusal(refusal("copy_stub", {{"out", TensorMeta{DType::kF32, {3}}},
                                      {"input", TensorMeta{DType::kF16, {4}}}}),
                "copy_stub: input is f16[4]; need [3], as out is");
  ExpectRefusal(refusal("copy_stub", {{"out", TensorMeta{DType::kF32, {4}}},
                                      {"input", TensorMeta{DType::kI8, {4}}}}),
                absl::StatusCode::kUnimplemented, "input is i8");
  ExpectRefusal(refusal("per_token_quant_int8_cpu",
                        {{"mat1", TensorMeta{DType::kF32, {4}}}}),
                "mat1 has rank 1; need at least 2");
  const MadeOp op = Make("simd", "convert_weight_packed",
                         {{"weight", TensorMeta{DType::kI8, {32, 32}}}});
  EXPECT_RAN_ON(*op.op);
  std::vector<int8_t> w(32 * 32), out(32 * 40);
  ExpectRefusal(
      op.CheckArgs({DenseMatrix(w.data(), 32, 32),
                    MatrixView<int8_t>(out.data(), {32, 36}, {40, 1})}),
      "out has gaps; need a dense tensor");
  ExpectRefusal(
      op.CheckArgs({MatrixView<const int8_t>(w.data(), {32, 32}, {0, 1}),
                    DenseMatrix(out.data(), 32, 36)}),
      "weight has stride 0 in dimension 0; need 32 or more, as its elements "
      "must not overlap");
}

}  // namespace
}  // namespace quern
