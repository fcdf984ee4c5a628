#include "quern/ops/registry/sglang_token_attention.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/varlen_attention.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/index_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_attention.h"
#include "quern/ops/registry/sglang_token_writes.h"
#include "quern/ops/registry/token_cache.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;

// The lengths and the slots of one request.
struct Request {
  int64_t q_len;
  int64_t kv_len;
  int64_t skipped;  // tokens before the first key
};

class BoundTokenAttention final : public BoundOp {
 public:
  BoundTokenAttention(const TokenAttention& a, const PagedAttentionPlan& plan,
                      std::optional<TokenWrites> writes, bool native)
      : a_(a), plan_(plan), writes_(std::move(writes)), native_(native) {}

  const char* target() const override {
    return native_ ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t) const override {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }

  absl::Status Prepare(Tensors t, Executor& executor) override {
    prepared_ = false;
    QUERN_RETURN_IF_ERROR(CheckStepTensors(t));
    const int64_t requests = t[a_.seq_lens].extent(0);
    storage_.q_lens.clear();
    storage_.kv_lens.clear();
    storage_.causal.assign(static_cast<size_t>(requests), a_.is_cross ? 0 : 1);
    pages_.Clear();
    new_slots_.Clear();
    int64_t tokens = 0;
    for (int64_t b = 0; b < requests; ++b) {
      QUERN_RETURN_IF_ERROR(AddRequest(t, b, tokens));
      tokens += storage_.q_lens.back();
    }
    if (a_.loc != TokenAttention::kNone) new_slots_.Read(t[a_.loc]);
    QUERN_RETURN_IF_ERROR(SetDrafts(t));
    QUERN_ASSIGN_OR_RETURN(table_, pages_.Build(1, t[a_.k_buffer].extent(0)));
    QUERN_ASSIGN_OR_RETURN(
        schedule_,
        AttentionSchedule::Build(plan_.spec(),
                                 {storage_.q_lens,
                                  storage_.kv_lens,
                                  storage_.causal,
                                  {},
                                  {},
                                  draft_lens_,
                                  draft_masks_},
                                 AttentionTiles(), executor.num_workers(),
                                 storage_.schedule));
    prepared_ = true;
    return absl::OkStatus();
  }

