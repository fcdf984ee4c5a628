// onednn_scaled_mm and create_onednn_scaled_mm by name, against the equation in
// double. Scales are powers of two, so that every result is exact.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/vllm/linear_ops.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr const char* kProviders[] = {"simd", "onednn", "reference"};

struct Case {
  int64_t m, n, k;
  bool dynamic = true, azp = false, bias = false;
  bool one_scale = false;  // of b
  bool column = true;      // terms of rows as [m, 1], not as [m]
};

class VllmScaledMmOpsTest : public OpFixture {
 protected:
  VllmScaledMmOpsTest() {
    EXPECT_EQ(RegisterVllmLinearOps(registry_), absl::OkStatus());
  }

  // b[k, n] comes column-major, as in vLLM.
  void Create(const Case& c, const std::vector<int8_t>& b,
              const std::vector<float>& scales, DType output,
              OneDnnHandler* handler) {
    const auto count = static_cast<int64_t>(scales.size());
    const MadeOp create = Make("reference", "create_onednn_scaled_mm",
                               {{"b", TensorMeta{DType::kI8, {c.k, c.n}}},
                                {"b_scales", TensorMeta{DType::kF32, {count}}},
                                {"output_type", DTypeName(output)},
                                {"dynamic_act_quant", c.dynamic},
                                {"use_azp", c.azp},
                                {"handler", handler}});
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(
        create.Bind(
            {{"b", AnyTensorView(DType::kI8, static_cast<const void*>(b.data()),
                                 2, {c.k, c.n}, {1, c.k})},
             {"b_scales", DenseVector<const float>(scales.data(), count)}},
            tensors),
        absl::OkStatus());
    ASSERT_EQ(create.op->Prepare(tensors, executor_), absl::OkStatus());
  }

  NamedArgs ArgsOf(const Case& c, DType output, OneDnnHandler* handler) {
    const int64_t terms = c.dynamic ? c.m : 1;
    const std::vector<int64_t> extents =
        c.column ? std::vector<int64_t>{terms, 1} : std::vector<int64_t>{terms};
    NamedArgs args = {{"c", TensorMeta{output, {c.m, c.n}}},
                      {"a", TensorMeta{DType::kI8, {c.m, c.k}}},
                      {"a_scales", TensorMeta{DType::kF32, extents}},
                      {"handler", handler}};
    if (c.azp) {
      args.emplace_back("azp", TensorMeta{DType::kI32, extents});
      // vLLM sums with keepdim=True.
      args.emplace_back("azp_adj", c.column ? TensorMeta{DType::kF32, {1, c.n}}
                                            : TensorMeta{DType::kF32, {c.n}});
    }
    if (c.bias) args.emplace_back("bias", TensorMeta{output, {c.n}});
    return args;
  }

  template <typename T>
  AnyTensorView Terms(const std::vector<T>& terms, bool column) {
    const auto count = static_cast<int64_t>(terms.size());
    if (column) return DenseMatrix<const T>(terms.data(), count, 1);
    return DenseVector<const T>(terms.data(), count);
  }

