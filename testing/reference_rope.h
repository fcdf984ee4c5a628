#ifndef QUERN_TESTING_REFERENCE_ROPE_H_
#define QUERN_TESTING_REFERENCE_ROPE_H_

// Rotary position embedding: each pair (a, b) of a head's first rotary_dim
// elements turns by the angle position * base^(-2 i / rotary_dim):
//
//   a' = a cos - b sin        pair i is   (i, i + rotary_dim / 2)   kNeox
//   b' = b cos + a sin                    (2 i, 2 i + 1) kInterleaved
//
// The elements from rotary_dim on stay as they are.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/check.h"

namespace quern {

enum class ReferenceRopeStyle { kNeox, kInterleaved };

// x[tokens, heads, head_dim] dense, one position per token.
inline std::vector<double> ReferenceRope(std::vector<double> x,
                                         const std::vector<int64_t>& positions,
                                         int64_t heads, int64_t head_dim,
                                         int64_t rotary_dim, double base,
                                         ReferenceRopeStyle style) {
  const auto tokens = static_cast<int64_t>(positions.size());
  QUERN_CHECK(static_cast<int64_t>(x.size()) == tokens * heads * head_dim);
  QUERN_CHECK(rotary_dim % 2 == 0 && rotary_dim <= head_dim);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      double* head = x.data() + (t * heads + h) * head_dim;
      for (int64_t i = 0; i < rotary_dim / 2; ++i) {
        const bool neox = style == ReferenceRopeStyle::kNeox;
        double& a = head[neox ? i : 2 * i];
        double& b = head[neox ? i + rotary_dim / 2 : 2 * i + 1];
        const double angle =
            static_cast<double>(positions[static_cast<size_t>(t)]) *
            std::pow(base, -2.0 * static_cast<double>(i) /
                               static_cast<double>(rotary_dim));
        const double old_a = a;
        a = a * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + old_a * std::sin(angle);
      }
    }
  }
  return x;
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_ROPE_H_
