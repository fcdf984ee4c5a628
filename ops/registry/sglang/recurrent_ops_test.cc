// Recurrent operators by SGLang's and vLLM's names, against the operators of
// other names that have the same equations.

#include "quern/ops/registry/families/recurrent/recurrent_ops.h"

#include <algorithm>
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
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/sglang/recurrent_ops.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int64_t kTokens = 22, kSlots = 9;

// A dense tensor of f32, bf16 or i32.
struct Tensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> extents;
  std::vector<float> floats = {};
  std::vector<BFloat16> halves = {};
  std::vector<int32_t> indices = {};

  void* data() {
    if (dtype == DType::kI32) return indices.data();
    return dtype == DType::kF32 ? static_cast<void*>(floats.data())
                                : static_cast<void*>(halves.data());
  }
  AnyTensorView view() {
    AnyTensorView::Dims sizes{}, strides{};
    int64_t stride = 1;
    for (size_t d = extents.size(); d-- > 0;) {
      sizes[d] = extents[d];
      strides[d] = stride;
      stride *= extents[d];
    }
    return {dtype, data(), static_cast<int>(extents.size()), sizes, strides};
  }
  Tensor Named(std::string other) const {
    Tensor t = *this;
    t.name = std::move(other);
    return t;
  }
  std::vector<double> values() const {
    std::vector<double> values(floats.begin(), floats.end());
    for (const BFloat16 x : halves) values.push_back(ToDouble(x));
    return values;
  }
};

Tensor Indices(std::string name, std::vector<int64_t> extents,
               std::vector<int32_t> values) {
  Tensor t = {std::move(name), DType::kI32, std::move(extents)};
  t.indices = std::move(values);
  return t;
}

// Sequences of three tokens, of one, and of eighteen.
Tensor Starts(const char* name) {
  return Indices(name, {4}, {0, 3, 4, kTokens});
}
Tensor Slots(const char* name) { return Indices(name, {3}, {7, 0, 4}); }

class SglangRecurrentTest : public OpFixture {
 protected:
  SglangRecurrentTest() {
    EXPECT_EQ(RegisterRecurrentOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterDeltaRuleOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangDeltaRuleOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangConvOps(registry_), absl::OkStatus());
  }
  Tensor Reals(std::string name, DType dtype, std::vector<int64_t> extents,
               double lo = -1, double hi = 1) {
    int64_t count = 1;
    for (const int64_t extent : extents) count *= extent;
    Tensor t = {std::move(name), dtype, std::move(extents)};
    if (dtype == DType::kF32) {
      t.floats = UniformReals<float>(rng_, count, lo, hi);
    } else {
      for (const BFloat16 x : UniformReals<BFloat16>(rng_, count, lo, hi)) {
        t.halves.push_back(x);
      }
    }
    return t;
  }
  // Zeros.
  Tensor Empty(std::string name, DType dtype, std::vector<int64_t> extents) {
    return Reals(std::move(name), dtype, std::move(extents), 0, 0);
  }
  // Runs the operator, which writes `outs` and, among `tensors`, its state.
  void Call(const char* provider, const char* op,
            const std::vector<Tensor*>& tensors,
            const std::vector<Tensor*>& outs, NamedArgs args = {}) {
    std::vector<NamedTensor> named;
    for (Tensor* const t : outs) named.push_back({t->name, t->view()});
    for (Tensor* const t : tensors) {
      args.emplace_back(t->name, TensorMeta{t->dtype, t->extents});
      named.push_back({t->name, t->view()});
    }
    Run(Make(provider, op, args), named);
  }
  void ExpectGatesOfTheFormula();
  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(SglangRecurrentTest);

// In double, rounded once.
void SglangRecurrentTest::ExpectGatesOfTheFormula() {
  constexpr int64_t kHeads = 300;  // more than a block
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(provider);
      Tensor a_log = Reals("a_log", DType::kF32, {kHeads}, -2, 2);
      Tensor a = Reals("a", dtype, {5, kHeads}, -30, 30);
      Tensor b = Reals("b", dtype, {5, kHeads}, -30, 30);
      Tensor bias = Reals("dt_bias", dtype, {kHeads}, -3, 3);
      Tensor g = Empty("out0", DType::kF32, {5, kHeads});
      Tensor beta = Empty("out1", dtype, {5, kHeads});
      Call(provider, "fused_gdn_gating_cpu", {&a_log, &a, &b, &bias},
           {&g, &beta});
      const auto logs = a_log.values(), as = a.values(), bs = b.values();
      const auto biases = bias.values();
      std::vector<double> want_g, want_beta;
      for (size_t i = 0; i < as.size(); ++i) {
        const size_t h = i % kHeads;
        const double x = as[i] + biases[h];
        const double softplus =
            std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
        want_g.push_back(-std::exp(logs[h]) * softplus);
        want_beta.push_back(1 / (1 + std::exp(-bs[i])));
      }
      const auto within = [](double unit) {
        return [unit](double x, int64_t) { return std::abs(x) * unit; };
      };
      // Half a unit in the last place of what is stored, and the roundings of
      // double; normal numbers.
      EXPECT_TRUE(AllWithin(g.values(), want_g, within(0x1.01p-24)));
      EXPECT_TRUE(
          AllWithin(beta.values(), want_beta,
                    within(dtype == DType::kF32 ? 0x1.01p-24 : 0x1.01p-8)));
    }
  }
}

