// SGLang's norms by its names, against their equations in double, with the
// cases of its own tests.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
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
constexpr double kEps = 1e-6;
// Roundings of f32 in sums of 533 elements and in an activation.
constexpr double kRelative = 48 * 0x1p-24;

class SglangNormTest : public RowsFixture {
 protected:
  SglangNormTest() {
    EXPECT_EQ(RegisterSglangNormOps(registry_), absl::OkStatus());
  }
};

testing::AssertionResult Near(const AnyMatrix& have, DType dtype,
                              const Doubles& want) {
  return AllWithin(have.doubles(), want, [&](double value, int64_t) {
    return ResultBound(dtype, value, kRelative) + 1e-6;
  });
}

Doubles Sum(Doubles a, const Doubles& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

// (h - mean) / sqrt(mean of squares + eps) * (weight + shift); the mean is 0
// unless kCentred.
template <bool kCentred = false>
Doubles Normed(const Doubles& h, size_t n, const Doubles& weight,
               double shift) {
  Doubles out;
  for (size_t row = 0; row < h.size(); row += n) {
    double mean = 0, squares = 0;
    for (size_t i = 0; kCentred && i < n; ++i) mean += h[row + i];
    mean /= static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) {
      squares += (h[row + i] - mean) * (h[row + i] - mean);
    }
    const double root = std::sqrt(squares / static_cast<double>(n) + kEps);
    for (size_t i = 0; i < n; ++i) {
      const double w = weight.empty() ? 1 : weight[i] + shift;
      out.push_back((h[row + i] - mean) / root * w);
    }
  }
  return out;
}

TEST_F(SglangNormTest, Norms) {
  const struct {
    const char* op;
    NamedArgs more;
    bool weight, reads_weight;
    double shift;
  } kOps[] = {{"rmsnorm_cpu", {}, true, true, 0},
              {"gemma_rmsnorm_cpu", {}, true, true, 1},
              {"gemma3_rmsnorm_cpu", {}, true, true, 1},
              {"l2norm_cpu", {}, false, false, 0},
              {"gemma4_rmsnorm_cpu",
               {{"scale_shift", 0.0}, {"with_scale", true}},
               true,
               true,
               0},
              {"gemma4_rmsnorm_cpu",
               {{"scale_shift", -0.375}, {"with_scale", true}},
               true,
               true,
               -0.375},
              {"gemma4_rmsnorm_cpu",
               {{"scale_shift", 1.0}, {"with_scale", false}},
               true,
               false,
               0}};
  for (const char* provider : {"simd", "reference"}) {
    for (const auto& c : kOps) {
      for (const DType dtype : kDTypes) {
        for (const int64_t n : kWidths) {
          SCOPED_TRACE(testing::Message() << provider << " " << c.op << c.shift
                                          << DTypeName(dtype) << n);
          const AnyMatrix x = Random(dtype, kRows, n);
          const AnyMatrix w = Random(dtype, 1, n);
          const AnyMatrix out = Empty(dtype, kRows, n);
          std::vector<NamedTensor> tensors = {{"input", x.const_view()},
                                              {"out", out.view()}};
          if (c.weight) tensors.emplace_back("weight", w.vector());
          NamedArgs more = c.more;
          more.emplace_back("eps", kEps);
          ASSERT_EQ(Run(provider, c.op, tensors, more), absl::OkStatus());
          EXPECT_TRUE(
              Near(out, dtype,
                   Normed(x.doubles(), static_cast<size_t>(n),
                          c.reads_weight ? w.doubles() : Doubles(), c.shift)));
        }
      }
    }
  }
}

// The norm is that of the f32 sum, also where the residual rounds: 256 + 1 has
// no code of bf16, and its norm beside zeros is 257 / (257 / 2).
TEST_F(SglangNormTest, FusedAddNormalisesTheSumBeforeItIsRounded) {
  for (const char* provider : {"simd", "reference"}) {
    const AnyMatrix x(DType::kBF16, {256, 64, 0, 0}, 1, 4, 4);
    const AnyMatrix r(DType::kBF16, {1, 0, 0, 0}, 1, 4, 4);
    const AnyMatrix w(DType::kBF16, {1, 1, 1, 1}, 1, 4, 4);
    ASSERT_EQ(Run(provider, "fused_add_rmsnorm_cpu",
                  {{"input", x.view()},
                   {"residual", r.view()},
                   {"weight", w.vector()}},
                  {{"eps", 0.0}}),
              absl::OkStatus());
    EXPECT_EQ(r.doubles(), (Doubles{256, 64, 0, 0}));
    // 64 / (sqrt(257^2 + 64^2) / 2) = 0.48329, where sqrt(256^2 + 64^2) gives
    // 0.48507: codes of bf16 lie 2^-9 apart.
    EXPECT_EQ(x.doubles()[1], RoundThroughF32(DType::kBF16, 0.483289));
    EXPECT_NE(x.doubles()[1], RoundThroughF32(DType::kBF16, 0.485071));
  }
}

