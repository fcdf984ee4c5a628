#ifndef QUERN_OPS_MIXER_MIXER_TESTUTIL_H_
#define QUERN_OPS_MIXER_MIXER_TESTUTIL_H_

// What the tests of all layers here share: the common tensors between guard
// pages, batches, and the verdict.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/judge_testutil.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/reference_mixers_testutil.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/workers.h"

namespace quern {

// Weights [n, k] of a product: packed, and as the oracle multiplies them.
struct TestWeights {
  TestWeights(DType dtype, int64_t n, int64_t k, double size, Rng& rng) {
    const KnownWeights known = FloatWeights(
        dtype, n, k, ToDoubles(UniformReals(rng, n * k, -size, size)));
    values = known.codes;
    InlineExecutor executor;
    packed = known.Pack(executor);
  }
  Doubles values;
  LinearWeights packed;
};

// A tensor of f32 or another dtype, dense, as a view of any shape.
class TestTensor {
 public:
  TestTensor(DType dtype, const std::vector<int64_t>& extents, double lo,
             double hi, Rng& rng)
      : extents_(extents), matrix_(Make(dtype, extents, lo, hi, rng)) {}

  AnyTensorView view() const {
    const Shape shape = ShapeOf(extents_);
    const AnyTensorView v = matrix_.view();
    return AnyTensorView(v.dtype(), v.mutable_data(), shape.rank, shape.extents,
                         shape.strides);
  }
  AnyTensorView const_view() const {
    const Shape shape = ShapeOf(extents_);
    const AnyTensorView v = matrix_.view();
    return AnyTensorView(v.dtype(), v.data(), shape.rank, shape.extents,
                         shape.strides);
  }
  Doubles doubles() const { return matrix_.doubles(); }
  std::vector<uint32_t> bits() const { return matrix_.bits(); }

 private:
  struct Shape {
    int rank;
    AnyTensorView::Dims extents, strides;
  };
  static Shape ShapeOf(const std::vector<int64_t>& extents) {
    Shape shape = {static_cast<int>(extents.size()), {}, {}};
    int64_t stride = 1;
    for (size_t d = extents.size(); d-- > 0;) {
      shape.extents[d] = extents[d];
      shape.strides[d] = stride;
      stride *= extents[d];
    }
    return shape;
  }
  static AnyMatrix Make(DType dtype, const std::vector<int64_t>& extents,
                        double lo, double hi, Rng& rng) {
    int64_t count = 1;
    for (const int64_t extent : extents) count *= extent;
    return AnyMatrix(dtype, ToDoubles(UniformReals(rng, count, lo, hi)), 1,
                     count, count);
  }
  std::vector<int64_t> extents_;
  AnyMatrix matrix_;
};

// A batch of prompts and decode steps: padding, five tokens that go on, none,
// one in no slot, one of decode, three that begin, padding.
inline Sequences MixedBatch() {
  return {{3, 0, -1, 1, 4}, {1, 6, 6, 7, 8, 11}, {1, 1, 1, 1, 0}};
}
inline constexpr int64_t kMixedTokens = 12;
// A batch whose prompts go by chunks where the layer's recurrence does: 40
// tokens that go on, a decode step, 17 in no slot, 16 that begin, 15, which are
// too few, 33, and padding.
inline Sequences PromptBatch() {
  return {
      {3, 0, -1, 1, 4, 2}, {1, 41, 42, 59, 75, 90, 123}, {1, 1, 1, 0, 1, 1}};
}
inline constexpr int64_t kPromptTokens = 124;
inline constexpr int64_t kTestSlots = 5;

// A layer, its pools and its tokens, and the oracle of all but Sequence, which
// is the layer's own.
class MixerLayer {
 public:
  struct Shape {
    int64_t hidden, conv_channels, width;
    DType dtype, weight_dtype;
    // Extents of a slot's state; empty for layers that have none.
    std::vector<int64_t> state;
    DType state_dtype;
  };
  struct Pools {
    Doubles windows, states;
  };

  MixerLayer(const Shape& shape, int64_t tokens, bool biased, Rng& rng)
      : shape_(shape),
        biased_(biased),
        x_(shape.dtype,
           ToDoubles(UniformReals(rng, tokens * shape.hidden, -2, 2)), tokens,
           shape.hidden, shape.hidden + 3),
        conv_weight_(shape.weight_dtype, {shape.conv_channels, shape.width}, -1,
                     1, rng),
        conv_bias_(shape.weight_dtype, {shape.conv_channels}, -1, 1, rng),
        windows_(shape.dtype, {kTestSlots, shape.width, shape.conv_channels},
                 -2, 2, rng),
        states_(shape.state_dtype, Slots(shape.state), -1, 1, rng),
        out_(shape.dtype, tokens, shape.hidden, shape.hidden + 3) {}
  virtual ~MixerLayer() = default;

  // The outputs of the tokens that a call has of a sequence. The window and the
  // state, which are exact at first, move on. chunk: tokens that the recurrence
  // takes at a time.
  virtual BoundedRows Sequence(const BoundedRows& x, int64_t chunk,
                               BoundedWindow& window,
                               BoundedRow& state) const = 0;
  // The chunk of a call with so many tokens of a sequence.
  virtual int64_t ChunkOf(int64_t /*tokens*/) const { return 1; }