TEST_P(SglangRecurrentTest, FusedUpdatesAreGatesAndThenTheRule) {
  ExpectGatesOfTheFormula();
  for (const bool drafts : {false, true}) {
    Tensor a_log = Reals("a_log", DType::kF32, {4}, -2, 2);
    Tensor a = Reals("a", DType::kBF16, {kTokens, 4}, -3, 3);
    Tensor b = Reals("b", DType::kBF16, {kTokens, 4}, -3, 3);
    Tensor bias = Reals("dt_bias", DType::kBF16, {4});
    Tensor q = Reals("q", DType::kBF16, {kTokens, 2, 9});
    Tensor k = Reals("k", DType::kBF16, {kTokens, 2, 9});
    Tensor v = Reals("v", DType::kBF16, {kTokens, 4, 21});
    const Tensor state = Reals("state", DType::kF32, {kSlots, 4, 9, 21});
    Tensor starts = Starts("cu_seqlens");
    Tensor slots = Slots("initial_state_indices"), accepted;
    if (drafts) {
      // Two columns: one token each, or two. Token 0 is padding.
      starts = Indices("cu_seqlens", {4}, {1, 3, 4, 6});
      slots = Indices("spec_state_indices", {3, 2}, {7, 3, 0, 1, 4, 5});
      accepted = Indices("num_accepted_tokens", {3}, {2, 1, 0});
    }
    // The two after each other, with gates of f32.
    const auto f32 = [](const Tensor& t) {
      Tensor wide = t;
      wide.dtype = DType::kF32;
      for (const BFloat16 x : t.halves) {
        wide.floats.push_back(static_cast<float>(ToDouble(x)));
      }
      return wide;
    };
    Tensor g = Empty("out0", DType::kF32, {kTokens, 4});
    Tensor beta = Empty("out1", DType::kF32, {kTokens, 4});
    Tensor wide_a = f32(a), wide_b = f32(b), wide_bias = f32(bias);
    Call("simd", "fused_gdn_gating_cpu", {&a_log, &wide_a, &wide_b, &wide_bias},
         {&g, &beta});
    g.name = "g", beta.name = "beta";
    Tensor want_state = state;
    Tensor want = Empty("out", DType::kBF16, v.extents);
    Tensor their_starts = starts.Named("query_start_loc");
    Tensor their_slots = slots.Named("state_indices");
    std::vector<Tensor*> plain = {
        &q, &k, &v, &g, &beta, &want_state, &their_slots, &their_starts};
    if (drafts) plain.push_back(&accepted);
    Call("simd", "gated_delta_rule_update", plain, {&want},
         {{"use_qk_l2norm", true}});
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(testing::Message() << provider << drafts);
      Tensor have_state = state.Named("initial_state_source");
      Tensor have = Empty("out", DType::kBF16, v.extents);
      std::vector<Tensor*> tensors = {
          &a_log, &bias, &q, &k, &v, &a, &b, &have_state, &slots, &starts};
      if (drafts) tensors.push_back(&accepted);
      Call(provider,
           drafts ? "fused_sigmoid_gating_delta_rule_update_spec_cpu"
                  : "fused_sigmoid_gating_delta_rule_update_cpu",
           tensors, {&have}, {{"use_qk_l2norm_in_kernel", true}});
      if (provider == std::string("simd")) {
        EXPECT_EQ(have.values(), want.values());
        EXPECT_EQ(have_state.floats, want_state.floats);
      } else {
        EXPECT_TRUE(AllClose(have.values(), want.values(), 0x1p-8));
        EXPECT_TRUE(AllClose(have_state.floats, want_state.floats, 1e-5));
      }
      EXPECT_NE(have_state.floats, state.floats);
    }
  }
}

