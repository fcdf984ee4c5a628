#ifndef QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_VARLEN_CALL_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_VARLEN_CALL_H_

// Private: what operators over VarlenAttentionPlan share. A batch is prepared
// once, and then run for each layer, by the plan's kernels or by plain loops.

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/varlen_attention.h"
#include "quern/cache/page_table.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/families/attention/token_cache.h"
#include "quern/ops/registry/reference/attention.h"

namespace quern {

// `op` opens the messages. A plan derives from it.
class VarlenCall {
 public:
  // `native`: plain loops with sums in double.
  static absl::StatusOr<VarlenCall> Create(const char* op,
                                           const VarlenAttentionSpec& spec,
                                           bool native) {
    QUERN_ASSIGN_OR_RETURN(const VarlenAttentionPlan plan,
                           VarlenAttentionPlan::Create(spec));
    AttentionSpec paged;
    QUERN_ASSIGN_OR_RETURN(paged.kv, TokenLayout(spec.dtype, spec.kv_heads,
                                                 spec.head_dim, VDim(spec)));
    paged.q_heads = spec.q_heads;
    paged.q_dtype = paged.out_dtype = spec.dtype;
    paged.scale = spec.scale;
    return VarlenCall(op, paged, plan, VDim(spec), native);
  }

  const char* target() const { return native_ ? "scalar" : plan_.target(); }
  std::string Explain(int64_t) const {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }

  // Sequences as BuildSchedule has them. FailedPrecondition of Prepared() until
  // this succeeds, and where it did not.
  absl::Status Prepare(const std::vector<int32_t>& cu_q,
                       const std::vector<int32_t>& cu_k, VarlenMask mask,
                       Executor& executor) {
    prepared_ = false;
    QUERN_ASSIGN_OR_RETURN(
        schedule_, plan_.BuildSchedule(cu_q, cu_k, mask, executor.num_workers(),
                                       storage_));
    if (native_) QUERN_RETURN_IF_ERROR(SetPages(cu_k));
    prepared_ = true;
    return absl::OkStatus();
  }
  void Forget() { prepared_ = false; }
  absl::Status Prepared() const {
    if (prepared_) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(op_, ": has no schedule; need a call of Prepare before"));
  }

  // The schedule of `args` is the one that Prepare built.
  absl::Status CheckArgs(VarlenAttentionArgs args) const {
    args.schedule = schedule_;
    return plan_.CheckArgs(args);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t, int max_workers) const {
    QUERN_RETURN_IF_ERROR(Prepared());
    if (!native_) return plan_.WorkspaceBytes(schedule_, max_workers);
    WorkspaceLayout layout;
    layout.Allocate<double>("sums", v_dim_);
    return layout.bytes();
  }
  void Execute(VarlenAttentionArgs args, Workspace workspace,
               Executor& executor) const {
    args.schedule = schedule_;
    if (!native_) return plan_.Execute(args, workspace, executor);
    PagedAttentionArgs paged;
    paged.q = args.q;
    paged.kv = TokenCache(paged_.kv, args.k, args.v);
    paged.pages = table_;
    paged.schedule = schedule_;
    paged.out = args.out;
    NativePagedAttention(paged_, paged,
                         workspace.Allocate<double>("sums", v_dim_));
  }

 private:
  VarlenCall(const char* op, const AttentionSpec& paged,
             const VarlenAttentionPlan& plan, int64_t v_dim, bool native)
      : op_(op), paged_(paged), plan_(plan), v_dim_(v_dim), native_(native) {}

  static int64_t VDim(const VarlenAttentionSpec& spec) {
    return spec.v_head_dim == 0 ? spec.head_dim : spec.v_head_dim;
  }

  // The page of a key is the key.
  absl::Status SetPages(const std::vector<int32_t>& cu_k) {
    pages_.Clear();
    pages_.page_ids.resize(static_cast<size_t>(cu_k.back()));
    std::iota(pages_.page_ids.begin(), pages_.page_ids.end(), 0);
    pages_.indptr.assign(cu_k.begin(), cu_k.end());
    QUERN_ASSIGN_OR_RETURN(table_, pages_.Build(1, cu_k.back()));
    return absl::OkStatus();
  }

  const char* op_;
  AttentionSpec paged_;  // the same attention over pages of single tokens
  VarlenAttentionPlan plan_;
  int64_t v_dim_;
  bool native_;
  // The batch of the last Prepare.
  bool prepared_ = false;
  VarlenAttentionStorage storage_;
  AttentionSchedule schedule_;
  PageTableStorage pages_;  // of the reference
  PageTable table_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_VARLEN_CALL_H_