TEST_F(SglangNormTest, FusedAddNorms) {
  for (const char* provider : {"simd", "reference"}) {
    for (const DType dtype : kDTypes) {
      for (const int64_t n : kWidths) {
        for (const double shift : {0.0, 1.0}) {
          SCOPED_TRACE(testing::Message()
                       << provider << DTypeName(dtype) << n << shift);
          const AnyMatrix x = Random(dtype, kRows, n);
          const AnyMatrix r = Random(dtype, kRows, n);
          const AnyMatrix w = Random(dtype, 1, n);
          const Doubles h = Sum(x.doubles(), r.doubles());
          ASSERT_EQ(Run(provider,
                        shift == 0 ? "fused_add_rmsnorm_cpu"
                                   : "gemma_fused_add_rmsnorm_cpu",
                        {{"input", x.view()},
                         {"residual", r.view()},
                         {"weight", w.vector()}},
                        {{"eps", kEps}}),
                    absl::OkStatus());
          EXPECT_TRUE(Near(
              x, dtype, Normed(h, static_cast<size_t>(n), w.doubles(), shift)));
          Doubles rounded = h;
          for (double& v : rounded) v = RoundThroughF32(dtype, v);
          EXPECT_TRUE(AllEqual(r.doubles(), rounded));
        }
      }
    }
  }
}

TEST_F(SglangNormTest, GatedNorm) {
  for (const char* provider : {"simd", "reference"}) {
    for (const DType dtype : kDTypes) {
      for (const int64_t n : kWidths) {
        SCOPED_TRACE(testing::Message() << provider << DTypeName(dtype) << n);
        const AnyMatrix x = Random(dtype, kRows, n);
        const AnyMatrix gate = Random(dtype, kRows, n, 5);
        const AnyMatrix w = Random(dtype, 1, n);
        const AnyMatrix out = Empty(dtype, kRows, n);
        ASSERT_EQ(Run(provider, "fused_rmsnorm_gated_cpu",
                      {{"input", x.const_view()},
                       {"weight", w.vector()},
                       {"gate", gate.const_view()},
                       {"out", out.view()}},
                      {{"eps", kEps}}),
                  absl::OkStatus());
        Doubles want =
            Normed(x.doubles(), static_cast<size_t>(n), w.doubles(), 0);
        const Doubles z = gate.doubles();
        for (size_t i = 0; i < want.size(); ++i)
          want[i] *= z[i] / (1 + std::exp(-z[i]));
        EXPECT_TRUE(Near(out, dtype, want));
      }
    }
  }
}

TEST_F(SglangNormTest, LayerNorms) {
  for (const char* provider : {"simd", "reference"}) {
    for (const DType dtype : kDTypes) {
      for (const int64_t n : kWidths) {
        for (const bool has_bias : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << provider << DTypeName(dtype) << n << has_bias);
          const AnyMatrix x = Random(dtype, kRows, n);
          const AnyMatrix r = Random(dtype, kRows, n);
          const AnyMatrix w = Random(dtype, 1, n), b = Random(dtype, 1, n);
          const AnyMatrix out = Empty(dtype, kRows, n);
          std::vector<NamedTensor> tensors = {{"input", x.const_view()},
                                              {"weight", w.vector()},
                                              {"out", out.view()}};
          if (has_bias) tensors.emplace_back("bias", b.vector());
          const auto want = [&](const Doubles& h) {
            Doubles y = Normed<true>(h, static_cast<size_t>(n), w.doubles(), 0);
            const Doubles bias = b.doubles();
            for (size_t i = 0; has_bias && i < y.size(); ++i) {
              y[i] += bias[i % bias.size()];
            }
            return y;
          };
          ASSERT_EQ(Run(provider, "layernorm_cpu", tensors, {{"eps", kEps}}),
                    absl::OkStatus());
          EXPECT_TRUE(Near(out, dtype, want(x.doubles())));

          const Doubles h = Sum(x.doubles(), r.doubles());
          tensors.emplace_back("residual", r.view());
          ASSERT_EQ(Run(provider, "fused_add_layernorm_cpu", tensors,
                        {{"eps", kEps}}),
                    absl::OkStatus());
          EXPECT_TRUE(Near(out, dtype, want(h)));
          Doubles rounded = h;
          for (double& v : rounded) v = RoundThroughF32(dtype, v);
          EXPECT_TRUE(AllEqual(r.doubles(), rounded));
        }
      }
    }
  }
}

