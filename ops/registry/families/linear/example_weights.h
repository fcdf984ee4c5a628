#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXAMPLE_WEIGHTS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXAMPLE_WEIGHTS_H_

// Weights of the examples that operators on layers have, for listings and
// tests.

#include <cstdint>
#include <vector>

#include "quern/gemm/linear_weights.h"

namespace quern {

// The values of an example, [n, k]:
//
//   value[i] = unit * (i * step % 17 - 8)
//
// where `step` makes those of several layers differ.
std::vector<float> ExampleValues(int64_t n, int64_t k, float unit,
                                 int64_t step = 7);

// These values as weights of f32.
LinearWeights ExampleWeights(int64_t n, int64_t k, float unit, int64_t step = 7,
                             bool gated = false);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXAMPLE_WEIGHTS_H_
