#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_DECLARATION_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_DECLARATION_H_

// Private to ops/registry: a declaration of a gated activation, for its names
// here and in other projects.

#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

struct GatedArgs {
  AnyTensorView x, out;
};
using GatedDeclaration = OpDeclaration<ActAndMulPlan, ActAndMulSpec, GatedArgs>;

// An operator that maps [.., 2 d], a gate and what it is multiplied with, to
// [.., d]. `input` is the schema's name of the tensor that is read.
GatedDeclaration GatedOp(const char* name, const char* input,
                         Activation activation,
                         GateOrder order = GateOrder::kGateFirst);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_DECLARATION_H_
