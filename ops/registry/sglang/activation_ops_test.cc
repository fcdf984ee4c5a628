// SGLang's activations by its names, against their equations in double, with
// the cases of its own tests: rows with gaps, gates in heads, results in place.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/sglang/rows_ops.h"
#include "quern/ops/registry/sglang/rows_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
// The widths of SGLang's tests, and odd ones.
constexpr int64_t kWidths[] = {1, 33, 128, 533};
constexpr int64_t kRows = 5;
// Roundings of f32 in sums of 533 elements and in an activation.
constexpr double kRelative = 48 * 0x1p-24;

class SglangActivationTest : public RowsFixture {
 protected:
  SglangActivationTest() {
    EXPECT_EQ(RegisterSglangActivationOps(registry_), absl::OkStatus());
  }
};

testing::AssertionResult Near(const AnyMatrix& have, DType dtype,
                              const Doubles& want) {
  return AllWithin(have.doubles(), want, [&](double value, int64_t) {
    return ResultBound(dtype, value, kRelative) + 1e-6;
  });
}

double Silu(double x) { return x / (1 + std::exp(-x)); }
double Gelu(double x) { return x * std::erfc(-x / std::sqrt(2.0)) / 2; }
double GeluTanh(double x) {
  return x / 2 *
         (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

TEST_F(SglangActivationTest, GatedActivations) {
  const std::pair<const char*, double (*)(double)> kOps[] = {
      {"silu_and_mul_cpu", &Silu},
      {"gelu_and_mul_cpu", &Gelu},
      {"gelu_tanh_and_mul_cpu", &GeluTanh}};
  for (const auto& [op, act] : kOps) {
    for (const DType dtype : kDTypes) {
      for (const int64_t d : kWidths) {
        SCOPED_TRACE(testing::Message() << op << DTypeName(dtype) << d);
        const AnyMatrix x = Random(dtype, kRows, 2 * d);
        const AnyMatrix out = Empty(dtype, kRows, d);
        ASSERT_EQ(
            Run("simd", op, {{"input", x.const_view()}, {"out", out.view()}}),
            absl::OkStatus());
        const Doubles in = x.doubles();
        Doubles want;
        for (int64_t t = 0; t < kRows; ++t) {
          for (int64_t i = 0; i < d; ++i) {
            const auto at = static_cast<size_t>(t * 2 * d + i);
            want.push_back(act(in[at]) * in[at + static_cast<size_t>(d)]);
          }
        }
        EXPECT_TRUE(Near(out, dtype, want));
      }
    }
  }
}

TEST_F(SglangActivationTest, SigmoidMulTakesGatesInHeads) {
  constexpr int64_t kHeads = 4, kDim = 40, kStep = 80;
  for (const char* provider : {"simd", "reference"}) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE(testing::Message() << provider << DTypeName(dtype));
      const AnyMatrix x = Random(dtype, kRows, kHeads * kDim);
      // SGLang's test: the first half of each head's columns.
      const AnyMatrix storage = Random(dtype, kRows, kHeads * kStep, 6);
      const AnyMatrix flat = Random(dtype, kRows, kHeads * kDim, 6);
      const Doubles in = x.doubles();
      for (const bool heads : {false, true}) {
        const Doubles gates = heads ? storage.doubles() : flat.doubles();
        Doubles want;
        for (int64_t i = 0; i < kRows * kHeads * kDim; ++i) {
          const int64_t at = heads ? i / kDim * kStep + i % kDim : i;
          want.push_back(in[static_cast<size_t>(i)] /
                         (1 + std::exp(-gates[static_cast<size_t>(at)])));
        }
        const AnyTensorView gate =
            heads ? storage.heads(kHeads, kDim, kStep) : flat.const_view();
        const AnyMatrix out = Empty(dtype, kRows, kHeads * kDim);
        const std::vector<NamedTensor> tensors = {
            {"input", x.view()}, {"gate", gate}, {"out", out.view()}};
        ASSERT_EQ(Run(provider, "fused_sigmoid_mul_cpu", tensors,
                      {{"inplace", false}}),
                  absl::OkStatus());
        EXPECT_TRUE(Near(out, dtype, want));
        ExpectRefusal(Run(provider, "fused_sigmoid_mul_cpu", tensors,
                          {{"inplace", true}}),
                      "fused_sigmoid_mul_cpu: out is not input; need the same "
                      "elements with inplace");
        const AnyMatrix place(dtype, in, kRows, kHeads * kDim,
                              kHeads * kDim + 2);
        ASSERT_EQ(Run(provider, "fused_sigmoid_mul_cpu",
                      {{"input", place.view()},
                       {"gate", gate},
                       {"out", place.view()}},
                      {{"inplace", true}}),
                  absl::OkStatus());
        EXPECT_EQ(place.bits(), out.bits());
      }
    }
  }
}

TEST_F(SglangActivationTest, Refuses) {
  ExpectRefused({
      {"silu_and_mul_cpu", "input", F32({4, 7}), "input is f32[4, 7]; need "},
      {"fused_sigmoid_mul_cpu", "input", F32({4, 64, 2}), "input is f32"},
      {"fused_sigmoid_mul_cpu", "gate", F32({4, 3, 32}),
       "gate is f32[4, 3, 32] and input is f32[4, 64]; need the shape of "
       "input, or [4, heads, head_dim] of as many elements"},
      {"fused_sigmoid_mul_cpu", "gate", F32({4, 1}), "gate is f32[4, 1]"},
      {"fused_sigmoid_mul_cpu", "gate", F32({4, 64, 0}), "gate is f32"},
      {"fused_sigmoid_mul_cpu", "gate", TensorMeta{DType::kBF16, {4, 64}},
       "gate is bf16[4, 64]; need f32, as input is"},
  });
}

}  // namespace
}  // namespace quern
