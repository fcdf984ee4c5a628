#ifndef OPS_REGISTRY_OP_REGISTRY_H_
#define OPS_REGISTRY_OP_REGISTRY_H_

// Operators of this repository that replace Quern's: relu2 and rms_norm, for
// f32 only, as plain loops.
//
// Quern has an ops/registry/op_registry.h too, a core/check.h and a
// testing/data.h. They do not collide with the files of this repository,
// because Quern's headers are included with quern/ in front.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

// Overrides relu2 and rms_norm of `registry`, under the provider name "mine",
// wherever the policy enables them. A model that takes its operators from this
// registry then runs them.
absl::Status OverrideOps(quern::OpRegistry& registry);
// rms_norm alone, for a registry without relu2.
absl::Status OverrideNorm(quern::OpRegistry& registry);

// Rows that our rms_norm has computed so far.
int64_t RowsNormed();

#endif  // OPS_REGISTRY_OP_REGISTRY_H_