  const Shape& shape() const { return shape_; }
  Pools pools() const { return {windows_.doubles(), states_.doubles()}; }
  const AnyMatrix& out() const { return out_; }
  const TestTensor& windows() const { return windows_; }
  const TestTensor& states() const { return states_; }

  MixerArgs CommonArgs(const Sequences& sequences) const {
    MixerArgs args;
    args.x = x_.const_view();
    args.conv_weight = conv_weight_.const_view();
    if (biased_) args.conv_bias = conv_bias_.const_view();
    args.conv_state = windows_.view();
    args.batch = sequences.batch();
    args.out = out_.view();
    return args;
  }

  // Judges out and the pools: by bounds, and in bf16 and f16, where these are
  // wide, by samples of rounding, too. before: the pools that the call found.
  // kTokens: every token had a call of its own.
  enum class Calls { kOne, kTokens };
  void ExpectResults(const Sequences& sequences, const Pools& before,
                     Calls calls = Calls::kOne) const {
    const int64_t hidden = shape_.hidden, n = shape_.conv_channels;
    const auto size = static_cast<int64_t>(before.states.size()) / kTestSlots;
    const Doubles in = x_.doubles();
    BoundedRow windows = Exact(before.windows), states = Exact(before.states);
    // Tokens of no sequence stay poison.
    BoundedRow want(in.size(),
                    Bounded{std::numeric_limits<double>::quiet_NaN(), 0});
    const SequenceBatch batch = sequences.batch();
    for (int64_t s = 0; s < batch.sequences(); ++s) {
      const int64_t slot = batch.state_indices[s];
      if (batch.begin(s) == batch.end(s)) continue;
      if (slot < 0) {
        // All layers make zeros of zeros.
        std::fill(want.begin() + batch.begin(s) * hidden,
                  want.begin() + batch.end(s) * hidden, Bounded{});
        continue;
      }
      const auto row = [&](int64_t i) { return (slot * shape_.width + i) * n; };
      BoundedWindow window;
      for (int64_t i = 0; i + 1 < shape_.width; ++i) {
        window.push_back(Part(windows, row(i), n));
      }
      BoundedRow state = Part(states, slot * size, size);
      if (batch.fresh(s)) {
        for (BoundedRow& old : window) old.assign(old.size(), Bounded{});
        state.assign(state.size(), Bounded{});
      }
      BoundedRows x;
      for (int64_t t = batch.begin(s); t < batch.end(s); ++t) {
        x.push_back(Exact(
            Doubles(in.begin() + t * hidden, in.begin() + (t + 1) * hidden)));
      }
      const int64_t tokens = batch.end(s) - batch.begin(s);
      int64_t row_of_out = batch.begin(s) * hidden;
      for (const BoundedRow& y : Sequence(
               x, calls == Calls::kOne ? ChunkOf(tokens) : 1, window, state)) {
        std::copy(y.begin(), y.end(), want.begin() + row_of_out);
        row_of_out += hidden;
      }
      for (int64_t i = 0; i + 1 < shape_.width; ++i) {
        const BoundedRow& kept = window[static_cast<size_t>(i)];
        std::copy(kept.begin(), kept.end(), windows.begin() + row(i));
      }
      std::copy(state.begin(), state.end(), states.begin() + slot * size);
    }
    EXPECT_TRUE(WithinBounds(out_.doubles(), want));
    EXPECT_TRUE(WithinBounds(windows_.doubles(), windows));
    const bool rounds = shape_.dtype != DType::kF32;
    if (rounds) {
      ExpectRoundings(out_.doubles(), want, hidden);
      ExpectRoundings(windows_.doubles(), windows, n);
    }
    if (shape_.state.empty()) return;
    EXPECT_TRUE(WithinBounds(states_.doubles(), states));
    if (rounds) {
      ExpectRoundings(states_.doubles(), states, shape_.state.back());
    }
  }

 protected:
  // The numbers of this layer, for the oracle.
  ReferenceMixer Numbers(const TestWeights& in_proj,
                         const TestWeights& out_proj) const {
    return {in_proj.values, out_proj.values, conv_weight_.doubles(),
            biased_ ? conv_bias_.doubles() : Doubles()};
  }
  static BoundedRow Exact(const Doubles& values) {
    BoundedRow row;
    for (const double v : values) row.push_back({v, 0});
    return row;
  }

 private:
  static std::vector<int64_t> Slots(std::vector<int64_t> extents) {
    extents.insert(extents.begin(), kTestSlots);
    return extents;
  }

  Shape shape_;
  bool biased_;
  AnyMatrix x_;
  TestTensor conv_weight_, conv_bias_, windows_, states_;
  AnyMatrix out_;
};

// Runs plans of one layer on its arguments, on a workspace of exactly as many
// bytes as they ask for, all NaN.
class MixerFixture : public IsaTest {
 protected:
  template <typename Plan, typename Args>
  void Run(const Plan& plan, const Args& args, int64_t tokens,
           Executor& executor) {
    const auto bytes = plan.WorkspaceBytes(tokens, executor.num_workers());
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    GuardBuffer<float> memory(*bytes / 4);
    const Workspace workspace(memory.data(), static_cast<size_t>(*bytes));
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
  }

