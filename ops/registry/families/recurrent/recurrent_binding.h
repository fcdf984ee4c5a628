#ifndef QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_BINDING_H_
#define QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_BINDING_H_

// What the operators on pools of states share: the batch of sequences among
// their tensors.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

inline absl::Status CheckRank(absl::string_view op, absl::string_view field,
                              const TensorMeta& meta, size_t rank) {
  if (meta.extents.size() == rank) return absl::OkStatus();
  return InvalidArgument(op, field, " has rank ", meta.extents.size(),
                         "; need ", rank);
}

// Slots by rows, [sequences, columns]: one row after the other.
inline absl::Status CheckSlots(absl::string_view op, absl::string_view field,
                               const AnyTensorView& slots) {
  QUERN_RETURN_IF_ERROR(
      CheckIndexView(op, field, slots, {kAnyExtent, kAnyExtent}));
  if (slots.extent(1) < 1) {
    return InvalidArgument(op, field, " is [", slots.extent(0), ", 0]",
                           "; need a slot in each row");
  }
  if (slots.extent(0) > 1 && slots.stride(0) != slots.extent(1)) {
    return InvalidArgument(op, field, " has rows ", slots.stride(0),
                           " apart; need ", slots.extent(1),
                           ", a dense tensor");
  }
  return absl::OkStatus();
}

// The last tensors of an operator before out: state indices, which the schema
// calls `field`, starts, and bytes that say whether there is an initial state;
// each rank 0 where it is left out. With starts there may be more indices than
// sequences, as an engine has that pads its batch; those are not read.
inline absl::Status CheckBatch(absl::string_view op, absl::string_view field,
                               const AnyTensorView& indices,
                               const AnyTensorView& starts,
                               const AnyTensorView& initial) {
  if (indices.rank() == 2) {
    QUERN_RETURN_IF_ERROR(CheckSlots(op, field, indices));
  } else {
    QUERN_RETURN_IF_ERROR(CheckIndexView(op, field, indices, {kAnyExtent}));
  }
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
  if (indices.rank() == 2) {
    batch.columns = std::max<int64_t>(indices.extent(1), 1);
  }
  batch.state_indices = IndicesOf(indices);
  if (starts.rank() != 0) {
    batch.query_start_loc = IndicesOf(starts);
    batch.state_indices = IndicesOf(
        indices, std::max<int64_t>(starts.extent(0), 1) - 1, batch.columns);
  }
  if (initial.rank() != 0) {
    batch.has_initial_state =
        absl::MakeConstSpan(static_cast<const uint8_t*>(initial.data()),
                            static_cast<size_t>(initial.extent(0)));
  }
  return batch;
}

// What the shape of the states of a convolution says of their layout. Where
// both dimensions may be those of channels, they are rows.
inline ConvStateLayout ConvStateLayoutOf(const TensorMeta& states,
                                         int64_t channels) {
  return states.extents[2] != channels && states.extents[1] == channels
             ? ConvStateLayout::kChannels
             : ConvStateLayout::kRows;
}

// The arguments of a plan on pools of states, and the tensors of its batch.
template <class PlanArgs>
struct SequenceArgs : PlanArgs {
  AnyTensorView indices, starts, initial;
  AnyTensorView destinations, accepted;  // of drafts
};

// One sequence for each index of a state, which the schema calls `indices`; in
// a decode step every token is a sequence. `shape`: empty where the indices may
// have rows, for drafts.
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& InTokens(OpDeclaration<Plan, Spec, Args>& op,
                                          const char* indices,
                                          OpShape<Spec> shape = {kAny}) {
  return op.In(indices, &Args::indices, std::move(shape), IndexDType<Spec>())
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
                                         const char* indices,
                                         OpShape<Spec> shape = {kAny}) {
  return InTokens(op, indices, std::move(shape))
      .Maybe("query_start_loc", &Args::starts, {kAny}, IndexDType<Spec>())
      .Maybe("has_initial_state", &Args::initial, {kAny});
}

// The tensors of drafts, which InTokens or InBatch comes before: destinations
// [sequences] or [sequences, columns], which the schema calls `destinations`,
// and num_accepted_tokens [sequences]. There may be more rows than sequences,
// which are not read.
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& OrDrafts(OpDeclaration<Plan, Spec, Args>& op,
                                          const char* indices,
                                          const char* destinations) {
  const auto check = [indices, destinations](const Args& a) -> absl::Status {
    QUERN_RETURN_IF_ERROR(
        CheckBatch("sequences", indices, a.indices, a.starts, a.initial));
    const int64_t sequences =
        a.starts.rank() != 0 ? a.starts.extent(0) - 1 : a.indices.extent(0);
    const auto enough = [&](const char* field, const AnyTensorView& v) {
      return v.extent(0) >= sequences
                 ? absl::OkStatus()
                 : InvalidArgument("sequences", field, " has ", v.extent(0),
                                   " rows; need ", sequences, " sequences");
    };
    if (a.destinations.rank() != 0) {
      QUERN_RETURN_IF_ERROR(
          a.destinations.rank() == 2
              ? CheckSlots("sequences", destinations, a.destinations)
              : CheckIndexView("sequences", destinations, a.destinations,
                               {kAnyExtent}));
      QUERN_RETURN_IF_ERROR(enough(destinations, a.destinations));
    }
    if (a.accepted.rank() == 0) return absl::OkStatus();
    QUERN_RETURN_IF_ERROR(CheckIndexView("sequences", "num_accepted_tokens",
                                         a.accepted, {kAnyExtent}));
    return enough("num_accepted_tokens", a.accepted);
  };
  const auto ranks = [indices, destinations](
                         Spec&, const OpCall& call) -> absl::Status {
    for (const char* field : {indices, destinations}) {
      const TensorMeta* const meta = call.Tensor(field);
      if (meta == nullptr || meta->extents.size() == 2) continue;
      QUERN_RETURN_IF_ERROR(CheckRank(call.op(), field, *meta, 1));
    }
    return absl::OkStatus();
  };
  return op.Maybe(destinations, &Args::destinations, {}, IndexDType<Spec>())
      .Then(ranks)
      .Maybe("num_accepted_tokens", &Args::accepted, {kAny}, IndexDType<Spec>())
      .Finish([destinations](Args& a) {
        SequenceBatch& batch = a.batch;
        batch.destinations_name = destinations;
        const int64_t sequences = batch.sequences();
        if (a.destinations.rank() != 0) {
          batch.destination_columns =
              a.destinations.rank() == 2 ? a.destinations.extent(1) : 1;
          batch.destination_indices =
              IndicesOf(a.destinations, sequences, batch.destination_columns);
        }
        if (a.accepted.rank() != 0) {
          batch.num_accepted_tokens = IndicesOf(a.accepted, sequences);
        }
      })
      .CheckFirst(check);
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_RECURRENT_RECURRENT_BINDING_H_
