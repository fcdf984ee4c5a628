#ifndef QUERN_OPS_SAMPLING_SAMPLER_TESTUTIL_H_
#define QUERN_OPS_SAMPLING_SAMPLER_TESTUTIL_H_

// What tests of the sampler share: one row at a time, and the chi-squared test.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/sampling/philox.h"
#include "quern/ops/sampling/sampler.h"
#include "quern/testing/reference_sampling.h"

namespace quern {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr int32_t kNoToken = SamplerPlan::kNoToken;

inline SamplingParams Params(float temperature, int64_t top_k = 0,
                             float top_p = 1.0f, uint64_t seed = 1,
                             uint64_t step = 0) {
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.seed = seed;
  params.step = step;
  return params;
}

// Samples rows of one width.
class Sampler {
 public:
  explicit Sampler(int64_t vocab, int workers = 1) {
    SamplerSpec spec;
    spec.vocab = vocab;
    auto plan = SamplerPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    plan_.push_back(*plan);
    auto memory = AlignedBuffer::Create(*plan_[0].WorkspaceBytes(1, workers));
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
  }

  const SamplerPlan& plan() const { return plan_[0]; }
  Workspace workspace() { return Workspace(memory_); }

  int32_t Sample(const std::vector<float>& logits,
                 const SamplingParams& params) {
    InlineExecutor executor;
    int32_t token = -99;
    const auto view = DenseMatrix<const float>(
        logits.data(), 1, static_cast<int64_t>(logits.size()));
    EXPECT_EQ(plan().CheckArgs(view, {&params, 1}, {&token, 1}),
              absl::OkStatus());
    plan().Execute(view, {&params, 1}, {&token, 1}, workspace(), executor);
    return token;
  }

 private:
  std::vector<SamplerPlan> plan_;  // a single plan
  AlignedBuffer memory_;
};

inline int32_t Sample(const std::vector<float>& logits,
                      const SamplingParams& params) {
  return Sampler(static_cast<int64_t>(logits.size())).Sample(logits, params);
}

inline ReferenceDistribution ReferenceSampling(const std::vector<float>& logits,
                                               const SamplingParams& params) {
  ReferenceSamplingRule rule;
  rule.temperature = static_cast<double>(params.temperature);
  rule.top_k = params.top_k;
  rule.top_p = static_cast<double>(params.top_p);
  rule.min_p = static_cast<double>(params.min_p);
  rule.top_n_sigma = static_cast<double>(params.top_n_sigma);
  rule.typical_p = static_cast<double>(params.typical_p);
  return ReferenceSampling(logits, rule);
}

inline ReferenceToken ReferenceSample(const std::vector<float>& logits,
                                      const SamplingParams& params) {
  return ReferenceDraw(ReferenceSampling(logits, params),
                       PhiloxUniform(params.seed, params.step));
}

inline double ChiSquare(const std::vector<int64_t>& counts,
                        const std::vector<double>& probabilities,
                        int64_t draws) {
  double sum = 0.0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected = probabilities[i] * static_cast<double>(draws);
    if (expected == 0.0) {
      EXPECT_EQ(counts[i], 0) << i;
      continue;
    }
    const double off = static_cast<double>(counts[i]) - expected;
    sum += off * off / expected;
  }
  return sum;
}

// A chi-square variable with `freedom` degrees exceeds this bound about once in
// 10^6 cases: by Wilson and Hilferty its cube root is nearly normal, and 4.75
// deviations are that rare.
inline double ChiSquareBound(double freedom) {
  const double s = 2.0 / (9.0 * freedom);
  return freedom * std::pow(1.0 - s + 4.75 * std::sqrt(s), 3);
}

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_SAMPLER_TESTUTIL_H_
