#ifndef QUERN_OPS_MOE_ROUTER_TESTUTIL_H_
#define QUERN_OPS_MOE_ROUTER_TESTUTIL_H_

// What tests of the router share: routes of a batch between guard pages, and
// the bound of a weight that router_spec.h states.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/moe/reference_router.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"

namespace quern {

inline RouterSpec MakeRouterSpec(int64_t experts, int64_t top_k,
                                 RouterScore score = RouterScore::kSoftmax,
                                 bool renormalize = false) {
  RouterSpec spec;
  spec.experts = experts;
  spec.top_k = top_k;
  spec.score = score;
  spec.renormalize = renormalize;
  return spec;
}

inline std::string Describe(const RouterSpec& spec) {
  return testing::PrintToString(std::vector<int64_t>{
             spec.experts, spec.top_k, static_cast<int64_t>(spec.score),
             spec.biased, spec.renormalize, spec.groups, spec.top_groups}) +
         std::string(DTypeName(spec.logits_dtype)) +
         std::string(DTypeName(spec.bias_dtype));
}

// Bound on the error of each weight of a token.
inline std::vector<double> RouterBounds(const RouterSpec& spec,
                                        const std::vector<double>& logits,
                                        const ReferenceRoute& want) {
  double max = ReferenceFinite(logits[0]);
  for (const double l : logits) max = std::max(max, ReferenceFinite(l));
  const bool softmax = spec.score == RouterScore::kSoftmax;
  double sums = 1;
  if (spec.renormalize) sums += 20 + static_cast<double>(spec.top_k) / 4;
  if (softmax && (spec.biased || !spec.renormalize)) {
    sums += 20 + static_cast<double>(spec.experts) / 4;
  }
  std::vector<double> bounds;
  for (size_t j = 0; j < want.ids.size(); ++j) {
    const double l = ReferenceFinite(logits[static_cast<size_t>(want.ids[j])]);
    // Beyond 200 the score is 0.
    const double units = softmax ? 6 + 1.1 * std::min(max - l, 200.0) : 16;
    double absolute =
        spec.score == RouterScore::kSqrtSoftplus ? 0x1p-60 : 0x1p-120;
    if (spec.renormalize) {
      // The error of a score is divided by the sum, too.
      double sum = 0;
      for (const int32_t e : want.ids) {
        sum += ReferenceScores(
            spec.score, {ReferenceFinite(logits[static_cast<size_t>(e)])})[0];
      }
      if (!softmax && sum > 0) absolute /= std::min(sum, 1.0);
    }
    bounds.push_back((units + sums) * 0x1p-24 * std::abs(want.weights[j]) +
                     absolute * double{spec.scale});
  }
  return bounds;
}

class RouterFixture : public IsaTest {
 protected:
  struct Routes {
    std::vector<float> weights;
    std::vector<int32_t> ids;
  };

  RouterPlan Plan(const RouterSpec& spec) {
    auto plan = RouterPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status() << Describe(spec);
    EXPECT_RAN_ON(*plan);
    return *plan;
  }

  // Poison lies between and behind the rows of all matrices.
  Routes Run(const RouterSpec& spec, const std::vector<double>& logits,
             const std::vector<double>& bias = {}) {
    const RouterPlan plan = Plan(spec);
    const int64_t tokens = static_cast<int64_t>(logits.size()) / spec.experts;
    const AnyMatrix l(spec.logits_dtype, logits, tokens, spec.experts,
                      spec.experts + 3, Edge::kEnd);
    const AnyMatrix b(
        spec.bias_dtype, spec.biased ? bias : std::vector<double>(1), 1,
        spec.biased ? spec.experts : 1, spec.biased ? spec.experts : 1);
    StridedMatrix<float> weights(tokens, spec.top_k, spec.top_k + 2);
    StridedMatrix<int32_t> ids(tokens, spec.top_k, spec.top_k + 1);
    const AnyTensorView any_bias = spec.biased ? b.vector() : AnyTensorView();
    EXPECT_EQ(
        plan.CheckArgs(l.const_view(), any_bias, weights.view(), ids.view()),
        absl::OkStatus());
    plan.Execute(l.const_view(), any_bias, weights.view(), ids.view(),
                 executor_);
    return {weights.ToDense(), ids.ToDense()};
  }

  // Runs the tokens and compares with the reference, which must route them with
  // some margin, as Draw sees to. Both see logits and biases after their
  // rounding to the spec's dtypes.
  void Compare(const RouterSpec& spec, const std::vector<double>& logits,
               const std::vector<double>& bias = {}) {
    SCOPED_TRACE(Describe(spec));
    const Routes got = Run(spec, logits, bias);
    const auto k = static_cast<size_t>(spec.top_k);
    for (size_t t = 0; t < got.ids.size() / k; ++t) {
      const auto from =
          logits.begin() + static_cast<std::ptrdiff_t>(t) * spec.experts;
      const std::vector<double> row(from, from + spec.experts);
      const ReferenceRoute want = ReferenceRouter(spec, row, bias);
      const std::vector<double> bounds = RouterBounds(spec, row, want);
      for (size_t j = 0; j < k; ++j) {
        ASSERT_EQ(got.ids[t * k + j], want.ids[j])
            << "token " << t << " slot " << j;
        // Written this way, NaN fails.
        ASSERT_TRUE(std::abs(double{got.weights[t * k + j]} -
                             want.weights[j]) <= bounds[j])
            << "token " << t << " slot " << j << ": " << got.weights[t * k + j]
            << ", want " << want.weights[j] << " within " << bounds[j];
      }
    }
  }

  // Reals in [lo, hi) of the spec's dtype.
  static std::vector<double> Rounded(Rng& rng, DType dtype, int64_t count,
                                     double lo, double hi) {
    return WithType(dtype, [&](auto type) {
      return ToDoubles(UniformReals<decltype(type)>(rng, count, lo, hi));
    });
  }

  // Logits of one token, and biases where there are some, that are routed by
  // differences above the rounding of scores.
  static void Draw(Rng& rng, const RouterSpec& spec,
                   std::vector<double>& logits, std::vector<double>& bias) {
    for (int tries = 0; tries < 1000; ++tries) {
      logits = Rounded(rng, spec.logits_dtype, spec.experts, -6, 6);
      bias.clear();
      if (!spec.biased) return;
      bias = Rounded(rng, spec.bias_dtype, spec.experts, -1, 1);
      // Scores are below 3, and within 64 + experts / 4 units; pairs, twice.
      const double rounding =
          6 * (64 + static_cast<double>(spec.experts) / 4) * 0x1p-24;
      if (ReferenceRouter(spec, logits, bias).margin > rounding) return;
    }
    FAIL() << "no row with a margin for " << Describe(spec);
  }

  InlineExecutor executor_;
};

}  // namespace quern

#endif  // QUERN_OPS_MOE_ROUTER_TESTUTIL_H_
