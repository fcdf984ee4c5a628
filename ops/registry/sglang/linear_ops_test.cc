// SGLang's products by name, on plain weights and on what convert_weight_packed
// makes of them, against products in double. Every result is exact.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
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
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr const char* kProviders[] = {"simd", "reference"};

struct Shape {
  int64_t m, n, k;
};

class SglangLinearOpsTest : public OpFixture {
 protected:
  SglangLinearOpsTest() {
    EXPECT_EQ(RegisterSglangPackOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangLinearOps(registry_), absl::OkStatus());
  }

  // The weights [n, k], or what SGLang packs them into: bytes, and their shape.
  struct Weights {
    TensorMeta meta;
    std::vector<uint8_t> bytes;

    AnyTensorView view() const {
      return AnyTensorView(meta.dtype, static_cast<const void*>(bytes.data()),
                           2, {meta.extents[0], meta.extents[1]},
                           {meta.extents[1], 1});
    }
  };
  template <typename T>
  Weights WeightsOf(const std::vector<T>& w, const Shape& s, bool packed) {
    Weights plain = {{DTypeOf<T>, {s.n, s.k}}, {}};
    const auto* const bytes = reinterpret_cast<const uint8_t*>(w.data());
    plain.bytes.assign(bytes, bytes + w.size() * sizeof(T));
    if (!packed) return plain;
    const NamedArgs args = {{"weight", plain.meta}};
    Weights out = {(*registry_.InferShapes("convert_weight_packed", args))[0],
                   {}};
    out.bytes.resize(
        static_cast<size_t>(out.meta.extents[0] * out.meta.extents[1]) *
        SizeOf(out.meta.dtype));
    const OpDispatcher ops(registry_, OpPolicy());
    const MadeOp op = *ops.Make("convert_weight_packed", args);
    const AnyTensorView to(out.meta.dtype, static_cast<void*>(out.bytes.data()),
                           2, {out.meta.extents[0], out.meta.extents[1]},
                           {out.meta.extents[1], 1});
    Run(op, {{"weight", plain.view()}, {"out", to}});
    return out;
  }

  // Makes, prepares and runs an operator, which must not allocate when it runs.
  void RunPrepared(const std::string& provider, const char* op,
                   const NamedArgs& args, const std::vector<NamedTensor>& named,
                   int64_t rows) {
    const MadeOp made = Make(provider, op, args);
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(made.tensors.Arrange(named, tensors), absl::OkStatus());
    ExpectRefusal(made.CheckArgs(tensors),
                  absl::StatusCode::kFailedPrecondition,
                  "has no weights; need a call of Prepare before");
    ASSERT_EQ(made.op->Prepare(tensors, executor_), absl::OkStatus());
    Run(made, named);
  }

  template <typename T, typename W>
  void ExpectExactLinear(const Shape& s, bool packed, bool bias) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << " x " << DTypeName(DTypeOf<W>)
                 << " m " << s.m << " n " << s.n << " k " << s.k << " packed "
                 << packed);
    const auto x = SmallIntegers<T>(rng_, s.m * s.k, -4, 4);
    const auto w = SmallIntegers<W>(rng_, s.n * s.k, -4, 4);
    const auto b = SmallIntegers<float>(rng_, s.n, -4, 4);
    const Doubles want =
        ReferenceLinear(s.m, s.n, s.k, ToDoubles(x), ToDoubles(w),
                        bias ? ToDoubles(b) : Doubles());
    const Weights weights = WeightsOf(w, s, packed);
    for (const char* provider : kProviders) {
      GuardBuffer<T> out(s.m * s.n);
      NamedArgs args = {{"mat1", TensorMeta{DTypeOf<T>, {1, s.m, s.k}}},
                        {"mat2", weights.meta},
                        {"is_vnni", packed}};
      std::vector<NamedTensor> named = {
          {"mat1", DenseTensor<const T, 3>(x.data(), {1, s.m, s.k})},
          {"mat2", weights.view()},
          {"out", DenseTensor<T, 3>(out.data(), {1, s.m, s.n})}};
      if (bias) {
        args.emplace_back("bias", TensorMeta{DType::kF32, {s.n}});
        named.emplace_back("bias", DenseVector<const float>(b.data(), s.n));
      }
      RunPrepared(provider, "weight_packed_linear", args, named, 1);
      EXPECT_TRUE(AllEqual(out.ToVector(), ToDoubles(RoundedTo<T>(want))));
    }
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(SglangLinearOpsTest);

