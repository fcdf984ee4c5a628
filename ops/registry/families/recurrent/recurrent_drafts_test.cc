// Drafts by name: several states of a sequence, by the arguments of each
// operator, against a call for each token.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/recurrent/recurrent_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int64_t kTokens = 6, kSlots = 9;

struct Tensor {
  std::string name;
  std::vector<int64_t> extents;
  std::vector<float> floats = {};
  std::vector<int32_t> indices = {};  // of a tensor of i32

  TensorMeta meta() const {
    return {indices.empty() ? DType::kF32 : DType::kI32, extents};
  }
  AnyTensorView view() {
    AnyTensorView::Dims sizes{}, strides{};
    int64_t stride = 1;
    for (size_t d = extents.size(); d-- > 0;) {
      sizes[d] = extents[d];
      strides[d] = stride;
      stride = d == 0 ? stride : stride * extents[d];
    }
    void* const data = indices.empty() ? static_cast<void*>(floats.data())
                                       : static_cast<void*>(indices.data());
    return {meta().dtype, data, static_cast<int>(extents.size()), sizes,
            strides};
  }
};

Tensor Indices(std::string name, std::vector<int64_t> extents,
               std::vector<int32_t> values) {
  return {std::move(name), std::move(extents), {}, std::move(values)};
}

// An operator, what it calls its slots, its tensors, and which of them is the
// state and which is like out.
struct Case {
  const char *op, *slots, *destinations;
  std::vector<Tensor> tensors;
  size_t state, like_out;
};

class RecurrentDraftsTest : public OpFixture {
 protected:
  RecurrentDraftsTest() {
    EXPECT_EQ(RegisterRecurrentOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterDeltaRuleOps(registry_), absl::OkStatus());
  }
  Tensor Reals(std::string name, std::vector<int64_t> extents, double lo = -1,
               double hi = 1) {
    int64_t count = 1;
    for (const int64_t extent : extents) count *= extent;
    return {std::move(name), std::move(extents),
            UniformReals<float>(rng_, count, lo, hi)};
  }
  std::vector<Case> Cases() {
    const auto delta = [&](const char* op) {
      return Case{op,
                  "state_indices",
                  "destination_indices",
                  {Reals("q", {kTokens, 1, 5}), Reals("k", {kTokens, 1, 5}),
                   Reals("v", {kTokens, 2, 7}), Reals("g", {kTokens, 2}, -1, 0),
                   Reals("beta", {kTokens, 2}, 0, 1),
                   Reals("state", {kSlots, 2, 5, 7})},
                  5,
                  2};
    };
    const auto conv = [&](const char* op, const char* slots,
                          const char* states) {
      return Case{op,
                  slots,
                  "destination_indices",
                  {Reals("x", {kTokens, 11}), Reals("weight", {11, 4}),
                   Reals(states, {kSlots, 3, 11})},
                  2,
                  0};
    };
    return {
        delta("chunk_gated_delta_rule"), delta("gated_delta_rule_update"),
        conv("causal_conv1d_fn", "cache_indices", "conv_states"),
        conv("causal_conv1d_update", "conv_state_indices", "conv_state"),
        Case{"selective_state_update",
             "state_batch_indices",
             "dst_state_batch_indices",
             {Reals("x", {kTokens, 2, 5}), Reals("dt", {kTokens, 2}),
              Reals("a", {2}, -2, 0), Reals("b", {kTokens, 1, 7}),
              Reals("c", {kTokens, 1, 7}), Reals("state", {kSlots, 2, 5, 7})},
             5,
             0}};
  }
  // Calls the operator with more tensors. Returns out; the state is written.
  Tensor Call(const char* provider, Case& c, std::vector<Tensor> more) {
    Tensor out = c.tensors[c.like_out];
    out.name = "out";
    out.floats.assign(out.floats.size(), 77.0f);
    NamedArgs args;
    std::vector<NamedTensor> named = {{"out", out.view()}};
    for (std::vector<Tensor>* tensors : {&c.tensors, &more}) {
      for (Tensor& tensor : *tensors) {
        args.emplace_back(tensor.name, tensor.meta());
        named.push_back({tensor.name, tensor.view()});
      }
    }
    Run(Make(provider, c.op, args), named);
    return out;
  }
  // `more` has the bits of a call for each token, which goes from a slot to
  // another; tokens_of_no_sequence keep what they held.
  struct Step {
    int32_t token, from, to;
  };
  void ExpectSteps(Case c, const std::vector<Tensor>& more,
                   const std::vector<Step>& steps) {
    SCOPED_TRACE(c.op);
    Case want = c;
    const std::vector<float> before = c.tensors[c.state].floats;
    const size_t slot = before.size() / kSlots;
    Tensor want_out = c.tensors[c.like_out];
    want_out.floats.assign(want_out.floats.size(), 77.0f);
    const size_t row = want_out.floats.size() / kTokens;
    std::vector<float>& pool = want.tensors[c.state].floats;
    for (const Step& s : steps) {
      Case one = want;
      const Tensor out =
          Call("simd", one,
               {Indices(c.slots, {1}, {s.from}),
                Indices("query_start_loc", {2}, {s.token, s.token + 1})});
      for (size_t i = 0; i < row; ++i) {
        const size_t at = static_cast<size_t>(s.token) * row + i;
        want_out.floats[at] = out.floats[at];
      }
      for (size_t i = 0; i < slot; ++i) {
        pool[static_cast<size_t>(s.to) * slot + i] =
            one.tensors[c.state].floats[static_cast<size_t>(s.from) * slot + i];
      }
    }
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(provider);
      Case got = c;
      const Tensor out = Call(provider, got, more);
      const std::vector<float>& state = got.tensors[c.state].floats;
      if (std::string(provider) == "simd") {
        EXPECT_TRUE(AllBitsEqual(out.floats, want_out.floats));
        EXPECT_TRUE(AllBitsEqual(state, pool));
      } else {
        EXPECT_TRUE(AllClose(out.floats, want_out.floats, 1e-5));
        EXPECT_TRUE(AllClose(state, pool, 1e-5));
      }
    }
  }
  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(RecurrentDraftsTest);