TEST_P(SglangRecurrentTest, ChunksAreThoseOfOurName) {
  Tensor q = Reals("q", DType::kBF16, {kTokens, 1, 9});
  Tensor k = Reals("k", DType::kBF16, {kTokens, 1, 9});
  Tensor v = Reals("v", DType::kBF16, {kTokens, 2, 21});
  Tensor g = Reals("g", DType::kF32, {kTokens, 2}, -1, 0);
  Tensor beta = Reals("beta", DType::kBF16, {kTokens, 2}, 0, 1);
  const Tensor state = Reals("state", DType::kF32, {kSlots, 2, 9, 21});
  Tensor starts = Starts("query_start_loc"), slots = Slots("state_indices");
  Tensor want = Empty("out", DType::kBF16, v.extents), want_state = state;
  Call("simd", "chunk_gated_delta_rule",
       {&q, &k, &v, &g, &beta, &want_state, &slots, &starts}, {&want},
       {{"use_qk_l2norm", true}});
  Tensor have = Empty("out", DType::kBF16, v.extents);
  Tensor have_state = state.Named("initial_state");
  Tensor query = q.Named("query"), key = k.Named("key");
  Tensor value = v.Named("value"), ends = starts.Named("cu_seqlens");
  Tensor indices = slots.Named("initial_state_indices");
  const NamedArgs scalars = {{"output_final_state", true},
                             {"head_first", false},
                             {"use_qk_l2norm_in_kernel", true}};
  const std::vector<Tensor*> tensors = {&query, &key,        &value, &g,
                                        &beta,  &have_state, &ends,  &indices};
  Call("simd", "chunk_gated_delta_rule_cpu", tensors, {&have}, scalars);
  EXPECT_EQ(have.values(), want.values());
  EXPECT_EQ(have_state.floats, want_state.floats);
  // Another epsilon is another result.
  NamedArgs other = scalars;
  other.emplace_back("eps", 0.5);
  Call("simd", "chunk_gated_delta_rule_cpu", tensors, {&have}, other);
  EXPECT_NE(have.values(), want.values());
}

TEST_P(SglangRecurrentTest, ConvolutionsAreThoseOfOurNamesWithPackedWeights) {
  constexpr int64_t kChannels = 544;  // more than a block
  Tensor x = Reals("x", DType::kBF16, {kTokens, kChannels});
  Tensor weight = Reals("weight", DType::kBF16, {kChannels, 4});
  Tensor bias = Reals("bias", DType::kBF16, {kChannels});
  const Tensor state =
      Reals("conv_states", DType::kBF16, {kSlots, 3, kChannels});
  Tensor starts = Starts("query_start_loc"), slots = Slots("cache_indices");
  Tensor want = Empty("out", DType::kBF16, x.extents), want_state = state;
  Call("simd", "causal_conv1d_fn",
       {&x, &weight, &bias, &want_state, &slots, &starts}, {&want});
  for (const char* provider : {"simd", "reference"}) {
    Tensor packed = Empty("out", DType::kBF16, weight.extents);
    Call(provider, "causal_conv1d_weight_pack", {&weight}, {&packed});
    packed.name = "weight";
    // [channels / 32][2][32][2]
    for (const int64_t c : {0, 31, 32, 543}) {
      for (int64_t j = 0; j < 4; ++j) {
        EXPECT_EQ(packed.values()[static_cast<size_t>(
                      c / 32 * 128 + j / 2 * 64 + c % 32 * 2 + j % 2)],
                  weight.values()[static_cast<size_t>(c * 4 + j)]);
      }
    }
    for (const bool is_vnni : {false, true}) {
      SCOPED_TRACE(testing::Message() << provider << is_vnni);
      Tensor have = Empty("out", DType::kBF16, x.extents);
      Tensor have_state = state;
      Call(provider, "causal_conv1d_fwd_cpu",
           {&x, is_vnni ? &packed : &weight, &bias, &have_state, &starts,
            &slots},
           {&have},
           {{"silu_activation", true},
            {"pad_slot_id", int64_t{-1}},
            {"is_vnni", is_vnni}});
      if (provider == std::string("simd")) {
        EXPECT_EQ(have.values(), want.values());
      } else {
        EXPECT_TRUE(AllClose(have.values(), want.values(), 0x1p-7));
      }
      EXPECT_EQ(have_state.values(), want_state.values());
    }
  }
}

