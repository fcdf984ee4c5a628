#ifndef QUERN_OPS_SAMPLING_TOKEN_ORDER_H_
#define QUERN_OPS_SAMPLING_TOKEN_ORDER_H_

// Private: the orders in which the sampler's filters keep tokens, and the
// fewest first tokens of an order whose weights reach a sum.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "quern/ops/sampling/logit_blocks.h"
#include "quern/ops/sampling/sampler_kernels.h"

namespace quern {

// The order of sampler.h, and how far a token is from the first of it.
struct ByLogit {
  double Offset(int32_t id) const {
    if (logits[id] == largest) return 0.0;
    return static_cast<double>(largest) - static_cast<double>(logits[id]);
  }
  bool operator()(int32_t a, int32_t b) const {
    return LargerLogit{logits}(a, b);
  }
  const float* logits;
  float largest;
};

// The order of typical_p: first what is closest to the mean exponent.
struct MoreTypical {
  double Exponent(int32_t id) const {
    if (logits[id] == rule.largest) return 0.0;
    return static_cast<double>((logits[id] - rule.largest) / rule.temperature);
  }
  double Offset(int32_t id) const { return std::abs(Exponent(id) - mean); }
  bool operator()(int32_t a, int32_t b) const {
    const double off_a = Offset(a);
    const double off_b = Offset(b);
    return off_a < off_b || (off_a == off_b && a < b);
  }
  const float* logits;
  const WeightRule& rule;
  double mean = 0.0;
};

// The end of the fewest first ids, in the order of `before`, whose weights and
// `sum`, what was weighed before, come to at least `wanted`: at least one. They
// are moved to the front. Linear in the number of ids, because each step halves
// them.
template <class Before>
int32_t* FewestThatReach(double wanted, double sum, int32_t* begin,
                         int32_t* end, const float* weights,
                         const Before& before) {
  constexpr std::ptrdiff_t kFew = 64;
  const auto weigh = [weights](const int32_t* from, const int32_t* to) {
    double all = 0.0;
    for (; from != to; ++from) all += static_cast<double>(weights[*from]);
    return all;
  };
  while (end - begin > kFew) {
    int32_t* const middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, before);
    const double with_half = sum + weigh(begin, middle);
    if (with_half >= wanted) {
      end = middle;
    } else {
      sum = with_half;
      begin = middle;
    }
  }
  std::sort(begin, end, before);
  while (begin != end) {
    sum += static_cast<double>(weights[*begin++]);
    if (sum >= wanted) break;
  }
  return begin;
}

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_TOKEN_ORDER_H_