TEST_P(SglangLinearOpsTest, LinearIsExactOnSmallIntegers) {
  for (const bool packed : {false, true}) {
    for (const bool bias : {false, true}) {
      for (const int64_t m : {1, 5}) {
        ExpectExactLinear<BFloat16, BFloat16>({m, 48, 64}, packed, bias);
        ExpectExactLinear<Float16, Float16>({m, 32, 32}, packed, bias);
        ExpectExactLinear<float, BFloat16>({m, 16, 96}, packed, bias);
        // Fewer than 16 columns are f32[k, n] where they are packed.
        ExpectExactLinear<BFloat16, BFloat16>({m, 3, 37}, packed, bias);
      }
    }
  }
  ExpectExactLinear<float, float>({3, 17, 33}, false, true);
}

TEST_P(SglangLinearOpsTest, Int8IsExactWithScalesOfPowersOfTwo) {
  for (const bool packed : {false, true}) {
    for (const Shape& s : {Shape{1, 32, 32}, Shape{5, 64, 96}}) {
      const auto q = SmallIntegers<uint8_t>(rng_, s.m * s.k, 0, 255);
      const auto w = SmallIntegers<int8_t>(rng_, s.n * s.k, -128, 127);
      const auto bias = SmallIntegers<float>(rng_, s.n, -4, 4);
      std::vector<float> x_scales, w_scales;
      for (int64_t m = 0; m < s.m; ++m) x_scales.push_back(m % 2 ? 0.5f : 2.0f);
      for (int64_t n = 0; n < s.n; ++n)
        w_scales.push_back(n % 3 ? 4.0f : 0.25f);
      Doubles codes = ToDoubles(q);
      for (double& code : codes) code -= 128;
      Doubles want = ReferenceLinear(s.m, s.n, s.k, codes, ToDoubles(w));
      for (size_t i = 0; i < want.size(); ++i) {
        const size_t n = i % static_cast<size_t>(s.n);
        want[i] =
            want[i] *
                static_cast<double>(x_scales[i / static_cast<size_t>(s.n)]) *
                static_cast<double>(w_scales[n]) +
            static_cast<double>(bias[n]);
      }
      const Weights weights = WeightsOf(w, s, packed);
      for (const char* provider : kProviders) {
        GuardBuffer<float> out(s.m * s.n);
        RunPrepared(
            provider, "int8_scaled_mm_cpu",
            {{"mat1", TensorMeta{DType::kU8, {s.m, s.k}}},
             {"mat2", weights.meta},
             {"scales1", TensorMeta{DType::kF32, {s.m}}},
             {"scales2", TensorMeta{DType::kF32, {s.n}}},
             {"bias", TensorMeta{DType::kF32, {s.n}}},
             {"out_dtype", "f32"},
             {"is_vnni", packed}},
            {{"mat1", DenseMatrix<const uint8_t>(q.data(), s.m, s.k)},
             {"mat2", weights.view()},
             {"scales1", DenseVector<const float>(x_scales.data(), s.m)},
             {"scales2", DenseVector<const float>(w_scales.data(), s.n)},
             {"bias", DenseVector<const float>(bias.data(), s.n)},
             {"out", DenseMatrix(out.data(), s.m, s.n)}},
            s.m);
        EXPECT_TRUE(AllEqual(out.ToVector(), want));
      }
    }
  }
}

