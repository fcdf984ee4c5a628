#include "quern/attention/varlen_attention.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/attention/attention_args.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/cache/write_kv.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"

namespace quern {
namespace {

constexpr char kOp[] = "varlen_attention";

// One group of the paired form: the least that a sequence is rounded up to.
constexpr int64_t kPageSize = KvLayout::kGroupTokens;

struct Sizes {
  explicit Sizes(const AttentionSchedule& schedule) {
    for (const AttentionSequence& s : schedule.sequences()) {
      kv_tokens += s.kv_len;
      pages += DivCeil(s.kv_len, kPageSize);
    }
  }
  // Enough for all schedules within limits, where each sequence may round up to
  // a group of its own.
  explicit Sizes(const AttentionLimits& limits)
      : kv_tokens(limits.max_tokens),
        pages(limits.max_tokens / kPageSize + limits.max_sequences) {}
  int64_t kv_tokens = 0;
  int64_t pages = 0;
};

// The keys and values of one call as a cache.
struct Staged {
  int64_t* indptr;    // of each sequence's pages
  int32_t* page_ids;  // 0, 1, ...
  int64_t* slots;     // of each key
  uint8_t* pages;
};

template <typename Allocator>
Staged LayOut(Allocator& a, const KvLayout& layout, const Sizes& sizes,
              int64_t sequences) {
  int64_t bytes = 0;
  if (!CheckedMul(sizes.pages, layout.page_bytes(), &bytes)) bytes = -1;
  Staged s;
  s.indptr = a.template Allocate<int64_t>("page offsets", sequences + 1);
  s.page_ids = a.template Allocate<int32_t>("pages", sizes.pages);
  s.slots = a.template Allocate<int64_t>("slots", sizes.kv_tokens);
  s.pages = a.template Allocate<uint8_t>("keys and values", bytes);
  return s;
}

// Bytes of so many keys and values, and of attention behind them.
absl::StatusOr<int64_t> StagedBytes(const KvLayout& layout, const Sizes& sizes,
                                    int64_t sequences, int64_t attend) {
  WorkspaceLayout counted;
  LayOut(counted, layout, sizes, sequences);
  counted.Allocate<uint8_t>("attention", attend);
  if (counted.overflow() || sizes.pages > std::numeric_limits<int32_t>::max()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": ", sizes.kv_tokens,
                     " keys take more than 2^31 groups of 16, or more than "
                     "2^63 bytes"));
  }
  return counted.bytes();
}

// The differences of neighbours.
absl::Status LengthsOf(const char* name, absl::Span<const int32_t> cu,
                       std::vector<int64_t>* lengths) {
  lengths->clear();
  if (cu.empty() || cu[0] != 0) {
    return InvalidArgument(kOp, name, " does not begin with 0");
  }
  for (size_t s = 1; s < cu.size(); ++s) {
    if (cu[s] < cu[s - 1]) {
      return InvalidArgument(kOp, name, "[", s, "]=", cu[s], "; need at least ",
                             cu[s - 1], ", the one before");
    }
    lengths->push_back(int64_t{cu[s]} - cu[s - 1]);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<VarlenAttentionPlan> VarlenAttentionPlan::Create(
    const VarlenAttentionSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "kv_heads", spec.kv_heads, 1));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "head_dim", spec.head_dim, 1));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "v_head_dim", spec.v_head_dim, 0));
  KvLayoutSpec layout;
  layout.dtype = spec.dtype;
  layout.kv_heads = spec.kv_heads;
  layout.head_dim = spec.head_dim;
  layout.v_head_dim = spec.v_head_dim;
  layout.page_size = kPageSize;
  layout.form = KvForm::kPaired;
  AttentionSpec attention;
  QUERN_ASSIGN_OR_RETURN(attention.kv, KvLayout::Create(layout));
  attention.q_heads = spec.q_heads;
  attention.q_dtype = spec.dtype;
  attention.out_dtype = spec.out_dtype;
  attention.scale = spec.scale;
  attention.window_left = spec.window_left;
  attention.window_right = spec.window_right;
  attention.soft_cap = spec.soft_cap;
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kOp, attention));
  QUERN_ASSIGN_OR_RETURN(const PagedAttentionPlan attend,
                         PagedAttentionPlan::Create(attention));
  WriteKvSpec write_spec;
  write_spec.kv = attention.kv;
  write_spec.input = spec.dtype;
  write_spec.stores = Stores::kCached;
  QUERN_ASSIGN_OR_RETURN(const WriteKvPlan write,
                         WriteKvPlan::Create(write_spec));
  return VarlenAttentionPlan(attend, write);
}