// Two sequences, of three tokens and of two; the last token is padding.
TEST_P(RecurrentDraftsTest, GoOnFromTheLastAcceptedToken) {
  const Tensor starts = Indices("query_start_loc", {3}, {0, 3, 5});
  for (const Case& c : Cases()) {
    // A row of padding, as the indices of an engine have.
    ExpectSteps(c,
                {Indices(c.slots, {3, 3}, {4, 1, 6, 2, 3, 0, 99, 99, 99}),
                 starts, Indices("num_accepted_tokens", {3}, {3, 2, 99})},
                {{0, 6, 4}, {1, 4, 1}, {2, 1, 6}, {3, 3, 2}, {4, 2, 3}});
  }
}

TEST_P(RecurrentDraftsTest, LeaveTheirStatesWhereTheyAreTold) {
  const Tensor starts = Indices("query_start_loc", {3}, {0, 3, 5});
  for (const Case& c : Cases()) {
    const Tensor from = Indices(c.slots, {2}, {7, 7});
    ExpectSteps(
        c, {from, starts, Indices(c.destinations, {2, 3}, {4, 1, 6, 2, 3, 99})},
        {{0, 7, 4}, {1, 4, 1}, {2, 1, 6}, {3, 7, 2}, {4, 2, 3}});
    // The state after the last token alone; 8 is where the others pass.
    Case last = c;
    ExpectSteps(last, {from, starts, Indices(c.destinations, {2}, {4, 2})},
                {{0, 7, 4}, {1, 4, 4}, {2, 4, 4}, {3, 7, 2}, {4, 2, 2}});
  }
}

// Without starts, every token is a sequence.
TEST_P(RecurrentDraftsTest, GoFromASlotToAnotherInADecodeStep) {
  for (const Case& c : Cases()) {
    ExpectSteps(
        c,
        {Indices(c.slots, {6}, {0, 1, 2, 2, 4, 5}),
         Indices(c.destinations, {6}, {0, 6, 7, 8, 3, 5})},
        {{0, 0, 0}, {1, 1, 6}, {2, 2, 7}, {3, 2, 8}, {4, 4, 3}, {5, 5, 5}});
  }
}

// A slot of four rows more than a state: the states of five tokens.
TEST_P(RecurrentDraftsTest, ConvolutionsKeepWindowsInASlot) {
  const std::pair<const char*, const char*> ops[] = {
      {"causal_conv1d_fn", "conv_states"},
      {"causal_conv1d_update", "conv_state"}};
  for (const auto& [op, states] : ops) {
    SCOPED_TRACE(op);
    Case c = {op,
              std::string(op) == "causal_conv1d_fn" ? "cache_indices"
                                                    : "conv_state_indices",
              "destination_indices",
              {Reals("x", {kTokens, 11}), Reals("weight", {11, 4}),
               Reals(states, {kSlots, 7, 11})},
              2,
              0};
    const Tensor slot = Indices(c.slots, {1}, {3});
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(provider);
      Case drafts = c, decode = c;
      // Tokens 0 to 3, of which two are accepted, and then tokens 4 and 5.
      const auto call = [&](Case& on, std::vector<int32_t> range,
                            bool windows) {
        std::vector<Tensor> more = {
            slot, Indices("query_start_loc", {2}, {range[0], range[1]})};
        if (windows) {
          more.push_back(Indices("num_accepted_tokens", {1}, {range[2]}));
        }
        return Call(provider, on, more);
      };
      const Tensor first = call(drafts, {0, 4, 1}, true);
      const Tensor second = call(drafts, {4, 6, 2}, true);
      const Tensor begin = call(decode, {0, 2}, false);
      const Tensor end = call(decode, {4, 6}, false);
      for (size_t i = 0; i < 11; ++i) {
        EXPECT_EQ(first.floats[11 + i], begin.floats[11 + i]);
        EXPECT_EQ(second.floats[4 * 11 + i], end.floats[4 * 11 + i]);
        EXPECT_EQ(second.floats[5 * 11 + i], end.floats[5 * 11 + i]);
        // The second window of the slot.
        EXPECT_EQ(drafts.tensors[2].floats[(3 * 7 + 3) * 11 + i],
                  decode.tensors[2].floats[(3 * 7 + 2) * 11 + i]);
      }
    }
  }
}

