// vLLM's operators on rows by its names, against their formulas in double.

#include "quern/ops/registry/vllm/rows_ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr int64_t kRows = 5;

class VllmRowsTest : public testing::Test {
 protected:
  VllmRowsTest() {
    EXPECT_EQ(RegisterVllmRowsOps(registry_), absl::OkStatus());
  }

  AnyMatrix Random(DType dtype, int64_t cols) {
    return AnyMatrix(dtype, ToDoubles(UniformReals(rng_, kRows * cols, -4, 4)),
                     kRows, cols, cols + 3);
  }
  // Makes the operator for tensors like these, and runs it.
  absl::Status Run(const std::string& provider, const std::string& op,
                   const std::vector<NamedTensor>& tensors, NamedArgs args = {},
                   bool has_out = false) {
    const OpDispatcher ops(registry_, OpPolicy());
    for (const auto& [name, view] : tensors) {
      if (name == "out" && !has_out) continue;
      TensorMeta meta{view.dtype(), {}};
      for (int d = 0; d < view.rank(); ++d) {
        meta.extents.push_back(view.extent(d));
      }
      args.emplace_back(name, meta);
    }
    auto made = ops.MakeFrom(provider, op, args);
    if (!made.ok()) return made.status();
    std::vector<AnyTensorView> views;
    const absl::Status bound = made->Bind(tensors, views);
    if (!bound.ok()) return bound;
    const absl::Status checked = made->CheckArgs(views);
    if (!checked.ok()) return checked;
    made->op->Execute(views, Workspace(), executor_);
    return absl::OkStatus();
  }

  OpRegistry registry_;
  InlineExecutor executor_;
  TestRng rng_;
};

TEST_F(VllmRowsTest, Activations) {
  const auto tanh = [](double x) {
    return x / 2 *
           (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  };
  for (const DType dtype : kDTypes) {
    for (const int64_t n : {1, 33, 130}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << n);
      const AnyMatrix x = Random(dtype, 2 * n);
      const AnyMatrix half(dtype, kRows, n, n + 1);
      const AnyMatrix whole(dtype, kRows, 2 * n, 2 * n + 1);
      const Doubles in = x.doubles();
      const auto near = [&](const AnyMatrix& have, const Doubles& want) {
        EXPECT_TRUE(AllWithin(have.doubles(), want, [&](double v, int64_t) {
          return ResultBound(dtype, v, 32 * 0x1p-24) + 1e-6;
        }));
      };
      Doubles gated, quick, gelu;
      for (int64_t i = 0; i < kRows * n; ++i) {
        const auto at = static_cast<size_t>(i / n * 2 * n + i % n);
        gated.push_back(tanh(in[at]) * in[at + static_cast<size_t>(n)]);
      }
      for (const double v : in) {
        quick.push_back(v / (1 + std::exp(-1.702 * v)));
        gelu.push_back(v * std::erfc(-v / std::sqrt(2.0)) / 2);
      }
      ASSERT_EQ(Run("simd", "gelu_tanh_and_mul",
                    {{"x", x.const_view()}, {"out", half.view()}}),
                absl::OkStatus());
      near(half, gated);
      for (const char* provider : {"simd", "reference"}) {
        ASSERT_EQ(Run(provider, "gelu_quick",
                      {{"x", x.const_view()}, {"out", whole.view()}}),
                  absl::OkStatus());
        near(whole, quick);
        const absl::Status status =
            Run(provider, "activation_lut_bf16",
                {{"input", x.const_view()}, {"out", whole.view()}},
                {{"activation", std::string("gelu")}});
        if (dtype != DType::kBF16) {
          ExpectRefusal(status, absl::StatusCode::kUnimplemented,
                        "activation_lut_bf16: input is");
          continue;
        }
        ASSERT_EQ(status, absl::OkStatus());
        near(whole, gelu);
      }
    }
  }
}

// A scale of a power of two: x * (1 / scale) is exact, and so is each code.
TEST_F(VllmRowsTest, StaticQuantisation) {
  for (const char* provider : {"simd", "reference"}) {
    for (const DType dtype : kDTypes) {
      for (const int32_t azp : {0, -128, 17, 127}) {
        for (const bool given : {false, true}) {
          if (!given && azp != 0) continue;
          SCOPED_TRACE(testing::Message()
                       << provider << DTypeName(dtype) << azp);
          constexpr int64_t kCols = 67;
          const AnyMatrix x = Random(dtype, kCols);
          float scale = 0x1p-6f;
          int32_t zero = azp;
          std::vector<int8_t> codes(kRows * kCols, 99);
          std::vector<NamedTensor> tensors = {
              {"out", DenseMatrix(codes.data(), kRows, kCols)},
              {"input", x.const_view()},
              {"scale", DenseVector<const float>(&scale, 1)}};
          if (given) {
            tensors.emplace_back("azp", DenseVector<const int32_t>(&zero, 1));
          }
          ASSERT_EQ(
              Run(provider, "static_scaled_int8_quant", tensors, {}, true),
              absl::OkStatus());
          const Doubles in = x.doubles();
          for (size_t i = 0; i < codes.size(); ++i) {
            const double code = std::nearbyint(in[i] * 64) + azp;
            ASSERT_EQ(codes[i], std::min(127.0, std::max(-128.0, code))) << i;
          }
          for (const float bad :
               {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(), 1e38f}) {
            scale = bad;
            ExpectRefusal(
                Run(provider, "static_scaled_int8_quant", tensors, {}, true),
                "static_scaled_int8_quant: scale[0]=");
          }
          if (!given) continue;
          scale = 1;
          zero = 128;
          ExpectRefusal(
              Run(provider, "static_scaled_int8_quant", tensors, {}, true),
              "azp[0]=128; need -128 <= azp[0] <= 127");
        }
      }
    }
  }
}

