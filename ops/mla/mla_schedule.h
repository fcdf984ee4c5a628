#ifndef QUERN_OPS_MLA_MLA_SCHEDULE_H_
#define QUERN_OPS_MLA_MLA_SCHEDULE_H_

// What one step of multi-head latent attention knows of its sequences, the same
// for all layers: which form computes each, which rows the products of the
// forms read, where new latents go, and both schedules of attention.
//
//   MlaScheduleStorage storage;   // kept from step to step
//   QUERN_ASSIGN_OR_RETURN(const MlaSchedule schedule,
//       MlaSchedule::Build(spec, {q_lens, kv_lens, pages}, workers, storage));

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/schedule.h"
#include "quern/attention/varlen_attention.h"
#include "quern/cache/page_table.h"
#include "quern/ops/mla/mla_spec.h"

namespace quern {

// The sequences of a step, one entry each.
struct MlaBatch {
  absl::Span<const int64_t> q_lens;   // new tokens
  absl::Span<const int64_t> kv_lens;  // all tokens, the new ones included
  PageTable pages;  // their pages, whose arrays outlive the schedule
};

// The arrays of a schedule: only growth allocates. Callers do not look inside.
struct MlaScheduleStorage {
  std::vector<int32_t> absorbed, direct;  // tokens of each form
  std::vector<int32_t> query_rows, query_ends;
  std::vector<int64_t> slots, sorted_slots;
  std::vector<int64_t> q_lens, kv_lens, absorbed_lens;
  std::vector<int32_t> cu_q, cu_kv;
  AttentionScheduleStorage absorbed_schedule;
  VarlenAttentionStorage direct_schedule;
};

// A borrowed, validated schedule: the storage outlives it and does not change,
// and the next Build into that storage ends it. It may be copied freely.
class MlaSchedule {
 public:
  // Nothing to do.
  MlaSchedule() = default;

  // InvalidArgument names the field or the sequence, the value and the bound: a
  // spec that CheckMlaSpec refuses; lists of different sizes; a q_len outside
  // [0, kv_len]; pages that do not hold kv_len tokens, are missing, or have
  // another size than the cache's; two new tokens in one slot; 2^31 or more new
  // tokens times heads; what AttentionSchedule::Build refuses. num_workers:
  // those of the executor that will run it; another number changes no bit.
  // Cost: linear in tokens times heads, and sorting the slots.
  static absl::StatusOr<MlaSchedule> Build(const MlaSpec& spec,
                                           const MlaBatch& batch,
                                           int num_workers,
                                           MlaScheduleStorage& storage);

  // Rows of x and out: the new tokens, sequence by sequence.
  int64_t num_tokens() const { return static_cast<int64_t>(slots_.size()); }
  // Sizes that a plan must share.
  int64_t heads() const { return heads_; }
  const PageTable& pages() const { return pages_; }
  // Lengths of the sequences, as Build was given them.
  absl::Span<const int64_t> q_lens() const { return q_lens_; }
  absl::Span<const int64_t> kv_lens() const { return kv_lens_; }
  // Where the latent of each token goes.
  absl::Span<const int64_t> slots() const { return slots_; }

  // The tokens of each form, ascending. Together they are all tokens.
  absl::Span<const int32_t> absorbed_tokens() const { return absorbed_tokens_; }
  absl::Span<const int32_t> direct_tokens() const { return direct_tokens_; }
  // For absorbed token i of head h, which is row h * absorbed tokens + i, the
  // row token * heads + h of all queries.
  absl::Span<const int32_t> query_rows() const { return query_rows_; }
  // [heads + 1]: the rows above of each head.
  absl::Span<const int32_t> query_ends() const { return query_ends_; }

  // Attention over the cache. Its tokens are the absorbed ones, without gaps.
  const AttentionSchedule& absorbed() const { return absorbed_; }
  // Attention over expanded keys and values. Its queries are the tokens
  // [direct_begin, direct_begin + direct().num_tokens()), among which those of
  // the absorbed form see no key; its keys are those of the direct tokens.
  const AttentionSchedule& direct() const { return direct_; }
  int64_t direct_begin() const { return direct_begin_; }

 private:
  void Borrow(const MlaScheduleStorage& storage);

  PageTable pages_;
  int64_t heads_ = 0;
  int64_t direct_begin_ = 0;
  absl::Span<const int64_t> q_lens_, kv_lens_, slots_;
  absl::Span<const int32_t> absorbed_tokens_, direct_tokens_;
  absl::Span<const int32_t> query_rows_, query_ends_;
  AttentionSchedule absorbed_, direct_;
};

}  // namespace quern

#endif  // QUERN_OPS_MLA_MLA_SCHEDULE_H_
