#ifndef QUERN_OPS_REGISTRY_OP_DISPATCHER_H_
#define QUERN_OPS_REGISTRY_OP_DISPATCHER_H_

// Constructs operators from a registry under a policy. The implementation is
// chosen here, once; nothing is looked up at run time.
//
//   enabled    the override, if there is one, whatever it answers; else the
//              first provider that does not answer Unimplemented, in the order
//              of registration
//   disabled   the reference
//
// `none` disables every operator that is not a layer (OpKind), and -op disables
// the operator that it names. MakeFrom takes the provider that the caller names
// instead. Each construction is counted under the operator's name: as disabled
// if a policy or a caller chose the reference.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"

namespace quern {

enum class OpEnable : uint8_t { kByPolicy, kAlways };

struct OpCounts {
  int64_t enabled = 0;
  int64_t disabled = 0;
};

// A constructed operator, and where its implementation comes from.
struct MadeOp {
  std::unique_ptr<BoundOp> op;
  std::string provider;
  OpTensors tensors;

  // Calls OpTensors::Check, which holds for every implementation including an
  // embedder's, and then op->CheckArgs. Refusals have the operator's name and
  // the schema's words (OpRules).
  absl::Status CheckArgs(absl::Span<const AnyTensorView> ordered) const;
  // Like CheckArgs, and then op->Execute: together they cost less than one
  // after the other.
  absl::Status CheckAndExecute(absl::Span<const AnyTensorView> ordered,
                               Workspace workspace, Executor& executor) const;
  // Calls OpTensors::Check, and then op->Prepare.
  absl::Status Prepare(absl::Span<const AnyTensorView> ordered,
                       Executor& executor) const;
  // Bytes of workspace for a step with these tensors: op->WorkspaceBytes of
  // tensors.Rows. Reads shapes alone.
  absl::StatusOr<int64_t> WorkspaceBytes(
      absl::Span<const AnyTensorView> ordered, int max_workers) const;
  // Puts tensors in order by name, and checks them; Execute takes the result.
  //
  //   std::vector<AnyTensorView> tensors;  // kept from step to step
  //   QUERN_RETURN_IF_ERROR(add.Bind(
  //       {{"x", x}, {"residual", stream}, {"weight", w}, {"out", y}},
  //       tensors));
  //   add.op->Execute(tensors, executor);
  //
  // Allocates nothing after the first time, unless it refuses.
  absl::Status Bind(absl::Span<const NamedTensor> named,
                    std::vector<AnyTensorView>& ordered) const;
};

class OpDispatcher {
 public:
  // `registry` is borrowed, and must not change while the dispatcher lives.
  OpDispatcher(const OpRegistry& registry, OpPolicy policy);

  const OpPolicy& policy() const { return policy_; }
  // Whether the policy enables the operator; a layer is enabled unless the
  // policy says -op.
  bool enabled(absl::string_view op) const;

  // NotFound for an unknown operator; InvalidArgument for arguments that its
  // schema, its shapes (OpRegistry::InferShapes) or the chosen implementation
  // refuse; Unimplemented if no provider accepts them. CheckArgs checks the
  // remaining conditions. Counts successful calls only. Safe to call
  // concurrently.
  absl::StatusOr<MadeOp> Make(absl::string_view op, const NamedArgs& args,
                              OpEnable enable = OpEnable::kByPolicy) const;

  // Like Make, but takes the implementation of the named provider and ignores
  // the policy. An override is found under the provider name it was registered
  // with. NotFound if the operator has no provider of that name.
  absl::StatusOr<MadeOp> MakeFrom(absl::string_view provider,
                                  absl::string_view op,
                                  const NamedArgs& args) const;

  // Constructions so far; zeros for an operator that does not exist.
  OpCounts Counts(absl::string_view op) const;

  // A warning for every token of the policy that had no effect: the operator
  // does not exist, or was never constructed. Empty until the first operator is
  // constructed.
  std::vector<std::string> Warnings() const;

 private:
  struct Counters {
    std::atomic<int64_t> enabled{0};
    std::atomic<int64_t> disabled{0};
  };
  using Maker = absl::FunctionRef<absl::StatusOr<MadeOp>(
      const OpDefinition& op, absl::Span<const OpArg> args, bool& enabled)>;

  // Finds the operator, arranges its arguments, makes it, and counts it.
  absl::StatusOr<MadeOp> MakeBy(absl::string_view op, const NamedArgs& args,
                                Maker make) const;

  const OpRegistry& registry_;
  OpPolicy policy_;
  // The keys never change after construction.
  std::map<std::string, std::unique_ptr<Counters>, std::less<>> counters_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_DISPATCHER_H_
