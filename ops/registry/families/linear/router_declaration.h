#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_ROUTER_DECLARATION_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_ROUTER_DECLARATION_H_

// Private to ops/registry: what the declarations of RouterPlan share, for its
// names here and in other projects.

#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

struct RouterArgs {
  AnyTensorView hidden, logits, bias, weights, ids;
  AnyTensorView non_padded;  // which no operator takes
};
using RouterDeclaration = OpDeclaration<RouterPlan, RouterSpec, RouterArgs>;

// Adds gating_output, the logits.
RouterDeclaration& RouterLogits(RouterDeclaration& op);
// Adds topk.
RouterDeclaration& RouterTopK(RouterDeclaration& op);
// Adds the weights and ids that are returned, the calls and the reference.
RouterDeclaration& RouterRoutes(RouterDeclaration& op);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_ROUTER_DECLARATION_H_