  // A mixed batch, a decode step, and the same sequence in calls of 1, 3, 0 and
  // 5 tokens as in one call of 9. make(tokens, rng) returns a layer as a
  // unique_ptr.
  template <typename Plan, typename Make>
  void ExpectOracle(const Plan& plan, const Make& make) {
    TestRng rng;
    InlineExecutor executor;
    const auto mixed = make(kMixedTokens, rng);
    const MixerLayer::Pools before = mixed->pools();
    Run(plan, mixed->args(MixedBatch()), kMixedTokens, executor);
    mixed->ExpectResults(MixedBatch(), before);

    const auto decode = make(4, rng);
    const MixerLayer::Pools found = decode->pools();
    const Sequences steps = {{4, 0, -1, 2}, {}, {}};
    Run(plan, decode->args(steps), 4, executor);
    decode->ExpectResults(steps, found);

    const auto cut = make(9, rng);
    const MixerLayer::Pools start = cut->pools();
    uint8_t begun = 0;
    constexpr int kCuts[] = {0, 1, 4, 4, 9};
    for (int i = 0; i < 4; ++i) {
      Run(plan, cut->args({{2}, {kCuts[i], kCuts[i + 1]}, {begun}}), 9,
          executor);
      begun = 1;
    }
    cut->ExpectResults({{2}, {0, 9}, {0}}, start);
  }

  // Prompts by chunks beside decode, on several workers; and a prompt of 40
  // tokens in one call and in 40. All are within the bounds of the oracle.
  template <typename Plan, typename Make>
  void ExpectPrompts(const Plan& plan, const Make& make) {
    TestRng rng;
    ManyWorkers many(5);
    const auto mixed = make(kPromptTokens, rng);
    const MixerLayer::Pools before = mixed->pools();
    Run(plan, mixed->args(PromptBatch()), kPromptTokens, many);
    mixed->ExpectResults(PromptBatch(), before);

    constexpr int kLength = 40;
    const Sequences all = {{2}, {0, kLength}, {0}};
    TestRng same(3), again(3);
    InlineExecutor executor;
    const auto whole = make(kLength, same);
    const MixerLayer::Pools found = whole->pools();
    Run(plan, whole->args(all), kLength, executor);
    whole->ExpectResults(all, found);
    const auto steps = make(kLength, again);
    for (int t = 0; t < kLength; ++t) {
      const auto begun = static_cast<uint8_t>(t > 0);
      Run(plan, steps->args({{2}, {t, t + 1}, {begun}}), kLength, executor);
    }
    steps->ExpectResults(all, found, MixerLayer::Calls::kTokens);
  }

  // The same bits on any number of workers.
  template <typename Plan, typename Make>
  void ExpectSameBitsOnWorkers(const Plan& plan, const Make& make) {
    ExpectSameBits(plan, make, MixedBatch(), kMixedTokens);
    ExpectSameBits(plan, make, PromptBatch(), kPromptTokens);
  }

  // Sequences of no tokens, and no sequences: nothing is written.
  template <typename Plan, typename Make>
  void ExpectNothingWithoutTokens(const Plan& plan, const Make& make) {
    TestRng rng;
    InlineExecutor executor;
    const auto layer = make(2, rng);
    const auto windows = layer->windows().bits();
    const auto states = layer->states().bits();
    Run(plan, layer->args({{2, 1}, {1, 1, 1}, {0, 1}}), 2, executor);
    Run(plan, layer->args({{}, {0}, {}}), 2, executor);
    EXPECT_TRUE(AllBitsEqual(layer->windows().bits(), windows));
    EXPECT_TRUE(AllBitsEqual(layer->states().bits(), states));
    for (const double y : layer->out().doubles()) EXPECT_TRUE(std::isnan(y));
  }

 private:
  template <typename Plan, typename Make>
  void ExpectSameBits(const Plan& plan, const Make& make,
                      const Sequences& batch, int64_t tokens) {
    InlineExecutor executor;
    TestRng same(7);
    const auto alone = make(tokens, same);
    Run(plan, alone->args(batch), tokens, executor);
    const auto threads = Workers(3);
    ManyWorkers many(17);
    for (Executor* workers : {static_cast<Executor*>(threads.get()),
                              static_cast<Executor*>(&many)}) {
      TestRng again(7);
      const auto layer = make(tokens, again);
      Run(plan, layer->args(batch), tokens, *workers);
      EXPECT_TRUE(AllBitsEqual(layer->out().bits(), alone->out().bits()));
      EXPECT_TRUE(
          AllBitsEqual(layer->windows().bits(), alone->windows().bits()));
      EXPECT_TRUE(AllBitsEqual(layer->states().bits(), alone->states().bits()));
    }
  }
};

}  // namespace quern

#endif  // QUERN_OPS_MIXER_MIXER_TESTUTIL_H_
