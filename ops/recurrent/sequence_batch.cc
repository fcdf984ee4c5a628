#include "quern/ops/recurrent/sequence_batch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

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

absl::Status CheckMemory(absl::string_view op, absl::string_view field,
                         IndexView list) {
  if (!list.null() || list.size() == 0) return absl::OkStatus();
  return InvalidArgument(op, field, " is null");
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
  QUERN_RETURN_IF_ERROR(CheckMemory(op, "query_start_loc", starts));
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

// A list of the batch that may be left out has `columns` >= 1 numbers for each
// sequence.
absl::Status CheckCount(absl::string_view op, absl::string_view field,
                        const SequenceBatch& batch, int64_t size,
                        int64_t columns) {
  const int64_t sequences = batch.sequences();
  // Divided, because a product may exceed 2^63.
  if (size == 0 || (size % columns == 0 && size / columns == sequences)) {
    return absl::OkStatus();
  }
  if (sequences > std::numeric_limits<int64_t>::max() / columns) {
    return InvalidArgument(op, field, "=", size, "; need rows of ", columns,
                           ", one for each of ", sequences, " sequences");
  }
  return CheckEqual(op, field, size, sequences * columns,
                    absl::StrCat(batch.indices_name, " has sequences"));
}

absl::Status CheckAccepted(absl::string_view op, const SequenceBatch& batch,
                           int64_t places) {
  const IndexView accepted = batch.num_accepted_tokens;
  QUERN_RETURN_IF_ERROR(
      CheckCount(op, "num_accepted_tokens", batch, accepted.size(), 1));
  QUERN_RETURN_IF_ERROR(CheckMemory(op, "num_accepted_tokens", accepted));
  for (int64_t s = 0; s < accepted.size(); ++s) {
    if (accepted[s] < 0 || accepted[s] > places) {
      return InvalidArgument(op, "num_accepted_tokens[", s, "]=", accepted[s],
                             "; need 0 <= accepted <= ", places,
                             ", as so many states of a sequence are kept");
    }
  }
  return absl::OkStatus();
}

// The slots that a batch with drafts takes: a row for each sequence, its tokens
// that may have a destination of their own.
class DraftSlots {
 public:
  DraftSlots(const SequenceBatch& batch, int64_t null_slot)
      : batch_(batch),
        null_slot_(null_slot),
        columns_(batch.destination_indices.size() > 0
                     ? batch.destination_columns
                     : batch.columns) {}

  int64_t columns() const { return columns_; }
  // The lists of the batch have so many numbers, so the product is one.
  int64_t size() const { return batch_.sequences() * columns_; }
  int64_t tokens(int64_t s) const { return batch_.end(s) - batch_.begin(s); }
  bool used(int64_t s) const {
    return tokens(s) > 0 && batch_.source(s) != null_slot_;
  }
  // The destination in column j of sequence s; -1 where it has none.
  int64_t At(int64_t s, int64_t j) const {
    if (!used(s) || j >= tokens(s)) return -1;
    const int64_t token = columns_ == 1 ? tokens(s) - 1 : j;
    const int64_t slot = batch_.destination(s, token, null_slot_);
    return slot == null_slot_ ? -1 : slot;
  }
  // Whether a token of sequence s leaves its state in `slot`.
  bool Has(int64_t s, int64_t slot) const {
    for (int64_t j = 0; j < columns_; ++j) {
      if (At(s, j) == slot) return true;
    }
    return false;
  }
  const char* name() const {
    return batch_.destination_indices.size() > 0 ? batch_.destinations_name
                                                 : batch_.indices_name;
  }

 private:
  const SequenceBatch& batch_;
  const int64_t null_slot_;
  const int64_t columns_;
};

// Starts and accepted tokens are right.
absl::Status CheckDraftRange(absl::string_view op, const SequenceBatch& batch,
                             const DraftSlots& drafts, int64_t slots,
                             int64_t null_slot) {
  const auto bad = [&](int64_t slot) {
    return (slot < 0 || slot >= slots) && slot != null_slot;
  };
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    const int64_t tokens = drafts.tokens(s), source = batch.source(s);
    if (tokens == 0) continue;
    if (bad(source)) {
      return InvalidArgument(op, batch.indices_name, ": sequence ", s,
                             " begins from slot ", source,
                             "; need 0 <= index < ", slots);
    }
    if (source == null_slot) continue;
    if (drafts.columns() > 1 && tokens > drafts.columns()) {
      return InvalidArgument(op, "sequence ", s, " has ", tokens, " tokens; ",
                             drafts.name(), " has ", drafts.columns(),
                             " slots for it");
    }
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t slot = batch.destination(s, i, null_slot);
      if (!bad(slot)) continue;
      return InvalidArgument(op, drafts.name(), ": token ", i, " of sequence ",
                             s, " has slot ", slot, "; need 0 <= index < ",
                             slots);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDraftsDistinct(absl::string_view op,
                                 const SequenceBatch& batch,
                                 const DraftSlots& drafts) {
  const int64_t columns = drafts.columns();
  int64_t taken = -1;  // a sequence that begins from another's destination
  const auto slot = [&](size_t i) {
    const auto at = static_cast<int64_t>(i);
    return drafts.At(at / columns, at % columns);
  };
  const int64_t twice = FindTwice<kWindow>(
      static_cast<size_t>(drafts.size()), slot, [&](const auto& window) {
        for (int64_t s = 0; s < batch.sequences(); ++s) {
          const int64_t source = batch.source(s);
          if (drafts.used(s) && window.Covers(source) &&
              window.Contains(source) && !drafts.Has(s, source)) {
            taken = s;
          }
        }
      });
  if (twice != kNoNumber) {
    return InvalidArgument(op, drafts.name(), ": slot ", twice,
                           " is given twice; need a slot for each token");
  }
  if (taken < 0) return absl::OkStatus();
  return InvalidArgument(op, batch.indices_name, ": sequence ", taken,
                         " begins from slot ", batch.source(taken),
                         ", where another leaves a state");
}

absl::Status CheckDrafts(absl::string_view op, const SequenceBatch& batch,
                         int64_t slots, int64_t null_slot) {
  QUERN_RETURN_IF_ERROR(
      CheckMemory(op, batch.indices_name, batch.state_indices));
  if (batch.destination_indices.size() > 0) {
    QUERN_RETURN_IF_ERROR(
        CheckAtLeast(op, "destination_columns", batch.destination_columns, 1));
  }
  const DraftSlots drafts(batch, null_slot);
  QUERN_RETURN_IF_ERROR(CheckCount(
      op, batch.destinations_name, batch, batch.destination_indices.size(),
      std::max<int64_t>(batch.destination_columns, 1)));
  QUERN_RETURN_IF_ERROR(
      CheckMemory(op, batch.destinations_name, batch.destination_indices));
  QUERN_RETURN_IF_ERROR(CheckDraftRange(op, batch, drafts, slots, null_slot));
  return CheckDraftsDistinct(op, batch, drafts);
}

}  // namespace

absl::Status CheckSequences(absl::string_view op, const SequenceBatch& batch,
                            int64_t tokens, int64_t slots, int64_t null_slot,
                            int64_t places) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "columns", batch.columns, 1));
  if (batch.state_indices.size() % batch.columns != 0) {
    return InvalidArgument(op, batch.indices_name, " has ",
                           batch.state_indices.size(),
                           " numbers; need rows of ", batch.columns);
  }
  if (!batch.drafts()) {
    QUERN_RETURN_IF_ERROR(CheckIndices(op, batch.indices_name, "index",
                                       batch.state_indices, slots, null_slot));
  }
  QUERN_RETURN_IF_ERROR(CheckStarts(op, batch, tokens));
  const auto initial = static_cast<int64_t>(batch.has_initial_state.size());
  QUERN_RETURN_IF_ERROR(CheckCount(op, "has_initial_state", batch, initial, 1));
  QUERN_RETURN_IF_ERROR(
      CheckAccepted(op, batch, places == 0 ? batch.columns : places));
  return batch.drafts() ? CheckDrafts(op, batch, slots, null_slot)
                        : CheckDistinct(op, batch, null_slot);
}

absl::Status CheckBatchApart(absl::string_view op, const SequenceBatch& batch,
                             absl::string_view field,
                             const AnyTensorView& view) {
  QUERN_RETURN_IF_ERROR(CheckApart(op, batch.indices_name,
                                   batch.state_indices.tensor(), field, view));
  QUERN_RETURN_IF_ERROR(CheckApart(
      op, "query_start_loc", batch.query_start_loc.tensor(), field, view));
  QUERN_RETURN_IF_ERROR(CheckApart(op, batch.destinations_name,
                                   batch.destination_indices.tensor(), field,
                                   view));
  QUERN_RETURN_IF_ERROR(CheckApart(op, "num_accepted_tokens",
                                   batch.num_accepted_tokens.tensor(), field,
                                   view));
  return CheckApart(
      op, "has_initial_state",
      DenseVector(batch.has_initial_state.data(),
                  static_cast<int64_t>(batch.has_initial_state.size())),
      field, view);
}

}  // namespace quern