// A row whose largest number is 127 has a scale of 1, and its codes are it.
TEST_P(SglangLinearOpsTest, QuantisesRowsOnTheWay) {
  const Shape s = {3, 32, 64};
  for (const bool packed : {false, true}) {
    auto x = SmallIntegers<BFloat16>(rng_, s.m * s.k, -100, 100);
    for (int64_t m = 0; m < s.m; ++m) {
      x[static_cast<size_t>(m * s.k)] = FromDouble<BFloat16>(127);
    }
    const auto w = SmallIntegers<int8_t>(rng_, s.n * s.k, -128, 127);
    const float scale = 0.125f;
    Doubles want = ReferenceLinear(s.m, s.n, s.k, ToDoubles(x), ToDoubles(w));
    for (double& y : want) y *= 0.125;
    const Weights weights = WeightsOf(w, s, packed);
    for (const char* provider : kProviders) {
      GuardBuffer<float> out(s.m * s.n);
      RunPrepared(provider, "int8_scaled_mm_with_quant",
                  {{"mat1", TensorMeta{DType::kBF16, {s.m, s.k}}},
                   {"mat2", weights.meta},
                   {"scales2", TensorMeta{DType::kF32, {1}}},
                   {"out_dtype", "f32"},
                   {"is_vnni", packed}},
                  {{"mat1", DenseMatrix<const BFloat16>(x.data(), s.m, s.k)},
                   {"mat2", weights.view()},
                   {"scales2", DenseVector<const float>(&scale, 1)},
                   {"out", DenseMatrix(out.data(), s.m, s.n)}},
                  s.m);
      EXPECT_TRUE(AllEqual(out.ToVector(), want));
    }
  }
}

TEST_P(SglangLinearOpsTest, Fp8IsExactWithScalesOfPowersOfTwo) {
  const Shape s = {2, 48, 160};
  constexpr int64_t kBlockN = 32, kBlockK = 128;
  const int64_t groups = DivCeil(s.k, kBlockK);
  for (const bool packed : {false, true}) {
    const auto x = SmallIntegers<BFloat16>(rng_, s.m * s.k, -4, 4);
    const auto w = SmallIntegers<Float8E4M3>(rng_, s.n * s.k, -8, 8);
    const std::vector<float> scales = {0.5f, 2, 4, 0.25f};
    Doubles weights_in_double = ToDoubles(w);
    for (int64_t n = 0; n < s.n; ++n) {
      for (int64_t k = 0; k < s.k; ++k) {
        weights_in_double[static_cast<size_t>(n * s.k + k)] *=
            static_cast<double>(scales[static_cast<size_t>(
                n / kBlockN * groups + k / kBlockK)]);
      }
    }
    const Doubles want =
        ReferenceLinear(s.m, s.n, s.k, ToDoubles(x), weights_in_double);
    const Weights weights = WeightsOf(w, s, packed);
    for (const char* provider : kProviders) {
      GuardBuffer<float> out(s.m * s.n);
      RunPrepared(
          provider, "fp8_scaled_mm_cpu",
          {{"mat1", TensorMeta{DType::kBF16, {s.m, s.k}}},
           {"mat2", weights.meta},
           {"scales2", TensorMeta{DType::kF32, {2, groups}}},
           {"block_n", kBlockN},
           {"block_k", kBlockK},
           {"out_dtype", "f32"},
           {"is_vnni", packed}},
          {{"mat1", DenseMatrix<const BFloat16>(x.data(), s.m, s.k)},
           {"mat2", weights.view()},
           {"scales2", DenseMatrix<const float>(scales.data(), 2, groups)},
           {"out", DenseMatrix(out.data(), s.m, s.n)}},
          s.m);
      EXPECT_TRUE(AllEqual(out.ToVector(), want));
    }
  }
}

