// vLLM's mixture of experts on a CPU: its packed form by the formula, results
// against experts in double and against the bits of our own operator on plain
// weights.

#include "quern/ops/registry/vllm/experts/experts_ops.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/moe/reference_experts_testutil.h"
#include "quern/ops/registry/families/linear/experts_ops.h"
#include "quern/ops/registry/vllm/named_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int64_t kTokens = 7, kHidden = 48, kInter = 40, kExperts = 5;
constexpr int64_t kTopK = 2;

// The formula of experts_ops.h.
template <typename T>
std::vector<T> Packed(const std::vector<T>& w, int64_t n, int64_t k,
                      const std::string& isa) {
  const int64_t v = isa == "vec" ? 1 : 4 / static_cast<int64_t>(sizeof(T));
  std::vector<T> packed(w.size());
  for (size_t at = 0; at < w.size(); ++at) {
    const auto flat = static_cast<int64_t>(at);
    const int64_t e = flat / (n * k), row = flat / k % n, i = flat % k;
    const int64_t to =
        ((row / 16 * (k / v) + i / v) * 16 + row % 16) * v + i % v + e * n * k;
    packed[static_cast<size_t>(to)] = w[at];
  }
  return packed;
}

class VllmPrepackTest : public VllmLoopFixture {
 protected:
  VllmPrepackTest() {
    EXPECT_EQ(RegisterVllmExpertsOps(registry_), absl::OkStatus());
  }

  template <typename T>
  void ExpectPacked(const char* op, const std::string& isa) {
    std::vector<T> w(2 * 32 * 8);
    for (size_t i = 0; i < w.size(); ++i) {
      w[i] = FromDouble<T>(static_cast<double>(i % 121));
    }
    SCOPED_TRACE(testing::Message()
                 << op << " " << DTypeName(DTypeOf<T>) << " " << isa);
    std::vector<T> packed(w.size());
    ASSERT_EQ(Try("reference", op,
                  {{"weight", Over(w, {2, 32, 8})},
                   {"packed_weight", Over(packed, {2, 32, 8})}},
                  {{"isa", isa}}),
              absl::OkStatus());
    const std::vector<T> want = Packed(w, 32, 8, isa);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(ToDouble(packed[i]), ToDouble(want[i])) << i;
    }
  }
};

TEST_F(VllmPrepackTest, PacksByTheFormula) {
  for (const char* isa : {"vec", "amx"}) {
    ExpectPacked<float>("prepack_moe_weight", isa);
    ExpectPacked<BFloat16>("prepack_moe_weight", isa);
    ExpectPacked<Float16>("prepack_moe_weight", isa);
    ExpectPacked<int8_t>("prepack_moe_weight_int8", isa);
  }
}

// Weights as a checkpoint has them, and a step.
template <typename T>
struct Mixture {
  explicit Mixture(Rng& rng)
      : w13(UniformReals<T>(rng, kExperts * 2 * kInter * kHidden, -0.5, 0.5)),
        w2(UniformReals<T>(rng, kExperts * kHidden * kInter, -0.5, 0.5)),
        b13(UniformReals<T>(rng, kExperts * 2 * kInter)),
        b2(UniformReals<T>(rng, kExperts * kHidden)),
        x(UniformReals<T>(rng, kTokens * kHidden)),
        weights(UniformReals<float>(rng, kTokens * kTopK, 0, 1)),
        ids(SmallIntegers<int32_t>(rng, kTokens * kTopK, 0, kExperts - 1)),
        out(kTokens * kHidden) {
    ids[3] = -1;
  }

  std::vector<T> w13, w2, b13, b2, x;
  std::vector<float> weights;
  std::vector<int32_t> ids;
  std::vector<T> out;
};

// Row r of the gate and then of up, among rows that alternate.
int64_t Alternating(int64_t r) {
  return r < kInter ? 2 * r : 2 * (r - kInter) + 1;
}

