#ifndef QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_BINDING_H_
#define QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_BINDING_H_

// What the operators on pools of states share: the batch of sequences among
// their tensors.

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"

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

// The arguments of a plan on pools of states, and the tensors of its batch.
template <class PlanArgs>
struct SequenceArgs : PlanArgs {
  AnyTensorView indices, starts, initial;
};

// One sequence for each index of a state, which the schema calls `indices`; in
// a decode step every token is a sequence.
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& InTokens(OpDeclaration<Plan, Spec, Args>& op,
                                          const char* indices) {
  return op.In(indices, &Args::indices, {kAny}, IndexDType<Spec>())
      .Finish([indices](Args& a) {
        a.batch = BatchOf(a.indices, a.starts, a.initial, indices);
      })
      .CheckFirst([indices](const Args& a) {
        return CheckBatch("sequences", indices, a.indices, a.starts, a.initial);
      });
}

// The same, of sequences of any length.
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& InBatch(OpDeclaration<Plan, Spec, Args>& op,
                                         const char* indices) {
  return InTokens(op, indices)
      .Maybe("query_start_loc", &Args::starts, {kAny}, IndexDType<Spec>())
      .Maybe("has_initial_state", &Args::initial, {kAny});
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_BINDING_H_
