#ifndef QUERN_OPS_MOE_REFERENCE_ROUTER_H_
#define QUERN_OPS_MOE_REFERENCE_ROUTER_H_

// The formulas of router_spec.h in double, one token at a time.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "quern/ops/moe/router_spec.h"

namespace quern {

struct ReferenceRoute {
  std::vector<double> weights;
  std::vector<int32_t> ids;
  // The least difference between two numbers whose order decided: rounding by
  // less changes no id. Infinite where nothing was close.
  double margin = std::numeric_limits<double>::infinity();
};

inline double ReferenceFinite(double x) {
  constexpr double kHighest = double{std::numeric_limits<float>::max()};
  if (!(x >= -kHighest)) return -kHighest;  // NaN, too
  return std::min(x, kHighest);
}

// Returns s[e] for finite logits.
inline std::vector<double> ReferenceScores(RouterScore score,
                                           const std::vector<double>& logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  std::vector<double> s;
  double sum = 0;
  for (const double l : logits) {
    if (score == RouterScore::kSoftmax) {
      s.push_back(std::exp(l - max));
    } else if (score == RouterScore::kSigmoid) {
      s.push_back(1 / (1 + std::exp(-l)));
    } else {
      s.push_back(
          std::sqrt(std::max(l, 0.0) + std::log1p(std::exp(-std::abs(l)))));
    }
    sum += s.back();
  }
  if (score == RouterScore::kSoftmax) {
    for (double& p : s) p /= sum;
  }
  return s;
}

// Returns the positions of the `count` largest of x, by value and then by
// position. `margin` shrinks to the least difference between the last and the
// next behind it, and where the order matters, between any two neighbours.
inline std::vector<size_t> ReferenceLargest(const std::vector<double>& x,
                                            int64_t count, bool order_matters,
                                            double& margin) {
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&x](size_t a, size_t b) { return x[a] > x[b]; });
  const auto n = static_cast<size_t>(count);
  for (size_t i = order_matters ? 1 : n; i <= n && i < x.size(); ++i) {
    const double gap = x[order[i - 1]] - x[order[i]];
    if (!std::isnan(gap)) margin = std::min(margin, gap);
  }
  order.resize(n);
  return order;
}

inline std::vector<double> ReferenceGroupScores(const RouterSpec& spec,
                                                const std::vector<double>& c) {
  std::vector<double> scores;
  const auto size = static_cast<std::ptrdiff_t>(spec.GroupExperts());
  for (auto at = c.begin(); at != c.end(); at += size) {
    std::vector<double> group(at, at + size);
    std::sort(group.rbegin(), group.rend());
    scores.push_back(
        ReferenceFinite(spec.biased ? group[0] + group[1] : group[0]));
  }
  return scores;
}

// bias is empty unless spec.biased.
inline ReferenceRoute ReferenceRouter(const RouterSpec& spec,
                                      const std::vector<double>& given,
                                      const std::vector<double>& bias) {
  ReferenceRoute route;
  std::vector<double> logits;
  for (const double l : given) logits.push_back(ReferenceFinite(l));
  const std::vector<double> s = ReferenceScores(spec.score, logits);
  std::vector<double> c = logits;
  for (size_t e = 0; e < bias.size(); ++e) {
    c[e] = ReferenceFinite(s[e] + bias[e]);
  }
  if (spec.groups > 1) {
    std::vector<bool> best(static_cast<size_t>(spec.groups));
    for (const size_t g :
         ReferenceLargest(ReferenceGroupScores(spec, c), spec.top_groups, false,
                          route.margin)) {
      best[g] = true;
    }
    for (size_t e = 0; e < c.size(); ++e) {
      if (!best[e / static_cast<size_t>(spec.GroupExperts())]) {
        c[e] = -std::numeric_limits<double>::infinity();
      }
    }
  }
  double sum = 0;
  for (const size_t e : ReferenceLargest(c, spec.top_k, true, route.margin)) {
    route.ids.push_back(static_cast<int32_t>(e));
    route.weights.push_back(s[e]);
    sum += s[e];
  }
  for (double& w : route.weights) {
    if (spec.renormalize && sum != 0) w /= sum;
    w *= double{spec.scale};
  }
  return route;
}

}  // namespace quern

#endif  // QUERN_OPS_MOE_REFERENCE_ROUTER_H_
