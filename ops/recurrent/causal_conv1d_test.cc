#include "quern/ops/recurrent/causal_conv1d.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/recurrent/testing/recurrent_fixture_testutil.h"
#include "quern/ops/recurrent/testing/reference_causal_conv1d_testutil.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Values {
  Doubles x, weight, bias, state;  // no bias: empty
};

// The arguments of one call, between guard pages and with poison between rows.
class ConvData {
 public:
  // The state has `rows` rows a slot, width - 1 or more.
  ConvData(const CausalConv1dSpec& spec, int64_t tokens, int64_t slots,
           const Values& values, int64_t rows, int64_t pad = 3)
      : spec_(spec),
        tokens_(tokens),
        slots_(slots),
        rows_(rows),
        biased_(!values.bias.empty()),
        x_(spec.dtype, values.x, tokens, spec.channels, spec.channels + pad),
        weight_(spec.weight_dtype, values.weight, spec.channels, spec.width,
                spec.width + (pad > 3 ? pad : 0)),
        bias_(
            spec.weight_dtype,
            biased_ ? values.bias : Doubles(static_cast<size_t>(spec.channels)),
            1, spec.channels, spec.channels),
        state_(spec.dtype, values.state, slots * rows, spec.channels,
               spec.channels + pad),
        out_(spec.dtype, tokens, spec.channels, spec.channels + pad) {}

  static Values Random(const CausalConv1dSpec& spec, int64_t tokens,
                       int64_t slots, int64_t rows, Rng& rng) {
    const auto reals = [&](int64_t n) {
      return ToDoubles(UniformReals(rng, n, -3, 3));
    };
    return {reals(tokens * spec.channels), reals(spec.channels * spec.width),
            reals(spec.channels), reals(slots * rows * spec.channels)};
  }

  CausalConv1dArgs args(const Sequences& sequences) const {
    CausalConv1dArgs a;
    a.x = x_.view();
    a.weight = weight_.const_view();
    if (biased_) a.bias = bias_.vector();
    const AnyTensorView rows = state_.view();
    a.state = AnyTensorView(spec_.dtype, rows.mutable_data(), 3,
                            {slots_, rows_, spec_.channels},
                            {rows_ * rows.stride(0), rows.stride(0), 1});
    a.batch = sequences.batch();
    a.out = out_.view();
    return a;
  }
  const AnyMatrix& x() const { return x_; }
  const AnyMatrix& state() const { return state_; }
  const AnyMatrix& out() const { return out_; }

  // Judges out and the state. `before`: the state that the call found.
  void ExpectResults(const Sequences& sequences, const Doubles& before) const {
    const auto channels = static_cast<size_t>(spec_.channels);
    Doubles state = before;
    Doubles out(static_cast<size_t>(tokens_) * channels, kNaN);
    Doubles bounds(out.size(), 0.0);
    const SequenceBatch batch = sequences.batch();
    const Values in = {x_.doubles(), weight_.doubles(), bias_.doubles(), {}};
    for (int64_t s = 0; s < batch.sequences(); ++s) {
      for (size_t c = 0; c < channels; ++c) {
        ExpectChannel(batch, s, c, in, state, out, bounds);
      }
    }
    EXPECT_TRUE(AllEqual(state_.doubles(), state));
    EXPECT_TRUE(AllWithin(out_.doubles(), out, [&](double y, int64_t i) {
      const double e = bounds[static_cast<size_t>(i)];
      // Where a NaN is expected there is no distance.
      return std::isnan(y) ? 0.0
                           : e + ResultBound(spec_.dtype, std::abs(y) + e, 0);
    }));
  }