absl::StatusOr<AttentionSchedule> VarlenAttentionPlan::BuildSchedule(
    absl::Span<const int32_t> cu_q, absl::Span<const int32_t> cu_kv,
    VarlenMask mask, int num_workers, VarlenAttentionStorage& storage) const {
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "cu_kv.size()", static_cast<int64_t>(cu_kv.size()),
                 static_cast<int64_t>(cu_q.size()), "cu_q.size()"));
  QUERN_RETURN_IF_ERROR(LengthsOf("cu_q", cu_q, &storage.q_lens));
  QUERN_RETURN_IF_ERROR(LengthsOf("cu_kv", cu_kv, &storage.kv_lens));
  storage.causal.assign(storage.q_lens.size(),
                        mask == VarlenMask::kCausal ? 1 : 0);
  return AttentionSchedule::Build(
      attend_.spec(), {storage.q_lens, storage.kv_lens, storage.causal},
      AttentionTiles(), num_workers, storage.schedule);
}

absl::StatusOr<int64_t> VarlenAttentionPlan::WorkspaceBytes(
    const AttentionSchedule& schedule, int num_workers) const {
  QUERN_ASSIGN_OR_RETURN(const int64_t attend,
                         attend_.WorkspaceBytes(schedule, num_workers));
  return StagedBytes(attend_.spec().kv, Sizes(schedule),
                     static_cast<int64_t>(schedule.sequences().size()), attend);
}

absl::StatusOr<int64_t> VarlenAttentionPlan::WorkspaceBytes(
    const AttentionLimits& limits, int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(const int64_t attend,
                         attend_.WorkspaceBytes(limits, max_workers));
  return StagedBytes(attend_.spec().kv, Sizes(limits), limits.max_sequences,
                     attend);
}

absl::Status VarlenAttentionPlan::CheckArgs(
    const VarlenAttentionArgs& args) const {
  const AttentionSpec& spec = attend_.spec();
  QUERN_RETURN_IF_ERROR(
      CheckAttentionRows(kOp, spec,
                         {args.schedule, args.q, args.out, args.lse,
                          args.alibi_slopes, args.sinks}));
  // Each sequence has keys of its own.
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kOp, "schedule.prefixes().size()",
      static_cast<int64_t>(args.schedule.prefixes().size()), 0, "none"));
  const int64_t kv_tokens = Sizes(args.schedule).kv_tokens;
  const struct {
    const char* name;
    const AnyTensorView& view;
    int64_t dim;
  } inputs[] = {{"k", args.k, spec.kv.head_dim()},
                {"v", args.v, spec.kv.v_head_dim()}};
  for (const auto& input : inputs) {
    QUERN_RETURN_IF_ERROR(CheckHeadRows(kOp, input.name, input.view,
                                        spec.kv.dtype(), kv_tokens,
                                        spec.kv.kv_heads(), input.dim));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, input.name, input.view, "out", args.out));
    if (args.lse.data() == nullptr) continue;
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, input.name, input.view, "lse", args.lse));
  }
  return absl::OkStatus();
}

void VarlenAttentionPlan::Execute(const VarlenAttentionArgs& args,
                                  Workspace workspace,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const KvLayout& layout = attend_.spec().kv;
  const absl::Span<const AttentionSequence> sequences =
      args.schedule.sequences();
  const Sizes sizes(args.schedule);
  const Staged staged =
      LayOut(workspace, layout, sizes, static_cast<int64_t>(sequences.size()));
  std::iota(staged.page_ids, staged.page_ids + sizes.pages, 0);
  staged.indptr[0] = 0;
  int64_t* slots = staged.slots;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int64_t kv_len = sequences[s].kv_len;
    std::iota(slots, slots + kv_len, staged.indptr[s] * kPageSize);
    slots += kv_len;
    staged.indptr[s + 1] = staged.indptr[s] + DivCeil(kv_len, kPageSize);
  }

  WriteKvArgs write;
  write.k = args.k;
  write.v = args.v;
  write.slots =
      absl::MakeConstSpan(staged.slots, static_cast<size_t>(sizes.kv_tokens));
  write.cache = KvCacheView(layout, sizes.pages, staged.pages);
  write_.Execute(write, executor);

  const absl::StatusOr<PageTable> pages = PageTable::Build(
      absl::MakeConstSpan(staged.indptr, sequences.size() + 1),
      absl::MakeConstSpan(staged.page_ids, static_cast<size_t>(sizes.pages)),
      kPageSize, sizes.pages);
  QUERN_CHECK(pages.ok());
  PagedAttentionArgs attend;
  attend.q = args.q;
  attend.kv = write.cache;
  attend.pages = *pages;
  attend.schedule = args.schedule;
  attend.out = args.out;
  attend.lse = args.lse;
  attend.alibi_slopes = args.alibi_slopes;
  attend.sinks = args.sinks;
  attend_.Execute(attend, workspace, executor);
}

}  // namespace quern