TEST_P(RecurrentDraftsTest, RefusesWhatIsNoRowOfSlots) {
  Case c = Cases()[1];
  struct Refused {
    std::vector<Tensor> more;
    std::string words;
  };
  const Tensor starts = Indices("query_start_loc", {3}, {0, 3, 5});
  const Tensor slots = Indices("state_indices", {2, 3}, {0, 1, 2, 3, 4, 5});
  const Refused cases[] = {
      {{slots, starts, Indices("num_accepted_tokens", {2}, {1, 4})},
       "num_accepted_tokens[1]=4; need 0 <= accepted <= 3"},
      {{slots, starts, Indices("num_accepted_tokens", {1}, {1})},
       "num_accepted_tokens has 1 rows; need 2"},
      {{slots, starts, Indices("destination_indices", {1, 3}, {0, 1, 2})},
       "destination_indices has 1 rows; need 2"},
      {{slots, starts, Indices("destination_indices", {2, 2}, {0, 1, 2, 3})},
       "sequence 0 has 3 tokens; destination_indices has 2 slots for it"},
      {{Indices("state_indices", {2, 3}, {0, 1, 2, 3, 1, 5}), starts},
       "state_indices: slot 1 is given twice"},
      {{Indices("state_indices", {2, 3}, {0, 1, 9, 3, 4, 5}), starts},
       "state_indices: token 2 of sequence 0 has slot 9"},
      {{Indices("state_indices", {2}, {0, 1}), starts,
        Indices("num_accepted_tokens", {2}, {1, 2})},
       "num_accepted_tokens[1]=2; need 0 <= accepted <= 1"},
      // More numbers than int64_t counts, which reach every other tensor.
      {{Indices("state_indices", {int64_t{1} << 62, 3}, {0}),
        Indices("query_start_loc", {2}, {0, 5})},
       "state overlaps state_indices"},
      {{Indices("state_indices", {int64_t{1} << 62, 3}, {0}),
        Indices("query_start_loc", {(int64_t{1} << 62) + 1}, {0})},
       "state overlaps state_indices"},
      {{Indices("state_indices", {1}, {0}),
        Indices("query_start_loc", {2}, {0, 5}),
        Indices("destination_indices", {int64_t{1} << 62, 3}, {0})},
       "state overlaps destination_indices"},
  };
  for (const Refused& refused : cases) {
    SCOPED_TRACE(refused.words);
    std::vector<Tensor> more = refused.more;
    Tensor out = c.tensors[c.like_out];
    NamedArgs args;
    std::vector<NamedTensor> named = {{"out", out.view()}};
    for (std::vector<Tensor>* tensors : {&c.tensors, &more}) {
      for (Tensor& tensor : *tensors) {
        args.emplace_back(tensor.name, tensor.meta());
        named.push_back({tensor.name, tensor.view()});
      }
    }
    const MadeOp made = Make("simd", c.op, args);
    std::vector<AnyTensorView> tensors;
    const absl::Status bound = made.Bind(named, tensors);
    ExpectRefusal(bound.ok() ? made.op->CheckArgs(tensors) : bound,
                  refused.words);
  }
}

TEST(RecurrentDraftsRefusalTest, RefusesOtherRanks) {
  OpRegistry registry;
  ASSERT_EQ(RegisterDeltaRuleOps(registry), absl::OkStatus());
  NamedArgs args =
      registry.Find("gated_delta_rule_update")->example(DType::kF32);
  for (auto& [name, value] : args) {
    if (name == "state_indices") value = TensorMeta{DType::kI32, {4, 1, 1}};
  }
  ExpectRefusal(registry.InferShapes("gated_delta_rule_update", args).status(),
                "state_indices has rank 3; need 1");
}

}  // namespace
}  // namespace quern