  absl::Status CheckArgs(Tensors t) const override {
    if (!prepared_) return NotPrepared();
    QUERN_RETURN_IF_ERROR(CheckStepTensors(t));
    QUERN_RETURN_IF_ERROR(
        CheckEqual(a_.op, "requests of Prepare",
                   static_cast<int64_t>(storage_.kv_lens.size()),
                   t[a_.seq_lens].extent(0), "seq_lens has"));
    for (size_t b = 0; b < storage_.kv_lens.size(); ++b) {
      const Request r = RequestOf(t, static_cast<int64_t>(b));
      if (r.q_len == storage_.q_lens[b] && r.kv_len == storage_.kv_lens[b]) {
        continue;
      }
      return InvalidArgument(a_.op, "request ", b, " has ", r.q_len,
                             " new tokens of ", r.kv_len,
                             "; Prepare was given ", storage_.q_lens[b], " of ",
                             storage_.kv_lens[b]);
    }
    for (size_t i = 0; i < draft_masks_.size(); ++i) {
      if (MaskOf(t, static_cast<int64_t>(i)) == draft_masks_[i]) continue;
      return InvalidArgument(a_.op, "row ", i,
                             " of tree_mask is not the one that Prepare was "
                             "given");
    }
    if (t[a_.sinks].rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(
          a_.op, "sinks", t[a_.sinks],
          a_.sinks_meta.has_value() ? a_.sinks_meta->dtype : DType::kF32,
          {plan_.spec().q_heads}));
    }
    QUERN_RETURN_IF_ERROR(CheckBuffers(t));
    if (writes_.has_value()) {
      if (a_.loc != TokenAttention::kNone) {
        QUERN_RETURN_IF_ERROR(new_slots_.CheckSame(a_.op, t[a_.loc]));
      }
      QUERN_RETURN_IF_ERROR(writes_->CheckArgs(NewKeys(t)));
    }
    return OfOp(a_.op, plan_.CheckArgs(ArgsOf(t)));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t,
                                         int max_workers) const override {
    if (!prepared_) return NotPrepared();
    int64_t bytes = 0;
    if (!native_) {
      QUERN_ASSIGN_OR_RETURN(bytes,
                             plan_.WorkspaceBytes(schedule_, max_workers));
    }
    WorkspaceLayout layout;
    LayOut(layout);
    layout.Allocate<uint8_t>("attention", bytes);
    return layout.bytes();
  }

  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    const Scratch scratch = LayOut(workspace);
    PagedAttentionArgs args = ArgsOf(t);
    if (t[a_.sinks].rank() != 0) {
      const ScalarRow sinks(t[a_.sinks], 0);
      for (int64_t h = 0; h < plan_.spec().q_heads; ++h) {
        scratch.sinks[h] = sinks[h];
      }
      args.sinks = absl::MakeConstSpan(
          scratch.sinks, static_cast<size_t>(plan_.spec().q_heads));
    }
    if (native_) {
      if (writes_.has_value()) writes_->ExecuteNative(NewKeys(t));
      NativePagedAttention(plan_.spec(), args, scratch.sums);
    } else {
      if (writes_.has_value()) writes_->Execute(NewKeys(t), executor);
      plan_.Execute(args, workspace, executor);
    }
  }

 private:
  struct Scratch {
    float* sinks;
    double* sums;  // of the reference
  };
  template <typename Allocator>
  Scratch LayOut(Allocator& a) const {
    return {a.template Allocate<float>("sinks", plan_.spec().q_heads),
            a.template Allocate<double>(
                "sums", native_ ? plan_.spec().kv.v_head_dim() : 0)};
  }
  absl::Status NotPrepared() const {
    return absl::FailedPreconditionError(absl::StrCat(
        a_.op, ": has no schedule; need a call of Prepare before"));
  }

  absl::Status CheckStepTensors(Tensors t) const {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(a_.op, t, a_.count));
    QUERN_RETURN_IF_ERROR(CheckIndexView(
        a_.op, "req_to_token", t[a_.req_to_token], {kAnyExtent, kAnyExtent}));
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(a_.op, "seq_lens", t[a_.seq_lens], {kAnyExtent}));
    const int64_t requests = t[a_.seq_lens].extent(0);
    const std::pair<const char*, size_t> kOthers[] = {
        {"req_pool_indices", a_.req_pool_indices},
        {"extend_seq_lens", a_.extend_seq_lens},
        {"extend_start_loc", a_.extend_start_loc},
        {"encoder_lens",
         a_.has_encoder_lens ? a_.encoder_lens : TokenAttention::kNone}};
    for (const auto& [field, at] : kOthers) {
      if (at == TokenAttention::kNone) continue;
      QUERN_RETURN_IF_ERROR(CheckIndexView(a_.op, field, t[at], {requests}));
    }
    if (a_.loc != TokenAttention::kNone) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(a_.op, "loc", t[a_.loc], DType::kI64, {requests}));
    }
    if (a_.drafts == 0) return absl::OkStatus();
    return CheckInput(a_.op, "tree_mask", t[a_.tree_mask], DType::kU8,
                      {requests * a_.drafts * a_.drafts});
  }

  // The mask of a new token, whichever its request.
  uint64_t MaskOf(Tensors t, int64_t token) const {
    const auto* row =
        static_cast<const uint8_t*>(t[a_.tree_mask].data()) + token * a_.drafts;
    uint64_t mask = 0;
    for (int64_t j = 0; j < a_.drafts; ++j) {
      if (row[j] != 0) mask |= uint64_t{1} << j;
    }
    return mask;
  }

  // The trees of all requests, whose lengths are set.
  absl::Status SetDrafts(Tensors t) {
    draft_lens_.clear();
    draft_masks_.clear();
    if (a_.drafts == 0) return absl::OkStatus();
    for (size_t b = 0; b < storage_.q_lens.size(); ++b) {
      QUERN_RETURN_IF_ERROR(CheckEqual(
          a_.op, absl::StrCat("new tokens of request ", b), storage_.q_lens[b],
          a_.drafts, "tree_mask has drafts for each request"));
      draft_lens_.push_back(a_.drafts);
      for (int64_t i = 0; i < a_.drafts; ++i) {
        draft_masks_.push_back(
            MaskOf(t, static_cast<int64_t>(draft_masks_.size())));
      }
    }
    return absl::OkStatus();
  }

  Request RequestOf(Tensors t, int64_t b) const {
    Request r = {1, IndicesOf(t[a_.seq_lens])[b], 0};
    if (a_.extend_seq_lens != TokenAttention::kNone) {
      r.q_len = IndicesOf(t[a_.extend_seq_lens])[b];
    }
    if (!a_.has_encoder_lens) return r;
    const int64_t encoder = IndicesOf(t[a_.encoder_lens])[b];
    (a_.is_cross ? r.kv_len : r.skipped) = encoder;
    return r;
  }

  // Adds the lengths and the slots of request b, whose queries begin at row
  // `token`.
  absl::Status AddRequest(Tensors t, int64_t b, int64_t token) {
    const AnyTensorView& table = t[a_.req_to_token];
    const Request r = RequestOf(t, b);
    const int64_t row = IndicesOf(t[a_.req_pool_indices])[b];
    if (row < 0 || row >= table.extent(0)) {
      return InvalidArgument(a_.op, "req_pool_indices[", b, "]=", row,
                             "; need a row of the ", table.extent(0),
                             " of req_to_token");
    }
    if (r.q_len < 0 || r.kv_len < 0 || r.skipped < 0 ||
        r.kv_len > table.extent(1) - r.skipped) {
      return InvalidArgument(a_.op, "request ", b, " has ", r.q_len,
                             " new tokens and ", r.kv_len, " keys from token ",
                             r.skipped, " on; need at most the ",
                             table.extent(1), " tokens of req_to_token");
    }
    if (a_.extend_start_loc != TokenAttention::kNone) {
      QUERN_RETURN_IF_ERROR(
          CheckEqual(a_.op, absl::StrCat("extend_start_loc[", b, "]"),
                     IndicesOf(t[a_.extend_start_loc])[b], token,
                     "extend_seq_lens before it add up to"));
    }
    const int64_t slots = t[a_.k_buffer].extent(0);
    if (a_.new_keys_alone && (r.kv_len != r.q_len || token > slots - r.q_len)) {
      return InvalidArgument(
          a_.op, "request ", b, " has ", r.kv_len, " keys, of which ", r.q_len,
          " are new; need new ones alone, of ", slots,
          ", because k_extend has other heads than k_buffer");
    }
    // The stride of a single row is meaningless and is not used.
    const int64_t stride = table.extent(0) > 1 ? table.stride(0) : 0;
    const auto slot_of = [&](int64_t i) {
      return table.dtype() == DType::kI64
                 ? static_cast<const int64_t*>(table.data())[row * stride + i]
                 : static_cast<const int32_t*>(table.data())[row * stride + i];
    };
    for (int64_t i = 0; i < r.kv_len; ++i) {
      const int64_t slot =
          a_.new_keys_alone ? token + i : slot_of(r.skipped + i);
      if (slot < 0 || slot >= slots) {
        return InvalidArgument(a_.op, "req_to_token[", row, "][", r.skipped + i,
                               "]=", slot, "; need a slot of ", slots);
      }
      pages_.page_ids.push_back(static_cast<int32_t>(slot));
      if (i >= r.kv_len - r.q_len) new_slots_.Add(slot);
    }
    pages_.indptr.push_back(static_cast<int64_t>(pages_.page_ids.size()));
    storage_.q_lens.push_back(r.q_len);
    storage_.kv_lens.push_back(r.kv_len);
    return absl::OkStatus();
  }

  absl::Status CheckBuffers(Tensors t) const {
    const KvLayout& layout = plan_.spec().kv;
    QUERN_RETURN_IF_ERROR(
        CheckInput(a_.op, a_.k_name, t[a_.k_buffer], layout.dtype(),
                   {kAnyExtent, layout.kv_heads(), layout.head_dim()}));
    return CheckInput(
        a_.op, a_.v_name, t[a_.v_buffer], layout.dtype(),
        {t[a_.k_buffer].extent(0), layout.kv_heads(), layout.v_head_dim()});
  }

  PagedAttentionArgs ArgsOf(Tensors t) const {
    PagedAttentionArgs args;
    args.q = t[a_.query];
    args.kv = TokenCache(plan_.spec().kv, t[a_.k_buffer], t[a_.v_buffer]);
    args.pages = table_;
    args.schedule = schedule_;
    args.out = t[a_.output];
    return args;
  }
  TokenWriteArgs NewKeys(Tensors t) const {
    return {t[a_.key], t[a_.value], t[a_.k_buffer], t[a_.v_buffer],
            new_slots_.slots()};
  }

  TokenAttention a_;
  PagedAttentionPlan plan_;
  std::optional<TokenWrites> writes_;  // with new_keys
  bool native_;
  // The step of the last Prepare.
  bool prepared_ = false;
  VarlenAttentionStorage storage_;
  PageTableStorage pages_;
  NewSlots new_slots_;
  std::vector<int64_t> draft_lens_;
  std::vector<uint64_t> draft_masks_;
  PageTable table_;
  AttentionSchedule schedule_;
};

}  // namespace

