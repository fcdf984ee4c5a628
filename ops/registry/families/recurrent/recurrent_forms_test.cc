// Forms of the recurrent operators' arguments that vLLM and SGLang pass: gates
// of bf16, dense windows, b and c of another dtype than x, Mamba-1 without a
// dimension of heads, and more slots than sequences. Each gives the bits of the
// form that means the same.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/recurrent/recurrent_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int64_t kTokens = 24, kSlots = 5;
constexpr const char* kProviders[] = {"simd", "reference"};

// A dense tensor, of bf16 or f32, of numbers that both have.
struct Tensor {
  TensorMeta meta;
  std::vector<float> floats;
  std::vector<BFloat16> halves;

  AnyTensorView view() {
    AnyTensorView::Dims extents{}, strides{};
    int64_t stride = 1;
    for (size_t d = meta.extents.size(); d-- > 0;) {
      extents[d] = meta.extents[d];
      strides[d] = stride;
      stride *= extents[d];
    }
    void* const data = meta.dtype == DType::kF32
                           ? static_cast<void*>(floats.data())
                           : static_cast<void*>(halves.data());
    return {meta.dtype, data, static_cast<int>(meta.extents.size()), extents,
            strides};
  }
  Tensor As(DType dtype) const {
    Tensor t = *this;
    t.meta.dtype = dtype;
    return t;
  }
  Tensor As(std::vector<int64_t> extents) const {
    Tensor t = *this;
    t.meta.extents = std::move(extents);
    return t;
  }
  bool operator==(const Tensor& other) const {
    if (meta.dtype == DType::kF32) return floats == other.floats;
    return halves.size() == other.halves.size() &&
           std::memcmp(halves.data(), other.halves.data(),
                       halves.size() * sizeof(BFloat16)) == 0;
  }
};

struct Argument {
  const char* name;
  Tensor* tensor;
};

class RecurrentFormsTest : public OpFixture {
 protected:
  RecurrentFormsTest() {
    EXPECT_EQ(RegisterRecurrentOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterDeltaRuleOps(registry_), absl::OkStatus());
  }

  Tensor Reals(std::vector<int64_t> extents, double lo = -1, double hi = 1) {
    int64_t count = 1;
    for (const int64_t extent : extents) count *= extent;
    Tensor t = {{DType::kF32, std::move(extents)}, {}, {}};
    for (const BFloat16 x : UniformReals<BFloat16>(rng_, count, lo, hi)) {
      t.halves.push_back(x);
      t.floats.push_back(static_cast<float>(ToDouble(x)));
    }
    return t;
  }

  // Runs the operator on the tensors, and returns its result. indices: the name
  // of the slots, which are `slots`.
  Tensor Call(const char* provider, const char* op,
              const std::vector<Argument>& tensors, const char* indices,
              const std::vector<int64_t>& slots, Tensor out,
              const NamedArgs& scalars = {}) {
    NamedArgs args = scalars;
    std::vector<NamedTensor> named = {{"out", out.view()}};
    for (const Argument& a : tensors) {
      args.emplace_back(a.name, a.tensor->meta);
      named.push_back({a.name, a.tensor->view()});
    }
    const auto count = static_cast<int64_t>(slots.size());
    args.emplace_back(indices, TensorMeta{DType::kI64, {count}});
    named.push_back({indices, DenseVector(slots.data(), count)});
    args.emplace_back("query_start_loc", TensorMeta{DType::kI32, {4}});
    named.push_back({"query_start_loc", DenseVector(starts_.data(), 4)});
    const MadeOp made = Make(provider, op, args);
    if (made.op != nullptr) Run(made, named);
    return out;
  }