 private:
  void ExpectChannel(const SequenceBatch& batch, int64_t s, size_t c,
                     const Values& in, Doubles& state, Doubles& out,
                     Doubles& bounds) const {
    const auto channels = static_cast<size_t>(spec_.channels);
    const auto width = static_cast<size_t>(spec_.width);
    const auto begin = static_cast<size_t>(batch.begin(s));
    const auto end = static_cast<size_t>(batch.end(s));
    if (batch.state_indices[s] == spec_.null_slot) {
      for (size_t t = begin; t < end; ++t) out[t * channels + c] = 0;
      return;
    }
    if (begin == end) return;
    const auto slot = static_cast<size_t>(batch.state_indices[s] * rows_);
    Doubles inputs;  // the history and the tokens
    for (size_t i = 0; i + 1 < width; ++i) {
      inputs.push_back(batch.fresh(s) ? 0 : state[(slot + i) * channels + c]);
    }
    for (size_t t = begin; t < end; ++t) {
      inputs.push_back(in.x[t * channels + c]);
    }
    const Doubles weights(
        in.weight.begin() + static_cast<int64_t>(c * width),
        in.weight.begin() + static_cast<int64_t>((c + 1) * width));
    for (size_t t = begin; t < end; ++t) {
      const auto first = inputs.begin() + static_cast<int64_t>(t - begin);
      const ConvReference y = ReferenceConv(
          weights, in.bias[c], Doubles(first, first + spec_.width),
          spec_.activation == ConvActivation::kSilu);
      out[t * channels + c] = y.y;
      bounds[t * channels + c] = y.bound;
    }
    for (size_t i = 0; i + 1 < width; ++i) {
      state[(slot + i) * channels + c] = inputs[inputs.size() - width + 1 + i];
    }
  }

  CausalConv1dSpec spec_;
  int64_t tokens_, slots_, rows_;
  bool biased_;
  AnyMatrix x_, weight_, bias_, state_, out_;
};

CausalConv1dSpec Spec(int64_t channels, int64_t width,
                      DType dtype = DType::kF32) {
  CausalConv1dSpec spec;
  spec.channels = channels;
  spec.width = width;
  spec.dtype = dtype;
  return spec;
}

class CausalConv1dTest
    : public RecurrentFixture<CausalConv1dPlan, /*kWorkspace=*/false> {
 protected:
  using RecurrentFixture::Run;
  void Run(const CausalConv1dPlan& plan, const ConvData& data,
           const Sequences& sequences, int workers) {
    ManyWorkers executor(workers);
    Run(plan, data, sequences, executor);
  }
};
QUERN_INSTANTIATE_ISA_TEST(CausalConv1dTest);

// Integers, no activation: every remainder of a vector and of a group of
// tokens.
TEST_P(CausalConv1dTest, IsExactOnSmallIntegers) {
  TestRng rng;
  const int64_t channels[] = {1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 513};
  for (const DType dtype : kFloats) {
    for (const int64_t width : {2, 3, 4}) {
      for (const int64_t n : channels) {
        for (const int32_t tokens : {1, 2, 3, 7, 8, 9, 17}) {
          if (n > 65 && tokens > 3) continue;
          SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << width
                                          << " " << n << " " << tokens);
          CausalConv1dSpec spec = Spec(n, width, dtype);
          spec.activation = ConvActivation::kNone;
          spec.weight_dtype = dtype;
          const auto integers = [&](int64_t count) {
            return ToDoubles(SmallIntegers(rng, count, -4, 4));
          };
          const ConvData data(spec, tokens, 2,
                              {integers(tokens * n), integers(n * width),
                               integers(n), integers(2 * (width - 1) * n)},
                              width - 1);
          const Doubles before = data.state().doubles();
          const Sequences one = {{1}, {0, tokens}, {}};
          Run(Plan(spec), data, one, tokens);
          data.ExpectResults(one, before);
          // The bound is below half a unit of an integer that the dtype has.
          for (const double y : data.out().doubles()) {
            EXPECT_EQ(y, std::round(y));
          }
        }
      }
    }
  }
}