TEST_F(SglangNormTest, NormsOfQueriesAndKeys) {
  // Tokens, query heads, key heads and elements of a head.
  constexpr int64_t kCases[][4] = {
      {8, 4, 2, 128}, {17, 8, 2, 64}, {5, 3, 1, 96}, {1, 1, 1, 7},
      {3, 2, 0, 16},  {3, 0, 2, 16},  {0, 2, 2, 16}};
  for (const char* provider : {"simd", "reference"}) {
    for (const auto& [tokens, heads, kv_heads, dim] : kCases) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(testing::Message()
                     << provider << DTypeName(dtype) << tokens << " " << heads
                     << " " << kv_heads << " " << dim);
        const auto n = static_cast<size_t>(dim);
        const AnyMatrix q = Random(dtype, tokens, heads * dim);
        const AnyMatrix k = Random(dtype, tokens, kv_heads * dim);
        const AnyMatrix qw = Random(dtype, 1, dim), kw = Random(dtype, 1, dim);
        const AnyMatrix q_out = Empty(dtype, tokens, heads * dim);
        const AnyMatrix k_out = Empty(dtype, tokens, kv_heads * dim);
        ASSERT_EQ(Run(provider, "fused_qk_gemma_rmsnorm_cpu",
                      {{"q", q.const_view()},
                       {"k", k.const_view()},
                       {"q_weight", qw.vector()},
                       {"k_weight", kw.vector()},
                       {"out0", q_out.view()},
                       {"out1", k_out.view()}},
                      {{"eps", kEps}, {"head_dim", dim}}),
                  absl::OkStatus());
        const Doubles keys = Normed(k.doubles(), n, kw.doubles(), 1);
        EXPECT_TRUE(
            Near(q_out, dtype, Normed(q.doubles(), n, qw.doubles(), 1)));
        EXPECT_TRUE(Near(k_out, dtype, keys));

        const AnyMatrix both = Random(dtype, tokens, heads * 2 * dim);
        Doubles queries, gates;
        const Doubles in = both.doubles();
        for (size_t i = 0; i < in.size(); ++i) {
          (i / n % 2 == 0 ? queries : gates).push_back(in[i]);
        }
        const AnyMatrix q2 = Empty(dtype, tokens * heads, dim);
        const AnyMatrix k2 = Empty(dtype, tokens * kv_heads, dim);
        const AnyMatrix gate = Empty(dtype, tokens * heads, dim);
        ASSERT_EQ(Run(provider, "fused_qk_gemma_rmsnorm_with_gate_cpu",
                      {{"q_gate", both.const_view()},
                       {"k", k.const_view()},
                       {"q_weight", qw.vector()},
                       {"k_weight", kw.vector()},
                       {"out0", q2.view()},
                       {"out1", k2.view()},
                       {"out2", gate.view()}},
                      {{"eps", kEps}, {"head_dim", dim}, {"num_head", heads}}),
                  absl::OkStatus());
        EXPECT_TRUE(Near(q2, dtype, Normed(queries, n, qw.doubles(), 1)));
        EXPECT_TRUE(Near(k2, dtype, keys));
        EXPECT_TRUE(AllEqual(gate.doubles(), gates));
      }
    }
  }
}

TEST_F(SglangNormTest, Refuses) {
  ExpectRefused({
      {"rmsnorm_cpu", "weight", F32({63}), "weight is f32[63]; need [64]"},
      {"rmsnorm_cpu", "weight", TensorMeta{DType::kBF16, {64}},
       "input is f32, weight bf16, out f32, residual f32; need one dtype",
       absl::StatusCode::kUnimplemented},
      {"rmsnorm_cpu", "eps", -1.0, "eps=-1; need finite eps >= 0"},
      {"gemma4_rmsnorm_cpu", "scale_shift", std::nan(""),
       "shift=nan; need a finite number"},
      {"fused_add_rmsnorm_cpu", "residual", F32({3, 64}),
       "residual is f32[3, 64]; need f32[4, 64], as input is"},
      {"fused_rmsnorm_gated_cpu", "gate", F32({4, 63}),
       "gate is f32[4, 63]; need f32[4, 64], as input is"},
      {"layernorm_cpu", "bias", F32({4, 64}), "bias is f32[4, 64]"},
      {"fused_qk_gemma_rmsnorm_cpu", "head_dim", int64_t{0},
       "q_weight is f32[16]; need [0]"},
      {"fused_qk_gemma_rmsnorm_cpu", "k", F32({4, 40}),
       "q has 64 columns and k 40; need multiples of head_dim=16"},
      {"fused_qk_gemma_rmsnorm_cpu", "k", F32({3, 32}), "k is f32[3, 32]"},
      {"fused_qk_gemma_rmsnorm_with_gate_cpu", "q_gate", F32({4, 112}),
       "q_gate has 112 columns and k 32; need multiples of twice head_dim=16"},
      {"fused_qk_gemma_rmsnorm_with_gate_cpu", "num_head", int64_t{2},
       "num_head=2; need 4, as q_gate has that many heads"},
  });
  // A head of more elements than a row may have, which the weights have too.
  for (const bool gated : {false, true}) {
    const char* const op = gated ? "fused_qk_gemma_rmsnorm_with_gate_cpu"
                                 : "fused_qk_gemma_rmsnorm_cpu";
    for (const int64_t n : {int64_t{1} << 59, int64_t{1} << 62,
                            std::numeric_limits<int64_t>::max()}) {
      SCOPED_TRACE(testing::Message() << op << n);
      NamedArgs args = registry_.Find(op)->example(DType::kF32);
      for (auto& [name, value] : args) {
        if (name == "q_weight" || name == "k_weight") value = F32({n});
        if (name == "head_dim") value = n;
      }
      ExpectRefusal(OpDispatcher(registry_, OpPolicy()).Make(op, args).status(),
                    "head_dim=" + std::to_string(n) + "; need 1 <= head_dim");
    }
  }
}

}  // namespace
}  // namespace quern