TEST_F(VllmRowsTest, DynamicQuantisation) {
  for (const char* provider : {"simd", "reference"}) {
    for (const DType dtype : kDTypes) {
      for (const bool used : {false, true}) {
        for (const int64_t cols : {1, 33, 260}) {
          SCOPED_TRACE(testing::Message()
                       << provider << DTypeName(dtype) << used << cols);
          const AnyMatrix x = Random(dtype, cols);
          std::vector<int8_t> codes(static_cast<size_t>(kRows * cols), 99);
          // Every second number is one of the results.
          std::vector<float> scale(2 * kRows, -7);
          std::vector<int32_t> azp(2 * kRows, -7);
          std::vector<NamedTensor> tensors = {
              {"out", DenseMatrix(codes.data(), kRows, cols)},
              {"input", x.const_view()},
              {"scale", MatrixView<float>(scale.data(), {kRows, 1}, {2, 1})}};
          if (used) {
            tensors.emplace_back(
                "azp", MatrixView<int32_t>(azp.data(), {kRows, 1}, {2, 1}));
          }
          ASSERT_EQ(
              Run(provider, "dynamic_scaled_int8_quant", tensors, {}, true),
              absl::OkStatus());
          const Doubles in = x.doubles();
          for (size_t t = 0; t < kRows; ++t) {
            const auto row = in.begin() + static_cast<ptrdiff_t>(t) * cols;
            const double low =
                std::min(0.0, *std::min_element(row, row + cols));
            const double high =
                std::max(0.0, *std::max_element(row, row + cols));
            const double want =
                used ? (high - low) / 255 : std::max(-low, high) / 127;
            const double s = double{scale[2 * t]};
            EXPECT_NEAR(s, want, want * 0x1p-24);
            EXPECT_EQ(scale[2 * t + 1], -7);
            const int32_t zero = used ? azp[2 * t] : 0;
            if (used) {
              EXPECT_NEAR(zero, -128 - low / want, 0.51);
            }
            EXPECT_EQ(azp[2 * t + 1], -7);
            // Half a step, and what the header allows beyond it.
            for (int64_t i = 0; i < cols; ++i) {
              const int8_t q =
                  codes[t * static_cast<size_t>(cols) + static_cast<size_t>(i)];
              ASSERT_NEAR(s * (q - zero), row[i], s * (0.5 + 0x1p-15));
            }
          }
        }
      }
    }
  }
}

// MadeOp refuses them by the names of the schema. The operator that it holds
// has tensors alone.
TEST_F(VllmRowsTest, RefusesZeroPointsWhereItWasMadeWithoutThem) {
  std::vector<float> x(8, 1.0f), scale(2);
  std::vector<int8_t> codes(8);
  std::vector<int32_t> azp(2, -7);
  const std::vector<AnyTensorView> tensors = {
      DenseMatrix(codes.data(), 2, 4), DenseMatrix<const float>(x.data(), 2, 4),
      DenseMatrix(scale.data(), 2, 1), DenseMatrix(azp.data(), 2, 1)};
  const NamedArgs without = {{"out", TensorMeta{DType::kI8, {2, 4}}},
                             {"input", TensorMeta{DType::kF32, {2, 4}}},
                             {"scale", TensorMeta{DType::kF32, {2, 1}}}};
  NamedArgs with = without;
  with.emplace_back("azp", TensorMeta{DType::kI32, {2, 1}});
  const OpDispatcher ops(registry_, OpPolicy());
  for (const char* provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    constexpr char kOp[] = "dynamic_scaled_int8_quant";
    const auto used = ops.MakeFrom(provider, kOp, with);
    ASSERT_TRUE(used.ok()) << used.status();
    EXPECT_EQ(used->op->CheckArgs(tensors), absl::OkStatus());
    const auto none = ops.MakeFrom(provider, kOp, without);
    ASSERT_TRUE(none.ok()) << none.status();
    ExpectRefusal(none->op->CheckArgs(tensors),
                  "quantize: azp is given; need none, as the operator was made "
                  "without it");
    std::vector<AnyTensorView> three = tensors;
    three.back() = AnyTensorView();
    EXPECT_EQ(none->op->CheckArgs(three), absl::OkStatus());
  }
}

TEST_F(VllmRowsTest, Refuses) {
  const struct {
    const char* op;
    std::string name;
    OpArg value;
    const char* words;  // behind the operator's name
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  } kCases[] = {
      {"gelu_tanh_and_mul", "x", TensorMeta{DType::kF32, {4, 7}},
       "x is f32[4, 7]; need a multiple of 2"},
      {"activation_lut_bf16", "activation", std::string("silu"),
       "activation=\"silu\"; need \"gelu\""},
      {"static_scaled_int8_quant", "input", TensorMeta{DType::kF32, {4, 63}},
       "input is f32[4, 63]; need [4, 64]"},
      {"static_scaled_int8_quant", "scale", TensorMeta{DType::kF32, {2}},
       "scale is f32[2]; need [1]"},
      {"dynamic_scaled_int8_quant", "scale", TensorMeta{DType::kF32, {4}},
       "scale is f32[4]; need [4, 1]"},
      {"dynamic_scaled_int8_quant", "azp", TensorMeta{DType::kI32, {3, 1}},
       "azp is i32[3, 1]; need [4, 1]"},
  };
  const OpDispatcher ops(registry_, OpPolicy());
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.words);
    NamedArgs args = registry_.Find(c.op)->example(DType::kF32);
    for (auto& [field, old] : args) {
      if (field == c.name) old = c.value;
    }
    ExpectRefusal(ops.Make(c.op, args).status(), c.code,
                  std::string(c.op) + ": " + c.words);
  }
}

}  // namespace
}  // namespace quern