TEST_P(SglangLinearOpsTest, RefusesByName) {
  const OpDispatcher ops(registry_, OpPolicy());
  const NamedArgs linear = {{"mat1", TensorMeta{DType::kBF16, {2, 64}}},
                            {"mat2", TensorMeta{DType::kBF16, {32, 64}}},
                            {"is_vnni", true}};
  const NamedArgs int8 = {{"mat1", TensorMeta{DType::kU8, {2, 64}}},
                          {"mat2", TensorMeta{DType::kI8, {32, 68}}},
                          {"scales1", TensorMeta{DType::kF32, {2}}},
                          {"scales2", TensorMeta{DType::kF32, {32}}},
                          {"out_dtype", "bf16"},
                          {"is_vnni", true}};
  const NamedArgs fp8 = {{"mat1", TensorMeta{DType::kBF16, {2, 64}}},
                         {"mat2", TensorMeta{DType::kF8E4M3, {32, 64}}},
                         {"scales2", TensorMeta{DType::kF32, {1, 1}}},
                         {"block_n", 32},
                         {"block_k", 128},
                         {"is_vnni", false}};
  const struct {
    const char* op;
    const NamedArgs& args;
    const char* name;
    OpArg value;
    const char* words;
  } kCases[] = {
      {"weight_packed_linear", linear, "mat2",
       TensorMeta{DType::kBF16, {40, 64}}, "need n % 16 == 0"},
      {"weight_packed_linear", linear, "mat1",
       TensorMeta{DType::kBF16, {2, 63}}, "columns of mat1=63; need 64"},
      {"weight_packed_linear", linear, "mat1", TensorMeta{DType::kBF16, {64}},
       "mat1 has rank 1; need at least 2"},
      {"weight_packed_linear", linear, "bias", TensorMeta{DType::kBF16, {32}},
       "bias is bf16[32]; need f32[32]"},
      {"int8_scaled_mm_cpu", int8, "mat1", TensorMeta{DType::kI8, {2, 64}},
       "mat1 is i8"},
      {"int8_scaled_mm_cpu", int8, "mat2", TensorMeta{DType::kI8, {32, 64}},
       "k=60"},
      {"int8_scaled_mm_cpu", int8, "scales1", TensorMeta{DType::kF32, {1}},
       "scales1 is f32[1]; need f32[2], one for each row"},
      {"int8_scaled_mm_cpu", int8, "scales2", TensorMeta{DType::kF32, {31}},
       "scales2 is f32[31]; need f32[32] or f32[1]"},
      {"int8_scaled_mm_cpu", int8, "out_dtype", "", "out_dtype is empty"},
      {"fp8_scaled_mm_cpu", fp8, "scales2", TensorMeta{DType::kF32, {1, 2}},
       "scales2 is f32[1, 2]; need f32[1, 1], one for each block"},
      {"fp8_scaled_mm_cpu", fp8, "block_k", 0, "block_k=0"},
      {"fp8_scaled_mm_cpu", fp8, "mat2", TensorMeta{DType::kBF16, {32, 64}},
       "mat2 is bf16"},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(refused.words);
    const auto good = ops.Make(refused.op, refused.args);
    EXPECT_TRUE(good.ok()) << good.status();
    NamedArgs args;
    for (const auto& arg : refused.args) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make(refused.op, args).status(), refused.words);
  }
  // Other weights than those of Prepare.
  const Shape s = {1, 16, 32};
  const Weights a = WeightsOf(std::vector<float>(16 * 32, 1), s, false);
  const Weights b = a;
  const MadeOp op = Make("simd", "weight_packed_linear",
                         {{"mat1", TensorMeta{DType::kF32, {1, 32}}},
                          {"mat2", a.meta},
                          {"is_vnni", false}});
  EXPECT_RAN_ON(*op.op);
  std::vector<float> x(32), out(16);
  const auto tensors = [&](const Weights& w) {
    return std::vector<AnyTensorView>{DenseMatrix<const float>(x.data(), 1, 32),
                                      w.view(), AnyTensorView(),
                                      DenseMatrix(out.data(), 1, 16)};
  };
  ASSERT_EQ(op.op->Prepare(tensors(a), executor_), absl::OkStatus());
  EXPECT_EQ(op.CheckArgs(tensors(a)), absl::OkStatus());
  ExpectRefusal(op.CheckArgs(tensors(b)),
                "mat2 or what goes with it is not what Prepare was given");
}

}  // namespace
}  // namespace quern
