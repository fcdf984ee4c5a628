#include "quern/ops/registry/families/attention/varlen_attention_ops.h"

#include <algorithm>
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
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/families/attention/token_cache.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/attention.h"

namespace quern {
namespace {

constexpr char kOp[] = "varlen_attention";

struct Spec : VarlenAttentionSpec {
  bool causal = false;
};
struct Args {
  AnyTensorView query, key, value, cu_q, cu_k, out;
};

// Attention over the sequences of a batch, which Prepare is given.
class Plan {
 public:
  template <bool kNative>
  static absl::StatusOr<Plan> Make(const Spec& spec, const OpCall&) {
    QUERN_ASSIGN_OR_RETURN(const VarlenAttentionPlan plan,
                           VarlenAttentionPlan::Create(spec));
    AttentionSpec paged;
    QUERN_ASSIGN_OR_RETURN(
        paged.kv,
        TokenLayout(spec.dtype, spec.kv_heads, spec.head_dim, spec.v_head_dim));
    paged.q_heads = spec.q_heads;
    paged.q_dtype = paged.out_dtype = spec.dtype;
    paged.scale = spec.scale;
    return Plan(spec, paged, plan, kNative);
  }

  const Spec& spec() const { return spec_; }
  const char* target() const { return native_ ? "scalar" : plan_.target(); }
  std::string Explain(int64_t) const {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }

  absl::Status Prepare(const Args& a, Executor& executor) {
    prepared_ = false;
    QUERN_RETURN_IF_ERROR(ReadEnds("cu_seqlens_q", a.cu_q, a.query, cu_q_));
    QUERN_RETURN_IF_ERROR(ReadEnds("cu_seqlens_k", a.cu_k, a.key, cu_k_));
    QUERN_ASSIGN_OR_RETURN(
        schedule_,
        plan_.BuildSchedule(
            cu_q_, cu_k_,
            spec_.causal ? VarlenMask::kCausal : VarlenMask::kBidirectional,
            executor.num_workers(), storage_));
    if (native_) QUERN_RETURN_IF_ERROR(SetPages());
    prepared_ = true;
    return absl::OkStatus();
  }

  absl::Status CheckArgs(const Args& a) const {
    if (!prepared_) return NotPrepared();
    QUERN_RETURN_IF_ERROR(CheckEnds("cu_seqlens_q", a.cu_q, cu_q_));
    QUERN_RETURN_IF_ERROR(CheckEnds("cu_seqlens_k", a.cu_k, cu_k_));
    return plan_.CheckArgs(ArgsOf(a));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t, int max_workers) const {
    if (!prepared_) return NotPrepared();
    if (!native_) return plan_.WorkspaceBytes(schedule_, max_workers);
    WorkspaceLayout layout;
    layout.Allocate<double>("sums", spec_.v_head_dim);
    return layout.bytes();
  }

  void Execute(const Args& a, Workspace workspace, Executor& executor) const {
    const VarlenAttentionArgs args = ArgsOf(a);
    if (!native_) return plan_.Execute(args, workspace, executor);
    PagedAttentionArgs paged;
    paged.q = args.q;
    paged.kv = TokenCache(paged_.kv, args.k, args.v);
    paged.pages = table_;
    paged.schedule = schedule_;
    paged.out = args.out;
    NativePagedAttention(paged_, paged,
                         workspace.Allocate<double>("sums", spec_.v_head_dim));
  }

 private:
  Plan(const Spec& spec, const AttentionSpec& paged,
       const VarlenAttentionPlan& plan, bool native)
      : spec_(spec), paged_(paged), plan_(plan), native_(native) {}

  static absl::Status NotPrepared() {
    return absl::FailedPreconditionError(
        absl::StrCat(kOp, ": has no schedule; need a call of Prepare before"));
  }

  VarlenAttentionArgs ArgsOf(const Args& a) const {
    VarlenAttentionArgs args;
    args.q = a.query;
    args.k = a.key;
    args.v = a.value;
    args.schedule = schedule_;
    args.out = a.out;
    return args;
  }

  // Copies the ends of sequences, which must be those of all `rows`.
  static absl::Status ReadEnds(absl::string_view field, const AnyTensorView& cu,
                               const AnyTensorView& rows,
                               std::vector<int32_t>& ends) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, field, cu, DType::kI32, {kAnyExtent}));
    const auto* const values = static_cast<const int32_t*>(cu.data());
    ends.assign(values, values + cu.extent(0));
    if (!ends.empty() && ends.front() == 0 && ends.back() == rows.extent(0) &&
        std::is_sorted(ends.begin(), ends.end())) {
      return absl::OkStatus();
    }
    return InvalidArgument(kOp, field, " does not ascend from 0 to ",
                           rows.extent(0), ", the rows that it divides");
  }
  static absl::Status CheckEnds(absl::string_view field,
                                const AnyTensorView& cu,
                                const std::vector<int32_t>& ends) {
    const auto size = static_cast<int64_t>(ends.size());
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, field, cu, DType::kI32, {size}));
    if (std::equal(ends.begin(), ends.end(),
                   static_cast<const int32_t*>(cu.data()))) {
      return absl::OkStatus();
    }
    return InvalidArgument(kOp, field, " is not what Prepare was given");
  }

  // The page of a key is the key.
  absl::Status SetPages() {
    pages_.Clear();
    pages_.page_ids.resize(static_cast<size_t>(cu_k_.back()));
    std::iota(pages_.page_ids.begin(), pages_.page_ids.end(), 0);
    pages_.indptr.assign(cu_k_.begin(), cu_k_.end());
    QUERN_ASSIGN_OR_RETURN(table_, pages_.Build(1, cu_k_.back()));
    return absl::OkStatus();
  }

  Spec spec_;
  AttentionSpec paged_;  // the same attention over pages of single tokens
  VarlenAttentionPlan plan_;
  bool native_;
  // The batch of the last Prepare.
  bool prepared_ = false;
  std::vector<int32_t> cu_q_, cu_k_;
  VarlenAttentionStorage storage_;
  AttentionSchedule schedule_;
  PageTableStorage pages_;  // of the reference
  PageTable table_;
};

}  // namespace

absl::Status RegisterVarlenAttentionOps(OpRegistry& registry) {
  return OpDeclaration<Plan, Spec, Args>(kOp)
      .Layer()
      .In("query", &Args::query, {kRows, &Spec::q_heads, &Spec::head_dim},
          {&Spec::dtype, &Spec::out_dtype})
      .Word("q", "query")
      .In("key", &Args::key, {kAny, &Spec::kv_heads, &Spec::head_dim},
          Like("query"))
      .Word("k", "key")
      .In("value", &Args::value, {kAny, &Spec::kv_heads, &Spec::v_head_dim},
          Like("query"))
      .Word("v", "value")
      .In("cu_seqlens_q", &Args::cu_q, {kAny}, DType::kI32)
      .In("cu_seqlens_k", &Args::cu_k, {kAny}, DType::kI32)
      .Attr("causal", false, &Spec::causal)
      .Attr("scale", 0.0, &Spec::scale)
      .Out("out", &Args::out, {kRows, &Spec::q_heads, &Spec::v_head_dim},
           Like("query"))
      .Provider("simd", &Plan::Make<false>)
      .Provider("reference", &Plan::Make<true>)
      .Example({{"query", {4, 2, 16}},
                {"key", {4, 1, 16}},
                {"value", {4, 1, 16}},
                {"cu_seqlens_q", {2}, DType::kI32},
                {"cu_seqlens_k", {2}, DType::kI32}})
      .AddTo(registry);
}

}  // namespace quern