  // a and b of any codes; azp in [zero_min, zero_max].
  template <typename Out>
  void ExpectExact(const Case& c, int64_t zero_min = -128,
                   int64_t zero_max = 127) {
    SCOPED_TRACE(testing::Message()
                 << "m " << c.m << " n " << c.n << " k " << c.k << " dynamic "
                 << c.dynamic << " azp " << c.azp << " bias " << c.bias);
    const auto a = SmallIntegers<int8_t>(rng_, c.m * c.k, -128, 127);
    const auto b = SmallIntegers<int8_t>(rng_, c.k * c.n, -128, 127);
    const int64_t terms = c.dynamic ? c.m : 1;
    std::vector<float> a_scales, b_scales;
    std::vector<int32_t> azp;
    for (int64_t i = 0; i < terms; ++i) {
      a_scales.push_back(i % 2 == 0 ? 0.5f : 0.25f);
      azp.push_back(static_cast<int32_t>(rng_.Integer(zero_min, zero_max)));
    }
    for (int64_t i = 0; i < (c.one_scale ? 1 : c.n); ++i) {
      b_scales.push_back(i % 3 == 0 ? 2.0f : 0.125f);
    }
    const auto bias = SmallIntegers<Out>(rng_, c.n, -8, 8);
    // azp_adj is not read: NaN.
    const GuardBuffer<float> azp_adj(c.n);
    std::vector<double> want, reference;
    for (int64_t m = 0; m < c.m; ++m) {
      for (int64_t n = 0; n < c.n; ++n) {
        const auto term = static_cast<size_t>(c.dynamic ? m : 0);
        double sum = 0;
        for (int64_t k = 0; k < c.k; ++k) {
          sum += (a[static_cast<size_t>(m * c.k + k)] -
                  (c.azp ? static_cast<double>(azp[term]) : 0.0)) *
                 b[static_cast<size_t>(n * c.k + k)];
        }
        sum *= static_cast<double>(a_scales[term]) *
               static_cast<double>(
                   b_scales[c.one_scale ? 0 : static_cast<size_t>(n)]);
        // Sums become f32 before the bias is added, but for the reference's.
        const double b_n = c.bias ? ToDouble(bias[static_cast<size_t>(n)]) : 0;
        reference.push_back(sum + b_n);
        want.push_back(static_cast<double>(static_cast<float>(sum) +
                                           static_cast<float>(b_n)));
      }
    }
    OneDnnHandler handler;
    Create(c, b, b_scales, DTypeOf<Out>, &handler);
    for (const std::string provider : kProviders) {
      if (provider == "onednn" && c.bias) continue;
      SCOPED_TRACE(provider);
      const NamedArgs args = ArgsOf(c, DTypeOf<Out>, &handler);
      if (provider == "onednn") {
        const OpDispatcher ops(registry_, OpPolicy());
        const auto made = ops.MakeFrom("onednn", "onednn_scaled_mm", args);
        if (absl::IsUnimplemented(made.status())) continue;
      }
      const MadeOp op = Make(provider, "onednn_scaled_mm", args);
      StridedMatrix<Out> out(c.m, c.n, c.n + 3);
      std::vector<NamedTensor> named = {
          {"c", out.view()},
          {"a", DenseMatrix<const int8_t>(a.data(), c.m, c.k)},
          {"a_scales", Terms(a_scales, c.column)}};
      if (c.azp) {
        named.emplace_back("azp", Terms(azp, c.column));
        const auto adj = azp_adj.view();
        if (c.column) {
          named.emplace_back("azp_adj", DenseMatrix(adj.data(), 1, c.n));
        } else {
          named.emplace_back("azp_adj", adj);
        }
      }
      if (c.bias) {
        named.emplace_back("bias", DenseVector<const Out>(bias.data(), c.n));
      }
      if (provider == "onednn") {
        std::vector<AnyTensorView> tensors;
        ASSERT_EQ(op.Bind(named, tensors), absl::OkStatus());
        auto memory = AlignedBuffer::Create(*op.op->WorkspaceBytes(c.m, 1));
        op.op->Execute(tensors, Workspace(*memory), executor_);
      } else {
        Run(op, named);
      }
      EXPECT_TRUE(AllEqual(out.ToDense(),
                           ToDoubles(RoundedTo<Out>(
                               provider == "reference" ? reference : want))));
    }
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(VllmScaledMmOpsTest);

TEST_P(VllmScaledMmOpsTest, IsExactWithScalesOfPowersOfTwo) {
  for (const bool dynamic : {false, true}) {
    for (const bool azp : {false, true}) {
      for (const bool bias : {false, true}) {
        for (const bool column : {false, true}) {
          ExpectExact<float>({1, 48, 64, dynamic, azp, bias, false, column});
          ExpectExact<float>({5, 17, 33, dynamic, azp, bias, true, column});
          ExpectExact<BFloat16>({3, 16, 32, dynamic, azp, bias, false, column});
          ExpectExact<float>({1, 1, 1, dynamic, azp, bias, true, column});
        }
      }
    }
  }
}

// vLLM's zero points need not be int8: a row of values from 5 to 6 has -1403.
TEST_P(VllmScaledMmOpsTest, ZeroPointsMayLieBeyondInt8) {
  ExpectExact<float>({4, 32, 64, true, true}, -1403, 1403);
  ExpectExact<float>({4, 32, 64, false, true, true}, -1403, -1403);
}

// Sums of 32 bits hold zero points up to (2^31 - 1) / 128 / 64 - 128 = 262015
// of 64 k. Beyond, as in a row of nearly equal values, the zero point is
// subtracted from the product.
TEST_P(VllmScaledMmOpsTest, ZeroPointsMayLieBeyondSumsOf32Bits) {
  for (const bool bias : {false, true}) {
    for (const bool dynamic : {false, true}) {
      for (const int64_t zero : {int64_t{262015}, int64_t{262016}}) {
        ExpectExact<float>({3, 32, 64, dynamic, true, bias}, zero, zero);
        ExpectExact<float>({3, 32, 64, dynamic, true, bias}, -zero, -zero);
      }
      // Rows of both kinds.
      ExpectExact<BFloat16>({9, 17, 64, dynamic, true, bias}, -500000, 500000);
      ExpectExact<float>({4, 32, 33, dynamic, true, bias},
                         std::numeric_limits<int32_t>::min(),
                         std::numeric_limits<int32_t>::max());
    }
  }
}

TEST_P(VllmScaledMmOpsTest, DoesNotSaturateAtTheExtremes) {
  const Case c = {2, 16, 1024, true, true};
  const std::vector<int8_t> a(2 * 1024, 127), b(16 * 1024, -128);
  OneDnnHandler handler;
  Create(c, b, {1}, DType::kF32, &handler);
  const std::vector<float> scales(2, 1);
  const std::vector<int32_t> azp(2, -128);
  for (const char* provider : {"simd", "reference"}) {
    std::vector<float> out(32);
    NamedArgs args = ArgsOf(c, DType::kF32, &handler);
    const MadeOp op = Make(provider, "onednn_scaled_mm", args);
    const std::vector<float> adj(16);
    Run(op, {{"c", DenseMatrix(out.data(), 2, 16)},
             {"a", DenseMatrix<const int8_t>(a.data(), 2, 1024)},
             {"a_scales", Terms(scales, true)},
             {"azp", Terms(azp, true)},
             {"azp_adj", DenseMatrix<const float>(adj.data(), 1, 16)}});
    for (const float x : out) EXPECT_EQ(x, 255.0f * -128 * 1024);
  }
}

TEST_P(VllmScaledMmOpsTest, RefusesByName) {
  const Case c = {2, 16, 32, true, true};
  OneDnnHandler handler, fixed, floats, plain, other;
  const std::vector<int8_t> b(16 * 32, 1);
  Create(c, b, {1}, DType::kBF16, &handler);
  Create({2, 16, 32, false}, b, {1}, DType::kBF16, &fixed);
  Create({2, 16, 32, true}, b, {1}, DType::kBF16, &plain);
  const std::vector<float> floats_of_b(32 * 16, 1);
  const MadeOp create_mm =
      Make("reference", "create_onednn_mm",
           {{"b", TensorMeta{DType::kF32, {32, 16}}}, {"handler", &other}});
  ASSERT_EQ(
      create_mm.op->Prepare(
          {DenseMatrix<const float>(floats_of_b.data(), 32, 16)}, executor_),
      absl::OkStatus());
  const OpDispatcher ops(registry_, OpPolicy());
  const NamedArgs good = ArgsOf(c, DType::kBF16, &handler);
  const MadeOp op = Make("simd", "onednn_scaled_mm", good);
  EXPECT_RAN_ON(*op.op);
  const struct {
    const char* name;
    OpArg value;
    const char* words;
  } kCases[] = {
      {"handler", &floats, "handler has no weights; need those that Prepare"},
      {"handler", &fixed,
       "a_scales is f32[2, 1]; need f32[1, 1], as static scales are"},
      {"handler", &plain,
       "azp is given; need none, as the handler was created with use_azp=Fal"},
      {"handler", &other, "handler has other weights; need those that Prepare"},
      {"a", TensorMeta{DType::kU8, {2, 32}}, "a is u8[2, 32]; need i8"},
      {"a", TensorMeta{DType::kI8, {2, 33}}, "a is i8[2, 33]; need [2, 32]"},
      {"c", TensorMeta{DType::kF32, {2, 16}}, "c is f32[2, 16]; need bf16"},
      {"c", TensorMeta{DType::kBF16, {2, 15}},
       "c is bf16[2, 15]; need [2, 16]"},
      {"a_scales", TensorMeta{DType::kF32, {1}},
       "a_scales is f32[1]; need f32[2, 1]"},
      {"azp", OpArg(), "azp is missing; need it, as the handler was created"},
      {"azp", TensorMeta{DType::kF32, {2, 1}},
       "azp is f32[2, 1]; need i32[2, 1]"},
      {"azp_adj", TensorMeta{DType::kF32, {2}},
       "azp_adj is f32[2]; need f32[1, 16] or f32[16]"},
      {"bias", TensorMeta{DType::kF32, {16}}, "bias is f32[16]; need bf16"},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(refused.words);
    NamedArgs args;
    for (const auto& arg : good) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make("onednn_scaled_mm", args).status(), refused.words);
  }
  const NamedArgs create = {{"b", TensorMeta{DType::kI8, {32, 16}}},
                            {"b_scales", TensorMeta{DType::kF32, {15}}},
                            {"output_type", "bf16"},
                            {"dynamic_act_quant", true},
                            {"use_azp", false},
                            {"handler", &handler}};
  ExpectRefusal(ops.Make("create_onednn_scaled_mm", create).status(),
                "b_scales is f32[15]; need f32[16] or f32[1]");
}

TEST_P(VllmScaledMmOpsTest, RefusesScalesWithGaps) {
  const Case c = {2, 16, 32, true};
  OneDnnHandler handler;
  Create(c, std::vector<int8_t>(16 * 32, 1), {1}, DType::kF32, &handler);
  const MadeOp op =
      Make("simd", "onednn_scaled_mm", ArgsOf(c, DType::kF32, &handler));
  EXPECT_RAN_ON(*op.op);
  const std::vector<int8_t> a(64, 1);
  const std::vector<float> gaps(4, 1);
  std::vector<float> out(32);
  std::vector<AnyTensorView> tensors;
  ExpectRefusal(
      op.Bind(
          {{"c", DenseMatrix(out.data(), 2, 16)},
           {"a", DenseMatrix<const int8_t>(a.data(), 2, 32)},
           {"a_scales", MatrixView<const float>(gaps.data(), {2, 1}, {2, 1})}},
          tensors),
      "onednn_scaled_mm: a_scales has stride 2; need 1, a dense column");
}

}  // namespace
}  // namespace quern
