// vLLM's operators of Mamba: updates and convolutions have the bits of our own
// operators, and a scan is near its recurrence in double.

#include "quern/ops/registry/vllm/recurrent_ops.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/recurrent/recurrent_ops.h"
#include "quern/ops/registry/vllm/named_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

size_t At(int64_t i) { return static_cast<size_t>(i); }

// One scan: sequences begin at `starts`.
struct Scan {
  int64_t tokens, heads, dim, state, groups;
  std::vector<int32_t> starts;
  bool gated;
};

class VllmRecurrentTest : public VllmOpFixture {
 protected:
  VllmRecurrentTest() {
    EXPECT_EQ(RegisterVllmRecurrentOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterRecurrentOps(registry_), absl::OkStatus());
  }

  template <typename T>
  void ExpectScan(const Scan& s) {
    const auto sequences = static_cast<int64_t>(s.starts.size()) - 1;
    const int64_t columns = s.heads * s.dim;
    auto x = UniformReals<T>(rng_, s.tokens * columns);
    auto z = UniformReals<T>(rng_, s.tokens * columns);
    auto b = UniformReals<T>(rng_, s.tokens * s.groups * s.state);
    auto c = UniformReals<T>(rng_, s.tokens * s.groups * s.state);
    auto dt = UniformReals<float>(rng_, s.tokens * s.heads, 0.01, 0.5);
    auto a = UniformReals<float>(rng_, s.heads, -2, -0.1);
    auto d = UniformReals<float>(rng_, s.heads);
    const auto before =
        UniformReals<float>(rng_, sequences * columns * s.state);
    std::vector<int32_t> starts = s.starts;
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(testing::Message() << DTypeName(DTypeOf<T>) << " tokens "
                                      << s.tokens << " " << provider);
      std::vector<float> states = before;
      std::vector<T> out(x.size(), FromDouble<T>(7));
      std::vector<NamedTensor> tensors = {
          {"out", Over(out, {s.tokens, s.heads, s.dim})},
          {"final_states", Over(states, {sequences, s.heads, s.dim, s.state})},
          {"x", Over(x, {s.tokens, s.heads, s.dim})},
          {"dt", Over(dt, {s.tokens, s.heads})},
          {"a", Over(a, {s.heads})},
          {"b", Over(b, {s.tokens, s.groups, s.state})},
          {"c", Over(c, {s.tokens, s.groups, s.state})},
          {"cu_seqlens", Over(starts, {sequences + 1})}};
      if (s.gated) {
        tensors.emplace_back("z", Over(z, {s.tokens, s.heads, s.dim}));
        tensors.emplace_back("d", Over(d, {s.heads}));
      }
      ASSERT_EQ(Try(provider, "mamba_chunk_scan_fwd_cpu", tensors),
                absl::OkStatus());
      for (int64_t q = 0; q < sequences; ++q) {
        for (int64_t h = 0; h < s.heads; ++h) {
          for (int64_t p = 0; p < s.dim; ++p) {
            const int64_t group = h / (s.heads / s.groups);
            const int64_t row = (q * s.heads + h) * s.dim + p;
            std::vector<double> state;
            for (int64_t n = 0; n < s.state; ++n) {
              state.push_back(double{before[At(row * s.state + n)]});
            }
            for (int64_t t = starts[At(q)]; t < starts[At(q + 1)]; ++t) {
              const double step = double{dt[At(t * s.heads + h)]};
              const double in = ToDouble(x[At(t * columns + h * s.dim + p)]);
              double y = s.gated ? double{d[At(h)]} * in : 0;
              for (int64_t n = 0; n < s.state; ++n) {
                const auto at = At((t * s.groups + group) * s.state + n);
                double& v = state[At(n)];
                v = v * std::exp(double{a[At(h)]} * step) +
                    ToDouble(b[at]) * step * in;
                y += v * ToDouble(c[at]);
              }
              if (s.gated) {
                const double gate =
                    ToDouble(z[At(t * columns + h * s.dim + p)]);
                y *= gate / (1 + std::exp(-gate));
              }
              // One rounding to T, and f32 sums of a few dozen terms below 8.
              ASSERT_NEAR(ToDouble(out[At(t * columns + h * s.dim + p)]), y,
                          UnitRoundoff<T>() * std::abs(y) + 0x1p-14)
                  << "token " << t << " head " << h << " row " << p;
            }
            for (int64_t n = 0; n < s.state; ++n) {
              ASSERT_NEAR(double{states[At(row * s.state + n)]}, state[At(n)],
                          0x1p-15);
            }
          }
        }
      }
      for (int64_t t = starts[At(sequences)]; t < s.tokens; ++t) {
        for (int64_t i = 0; i < columns; ++i) {
          ASSERT_EQ(ToDouble(out[At(t * columns + i)]), 7) << "padding";
        }
      }
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(VllmRecurrentTest);

TEST_P(VllmRecurrentTest, ScansNearItsRecurrence) {
  for (const Scan& scan : {Scan{9, 2, 8, 16, 1, {0, 4, 4, 9}, true},
                           Scan{70, 4, 16, 24, 2, {0, 65, 68}, true},
                           Scan{33, 1, 5, 7, 1, {0, 33}, false}}) {
    ExpectScan<float>(scan);
    ExpectScan<BFloat16>(scan);
    ExpectScan<Float16>(scan);
  }
}

TEST_P(VllmRecurrentTest, UpdateHasTheBitsOfOurs) {
  constexpr int64_t kTokens = 4, kSlots = 6, kHeads = 2, kDim = 12, kState = 16;
  auto x = UniformReals<BFloat16>(rng_, kTokens * kHeads * kDim);
  auto dt = UniformReals<BFloat16>(rng_, kTokens * kHeads);
  auto a = UniformReals<float>(rng_, kHeads, -2, -0.1);
  auto b = UniformReals<BFloat16>(rng_, kTokens * kState);
  auto c = UniformReals<BFloat16>(rng_, kTokens * kState);
  auto d = UniformReals<float>(rng_, kHeads);
  auto bias = UniformReals<float>(rng_, kHeads);
  const auto before =
      UniformReals<float>(rng_, kSlots * kHeads * kDim * kState);
  std::vector<int32_t> slots = {3, 5, 0, 4};
  for (const char* provider : {"simd", "reference"}) {
    std::vector<float> state[2] = {before, before};
    std::vector<BFloat16> out[2];
    for (const bool theirs : {false, true}) {
      out[theirs].resize(x.size());
      const std::vector<NamedTensor> tensors = {
          {"state", Over(state[theirs], {kSlots, kHeads, kDim, kState})},
          {"x", Over(x, {kTokens, kHeads, kDim})},
          {"dt", Over(dt, {kTokens, kHeads})},
          {"a", Over(a, {kHeads})},
          {"b", Over(b, {kTokens, 1, kState})},
          {"c", Over(c, {kTokens, 1, kState})},
          {"d", Over(d, {kHeads})},
          {"dt_bias", Over(bias, {kHeads})},
          {"state_batch_indices", Over(slots, {kTokens})},
          {"out", Over(out[theirs], {kTokens, kHeads, kDim})}};
      ASSERT_EQ(theirs
                    ? Try(provider, "selective_state_update_cpu", tensors,
                          {{"dt_softplus", true}, {"null_block_id", 0}})
                    : Try(provider, "selective_state_update", tensors,
                          {{"dt_softplus", true}, {"null_slot", 0}}, {"out"}),
                absl::OkStatus());
    }
    EXPECT_EQ(state[0], state[1]);
    EXPECT_NE(state[0], before);
    for (size_t i = 0; i < out[0].size(); ++i) {
      ASSERT_EQ(ToDouble(out[0][i]), ToDouble(out[1][i])) << i;
      // The sequence whose block is null.
      if (i / (kHeads * kDim) == 2) {
        ASSERT_EQ(ToDouble(out[1][i]), 0);
      }
    }
  }
}

TEST_P(VllmRecurrentTest, ConvolutionHasTheBitsOfOurs) {
  constexpr int64_t kTokens = 5, kChannels = 20, kWidth = 4, kSlots = 4;
  auto x = UniformReals<BFloat16>(rng_, kTokens * kChannels);
  auto weight = UniformReals<BFloat16>(rng_, kChannels * kWidth);
  auto bias = UniformReals<BFloat16>(rng_, kChannels);
  const auto before =
      UniformReals<BFloat16>(rng_, kSlots * kChannels * (kWidth - 1));
  std::vector<int32_t> slots = {2, 1}, starts = {0, 3, 5};
  std::vector<BFloat16> state[2] = {before, before}, out[2];
  for (const bool theirs : {false, true}) {
    out[theirs].resize(x.size());
    const std::vector<NamedTensor> tensors = {
        {"x", Over(x, {kTokens, kChannels})},
        {"conv_state", Over(state[theirs], {kSlots, kChannels, kWidth - 1})},
        {"weight", Over(weight, {kChannels, kWidth})},
        {"bias", Over(bias, {kChannels})},
        {"conv_state_indices", Over(slots, {2})},
        {"query_start_loc", Over(starts, {3})},
        {"out", Over(out[theirs], {kTokens, kChannels})}};
    ASSERT_EQ(theirs
                  ? Try("simd", "causal_conv1d_update_cpu_vec", tensors,
                        {{"activation", "silu"}, {"pad_slot_id", -1}}, {"out"})
                  : Try("simd", "causal_conv1d_update", tensors,
                        {{"activation", "silu"}}, {"out"}),
              absl::OkStatus());
  }
  bool changed = false;
  for (size_t i = 0; i < before.size(); ++i) {
    ASSERT_EQ(ToDouble(state[0][i]), ToDouble(state[1][i]));
    changed = changed || ToDouble(state[1][i]) != ToDouble(before[i]);
  }
  EXPECT_TRUE(changed);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(ToDouble(out[0][i]), ToDouble(out[1][i]));
  }
}

TEST_P(VllmRecurrentTest, RefusesStartsThatLeaveTheTokens) {
  std::vector<float> x(3 * 8), out(3 * 8), states(2 * 8 * 4), dt(3), a(1);
  std::vector<float> b(3 * 4), c(3 * 4);
  std::vector<int32_t> starts = {0, 2, 4};
  const auto scan = [&] {
    return Try("simd", "mamba_chunk_scan_fwd_cpu",
               {{"out", Over(out, {3, 1, 8})},
                {"final_states", Over(states, {2, 1, 8, 4})},
                {"x", Over(x, {3, 1, 8})},
                {"dt", Over(dt, {3, 1})},
                {"a", Over(a, {1})},
                {"b", Over(b, {3, 1, 4})},
                {"c", Over(c, {3, 1, 4})},
                {"cu_seqlens", Over(starts, {3})}});
  };
  ExpectRefusal(scan(), "cu_seqlens[2]=4");
  starts = {0, 3, 2};
  ExpectRefusal(scan(), "cu_seqlens[2]=2");
  starts = {0, 2, 3};
  EXPECT_EQ(scan(), absl::OkStatus());
}

}  // namespace
}  // namespace quern