  // Three sequences, of which one is long enough for chunks of tokens.
  const std::vector<int32_t> starts_ = {0, 3, 4, kTokens};
  const std::vector<int64_t> slots_ = {3, 0, 1};
  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(RecurrentFormsTest);

TEST_P(RecurrentFormsTest, GatesMayBeBf16) {
  Tensor q = Reals({kTokens, 1, 6}), k = Reals({kTokens, 1, 6});
  Tensor v = Reals({kTokens, 2, 10}), g = Reals({kTokens, 2}, -1, 0);
  const Tensor beta = Reals({kTokens, 2}, 0, 1);
  const Tensor state = Reals({kSlots, 2, 6, 10}), out = v;
  for (const char* provider : kProviders) {
    SCOPED_TRACE(provider);
    Tensor states[] = {state, state};
    Tensor betas[] = {beta, beta.As(DType::kBF16)};
    Tensor gs[] = {g, g.As(DType::kBF16)};
    Tensor outs[2];
    for (const size_t i : {0, 1}) {
      outs[i] = Call(provider, "chunk_gated_delta_rule",
                     {{"q", &q},
                      {"k", &k},
                      {"v", &v},
                      {"g", &gs[i]},
                      {"beta", &betas[i]},
                      {"state", &states[i]}},
                     "state_indices", slots_, out);
    }
    EXPECT_TRUE(outs[0] == outs[1]);
    EXPECT_TRUE(states[0] == states[1]);
    EXPECT_FALSE(outs[0] == out);
  }
}

TEST_P(RecurrentFormsTest, BAndCMayHaveAnotherDTypeThanX) {
  for (const bool per_row : {false, true}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const DType other = dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
      Tensor x = Reals({kTokens, 2, 5}).As(dtype);
      Tensor dt = Reals(per_row ? std::vector<int64_t>{kTokens, 2, 5}
                                : std::vector<int64_t>{kTokens, 2})
                      .As(dtype);
      Tensor a = Reals(
          per_row ? std::vector<int64_t>{2, 5, 7} : std::vector<int64_t>{2}, -2,
          0);
      const Tensor b = Reals({kTokens, 1, 7}), c = Reals({kTokens, 1, 7});
      const Tensor state = Reals({kSlots, 2, 5, 7});
      for (const char* provider : kProviders) {
        SCOPED_TRACE(provider);
        Tensor states[] = {state, state}, outs[2];
        for (const size_t i : {0, 1}) {
          Tensor b_i = b.As(i == 0 ? dtype : other);
          Tensor c_i = c.As(i == 0 ? dtype : other);
          outs[i] =
              Call(provider, "selective_state_update",
                   {{"state", &states[i]},
                    {"x", &x},
                    {"dt", &dt},
                    {"a", &a},
                    {"b", &b_i},
                    {"c", &c_i}},
                   "state_batch_indices", slots_, x, {{"dt_softplus", true}});
        }
        EXPECT_TRUE(outs[0] == outs[1]);
        EXPECT_TRUE(states[0] == states[1]);
        EXPECT_FALSE(outs[0] == x);
      }
    }
  }
}

TEST_P(RecurrentFormsTest, Mamba1NeedsNoDimensionOfHeads) {
  constexpr int64_t kChannels = 9, kState = 7;
  Tensor x = Reals({kTokens, 1, kChannels}),
         dt = Reals({kTokens, 1, kChannels});
  Tensor z = Reals({kTokens, 1, kChannels});
  Tensor a = Reals({1, kChannels, kState}, -2, 0);
  Tensor b = Reals({kTokens, 1, kState}), c = Reals({kTokens, 1, kState});
  Tensor d = Reals({1, kChannels}), bias = Reals({1, kChannels});
  const Tensor state = Reals({kSlots, 1, kChannels, kState});
  for (const char* provider : kProviders) {
    SCOPED_TRACE(provider);
    Tensor want = state, have = state.As({kSlots, kChannels, kState});
    const auto call = [&](Tensor& s, const Tensor& out) {
      return Call(provider, "selective_state_update",
                  {{"state", &s},
                   {"x", &x},
                   {"dt", &dt},
                   {"a", &a},
                   {"b", &b},
                   {"c", &c},
                   {"d", &d},
                   {"z", &z},
                   {"dt_bias", &bias}},
                  "state_batch_indices", slots_, out);
    };
    const Tensor want_out = call(want, x);
    Tensor* const with_heads[] = {&x, &dt, &z, &a, &b, &c, &d, &bias};
    std::vector<std::vector<int64_t>> before;
    for (Tensor* const t : with_heads) {
      before.push_back(t->meta.extents);
      auto& extents = t->meta.extents;
      extents.erase(extents.begin() + (extents[0] == kTokens ? 1 : 0));
    }
    const Tensor have_out = call(have, x);
    for (size_t i = 0; i < before.size(); ++i) {
      with_heads[i]->meta.extents = before[i];
    }
    EXPECT_TRUE(have_out == want_out);
    EXPECT_TRUE(have == want);
    EXPECT_FALSE(have == state);
  }
}

