#include "quern/ops/recurrent/sequence_batch.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "quern/core/algorithms/distinct.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/check_indices.h"

namespace quern {
namespace {

// Slots that one pass marks, in 4 KiB.
constexpr int64_t kWindow = int64_t{1} << 15;

// No index but null_slot occurs twice. Every index is >= 0 or is null_slot.
absl::Status CheckDistinct(absl::string_view op, const SequenceBatch& batch,
                           int64_t null_slot) {
  const IndexView indices = batch.state_indices;
  const auto slot = [&](size_t i) {
    const int64_t index = indices[static_cast<int64_t>(i)];
    return index == null_slot ? -1 : index;
  };
  const auto sequences = static_cast<size_t>(indices.size());
  const int64_t twice =
      FindTwice<kWindow>(sequences, slot, [](const auto& /*window*/) {});
  if (twice == kNoNumber) return absl::OkStatus();
  size_t second = 0;
  for (int seen = 0; seen < 2; ++second) seen += slot(second) == twice ? 1 : 0;
  return InvalidArgument(op, batch.indices_name, "[", second - 1, "]=", twice,
                         " is given twice; need a slot for each sequence");
}

absl::Status CheckStarts(absl::string_view op, const SequenceBatch& batch,
                         int64_t tokens) {
  const IndexView starts = batch.query_start_loc;
  if (starts.size() == 0) {
    return CheckEqual(op, batch.indices_name, batch.sequences(), tokens,
                      "every token is a sequence without query_start_loc");
  }
  // Words are put together for a refusal only, because that allocates.
  if (starts.size() - 1 != batch.sequences()) {
    return CheckEqual(op, "query_start_loc", starts.size() - 1,
                      batch.sequences(),
                      absl::StrCat(batch.indices_name, " has sequences"));
  }
  if (starts.null()) return InvalidArgument(op, "query_start_loc is null");
  int64_t least = 0;
  for (int64_t i = 0; i < starts.size(); ++i) {
    if (starts[i] < least || starts[i] > tokens) {
      return InvalidArgument(op, "query_start_loc[", i, "]=", starts[i],
                             "; need ", least, " <= start <= ", tokens);
    }
    least = starts[i];
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSequences(absl::string_view op, const SequenceBatch& batch,
                            int64_t tokens, int64_t slots, int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(CheckIndices(op, batch.indices_name, "index",
                                     batch.state_indices, slots, null_slot));
  QUERN_RETURN_IF_ERROR(CheckStarts(op, batch, tokens));
  const auto initial = static_cast<int64_t>(batch.has_initial_state.size());
  if (initial != 0 && initial != batch.sequences()) {
    return CheckEqual(op, "has_initial_state", initial, batch.sequences(),
                      absl::StrCat(batch.indices_name, " has sequences"));
  }
  return CheckDistinct(op, batch, null_slot);
}

absl::Status CheckBatchApart(absl::string_view op, const SequenceBatch& batch,
                             absl::string_view field,
                             const AnyTensorView& view) {
  QUERN_RETURN_IF_ERROR(CheckApart(op, batch.indices_name,
                                   batch.state_indices.tensor(), field, view));
  QUERN_RETURN_IF_ERROR(CheckApart(
      op, "query_start_loc", batch.query_start_loc.tensor(), field, view));
  return CheckApart(
      op, "has_initial_state",
      DenseVector(batch.has_initial_state.data(),
                  static_cast<int64_t>(batch.has_initial_state.size())),
      field, view);
}

}  // namespace quern
