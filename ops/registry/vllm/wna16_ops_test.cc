// cpu_gemm_wna16 against its formula in double, on weights whose sums are
// exact.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/vllm/linear_ops.h"
#include "quern/ops/registry/vllm/named_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

struct Layer {
  int64_t m, n, k, groups;
  bool zeros, order, bias;
};

size_t At(int64_t i) { return static_cast<size_t>(i); }

class Wna16Test : public VllmOpFixture {
 protected:
  Wna16Test() { EXPECT_EQ(RegisterVllmLinearOps(registry_), absl::OkStatus()); }

  template <typename T>
  void ExpectExact(const Layer& l) {
    const int64_t group = l.k / l.groups;
    const auto codes = SmallIntegers<int32_t>(rng_, l.k * l.n, 0, 15);
    const auto zero = SmallIntegers<int32_t>(rng_, l.groups * l.n, 0, 15);
    auto x = SmallIntegers<T>(rng_, l.m * l.k, -3, 3);
    auto bias = SmallIntegers<T>(rng_, l.n, -4, 4);
    std::vector<T> scales;
    for (int64_t i = 0; i < l.groups * l.n; ++i) {
      scales.push_back(FromDouble<T>(i % 3 == 0 ? 0.5 : 0.25));
    }
    // Groups in turn, each as often as it has k.
    std::vector<int32_t> g_idx;
    for (int64_t k = 0; k < l.k; ++k) {
      g_idx.push_back(static_cast<int32_t>(l.order ? k % l.groups : k / group));
    }
    // The layout, number by number.
    std::vector<int32_t> words(At(l.n * l.k / 8)),
        zeros(At(l.groups * l.n / 8));
    const auto put = [](int32_t& word, int64_t nibble, int32_t code) {
      word = static_cast<int32_t>(static_cast<uint32_t>(word) |
                                  static_cast<uint32_t>(code) << (4 * nibble));
    };
    for (int64_t n = 0; n < l.n; ++n) {
      for (int64_t k = 0; k < l.k; ++k) {
        put(words[At(n / 16 * 2 * l.k + 2 * k + n % 16 / 8)], n % 8,
            codes[At(k * l.n + n)]);
      }
      for (int64_t g = 0; g < l.groups; ++g) {
        put(zeros[At(g * l.n / 8 + n / 8)], n % 8, zero[At(g * l.n + n)]);
      }
    }
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(DTypeOf<T>) << " m " << l.m << " n " << l.n
                   << " k " << l.k << " groups " << l.groups << " zeros "
                   << l.zeros << " order " << l.order << " bias " << l.bias
                   << " " << provider);
      std::vector<float> out(At(l.m * l.n), -1);
      std::vector<NamedTensor> tensors = {
          {"input", Over(x, {l.m, l.k})},
          {"q_weight", Over(words, {l.n / 16, 2 * l.k})},
          {"output", Over(out, {l.m, l.n})},
          {"scales", Over(scales, {l.groups, l.n})}};
      if (l.zeros) {
        tensors.emplace_back("zeros", Over(zeros, {l.groups, l.n / 8}));
      }
      if (l.order) tensors.emplace_back("g_idx", Over(g_idx, {l.k}));
      if (l.bias) tensors.emplace_back("bias", Over(bias, {l.n}));
      ASSERT_EQ(Try(provider, "cpu_gemm_wna16", tensors), absl::OkStatus());
      for (int64_t m = 0; m < l.m; ++m) {
        for (int64_t n = 0; n < l.n; ++n) {
          double want = l.bias ? ToDouble(bias[At(n)]) : 0;
          for (int64_t k = 0; k < l.k; ++k) {
            const int64_t g = g_idx[At(k)];
            const double z = l.zeros ? zero[At(g * l.n + n)] : 8;
            want += ToDouble(x[At(m * l.k + k)]) *
                    ToDouble(scales[At(g * l.n + n)]) *
                    (codes[At(k * l.n + n)] - z);
          }
          ASSERT_EQ(double{out[At(m * l.n + n)]}, want) << m << ", " << n;
        }
      }
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(Wna16Test);

TEST_P(Wna16Test, IsExactOnSmallNumbers) {
  for (const Layer& layer : {Layer{1, 16, 32, 1, false, false, false},
                             Layer{3, 48, 64, 2, true, false, true},
                             Layer{5, 32, 96, 6, true, false, false},
                             Layer{7, 32, 64, 4, false, true, true},
                             Layer{2, 80, 32, 2, true, true, false},
                             Layer{33, 16, 48, 1, true, false, true}}) {
    ExpectExact<float>(layer);
    ExpectExact<BFloat16>(layer);
    ExpectExact<Float16>(layer);
  }
}

TEST_P(Wna16Test, Refuses) {
  const OpDispatcher ops(registry_, OpPolicy());
  const NamedArgs good = {{"input", TensorMeta{DType::kBF16, {2, 32}}},
                          {"q_weight", TensorMeta{DType::kI32, {2, 64}}},
                          {"output", TensorMeta{DType::kBF16, {2, 32}}},
                          {"scales", TensorMeta{DType::kBF16, {2, 32}}}};
  ASSERT_TRUE(ops.Make("cpu_gemm_wna16", good).ok());
  const struct {
    const char* name;
    OpArg value;
    const char* words;
  } kCases[] = {
      {"q_weight", TensorMeta{DType::kI32, {2, 32}},
       "q_weight is i32[2, 32]; need [2, 64], 2 words for each"},
      {"q_weight", TensorMeta{DType::kI32, {0, 64}}, "q_weight has 0 rows"},
      {"output", TensorMeta{DType::kBF16, {2, 31}}, "output is bf16[2, 31]"},
      {"scales", TensorMeta{DType::kBF16, {3, 32}},
       "scales has 3 rows; need a divisor of 32"},
      {"scales", TensorMeta{DType::kBF16, {2, 16}}, "scales is bf16[2, 16]"},
      {"scales", TensorMeta{DType::kBF16, {4, 32}}, "group_size=8"},
      {"zeros", TensorMeta{DType::kI32, {2, 8}}, "zeros is i32[2, 8]"},
      {"g_idx", TensorMeta{DType::kI32, {31}}, "g_idx is i32[31]"},
      {"bias", TensorMeta{DType::kBF16, {31}}, "bias is bf16[31]"},
      {"pack_factor", int64_t{4}, "pack_factor=4; need 8"},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(refused.words);
    NamedArgs args;
    for (const auto& arg : good) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make("cpu_gemm_wna16", args).status(), refused.words);
  }
  // A group that is named too often.
  std::vector<float> x(64), out(64), scales(64, 1);
  std::vector<int32_t> words(128), g_idx(32, 0);
  ExpectRefusal(Try("simd", "cpu_gemm_wna16",
                    {{"input", Over(x, {2, 32})},
                     {"q_weight", Over(words, {2, 64})},
                     {"output", Over(out, {2, 32})},
                     {"scales", Over(scales, {2, 32})},
                     {"g_idx", Over(g_idx, {32})}}),
                "g_idx");
}

}  // namespace
}  // namespace quern
