#include "quern/attention/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/attention/attention_args.h"
#include "quern/attention/attention_scratch.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/attention_step.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/cache/page_table.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"

namespace quern {
namespace {

constexpr char kOp[] = "paged_attention";

// What the schedule takes to be shared must be the same pages.
absl::Status CheckPrefixes(const AttentionSchedule& schedule,
                           const PageTable& table) {
  for (const PrefixGroup& prefix : schedule.prefixes()) {
    const absl::Span<const int32_t> members = schedule.Members(prefix);
    const auto count =
        static_cast<size_t>(DivCeil(prefix.tokens, table.page_size()));
    const absl::Span<const int32_t> pages =
        table.Pages(members.front()).first(count);
    for (const int32_t member : members) {
      const absl::Span<const int32_t> theirs = table.Pages(member).first(count);
      const auto at = std::mismatch(pages.begin(), pages.end(), theirs.begin());
      if (at.first == pages.end()) continue;
      return InvalidArgument(kOp, "sequences ", members.front(), " and ",
                             member, " share a prefix of ", prefix.tokens,
                             " tokens in the schedule, but ", *at.first,
                             " and ", *at.second, " are their pages ",
                             at.first - pages.begin(), "; need the same");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPages(const AttentionSchedule& schedule,
                        const PageTable& pages) {
  const auto sequences = static_cast<int64_t>(schedule.sequences().size());
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "pages.num_sequences",
                                   pages.num_sequences(), sequences,
                                   "the schedule's"));
  for (int64_t i = 0; i < sequences; ++i) {
    const AttentionSequence& s = schedule.sequences()[static_cast<size_t>(i)];
    if (s.kv_len > pages.Capacity(i)) {
      return InvalidArgument(kOp, "sequence ", i, ": kv_len=", s.kv_len,
                             "; need kv_len <= ", pages.Capacity(i),
                             ", what its pages hold");
    }
    if (s.q_len == 0 || s.kv_len == 0) continue;
    if (!pages.HasToken(i, s.first_key())) {
      return InvalidArgument(kOp, "sequence ", i, ": page ",
                             s.first_key() / pages.page_size(),
                             " is missing; need the pages of all keys from ",
                             s.first_key(), " on, which its queries see");
    }
  }
  return CheckPrefixes(schedule, pages);
}

absl::StatusOr<PagedAttentionPlan> PagedAttentionPlan::Create(
    const AttentionSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kOp, spec));
  return PagedAttentionPlan(
      spec,
      GetPagedAttentionKernels(spec.q_dtype, spec.kv.dtype(), spec.out_dtype),
      GetPackKvKernels(SizeOf(spec.kv.dtype())));
}

absl::StatusOr<int64_t> PagedAttentionPlan::ScratchBytes(
    int64_t block_rows, int64_t partial_rows, int num_workers) const {
  WorkspaceLayout layout;
  LayOutAttentionScratch(layout, spec_.kv, block_rows, partial_rows,
                         num_workers);
  if (layout.overflow()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        kOp, ": the workspace of ", partial_rows, " partial rows and ",
        num_workers, " workers has more than 2^63 bytes"));
  }
  return layout.bytes();
}

absl::StatusOr<int64_t> PagedAttentionPlan::WorkspaceBytes(
    const AttentionSchedule& schedule, int num_workers) const {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "num_workers", num_workers, 1));
  return ScratchBytes(schedule.max_block_rows(), schedule.partial_rows(),
                      num_workers);
}

absl::StatusOr<int64_t> PagedAttentionPlan::WorkspaceBytes(
    const AttentionLimits& limits, int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(
      const AttentionBound bound,
      AttentionBoundOf(spec_, limits, AttentionTiles(), max_workers));
  return ScratchBytes(bound.max_block_rows, bound.partial_rows, max_workers);
}

absl::Status PagedAttentionPlan::CheckArgs(
    const PagedAttentionArgs& args) const {
  const KvLayout& layout = spec_.kv;
  const AttentionSchedule& schedule = args.schedule;
  QUERN_RETURN_IF_ERROR(CheckAttentionRows(
      kOp, spec_,
      {schedule, args.q, args.out, args.lse, args.alibi_slopes, args.sinks}));
  if (args.kv.layout() != layout) {
    return InvalidArgument(kOp, "the cache has another layout than the spec");
  }
  QUERN_RETURN_IF_ERROR(CheckCache(kOp, args.kv));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "out", args.out, args.kv));
  if (args.lse.data() != nullptr) {
    QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "lse", args.lse, args.kv));
  }
  if (schedule.sequences().empty() || args.pages.num_sequences() == 0) {
    return CheckPages(schedule, args.pages);
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "pages.page_size",
                                   args.pages.page_size(), layout.page_size(),
                                   "the layout's"));
  QUERN_RETURN_IF_ERROR(CheckRange(
      kOp, "pages.num_pages", args.pages.num_pages(), 0, args.kv.num_pages()));
  return CheckPages(schedule, args.pages);
}

void PagedAttentionPlan::Execute(const PagedAttentionArgs& args,
                                 Workspace workspace,
                                 Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const AttentionSchedule& schedule = args.schedule;
  QUERN_CHECK(!args.pages.has_missing_pages() ||
              CheckPages(schedule, args.pages).ok());
  const AttentionScratch scratch =
      LayOutAttentionScratch(workspace, spec_.kv, schedule.max_block_rows(),
                             schedule.partial_rows(), executor.num_workers());
  const AttentionStep step(spec_, kernels_, pack_kernels_, args, scratch);
  // Each worker takes the next share as it gets free: whatever order the
  // executor has for its tasks, shares are taken longest first.
  std::atomic<size_t> next{0};
  const absl::Span<const AttentionShare> shares = schedule.shares();
  executor.ParallelFor(
      std::min(int64_t{executor.num_workers()},
               static_cast<int64_t>(shares.size())),
      [&](int64_t /*task*/, int worker) {
        for (size_t i = next.fetch_add(1, std::memory_order_relaxed);
             i < shares.size();
             i = next.fetch_add(1, std::memory_order_relaxed)) {
          const absl::Span<const AttentionWork> items =
              schedule.Work(shares[i]);
          for (size_t w = 0; w < items.size(); ++w) {
            step.Work(items[w], w + 1 < items.size() ? &items[w + 1] : nullptr,
                      worker);
          }
        }
      });
  executor.ParallelFor(
      static_cast<int64_t>(schedule.merges().size()),
      [&](int64_t task, int worker) {
        step.Merge(schedule.merges()[static_cast<size_t>(task)], worker);
      });
}

}  // namespace quern
