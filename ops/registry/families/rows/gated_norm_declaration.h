#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_NORM_DECLARATION_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_NORM_DECLARATION_H_

// Private to ops/registry: what the declarations of RmsNormGatedPlan share, for
// its names here and in other projects.

#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

struct RmsNormGatedArgs {
  AnyTensorView x, z, weight, out;
};
using RmsNormGatedDeclaration =
    OpDeclaration<RmsNormGatedPlan, RmsNormGatedSpec, RmsNormGatedArgs>;

absl::Status CheckRmsNormGated(const RmsNormGatedPlan& plan,
                               const RmsNormGatedArgs& args);
void ExecuteRmsNormGated(const RmsNormGatedPlan& plan,
                         const RmsNormGatedArgs& args, Workspace workspace,
                         Executor& executor);

// Computes in double and rounds once, as the kernel rounds its f32 results.
void NativeRmsNormGated(const RmsNormGatedSpec& spec,
                        const RmsNormGatedArgs& args);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_GATED_NORM_DECLARATION_H_
