#ifndef OPS_REGISTRY_OP_REGISTRY_H_
#define OPS_REGISTRY_OP_REGISTRY_H_

// Operators of this repository that take the place of Quern's: relu2 and
// rms_norm of f32 alone, by their own loops.
//
// Quern has an ops/registry/op_registry.h too, a core/check.h and a
// testing/data.h. They do not collide with the files of this repository,
// because Quern's headers are included with quern/ in front.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

// `registry` has both. They are "mine" afterwards wherever the policy enables
// them; a model that takes its operators from such a registry runs them.
absl::Status OverrideOps(quern::OpRegistry& registry);
// rms_norm alone, for a registry without relu2.
absl::Status OverrideNorm(quern::OpRegistry& registry);

// Rows that our rms_norm has computed so far.
int64_t RowsNormed();

#endif  // OPS_REGISTRY_OP_REGISTRY_H_
