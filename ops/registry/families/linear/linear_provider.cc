#include "quern/ops/registry/families/linear/linear_provider.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"

namespace quern {
namespace {

// Names of implementations in gemm/linear.h.
constexpr char kPacked[] = "packed";
constexpr char kOneDnn[] = "onednn";

absl::StatusOr<LinearPlan> PlanOf(LinearSpec spec, const LinearWeights& weights,
                                  const char* kernels) {
  spec.kernels = kernels;
  InlineExecutor executor;
  return LinearPlan::Create(spec, weights, executor);
}

absl::StatusOr<LinearPlan> PackedPlanIfChosen(absl::string_view op,
                                              const LinearSpec& spec,
                                              const LinearWeights& weights) {
  auto plan = PlanOf(spec, weights, "");
  if (plan.ok() && plan->implementation() != absl::string_view(kPacked)) {
    return Unimplemented(op, "QUERN_KERNELS asks for ", plan->implementation());
  }
  if (absl::IsUnimplemented(plan.status()) &&
      PlanOf(spec, weights, kPacked).ok()) {
    // The environment asks for kernels that cannot run this. Unimplemented
    // would lead to the reference.
    return absl::FailedPreconditionError(plan.status().message());
  }
  return plan;
}

}  // namespace

absl::StatusOr<LinearPlan> LinearPlanOf(absl::string_view op,
                                        LinearProvider provider,
                                        const LinearSpec& spec,
                                        const LinearWeights& weights) {
  if (provider == LinearProvider::kSimd) {
    return PackedPlanIfChosen(op, spec, weights);
  }
  if (provider == LinearProvider::kReference) {
    return PlanOf(spec, weights, kPacked);
  }
  if (!OneDnnIsLinked()) {
    return Unimplemented(op, "this program does not link //gemm/onednn");
  }
  return PlanOf(spec, weights, kOneDnn);
}

}  // namespace quern
