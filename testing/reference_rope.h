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
#include <utility>
#include <vector>

#include "quern/core/check.h"

namespace quern {

enum class ReferenceRopeStyle { kNeox, kInterleaved };

// Turns pair i of each head of token t by cosine(t, i) and sine(t, i), which
// need not be those of an angle. x[tokens, heads, head_dim] dense.
template <typename Cosine, typename Sine>
std::vector<double> ReferenceTurned(std::vector<double> x, int64_t tokens,
                                    int64_t heads, int64_t head_dim,
                                    int64_t rotary_dim,
                                    ReferenceRopeStyle style,
                                    const Cosine& cosine, const Sine& sine) {
  QUERN_CHECK(static_cast<int64_t>(x.size()) == tokens * heads * head_dim);
  QUERN_CHECK(rotary_dim % 2 == 0 && rotary_dim <= head_dim);
  const bool neox = style == ReferenceRopeStyle::kNeox;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < rotary_dim / 2; ++i) {
      const double c = cosine(t, i), s = sine(t, i);
      for (int64_t h = 0; h < heads; ++h) {
        double* head = x.data() + (t * heads + h) * head_dim;
        double& a = head[neox ? i : 2 * i];
        double& b = head[neox ? i + rotary_dim / 2 : 2 * i + 1];
        const double old_a = a;
        a = a * c - b * s;
        b = b * c + old_a * s;
      }
    }
  }
  return x;
}

// The angle of pair i at a position.
inline double ReferenceRopeAngle(int64_t position, int64_t i,
                                 int64_t rotary_dim, double base) {
  return static_cast<double>(position) *
         std::pow(base, -2.0 * static_cast<double>(i) /
                            static_cast<double>(rotary_dim));
}

// x[tokens, heads, head_dim] dense, one position per token.
inline std::vector<double> ReferenceRope(std::vector<double> x,
                                         const std::vector<int64_t>& positions,
                                         int64_t heads, int64_t head_dim,
                                         int64_t rotary_dim, double base,
                                         ReferenceRopeStyle style) {
  const auto angle = [&](int64_t t, int64_t i) {
    return ReferenceRopeAngle(positions[static_cast<size_t>(t)], i, rotary_dim,
                              base);
  };
  return ReferenceTurned(
      std::move(x), static_cast<int64_t>(positions.size()), heads, head_dim,
      rotary_dim, style,
      [&](int64_t t, int64_t i) { return std::cos(angle(t, i)); },
      [&](int64_t t, int64_t i) { return std::sin(angle(t, i)); });
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_ROPE_H_