template <typename T>
std::vector<double> RowsOfExpert(const std::vector<T>& w, int64_t e,
                                 int64_t rows, int64_t columns,
                                 bool alternates) {
  std::vector<double> plain;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = alternates ? Alternating(r) : r;
    for (int64_t i = 0; i < columns; ++i) {
      plain.push_back(
          ToDouble(w[static_cast<size_t>((e * rows + from) * columns + i)]));
    }
  }
  return plain;
}

class VllmExpertsTest : public VllmOpFixture {
 protected:
  VllmExpertsTest() {
    EXPECT_EQ(RegisterVllmExpertsOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterExpertsOps(registry_), absl::OkStatus());
  }

  template <typename T>
  absl::Status Fused(Mixture<T>& m, const char* provider, const char* act,
                     const std::string& isa, bool biases) {
    std::vector<T> w13 = Packed(m.w13, 2 * kInter, kHidden, isa);
    std::vector<T> w2 = Packed(m.w2, kHidden, kInter, isa);
    std::vector<NamedTensor> tensors = {
        {"output", Over(m.out, {kTokens, kHidden})},
        {"input", Over(m.x, {kTokens, kHidden})},
        {"w13", Over(w13, {kExperts, 2 * kInter, kHidden})},
        {"w2", Over(w2, {kExperts, kHidden, kInter})},
        {"topk_weights", Over(m.weights, {kTokens, kTopK})},
        {"topk_id", Over(m.ids, {kTokens, kTopK})}};
    if (biases) {
      tensors.emplace_back("w13_bias", Over(m.b13, {kExperts, 2 * kInter}));
      tensors.emplace_back("w2_bias", Over(m.b2, {kExperts, kHidden}));
    }
    return Try(provider, "cpu_fused_moe", tensors,
               {{"act", act}, {"isa", isa}});
  }

  // The experts of the mixture, packed from plain weights.
  template <typename T>
  ExpertWeights Plain(const Mixture<T>& m, bool alternates, bool biases) {
    ExpertWeights made;
    for (int64_t e = 0; e < kExperts; ++e) {
      for (const bool first : {true, false}) {
        const int64_t n = first ? 2 * kInter : kHidden;
        const int64_t k = first ? kHidden : kInter;
        const bool turn = first && alternates;
        std::vector<T> w;
        for (const double v :
             RowsOfExpert(first ? m.w13 : m.w2, e, n, k, turn)) {
          w.push_back(FromDouble<T>(v));
        }
        std::vector<float> bias;
        for (const double v :
             RowsOfExpert(first ? m.b13 : m.b2, e, n, 1, turn)) {
          bias.push_back(static_cast<float>(v));
        }
        LinearWeightsSpec spec;
        spec.n = n;
        spec.k = k;
        spec.format = FormatOfFloats(DTypeOf<T>);
        spec.gated = first;
        LinearSource source;
        source.codes = DenseMatrix<const T>(w.data(), n, k);
        if (biases) source.bias = DenseVector<const float>(bias.data(), n);
        auto packed = LinearWeights::Pack(spec, {source}, executor_);
        EXPECT_TRUE(packed.ok()) << packed.status();
        (first ? made.gate_up : made.down).push_back(*packed);
      }
    }
    return made;
  }