TEST_P(CausalConv1dTest, AgreesWithTheReference) {
  TestRng rng;
  const Sequences cases[] = {
      {{4, 1, 0}, {}, {}},
      {{4, -1, 0}, {}, {1, 0, 0}},
      {{2, 5, -1, 0, 3, 4}, {1, 8, 8, 10, 11, 13, 30}, {1, 1, 1, 0, 1, 0}}};
  for (const DType dtype : kFloats) {
    for (const DType weight : kFloats) {
      for (const int64_t width : {2, 3, 4}) {
        for (const Sequences& sequences : cases) {
          CausalConv1dSpec spec = Spec(70, width, dtype);
          spec.weight_dtype = weight;
          const int64_t tokens = sequences.starts.empty() ? 3 : 31;
          // More rows than the history needs, and weights that are columns of
          // something wider.
          const int64_t rows = width + 1;
          auto values = ConvData::Random(spec, tokens, 6, rows, rng);
          if (width == 3) values.bias.clear();
          const ConvData data(spec, tokens, 6, values, rows, width + 1);
          const Doubles before = data.state().doubles();
          Run(Plan(spec), data, sequences);
          data.ExpectResults(sequences, before);
        }
      }
    }
  }
}

TEST_P(CausalConv1dTest, CutsBatchesAndWorkersChangeNoBit) {
  TestRng rng;
  constexpr int64_t kTokens = 23, kChannels = 700;
  for (const DType dtype : kFloats) {
    const CausalConv1dSpec spec = Spec(kChannels, 4, dtype);
    const auto values = ConvData::Random(spec, kTokens, 2, 3, rng);
    const CausalConv1dPlan plan = Plan(spec);
    const ConvData whole(spec, kTokens, 2, values, 3);
    Run(plan, whole, {{0, 1}, {0, 14, 23}, {}});
    const std::vector<std::vector<Sequences>> ways = {
        {{{1}, {14, 23}, {}}, {{0}, {0, 14}, {}}},
        {{{0, 1}, {0, 1, 1}, {}},
         {{0}, {1, 3}, {}},
         {{0, 1}, {3, 14, 16}, {}},
         {{1}, {16, 23}, {}}},
    };
    // Real threads write the same bits.
    const ConvData threaded(spec, kTokens, 2, values, 3);
    const Sequences both = {{0, 1}, {0, 14, 23}, {}};
    const auto pool = Workers(3);
    Execute(plan, threaded.args(both), *pool);
    EXPECT_EQ(threaded.out().bits(), whole.out().bits());
    EXPECT_EQ(threaded.state().bits(), whole.state().bits());
    for (const int workers : {1, 3, 64}) {
      for (const auto& calls : ways) {
        const ConvData cut(spec, kTokens, 2, values, 3);
        for (const Sequences& call : calls) Run(plan, cut, call, workers);
        EXPECT_EQ(cut.out().bits(), whole.out().bits());
        EXPECT_EQ(cut.state().bits(), whole.state().bits());
      }
    }
    // x is out.
    const ConvData in_place(spec, kTokens, 2, values, 3);
    const Sequences two = {{0, 1}, {0, 14, 23}, {}};
    CausalConv1dArgs args = in_place.args(two);
    args.out = args.x;
    InlineExecutor executor;
    Execute(plan, args, executor);
    EXPECT_EQ(in_place.x().bits(), whole.out().bits());
    EXPECT_EQ(in_place.state().bits(), whole.state().bits());
  }
}

TEST_P(CausalConv1dTest, KeepsNaNWhereItBelongs) {
  TestRng rng;
  const CausalConv1dSpec spec = Spec(5, 3);
  auto values = ConvData::Random(spec, 8, 3, 2, rng);
  // Token 0 is padding; slot 0 is of nobody, slot 2 of a fresh sequence; token
  // 3 has a NaN in channel 1.
  for (size_t c = 0; c < 5; ++c) values.x[c] = kNaN;
  for (size_t i = 0; i < 10; ++i) {
    values.state[i] = values.state[20 + i] = kNaN;
  }
  values.x[3 * 5 + 1] = kNaN;
  const ConvData data(spec, 8, 3, values, 2);
  const Doubles before = data.state().doubles();
  const Sequences sequences = {{2, 1}, {1, 3, 8}, {0, 1}};
  Run(Plan(spec), data, sequences);
  data.ExpectResults(sequences, before);
  const Doubles out = data.out().doubles();
  for (size_t t = 1; t < 8; ++t) {
    for (size_t c = 0; c < 5; ++c) {
      EXPECT_EQ(std::isnan(out[t * 5 + c]), c == 1 && t >= 3 && t < 6);
    }
  }
}

