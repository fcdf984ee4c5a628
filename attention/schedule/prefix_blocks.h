#ifndef QUERN_ATTENTION_SCHEDULE_PREFIX_BLOCKS_H_
#define QUERN_ATTENTION_SCHEDULE_PREFIX_BLOCKS_H_

// Private: groups of sequences divided into blocks of an AttentionSchedule.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"

namespace quern {

// Fills storage's members, prefixes and places: each prefix has as many members
// of a group, in its order, as have block_queries queries together. Members
// with more queries than that, or without any, and those that are left alone
// have no place. All are empty where the batch has no groups, and where a
// window hides keys from some queries. Refuses what AttentionSchedule::Build
// says; the batch's lengths are valid.
absl::Status MakePrefixBlocks(const AttentionSpec& spec,
                              const AttentionBatch& batch,
                              int64_t block_queries,
                              AttentionScheduleStorage& storage);

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_PREFIX_BLOCKS_H_
