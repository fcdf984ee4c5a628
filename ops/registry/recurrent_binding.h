#ifndef QUERN_OPS_REGISTRY_RECURRENT_BINDING_H_
#define QUERN_OPS_REGISTRY_RECURRENT_BINDING_H_

// What the operators on pools of states share: the batch of sequences among
// their tensors, and the form of BoundOp over a plan or its native loops.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

inline absl::Status CheckRank(absl::string_view op, absl::string_view field,
                              const TensorMeta& meta, size_t rank) {
  if (meta.extents.size() == rank) return absl::OkStatus();
  return InvalidArgument(op, field, " has rank ", meta.extents.size(),
                         "; need ", rank);
}

// The last tensors of an operator before out: state indices, which the schema
// calls `field`, starts, and bytes that say whether there is an initial state;
// each rank 0 where it is left out. With starts there may be more indices than
// sequences, as an engine has that pads its batch; those are not read.
inline absl::Status CheckBatch(absl::string_view op, absl::string_view field,
                               const AnyTensorView& indices,
                               const AnyTensorView& starts,
                               const AnyTensorView& initial) {
  QUERN_RETURN_IF_ERROR(CheckIndexView(op, field, indices, {kAnyExtent}));
  // An empty tensor is not one that is left out.
  int64_t sequences = indices.extent(0);
  if (starts.rank() != 0) {
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(op, "query_start_loc", starts, {kAnyExtent}));
    if (starts.extent(0) < 1 || starts.extent(0) - 1 > sequences) {
      return InvalidArgument(op, "query_start_loc is [", starts.extent(0),
                             "]; need [1] to [", sequences + 1, "], as ", field,
                             " is [", sequences, "]");
    }
    sequences = starts.extent(0) - 1;
  }
  if (initial.rank() == 0) return absl::OkStatus();
  return CheckInput(op, "has_initial_state", initial, DType::kU8, {sequences});
}
// `field`: a literal, what the schema calls the indices.
inline SequenceBatch BatchOf(const AnyTensorView& indices,
                             const AnyTensorView& starts,
                             const AnyTensorView& initial,
                             const char* field = "state_indices") {
  SequenceBatch batch;
  batch.indices_name = field;
  batch.state_indices = IndicesOf(indices);
  if (starts.rank() != 0) {
    batch.query_start_loc = IndicesOf(starts);
    batch.state_indices = IndicesOf(indices, starts.extent(0) - 1);
  }
  if (initial.rank() != 0) {
    batch.has_initial_state =
        absl::MakeConstSpan(static_cast<const uint8_t*>(initial.data()),
                            static_cast<size_t>(initial.extent(0)));
  }
  return batch;
}

inline absl::Status CheckIndexMetas(absl::string_view op,
                                    absl::string_view field,
                                    const TensorMeta& indices,
                                    const std::optional<TensorMeta>& starts) {
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(op, field, indices));
  if (!starts.has_value()) return absl::OkStatus();
  return CheckIndexMeta(op, "query_start_loc", *starts);
}

// The tensors of an operator, in the order of its schema, as the arguments of
// its plan.
template <class Args>
struct Binding {
  const char* op;
  size_t tensors;
  // What must hold before args() may look.
  absl::Status (*check)(const char* op, absl::Span<const AnyTensorView> t);
  Args (*args)(absl::Span<const AnyTensorView> t);
};

template <class Plan, class Args>
absl::Status CheckBoundPlan(const Plan& plan, const Binding<Args>& binding,
                            absl::Span<const AnyTensorView> t) {
  QUERN_RETURN_IF_ERROR(CheckTensorCount(binding.op, t, binding.tensors));
  QUERN_RETURN_IF_ERROR(binding.check(binding.op, t));
  return plan.CheckArgs(binding.args(t));
}

// An operator on a plan whose Execute takes a workspace, or on native loops.
template <class Plan, class Args, class Spec>
class BoundSequences final : public BoundOp {
 public:
  using Tensors = absl::Span<const AnyTensorView>;
  using Native = void (*)(const Spec&, const Args&);
  // `native`: null for the plan itself.
  BoundSequences(const Plan& plan, const Binding<Args>& binding, Native native)
      : plan_(plan), binding_(binding), native_(native) {}

  const char* target() const override {
    return native_ == nullptr ? plan_.target() : "scalar";
  }
  absl::Status CheckArgs(Tensors t) const override {
    return CheckBoundPlan(plan_, binding_, t);
  }
  // max_rows: tokens of the step.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if (native_ != nullptr) return 0;
    return plan_.WorkspaceBytes(max_rows, max_workers);
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (native_ != nullptr) return native_(plan_.spec(), binding_.args(t));
    plan_.Execute(binding_.args(t), workspace, executor);
  }

 private:
  Plan plan_;
  Binding<Args> binding_;
  Native native_;
};

template <class Plan, class Args, class Spec>
std::unique_ptr<BoundOp> BindSequences(const Plan& plan,
                                       const Binding<Args>& binding,
                                       void (*native)(const Spec&,
                                                      const Args&)) {
  return std::make_unique<BoundSequences<Plan, Args, Spec>>(plan, binding,
                                                            native);
}

// An operator on a plan without a workspace, or on native loops.
template <class Plan, class Args, class Spec>
std::unique_ptr<BoundOp> BindPlan(const Plan& plan,
                                  const Binding<Args>& binding,
                                  void (*native)(const Spec&, const Args&)) {
  return std::make_unique<BoundCalls>(
      native == nullptr ? plan.target() : "scalar",
      [plan, binding](absl::Span<const AnyTensorView> t) {
        return CheckBoundPlan(plan, binding, t);
      },
      [plan, binding, native](absl::Span<const AnyTensorView> t,
                              Executor& executor) {
        if (native != nullptr) return native(plan.spec(), binding.args(t));
        plan.Execute(binding.args(t), executor);
      });
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_RECURRENT_BINDING_H_