  template <typename T>
  void ExpectBitsOfOurs(const char* act, const std::string& isa, bool biases) {
    Mixture<T> m(rng_);
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(DTypeOf<T>) << " " << act << " " << isa
                   << " biases " << biases << " " << provider);
      ASSERT_EQ(Fused(m, provider, act, isa, biases), absl::OkStatus());
      const ExpertWeights plain =
          Plain(m, std::string(act) == "swigluoai", biases);
      std::vector<T> want(m.out.size());
      ASSERT_EQ(Try(provider, "modular_fused_moe",
                    {{"hidden_states", Over(m.x, {kTokens, kHidden})},
                     {"topk_weights", Over(m.weights, {kTokens, kTopK})},
                     {"topk_ids", Over(m.ids, {kTokens, kTopK})},
                     {"out", Over(want, {kTokens, kHidden})}},
                    {{"experts", &plain}, {"activation", act}}, {"out"}),
                absl::OkStatus());
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_EQ(ToDouble(m.out[i]), ToDouble(want[i])) << i;
      }
    }
  }

  template <typename T>
  void ExpectNearDouble(LinearActivation activation, const char* act,
                        bool biases) {
    Mixture<T> m(rng_);
    const bool turn = activation == LinearActivation::kSwigluOaiAndMul;
    std::vector<ReferenceExpert> experts;
    for (int64_t e = 0; e < kExperts; ++e) {
      ReferenceExpert r;
      r.gate_up = RowsOfExpert(m.w13, e, 2 * kInter, kHidden, turn);
      r.down = RowsOfExpert(m.w2, e, kHidden, kInter, false);
      if (biases) {
        r.gate_up_bias = RowsOfExpert(m.b13, e, 2 * kInter, 1, turn);
        r.down_bias = RowsOfExpert(m.b2, e, kHidden, 1, false);
      }
      experts.push_back(r);
    }
    ExpertsSpec spec;
    spec.top_k = kTopK;
    spec.x = spec.out = DTypeOf<T>;
    spec.activation = activation;
    ASSERT_EQ(Fused(m, "simd", act, "amx", biases), absl::OkStatus());
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto at = static_cast<size_t>(t);
      std::vector<double> x, weights;
      for (size_t i = 0; i < kHidden; ++i) {
        x.push_back(ToDouble(m.x[at * kHidden + i]));
      }
      std::vector<int32_t> ids;
      for (size_t j = 0; j < kTopK; ++j) {
        ids.push_back(m.ids[at * kTopK + j]);
        weights.push_back(double{m.weights[at * kTopK + j]});
      }
      const ReferenceTerms want =
          ReferenceToken(spec, experts, x, ids, weights);
      for (size_t i = 0; i < kHidden; ++i) {
        const double diff = ToDouble(m.out[at * kHidden + i]) - want.value[i];
        ASSERT_TRUE(std::abs(diff) <= want.error[i])
            << act << " token " << t << " column " << i << " is off by " << diff
            << ", at most " << want.error[i];
      }
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(VllmExpertsTest);

TEST_P(VllmExpertsTest, HasTheBitsOfOurOperatorOnPlainWeights) {
  for (const char* act : {"silu", "gelu", "gelu_tanh", "swigluoai"}) {
    ExpectBitsOfOurs<BFloat16>(act, "amx", true);
    ExpectBitsOfOurs<float>(act, "vec", true);
  }
  ExpectBitsOfOurs<Float16>("silu", "vec", false);
  ExpectBitsOfOurs<BFloat16>("swigluoai", "vec", false);
}

TEST_P(VllmExpertsTest, IsNearExpertsInDouble) {
  for (const bool biases : {false, true}) {
    ExpectNearDouble<BFloat16>(LinearActivation::kSiluAndMul, "silu", biases);
    ExpectNearDouble<BFloat16>(LinearActivation::kSwigluOaiAndMul, "swigluoai",
                               biases);
    ExpectNearDouble<float>(LinearActivation::kSwigluOaiAndMul, "swigluoai",
                            biases);
  }
}

// A caller that has multiplied the input: weights are not read.
TEST_P(VllmExpertsTest, SkipsWeights) {
  Mixture<float> m(rng_);
  std::vector<int32_t> ids(m.ids.begin(), m.ids.begin() + kTokens);
  std::vector<float> ones(kTokens, 1), others(kTokens, NAN), want = m.out;
  std::vector<float> w13 = Packed(m.w13, 2 * kInter, kHidden, "vec");
  std::vector<float> w2 = Packed(m.w2, kHidden, kInter, "vec");
  const auto run = [&](std::vector<float>& weights, std::vector<float>& out,
                       bool skip) {
    return Try("simd", "cpu_fused_moe",
               {{"output", Over(out, {kTokens, kHidden})},
                {"input", Over(m.x, {kTokens, kHidden})},
                {"w13", Over(w13, {kExperts, 2 * kInter, kHidden})},
                {"w2", Over(w2, {kExperts, kHidden, kInter})},
                {"topk_weights", Over(weights, {kTokens, 1})},
                {"topk_id", Over(ids, {kTokens, 1})}},
               {{"skip_weighted", skip}});
  };
  ASSERT_EQ(run(ones, want, false), absl::OkStatus());
  ASSERT_EQ(run(others, m.out, true), absl::OkStatus());
  EXPECT_EQ(m.out, want);
}

// int8 with a scale for each row, within the bound of rows that become int8.
TEST_P(VllmExpertsTest, Int8IsNearExpertsInDouble) {
  Mixture<float> m(rng_);
  auto w13 =
      SmallIntegers<int8_t>(rng_, kExperts * 2 * kInter * kHidden, -127, 127);
  auto w2 = SmallIntegers<int8_t>(rng_, kExperts * kHidden * kInter, -127, 127);
  auto s13 = UniformReals<float>(rng_, kExperts * 2 * kInter, 0.001, 0.01);
  auto s2 = UniformReals<float>(rng_, kExperts * kHidden, 0.001, 0.01);
  auto packed13 = Packed(w13, 2 * kInter, kHidden, "amx");
  auto packed2 = Packed(w2, kHidden, kInter, "amx");
  for (const char* provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    ASSERT_EQ(Try(provider, "cpu_fused_moe_int8",
                  {{"output", Over(m.out, {kTokens, kHidden})},
                   {"input", Over(m.x, {kTokens, kHidden})},
                   {"w13", Over(packed13, {kExperts, 2 * kInter, kHidden})},
                   {"w2", Over(packed2, {kExperts, kHidden, kInter})},
                   {"w13_scale", Over(s13, {kExperts, 2 * kInter})},
                   {"w2_scale", Over(s2, {kExperts, kHidden})},
                   {"topk_weights", Over(m.weights, {kTokens, kTopK})},
                   {"topk_id", Over(m.ids, {kTokens, kTopK})}},
                  {{"act", "swigluoai"}, {"isa", "amx"}}),
              absl::OkStatus());
    std::vector<ReferenceExpert> experts;
    for (int64_t e = 0; e < kExperts; ++e) {
      ReferenceExpert r;
      r.int8_rows = true;
      r.gate_up = RowsOfExpert(w13, e, 2 * kInter, kHidden, true);
      r.down = RowsOfExpert(w2, e, kHidden, kInter, false);
      const auto of13 = RowsOfExpert(s13, e, 2 * kInter, 1, true);
      const auto of2 = RowsOfExpert(s2, e, kHidden, 1, false);
      for (size_t i = 0; i < r.gate_up.size(); ++i) {
        r.gate_up[i] *= of13[i / kHidden];
      }
      for (size_t i = 0; i < r.down.size(); ++i) r.down[i] *= of2[i / kInter];
      experts.push_back(r);
    }
    ExpertsSpec spec;
    spec.top_k = kTopK;
    spec.x = spec.out = DType::kF32;
    spec.activation = LinearActivation::kSwigluOaiAndMul;
    for (size_t t = 0; t < kTokens; ++t) {
      const std::vector<double> x = ToDoubles(std::vector<float>(
          m.x.begin() + t * kHidden, m.x.begin() + (t + 1) * kHidden));
      const ReferenceTerms want = ReferenceToken(
          spec, experts, x, {m.ids[2 * t], m.ids[2 * t + 1]},
          {double{m.weights[2 * t]}, double{m.weights[2 * t + 1]}});
      for (size_t i = 0; i < kHidden; ++i) {
        const double diff = double{m.out[t * kHidden + i]} - want.value[i];
        ASSERT_TRUE(std::abs(diff) <= want.error[i])
            << "token " << t << " column " << i << " is off by " << diff
            << ", at most " << want.error[i];
      }
    }
  }
}

TEST_P(VllmExpertsTest, RefusesAnExpertThatThereIsNot) {
  Mixture<float> m(rng_);
  m.ids[0] = kExperts;
  ExpectRefusal(Fused(m, "simd", "silu", "vec", false),
                "topk_id[0][0]=5; need 0 <= id < 5");
}

}  // namespace
}  // namespace quern
