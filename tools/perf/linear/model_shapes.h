#ifndef QUERN_TOOLS_PERF_LINEAR_MODEL_SHAPES_H_
#define QUERN_TOOLS_PERF_LINEAR_MODEL_SHAPES_H_

// The matrices of a model's linear layers, c[m, n] = a[m, k] * w[n, k], as an
// engine runs them: q, k and v in one matrix, gate and up in one.

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace quern {

struct LinearShape {
  absl::string_view layer;  // distinct within a model
  int64_t k = 0;
  int64_t n = 0;
  int64_t count = 0;  // such matrices in the model
};

struct ModelShapes {
  absl::string_view name;
  std::vector<LinearShape> layers;  // in the order of a forward pass
};

// All that are known.
const std::vector<ModelShapes>& AllModelShapes();

// One of them, or null.
const ModelShapes* FindModelShapes(absl::string_view name);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_MODEL_SHAPES_H_
