#ifndef QUERN_ATTENTION_SCHEDULE_DRAFT_TREES_H_
#define QUERN_ATTENTION_SCHEDULE_DRAFT_TREES_H_

// Private: the drafts of an AttentionBatch in an AttentionSchedule.

#include <cstddef>

#include "absl/status/status.h"
#include "quern/attention/schedule.h"

namespace quern {

// Refuses what AttentionSchedule::Build says about drafts. The batch's lengths
// are valid.
absl::Status CheckDrafts(const AttentionBatch& batch);

// Sets the draft_len and draft_begin of storage.sequences[s], the last of them,
// and appends its drafts. CheckDrafts accepts the batch, and the other fields
// of the sequence are set.
void AddDrafts(const AttentionBatch& batch, size_t s,
               AttentionScheduleStorage& storage);

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_DRAFT_TREES_H_
