#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_LAYER_NORM_DECLARATION_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_LAYER_NORM_DECLARATION_H_

// Private to ops/registry: what the declarations of LayerNormPlan share, for
// its names here and in other projects.

#include "quern/ops/norm/layer_norm.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

using LayerNormDeclaration =
    OpDeclaration<LayerNormPlan, LayerNormSpec, LayerNormArgs>;

// Computes in double and rounds once.
void NativeLayerNorm(const LayerNormSpec& spec, const LayerNormArgs& args);

// Adds a bias that may be left out, like a weight of the schema before it.
LayerNormDeclaration& MaybeBias(LayerNormDeclaration& op);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_LAYER_NORM_DECLARATION_H_
