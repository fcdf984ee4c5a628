#include "quern/attention/attention_args.h"

#include <cstdint>

#include "absl/status/status.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {

absl::Status CheckAttentionRows(const char* op, const AttentionSpec& spec,
                                const AttentionRows& rows) {
  const KvLayout& layout = spec.kv;
  const int64_t tokens = rows.schedule.num_tokens();
  if (tokens > 0) {
    QUERN_RETURN_IF_ERROR(CheckEqual(op, "schedule.kv_heads",
                                     rows.schedule.kv_heads(),
                                     layout.kv_heads(), "the spec's"));
    QUERN_RETURN_IF_ERROR(CheckEqual(op, "schedule.group",
                                     rows.schedule.group(), spec.group(),
                                     "the spec's"));
  }
  const int64_t left = AttentionSchedule::WindowTokens(spec.window_left);
  const int64_t right = AttentionSchedule::WindowTokens(spec.window_right);
  int64_t index = 0;
  for (const AttentionSequence& s : rows.schedule.sequences()) {
    if (s.left != left || (s.right != 0 && s.right != right)) {
      return InvalidArgument(op, "sequence ", index, " of the schedule sees ",
                             s.left, " tokens before and ", s.right,
                             " after its own; need ", left, " and 0 or ", right,
                             ", the spec's windows");
    }
    ++index;
  }
  QUERN_RETURN_IF_ERROR(CheckHeadRows(op, "q", rows.q, spec.q_dtype, tokens,
                                      spec.q_heads, layout.head_dim()));
  QUERN_RETURN_IF_ERROR(CheckHeadRowsOut(op, "out", rows.out, spec.out_dtype,
                                         tokens, spec.q_heads,
                                         layout.v_head_dim()));
  QUERN_RETURN_IF_ERROR(CheckApart(op, "q", rows.q, "out", rows.out));
  if (rows.lse.data() != nullptr) {
    QUERN_RETURN_IF_ERROR(CheckEqual(op, "lse.extent(0)", rows.lse.extent(0),
                                     tokens, "the schedule's tokens"));
    QUERN_RETURN_IF_ERROR(CheckEqual(op, "lse.extent(1)", rows.lse.extent(1),
                                     spec.q_heads, "the spec's q_heads"));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(op, "lse", rows.lse, DType::kF32, {tokens, spec.q_heads}));
    QUERN_RETURN_IF_ERROR(CheckApart(op, "q", rows.q, "lse", rows.lse));
    QUERN_RETURN_IF_ERROR(CheckApart(op, "out", rows.out, "lse", rows.lse));
  }
  if (!rows.alibi_slopes.empty()) {
    QUERN_RETURN_IF_ERROR(
        CheckEqual(op, "alibi_slopes.size()",
                   static_cast<int64_t>(rows.alibi_slopes.size()), spec.q_heads,
                   "the spec's q_heads"));
    if (!rows.schedule.drafts().empty()) {
      return Unimplemented(op, "alibi_slopes are given, and the schedule has ",
                           rows.schedule.drafts().size(),
                           " drafts; need one or the other");
    }
  }
  if (!rows.sinks.empty()) {
    QUERN_RETURN_IF_ERROR(CheckEqual(op, "sinks.size()",
                                     static_cast<int64_t>(rows.sinks.size()),
                                     spec.q_heads, "the spec's q_heads"));
  }
  return absl::OkStatus();
}

}  // namespace quern
