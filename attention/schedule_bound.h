#ifndef QUERN_ATTENTION_SCHEDULE_BOUND_H_
#define QUERN_ATTENTION_SCHEDULE_BOUND_H_

// What the schedules of all steps of an engine need at most, so that it plans
// its memory once:
//
//   QUERN_ASSIGN_OR_RETURN(const AttentionBound bound,
//                          AttentionBoundOf(spec, limits, {}, max_workers));
//   Reserve(bound, storage);   // Build allocates nothing from here on
//   QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
//                          plan.WorkspaceBytes(limits, max_workers));

#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"

namespace quern {

// The largest step: no AttentionBatch has more of any of these.
struct AttentionLimits {
  int64_t max_tokens = 0;      // new tokens of all sequences together
  int64_t max_sequences = 0;   // sequences
  int64_t max_kv_len = 0;      // tokens of one sequence, cached and new
  bool prefix_groups = false;  // whether batches have prefix groups
  int64_t max_drafts = 0;      // drafts of all sequences together
  // Workers that a schedule is built for, where these may be more than those
  // that run it. More workers cut more blocks, and each cut leaves partial
  // results, which take memory whoever runs the schedule.
  int max_schedule_workers = 0;
};

// Upper bounds of a schedule's sizes. Those of a real schedule are often far
// smaller: partial results are bounded as if each share ended in the middle of
// the longest sequence.
struct AttentionBound {
  int64_t sequences = 0;
  int64_t drafts = 0;
  int64_t work = 0;
  int64_t shares = 0;
  int64_t runs = 0;
  int64_t merges = 0;
  int64_t members = 0;  // of prefixes
  int64_t prefixes = 0;
  int64_t prefix_runs = 0;
  int64_t max_block_rows = 0;
  int64_t partial_rows = 0;
};

// The bound of all schedules of `spec` and `tiles` within `limits`, built for 1
// to max_workers workers, or to limits.max_schedule_workers if these are more.
// InvalidArgument names a limit below 0, above 2^30 or, of workers, above
// kMaxWorkers, or what AttentionSchedule::Build refuses of spec, tiles and
// workers.
absl::StatusOr<AttentionBound> AttentionBoundOf(const AttentionSpec& spec,
                                                const AttentionLimits& limits,
                                                const AttentionTiles& tiles,
                                                int max_workers);

// Makes room for every schedule within the bound.
void Reserve(const AttentionBound& bound, AttentionScheduleStorage& storage);

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_BOUND_H_
