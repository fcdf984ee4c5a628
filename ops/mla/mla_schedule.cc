#include "quern/ops/mla/mla_schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/varlen_attention.h"
#include "quern/core/status_macros.h"
#include "quern/ops/mla/mla_spec.h"

namespace quern {
namespace {

constexpr char kOp[] = "multi_head_latent_attention";

// The number of new tokens. Rows of queries are numbered by 32 bits.
absl::StatusOr<int64_t> CountTokens(const MlaSpec& spec,
                                    const MlaBatch& batch) {
  const int64_t most = std::numeric_limits<int32_t>::max() / spec.heads;
  int64_t tokens = 0;
  for (size_t s = 0; s < batch.q_lens.size(); ++s) {
    const int64_t q_len = batch.q_lens[s], kv_len = batch.kv_lens[s];
    if (q_len < 0 || q_len > kv_len) {
      return InvalidArgument(kOp, "sequence ", s, ": q_len=", q_len,
                             "; need 0 <= q_len <= ", kv_len, ", its kv_len");
    }
    if (q_len > most - tokens) {
      return InvalidArgument(kOp, "sequence ", s, ": q_len=", q_len, " after ",
                             tokens, " tokens; need at most ", most,
                             " tokens in all, as there are ", spec.heads,
                             " heads");
    }
    tokens += q_len;
  }
  return tokens;
}

absl::Status FindSlots(const MlaBatch& batch, int64_t tokens,
                       MlaScheduleStorage& storage) {
  // Before memory is taken for so many tokens.
  QUERN_RETURN_IF_ERROR(batch.pages.CheckKvLens(batch.kv_lens));
  storage.slots.resize(static_cast<size_t>(tokens));
  QUERN_RETURN_IF_ERROR(batch.pages.SlotMapping(batch.q_lens, batch.kv_lens,
                                                absl::MakeSpan(storage.slots)));
  storage.sorted_slots = storage.slots;
  std::sort(storage.sorted_slots.begin(), storage.sorted_slots.end());
  const auto twice = std::adjacent_find(storage.sorted_slots.begin(),
                                        storage.sorted_slots.end());
  if (twice == storage.sorted_slots.end()) return absl::OkStatus();
  return InvalidArgument(kOp, "two new tokens go to slot ", *twice,
                         "; need pages that only one of the sequences has");
}

// Divides the tokens between the forms, and fills the lengths of both
// schedules. Returns the first token of the direct one.
int64_t DivideTokens(const MlaSpec& spec, const MlaBatch& batch,
                     MlaScheduleStorage& storage) {
  storage.absorbed.clear();
  storage.direct.clear();
  storage.absorbed_lens.clear();
  storage.cu_q.assign(1, 0);
  storage.cu_kv.assign(1, 0);
  int32_t token = 0, begin = 0;
  // Queries of the direct schedule so far, and those up to the end of the last
  // direct sequence.
  int32_t queries = 0, last = 0;
  for (size_t s = 0; s < batch.q_lens.size(); ++s) {
    const auto q_len = static_cast<int32_t>(batch.q_lens[s]);
    const bool direct = UsesDirectForm(spec, q_len, batch.kv_lens[s]);
    if (direct && storage.direct.empty()) begin = token;
    auto& tokens = direct ? storage.direct : storage.absorbed;
    for (int32_t i = 0; i < q_len; ++i) tokens.push_back(token + i);
    storage.absorbed_lens.push_back(direct ? 0 : q_len);
    if (!storage.direct.empty()) queries += q_len;
    if (direct) last = queries;
    storage.cu_q.push_back(queries);
    storage.cu_kv.push_back(static_cast<int32_t>(storage.direct.size()));
    token += q_len;
  }
  // What follows the last direct sequence has no queries there.
  for (int32_t& end : storage.cu_q) end = std::min(end, last);
  return begin;
}

void ListQueryRows(int64_t heads, MlaScheduleStorage& storage) {
  storage.query_rows.clear();
  storage.query_ends.assign(1, 0);
  for (int64_t h = 0; h < heads; ++h) {
    for (const int32_t token : storage.absorbed) {
      storage.query_rows.push_back(static_cast<int32_t>(token * heads + h));
    }
    storage.query_ends.push_back(
        static_cast<int32_t>(storage.query_rows.size()));
  }
}

}  // namespace

absl::StatusOr<MlaSchedule> MlaSchedule::Build(const MlaSpec& spec,
                                               const MlaBatch& batch,
                                               int num_workers,
                                               MlaScheduleStorage& storage) {
  QUERN_RETURN_IF_ERROR(CheckMlaSpec(spec));
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kOp, "kv_lens.size()", static_cast<int64_t>(batch.kv_lens.size()),
      static_cast<int64_t>(batch.q_lens.size()), "q_lens has"));
  if (!batch.q_lens.empty()) {
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "pages.page_size",
                                     batch.pages.page_size(),
                                     spec.cache.page_size(), "the cache has"));
  }
  QUERN_ASSIGN_OR_RETURN(const int64_t tokens, CountTokens(spec, batch));
  QUERN_RETURN_IF_ERROR(FindSlots(batch, tokens, storage));
  MlaSchedule schedule;
  storage.q_lens.assign(batch.q_lens.begin(), batch.q_lens.end());
  storage.kv_lens.assign(batch.kv_lens.begin(), batch.kv_lens.end());
  schedule.pages_ = batch.pages;
  schedule.heads_ = spec.heads;
  schedule.direct_begin_ = DivideTokens(spec, batch, storage);
  ListQueryRows(spec.heads, storage);
  if (!storage.absorbed.empty()) {
    QUERN_ASSIGN_OR_RETURN(
        schedule.absorbed_,
        AttentionSchedule::Build(AbsorbedAttention(spec), storage.absorbed_lens,
                                 batch.kv_lens, num_workers,
                                 storage.absorbed_schedule));
    QUERN_RETURN_IF_ERROR(CheckPages(schedule.absorbed_, batch.pages));
  }
  if (!storage.direct.empty()) {
    QUERN_ASSIGN_OR_RETURN(const VarlenAttentionPlan direct,
                           VarlenAttentionPlan::Create(DirectAttention(spec)));
    QUERN_ASSIGN_OR_RETURN(
        schedule.direct_,
        direct.BuildSchedule(storage.cu_q, storage.cu_kv, VarlenMask::kCausal,
                             num_workers, storage.direct_schedule));
  }
  schedule.Borrow(storage);
  return schedule;
}

void MlaSchedule::Borrow(const MlaScheduleStorage& storage) {
  q_lens_ = storage.q_lens;
  kv_lens_ = storage.kv_lens;
  slots_ = storage.slots;
  absorbed_tokens_ = storage.absorbed;
  direct_tokens_ = storage.direct;
  query_rows_ = storage.query_rows;
  query_ends_ = storage.query_ends;
}

}  // namespace quern