TEST_P(CausalConv1dTest, TakesNoTokensAndNoSequences) {
  const CausalConv1dSpec spec = Spec(2, 2);
  const ConvData none(spec, 0, 1, {{}, {1, 1, 1, 1}, {}, {5, 6}}, 1);
  Run(Plan(spec), none, {});
  Run(Plan(spec), none, {{0}, {0, 0}, {0}});
  EXPECT_EQ(none.state().doubles(), (Doubles{5, 6}));
}

TEST(CausalConv1dPlanTest, Refuses) {
  struct SpecCase {
    void (*spoil)(CausalConv1dSpec&);
    absl::StatusCode code;
    std::string words;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kMissing = absl::StatusCode::kUnimplemented;
  const SpecCase specs[] = {
      {[](CausalConv1dSpec& s) { s.channels = 0; }, kInvalid,
       "causal_conv1d: channels=0; need 1 <= channels"},
      {[](CausalConv1dSpec& s) { s.width = 1; }, kInvalid,
       "width=1; need 2 <= width <= 4"},
      {[](CausalConv1dSpec& s) { s.width = 5; }, kInvalid, "width=5; need"},
      {[](CausalConv1dSpec& s) { s.dtype = DType::kI8; }, kMissing,
       "dtype is i8; need f32 or bf16 or f16"},
      {[](CausalConv1dSpec& s) { s.weight_dtype = DType::kI8; }, kMissing,
       "weight_dtype is i8; need f32 or bf16 or f16"},
  };
  for (const SpecCase& c : specs) {
    CausalConv1dSpec spec = Spec(6, 3);
    c.spoil(spec);
    ExpectRefusal(CausalConv1dPlan::Create(spec).status(), c.code, c.words);
  }

  TestRng rng;
  const CausalConv1dSpec spec = Spec(6, 3);
  const auto plan = CausalConv1dPlan::Create(spec);
  const ConvData data(spec, 4, 5, ConvData::Random(spec, 4, 5, 2, rng), 2);
  struct Case {
    void (*spoil)(CausalConv1dArgs&);
    std::string words;
  };
  const Case cases[] = {
      {[](CausalConv1dArgs& a) { a.x = a.state; }, "causal_conv1d: x"},
      {[](CausalConv1dArgs& a) { a.weight = a.x; }, "causal_conv1d: weight"},
      {[](CausalConv1dArgs& a) { a.bias = a.x; }, "causal_conv1d: bias"},
      {[](CausalConv1dArgs& a) { a.state = a.x; }, "causal_conv1d: state"},
      {[](CausalConv1dArgs& a) {
         a.state = AnyTensorView(a.state.dtype(), a.state.mutable_data(), 3,
                                 {5, 1, 6}, {18, 9, 1});
       },
       "rows of state=1; need rows of state >= 2"},
      {[](CausalConv1dArgs& a) { a.out = a.weight; }, "causal_conv1d: out"},
      {[](CausalConv1dArgs& a) {
         a.out = AnyTensorView(a.x.dtype(),
                               static_cast<float*>(a.x.mutable_data()) + 1, 2,
                               {4, 6}, {9, 1});
       },
       "out overlaps x"},
      {[](CausalConv1dArgs& a) {
         static const int64_t twice[] = {0, 3, 1, 3};
         a.batch.state_indices = DenseVector(twice, 4);
       },
       "state_indices[3]=3 is given twice"},
      {[](CausalConv1dArgs& a) {
         static const int64_t beyond[] = {0, 3, 1, 5};
         a.batch.state_indices = DenseVector(beyond, 4);
       },
       "state_indices[3]=5; need 0 <= index < 5"},
  };
  for (const Case& c : cases) {
    CausalConv1dArgs args = data.args({{0, 1, 2, 3}, {}, {}});
    // The indices of that temporary are gone.
    static const int64_t indices[] = {0, 1, 2, 3};
    args.batch.state_indices = DenseVector(indices, 4);
    EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
    c.spoil(args);
    ExpectRefusal(plan->CheckArgs(args), c.words);
  }
}

}  // namespace
}  // namespace quern