// conv_states[slots, channels, width - 1], dense, and with more inputs than a
// state has.
TEST_P(RecurrentFormsTest, WindowsMayLieSideBySideForEachChannel) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t width : {2, 3, 4}) {
      for (const int64_t more : {0, 2}) {
        // More than a block of channels, and a tail.
        constexpr int64_t kChannels = 549;
        const int64_t rows = width - 1 + more;
        Tensor x = Reals({kTokens, kChannels}).As(dtype);
        Tensor weight = Reals({kChannels, width});
        Tensor state = Reals({kSlots, rows, kChannels}).As(dtype);
        const auto dense = [&](const Tensor& from) {
          Tensor to = from.As({kSlots, kChannels, rows});
          for (int64_t i = 0; i < kSlots * rows * kChannels; ++i) {
            const int64_t c = i % kChannels, r = i / kChannels % rows;
            const int64_t slot = i / kChannels / rows;
            const auto at =
                static_cast<size_t>((slot * kChannels + c) * rows + r);
            to.floats[at] = from.floats[static_cast<size_t>(i)];
            to.halves[at] = from.halves[static_cast<size_t>(i)];
          }
          return to;
        };
        for (const char* provider : kProviders) {
          SCOPED_TRACE(testing::Message() << provider << " width " << width);
          Tensor want = state, have = dense(state);
          const auto call = [&](Tensor& s) {
            return Call(provider, "causal_conv1d_fn",
                        {{"x", &x}, {"weight", &weight}, {"conv_states", &s}},
                        "cache_indices", slots_, x);
          };
          const Tensor want_out = call(want);
          EXPECT_TRUE(call(have) == want_out);
          EXPECT_TRUE(have == dense(want));
          EXPECT_FALSE(have == dense(state));
        }
      }
    }
  }
}

// What lies beyond the sequences of query_start_loc is not read.
TEST_P(RecurrentFormsTest, SlotsMayBePadded) {
  Tensor x = Reals({kTokens, 9}), weight = Reals({9, 4});
  const Tensor state = Reals({kSlots, 3, 9});
  std::vector<int64_t> padded = slots_;
  padded.insert(padded.end(), {3, -1, 1000});
  for (const char* provider : kProviders) {
    SCOPED_TRACE(provider);
    Tensor want = state, have = state;
    const auto call = [&](Tensor& s, const std::vector<int64_t>& slots) {
      return Call(provider, "causal_conv1d_fn",
                  {{"x", &x}, {"weight", &weight}, {"conv_states", &s}},
                  "cache_indices", slots, x);
    };
    const Tensor want_out = call(want, slots_);
    EXPECT_TRUE(call(have, padded) == want_out);
    EXPECT_TRUE(have == want);
    EXPECT_FALSE(have == state);
  }
}

TEST_P(RecurrentFormsTest, RefusesFewerSlotsThanSequences) {
  Tensor x = Reals({kTokens, 9}), weight = Reals({9, 4});
  Tensor state = Reals({kSlots, 3, 9}), out = x;
  const MadeOp op = Make("simd", "causal_conv1d_fn",
                         {{"x", x.meta},
                          {"weight", weight.meta},
                          {"conv_states", state.meta},
                          {"cache_indices", TensorMeta{DType::kI64, {2}}},
                          {"query_start_loc", TensorMeta{DType::kI32, {4}}}});
  std::vector<AnyTensorView> tensors;
  ExpectRefusal(op.Bind({{"x", x.view()},
                         {"weight", weight.view()},
                         {"conv_states", state.view()},
                         {"cache_indices", DenseVector(slots_.data(), 2)},
                         {"query_start_loc", DenseVector(starts_.data(), 4)},
                         {"out", out.view()}},
                        tensors),
                "causal_conv1d_fn: query_start_loc is [4]; need [1] to [3], as "
                "cache_indices is [2]");
}

}  // namespace
}  // namespace quern
