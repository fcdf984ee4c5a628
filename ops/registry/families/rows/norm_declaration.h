#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_DECLARATION_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_DECLARATION_H_

// Private to ops/registry: what the declarations of RmsNormPlan share, for its
// names here and in other projects.

#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

using RmsNormDeclaration = OpDeclaration<RmsNormPlan, RmsNormSpec, RmsNormArgs>;

// The calls of an operator on RmsNormPlan::Execute, and its reference. The
// reference rounds the normalised row to the weight's dtype, and then the
// product; with 1 + weight, or with NormSum::kExact, the product alone.
absl::Status CheckRmsNorm(const RmsNormPlan& plan, const RmsNormArgs& args);
void ExecuteRmsNorm(const RmsNormPlan& plan, const RmsNormArgs& args,
                    Workspace workspace, Executor& executor);
void NativeRmsNorm(const RmsNormSpec& spec, const RmsNormArgs& args);

// The calls of an operator on RmsNormPlan::ExecuteAdd, and its reference, which
// normalises the sum before it is rounded.
absl::Status CheckAddRmsNorm(const RmsNormPlan& plan, const RmsNormArgs& args);
void ExecuteAddRmsNorm(const RmsNormPlan& plan, const RmsNormArgs& args,
                       Workspace workspace, Executor& executor);
void NativeAddRmsNorm(const RmsNormSpec& spec, const RmsNormArgs& args);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_NORM_DECLARATION_H_