absl::Status CheckTokenAttention(const TokenAttention& a) {
  const auto& q = a.q.extents;
  const auto& k = a.k.extents;
  const auto& v = a.v.extents;
  if (k.size() != 3 || v.size() != 3 || v[0] != k[0] || v[1] != k[1] ||
      a.v.dtype != a.k.dtype) {
    return InvalidArgument(a.op, "need ", a.k_name, " and ", a.v_name,
                           " [slots, kv_heads, head_dim] of one dtype");
  }
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(a.op, a.k_name, a.k.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  if (q.size() != 3 || q[2] != k[2]) {
    return InvalidArgument(a.op, "the query is not [tokens, q_heads, ", k[2],
                           "], as ", a.k_name, " is");
  }
  if (a.out.extents != std::vector<int64_t>{q[0], q[1], v[2]}) {
    return InvalidArgument(a.op, "the output is not [", q[0], ", ", q[1], ", ",
                           v[2], "]");
  }
  if (!a.sinks_meta.has_value()) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(a.op, "sinks", a.sinks_meta->dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  if (a.sinks_meta->extents == std::vector<int64_t>{q[1]}) {
    return absl::OkStatus();
  }
  return InvalidArgument(a.op, "sinks is not [", q[1], "]");
}

absl::StatusOr<std::unique_ptr<BoundOp>> BindTokenAttention(
    const TokenAttention& a, bool native) {
  const auto layout =
      TokenLayout(a.k.dtype, a.k.extents[1], a.k.extents[2], a.v.extents[2]);
  if (!layout.ok()) return OfOp(a.op, layout.status());
  AttentionSpec spec;
  spec.kv = *layout;
  spec.q_heads = a.q.extents[1];
  spec.q_dtype = a.q.dtype;
  spec.out_dtype = a.out.dtype;
  spec.scale = static_cast<float>(a.scale);
  spec.soft_cap = static_cast<float>(a.cap);
  if (a.window > 0) spec.window_left = spec.window_right = a.window - 1;
  const auto plan = PagedAttentionPlan::Create(spec);
  if (!plan.ok()) return OfOp(a.op, plan.status());
  std::optional<TokenWrites> writes;
  if (a.new_keys) {
    QUERN_ASSIGN_OR_RETURN(writes,
                           TokenWrites::Create(a.op, *layout, a.new_dtype));
  }
  return std::unique_ptr<BoundOp>(
      new BoundTokenAttention(a, *plan, std::move(writes), native));
}

}  // namespace quern
