#ifndef QUERN_OPS_MIXER_MIXER_TESTUTIL_H_
#define QUERN_OPS_MIXER_MIXER_TESTUTIL_H_

// What the tests of all layers here share: the common tensors between guard
// pages, the oracle's convolution, batches, and the verdict.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/recurrent/sequences_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {

// Weights [n, k] of a product: packed, and as the oracle multiplies them.
struct TestWeights {
  TestWeights(DType dtype, int64_t n, int64_t k, double size, Rng& rng) {
    const AnyMatrix matrix(
        dtype, ToDoubles(UniformReals(rng, n * k, -size, size)), n, k, k);
    values = matrix.doubles();
    LinearWeightsSpec spec;
    spec.n = n;
    spec.k = k;
    spec.format = FormatOfFloats(dtype);
    LinearSource source;
    source.codes = matrix.const_view();
    InlineExecutor executor;
    const auto weights = LinearWeights::Pack(spec, {source}, executor);
    EXPECT_TRUE(weights.ok()) << weights.status();
    packed = *weights;
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
    AnyTensorView::Dims dims{}, strides{};
    int64_t stride = 1;
    for (size_t d = extents_.size(); d-- > 0;) {
      dims[d] = extents_[d];
      strides[d] = stride;
      stride *= extents_[d];
    }
    const AnyTensorView v = matrix_.view();
    return AnyTensorView(v.dtype(), v.mutable_data(),
                         static_cast<int>(extents_.size()), dims, strides);
  }
  AnyTensorView const_view() const {
    const AnyTensorView v = view();
    AnyTensorView::Dims dims{}, strides{};
    for (int d = 0; d < v.rank(); ++d) {
      dims[static_cast<size_t>(d)] = v.extent(d);
      strides[static_cast<size_t>(d)] = v.stride(d);
    }
    return AnyTensorView(v.dtype(), v.data(), v.rank(), dims, strides);
  }
  Doubles doubles() const { return matrix_.doubles(); }
  std::vector<uint32_t> bits() const { return matrix_.bits(); }

 private:
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

// A window of the convolution as the oracle has it: the last inputs of each
// channel, the oldest first.
using BoundedWindow = std::vector<BoundedRow>;

// One token of a causal convolution over rows of channels; the window moves on.
inline BoundedRow BoundedConv(const Doubles& weight, const Doubles& bias,
                              bool silu, DType dtype, const BoundedRow& x,
                              BoundedWindow& window) {
  const size_t width = window.size() + 1;
  BoundedRow out;
  for (size_t c = 0; c < x.size(); ++c) {
    BoundedRow taps, weights;
    for (size_t j = 0; j < width; ++j) {
      taps.push_back(j + 1 < width ? window[j][c] : x[c]);
      weights.push_back({weight[c * width + j], 0});
    }
    const Bounded first = {bias.empty() ? 0.0 : bias[c], 0};
    const Bounded y = Dot(taps, weights, first);
    out.push_back(Rounded(dtype, silu ? BoundedSilu(y) : y));
  }
  window.erase(window.begin());
  window.push_back(x);
  return out;
}

// A batch of prompts and decode steps: padding, five tokens that go on, none,
// one in no slot, one of decode, three that begin, padding.
inline Sequences MixedBatch() {
  return {{3, 0, -1, 1, 4}, {1, 6, 6, 7, 8, 11}, {1, 1, 1, 1, 0}};
}
inline constexpr int64_t kMixedTokens = 12;
inline constexpr int64_t kTestSlots = 5;

inline BoundedRow ExactRow(const Doubles& values, int64_t row, int64_t n) {
  BoundedRow out;
  for (int64_t i = 0; i < n; ++i) {
    out.push_back({values[static_cast<size_t>(row * n + i)], 0});
  }
  return out;
}

// Judges numbers against what the oracle has for them.
inline testing::AssertionResult WithinBounds(const Doubles& got,
                                             const BoundedRow& want) {
  Doubles values;
  for (const Bounded& w : want) values.push_back(w.value);
  return AllWithin(got, values, [&](double y, int64_t i) {
    // Where a NaN is expected there is no distance.
    return std::isnan(y) ? 0.0 : want[static_cast<size_t>(i)].error;
  });
}

// Runs plans of one layer on its arguments, with exactly the workspace that
// they ask for.
class MixerFixture : public IsaTest {
 protected:
  template <typename Plan, typename Args>
  void Run(const Plan& plan, const Args& args, int64_t tokens,
           Executor& executor) {
    const auto bytes = plan.WorkspaceBytes(tokens, executor.num_workers());
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    auto memory = AlignedBuffer::Create(*bytes);
    ASSERT_TRUE(memory.ok());
    const Workspace workspace(memory->data(), static_cast<size_t>(*bytes));
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
  }
};

}  // namespace quern

#endif  // QUERN_OPS_MIXER_MIXER_TESTUTIL_H_