TEST_P(SglangRecurrentTest, ConvolutionUpdatesAreThoseOfOurName) {
  constexpr int64_t kChannels = 64;
  Tensor x = Reals("x", DType::kBF16, {3, kChannels});
  Tensor weight = Reals("weight", DType::kBF16, {kChannels, 4});
  const Tensor state =
      Reals("conv_state", DType::kBF16, {kSlots, 3, kChannels});
  Tensor slots = Slots("conv_state_indices");
  Tensor want = Empty("out", DType::kBF16, x.extents), want_state = state;
  Call("simd", "causal_conv1d_update", {&x, &want_state, &weight, &slots},
       {&want});
  Tensor have = Empty("out", DType::kBF16, x.extents);
  Tensor have_state = state.Named("conv_states");
  Call("simd", "causal_conv1d_update_cpu", {&x, &have_state, &weight, &slots},
       {&have},
       {{"silu_activation", false},
        {"pad_slot_id", int64_t{-1}},
        {"is_vnni", false}});
  EXPECT_EQ(have.values(), want.values());
  EXPECT_EQ(have_state.values(), want_state.values());
  EXPECT_NE(have_state.values(), state.values());
}

TEST(SglangRecurrentRefusalTest, NamesWhatIsWrong) {
  OpRegistry registry;
  ASSERT_EQ(RegisterSglangDeltaRuleOps(registry), absl::OkStatus());
  ASSERT_EQ(RegisterSglangConvOps(registry), absl::OkStatus());
  struct Case {
    const char *op, *arg;
    OpArg value;
    std::string words;
  };
  const char* const update = "fused_sigmoid_gating_delta_rule_update_cpu";
  const Case cases[] = {
      {update, "softplus_beta", 2.0, "softplus_beta=2; need 1"},
      {update, "softplus_threshold", 16.5,
       "softplus_threshold=16.5; need 17 or more"},
      {update, "a_log", TensorMeta{DType::kF32, {3}},
       "dt_bias is bf16[2]; need [3]"},
      {"chunk_gated_delta_rule_cpu", "head_first", true,
       "head_first=true; need false"},
      {"chunk_gated_delta_rule_cpu", "eps", -1.0,
       "norm_eps=-1; need 0 or more"},
      {"fused_gdn_gating_cpu", "b", TensorMeta{DType::kBF16, {4, 3}},
       "b is bf16[4, 3]"},
      {"causal_conv1d_weight_pack", "weight", TensorMeta{DType::kBF16, {31, 4}},
       "channels=31; need 4 and a multiple of 32"},
      {"causal_conv1d_fwd_cpu", "weight", TensorMeta{DType::kBF16, {32, 5}},
       "width=5; need 2 <= width <= 4"},
      {"causal_conv1d_update_cpu", "cache_seqlens",
       TensorMeta{DType::kI32, {4}}, "cache_seqlens is given; need none"},
  };
  for (const Case& c : cases) {
    NamedArgs args = registry.Find(c.op)->example(DType::kBF16);
    bool found = false;
    for (auto& [name, value] : args) {
      if (name == c.arg) value = c.value, found = true;
    }
    if (!found) args.emplace_back(c.arg, c.value);
    const OpDispatcher ops(registry, OpPolicy());
    ExpectRefusal(ops.Make(c.op, args).status(), c.words);
  }
  // Packed weights of other widths.
  NamedArgs args =
      registry.Find("causal_conv1d_fwd_cpu")->example(DType::kBF16);
  for (auto& [name, value] : args) {
    if (name == "weight") value = TensorMeta{DType::kBF16, {32, 3}};
    if (name == "is_vnni") value = true;
  }
  ExpectRefusal(OpDispatcher(registry, OpPolicy())
                    .Make("causal_conv1d_fwd_cpu", args)
                    .status(),
                "packed weights of width=3 and channels=32; need 4 and a");
}

}  // namespace
}  // namespace quern
