#ifndef OPS_REGISTRY_OP_REGISTRY_H_
#define OPS_REGISTRY_OP_REGISTRY_H_

// An operator of this repository that takes the place of one of Quern's: relu2
// of f32 alone, by its own loop.
//
// Quern has an ops/registry/op_registry.h too, a core/check.h and a
// testing/data.h. They do not collide with the files of this repository,
// because Quern's headers are included with quern/ in front.

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

// `registry` has relu2. It is "mine" afterwards wherever the policy enables it.
absl::Status OverrideRelu2(quern::OpRegistry& registry);

#endif  // OPS_REGISTRY_OP_REGISTRY_H_
