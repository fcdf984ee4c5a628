#ifndef QUERN_TESTING_REFERENCE_SAMPLING_H_
#define QUERN_TESTING_REFERENCE_SAMPLING_H_

// Sampling in double, with full sorts. A margin is the least distance of any
// decision from a different result: a sum from a threshold, a draw from the
// edge of its token.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace quern {

struct ReferenceSamplingRule {
  double temperature = 1.0;  // > 0
  int64_t top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  double top_n_sigma = 0.0;
  double typical_p = 1.0;
};

struct ReferenceDistribution {
  std::vector<double> probabilities;  // all 0: there is no token
  double margin = 1.0;
};

// Keeps the first ids whose shares of the total reach p; returns the margin.
inline double KeepFewest(double p, const std::vector<double>& share,
                         std::vector<size_t>& order) {
  double sum = 0.0, margin = 1.0;
  size_t kept = 0;
  do {
    sum += share[order[kept++]];
    margin = std::min(margin, std::abs(sum - p));
  } while (sum < p && kept < order.size());
  order.resize(kept);
  return margin;
}

inline ReferenceDistribution ReferenceSampling(
    const std::vector<float>& logits, const ReferenceSamplingRule& rule) {
  ReferenceDistribution result;
  result.probabilities.assign(logits.size(), 0.0);
  std::vector<size_t> order;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > -std::numeric_limits<float>::infinity()) order.push_back(i);
  }
  if (order.empty()) return result;
  const auto logit = [&](size_t i) { return static_cast<double>(logits[i]); };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  const double most = logit(order[0]);
  const auto exponent = [&](size_t i) {
    return logit(i) == most ? 0.0 : (logit(i) - most) / rule.temperature;
  };
  const auto keep_if = [&](const auto& keeps) {
    order.erase(std::remove_if(order.begin(), order.end(),
                               [&](size_t i) { return !keeps(i); }),
                order.end());
  };
  if (rule.top_n_sigma > 0) {
    const double count = static_cast<double>(order.size());
    double mean = 0.0, variance = 0.0;
    for (const size_t i : order) mean += logit(i) / count;
    for (const size_t i : order) {
      variance += (logit(i) - mean) * (logit(i) - mean) / count;
    }
    const double least = most - rule.top_n_sigma * std::sqrt(variance);
    keep_if([&](size_t i) {
      const double above = logit(i) - least;
      if (logit(i) != most) {
        result.margin = std::min(result.margin, std::abs(above));
      }
      return logit(i) == most || above >= 0;
    });
  }
  if (rule.min_p > 0) {
    keep_if([&](size_t i) {
      const double above = std::exp(exponent(i)) - rule.min_p;
      if (logit(i) != most) {
        result.margin = std::min(result.margin, std::abs(above));
      }
      return above >= 0;
    });
  }
  if (rule.top_k > 0 && rule.top_k < static_cast<int64_t>(order.size())) {
    order.resize(static_cast<size_t>(rule.top_k));
  }
  std::vector<double>& share = result.probabilities;
  const auto normalise = [&] {
    share.assign(logits.size(), 0.0);
    double total = 0.0;
    for (const size_t i : order) total += std::exp(exponent(i));
    for (const size_t i : order) share[i] = std::exp(exponent(i)) / total;
  };
  normalise();
  if (rule.top_p < 1) {
    result.margin =
        std::min(result.margin, KeepFewest(rule.top_p, share, order));
    normalise();
  }
  if (rule.typical_p < 1) {
    double entropy = 0.0;
    for (const size_t i : order) {
      if (share[i] > 0) entropy -= share[i] * std::log(share[i]);
    }
    const auto off = [&](size_t i) {
      return std::abs(-std::log(share[i]) - entropy);
    };
    std::sort(order.begin(), order.end());
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return off(a) < off(b); });
    const std::vector<size_t> all = order;
    result.margin =
        std::min(result.margin, KeepFewest(rule.typical_p, share, order));
    // What is as far off as the last that is kept might have its place.
    if (order.size() < all.size() &&
        logits[all[order.size()]] != logits[order.back()]) {
      result.margin =
          std::min(result.margin, off(all[order.size()]) - off(order.back()));
    }
    normalise();
  }
  return result;
}

// The first id at which the running sum passes u, or -1 if there is none.
struct ReferenceToken {
  int32_t token = -1;
  double margin = 1.0;
};
inline ReferenceToken ReferenceDraw(const ReferenceDistribution& all,
                                    double u) {
  ReferenceToken drawn;
  drawn.margin = all.margin;
  double sum = 0.0;
  for (size_t i = 0; i < all.probabilities.size(); ++i) {
    if (all.probabilities[i] == 0.0) continue;
    sum += all.probabilities[i];
    drawn.margin = std::min(drawn.margin, std::abs(sum - u));
    if (drawn.token == -1 && sum > u) drawn.token = static_cast<int32_t>(i);
  }
  return drawn;
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_SAMPLING_H_
