// The steps of the softmax, through the seam that the plan uses.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/testing/compare.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kRow = 256;

struct Target {
  const char* name;
  const char* target() const { return name; }
};

// One instance per instruction set that this CPU has.
class SoftmaxStateTest : public IsaTest {
 protected:
  SoftmaxStateTest() {
    row_ = AlignedBuffer::Create(kRow * 4).value();
    other_ = AlignedBuffer::Create(kRow * 4).value();
    query_ = AlignedBuffer::Create(64).value();
  }
  // To be called in a test, once the fixture has chosen the instruction set.
  PagedAttentionKernels Kernels() {
    const auto kernels =
        GetPagedAttentionKernels(DType::kF32, DType::kF32, DType::kF32);
    EXPECT_RAN_ON(Target{kernels.target});
    return kernels;
  }
  // The row's logits, which become exp2(logit - max), as those of a query of 1
  // and keys of one dim.
  void Softmax(const PagedAttentionKernels& kernels, float* row, size_t tokens,
               SoftmaxState* state) {
    std::vector<float> keys(kChunkGroups * kGroupTokens, std::nanf(""));
    std::copy_n(row, tokens, keys.begin());
    const float one = 1;
    kernels.load_query(&one, 1, 1.0f, query_.data<uint32_t>());
    const TokenRange seen = {0, static_cast<uint32_t>(tokens)};
    AlignedBuffer logits =
        AlignedBuffer::Create(kChunkGroups * kGroupTokens * 4).value();
    float weights[2];
    ChunkArgs c = {};
    for (size_t g = 0; g < kChunkGroups; ++g) {
      c.k[g] = reinterpret_cast<const uint8_t*>(keys.data() + g * kGroupTokens);
    }
    c.rows = 1;
    c.q = query_.data<uint32_t>();
    c.q_stride = 1;
    c.seen = &seen;
    c.head_dim = 1;
    c.scale_log2e = 1;
    c.logits = logits.data<float>();
    c.weights = weights;
    c.first = true;
    c.state = state;
    kernels.attend(c);
    std::copy_n(logits.data<float>(), tokens, row);
  }
  float* row() { return row_.data<float>(); }
  float* other() { return other_.data<float>(); }

 private:
  AlignedBuffer row_, other_, query_;
};
QUERN_INSTANTIATE_ISA_TEST(SoftmaxStateTest);

TEST_P(SoftmaxStateTest, Exp2IsWithinItsBound) {
  const auto kernels = Kernels();
  std::vector<float> x, got;
  std::vector<double> want;
  // The first logit is the maximum, 0: the others become exp2 of themselves.
  for (float value = 0.0f; value > -140.0f;) {
    row()[0] = 0.0f;
    for (int64_t i = 1; i < kRow; ++i) {
      row()[i] = value;
      x.push_back(value);
      value -= 0.00137f;
    }
    SoftmaxState state;
    Softmax(kernels, row(), kRow, &state);
    EXPECT_EQ(state.max, 0.0f);
    EXPECT_EQ(row()[0], 1.0f);
    got.insert(got.end(), row() + 1, row() + kRow);
  }
  for (const float value : x) want.push_back(std::exp2(double{value}));
  EXPECT_TRUE(AllWithin(got, want, [&](double e, int64_t) {
    // Flushed to zero below 2^-126.
    return e < std::ldexp(1.0, -126) ? std::ldexp(1.0, -126)
                                     : std::ldexp(e, -22);
  }));
}

TEST_P(SoftmaxStateTest, CountsEqualLogitsExactly) {
  const auto kernels = Kernels();
  for (size_t tokens = 1; tokens <= 70; ++tokens) {
    // What lies beyond is garbage, and larger.
    for (int64_t i = 0; i < kRow; ++i) row()[i] = 1e30f;
    for (size_t i = 0; i < tokens; ++i) row()[i] = -3.7f;
    SoftmaxState state;
    Softmax(kernels, row(), tokens, &state);
    EXPECT_EQ(state.max, -3.7f);
    EXPECT_EQ(state.sum, static_cast<float>(tokens));
    for (size_t i = 0; i < tokens; ++i) EXPECT_EQ(row()[i], 1.0f);
  }
}

TEST_P(SoftmaxStateTest, NothingIsTheIdentity) {
  const auto kernels = Kernels();
  SoftmaxState none;
  none.max = 5, none.sum = 5;
  Softmax(kernels, row(), 0, &none);
  EXPECT_EQ(none.max, -kInf);
  EXPECT_EQ(none.sum, 0.0f);

  const auto expect_merged = [&](const SoftmaxState& a, float a_out,
                                 const SoftmaxState& b, float b_out,
                                 const SoftmaxState& want, float want_out) {
    for (int64_t i = 0; i < kRow; ++i) row()[i] = a_out, other()[i] = b_out;
    SoftmaxState state = a;
    kernels.merge(b, other(), 17, &state, row());
    EXPECT_EQ(state.max, want.max);
    EXPECT_EQ(state.sum, want.sum);
    for (int64_t i = 0; i < 17; ++i) EXPECT_EQ(row()[i], want_out);
  };
  const SoftmaxState some = {-1000.25f, 3.3f};
  expect_merged(SoftmaxState(), 0, some, 0.7f, some, 0.7f);
  expect_merged(some, 0.7f, SoftmaxState(), 0, some, 0.7f);
  expect_merged(SoftmaxState(), 0, SoftmaxState(), 0, SoftmaxState(), 0);
  // Exact: weights 1 and 1/4, either way round.
  const SoftmaxState high = {4, 3}, low = {2, 8};
  expect_merged(high, 1, low, 8, {4, 5}, 3);
  expect_merged(low, 8, high, 1, {4, 5}, 3);
  // Too far below to count.
  expect_merged({200, 1}, 1, {0, 1}, 1, {200, 1}, 1);
}

TEST_P(SoftmaxStateTest, MinusInfinityHasNoWeight) {
  const auto kernels = Kernels();
  for (int64_t i = 0; i < 5; ++i) row()[i] = -kInf;
  SoftmaxState state;
  Softmax(kernels, row(), 5, &state);
  EXPECT_EQ(state.max, -kInf);
  EXPECT_EQ(state.sum, 0.0f);
  for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(row()[i], 0.0f);
  row()[0] = -kInf, row()[1] = -2, row()[2] = -3;
  Softmax(kernels, row(), 3, &state);
  EXPECT_EQ(state.max, -2.0f);
  EXPECT_EQ(state.sum, 1.5f);
  EXPECT_EQ(row()[0], 0.0f);
}

TEST_P(SoftmaxStateTest, NanStaysNan) {
  const auto kernels = Kernels();
  for (const int64_t at : {0, 1, 6, 15, 16, 20}) {
    for (int64_t i = 0; i < 21; ++i) row()[i] = static_cast<float>(i % 5);
    row()[at] = std::nanf("");
    SoftmaxState state;
    Softmax(kernels, row(), 21, &state);
    EXPECT_TRUE(std::isnan(state.sum)) << at;
    // A merge keeps the NaN of either side.
    SoftmaxState other_state = {100, 1};
    kernels.merge(state, row(), 1, &other_state, other());
    EXPECT_TRUE(std::isnan(other_state.sum)) << at;
    kernels.merge({100, 1}, other(), 1, &state, row());
    EXPECT_TRUE(std::isnan(state.sum)) << at;
  }
}

}  // namespace
}  // namespace quern
