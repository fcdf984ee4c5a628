#include "quern/attention/schedule/draft_trees.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/numeric/bits.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "quern/attention/schedule.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "attention_schedule";

// The bits of the drafts [0, end), end <= 63.
uint64_t BitsBelow(int64_t end) { return (uint64_t{1} << end) - 1; }

}  // namespace

absl::Status CheckDrafts(const AttentionBatch& batch) {
  const auto masks = static_cast<int64_t>(batch.draft_masks.size());
  if (batch.draft_lens.empty()) {
    return CheckEqual(kOp, "draft_masks.size()", masks, 0, "draft_lens");
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kOp, "draft_lens.size()", static_cast<int64_t>(batch.draft_lens.size()),
      static_cast<int64_t>(batch.q_lens.size()), "q_lens"));
  int64_t drafts = 0;
  for (size_t s = 0; s < batch.draft_lens.size(); ++s) {
    const int64_t len = batch.draft_lens[s];
    const int64_t most = std::min(
        {AttentionSchedule::kMaxDrafts, batch.q_lens[s], batch.kv_lens[s]});
    if (len < 0 || len > most) {
      return InvalidArgument(kOp, "sequence ", s, ": draft_len=", len,
                             "; need 0 <= draft_len <= ", most,
                             ", the least of ", AttentionSchedule::kMaxDrafts,
                             ", its q_len and its kv_len");
    }
    if (len > 0 && !batch.causal.empty() && batch.causal[s] == 0) {
      return InvalidArgument(kOp, "sequence ", s, ": draft_len=", len,
                             "; need 0 of a sequence that is not causal");
    }
    drafts += len;
  }
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "draft_masks.size()", masks, drafts, "draft_lens"));
  size_t at = 0;
  for (size_t s = 0; s < batch.draft_lens.size(); ++s) {
    for (int64_t i = 0; i < batch.draft_lens[s]; ++i) {
      const uint64_t mask = batch.draft_masks[at++];
      if ((mask >> i) <= 1) continue;
      return InvalidArgument(
          kOp, "sequence ", s, ": the mask of draft ", i, " is 0x",
          absl::Hex(mask), "; need no bit above bit ", i,
          ", because a draft comes after those that it sees");
    }
  }
  return absl::OkStatus();
}

void AddDrafts(const AttentionBatch& batch, size_t s,
               AttentionScheduleStorage& storage) {
  AttentionSequence& sequence = storage.sequences[s];
  sequence.draft_begin = static_cast<int64_t>(storage.drafts.size());
  sequence.draft_len = batch.draft_lens.empty() ? 0 : batch.draft_lens[s];
  for (int64_t i = 0; i < sequence.draft_len; ++i) {
    uint64_t seen = batch.draft_masks[storage.drafts.size()];
    const int64_t before = absl::popcount(seen & BitsBelow(i));
    // The window hides those that stand farthest before the draft.
    for (int64_t hidden = before - sequence.left; hidden > 0; --hidden) {
      seen &= seen - 1;
    }
    storage.drafts.push_back({seen, before});
  }
}

}  // namespace quern
