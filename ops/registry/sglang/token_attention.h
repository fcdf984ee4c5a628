#ifndef QUERN_OPS_REGISTRY_SGLANG_TOKEN_ATTENTION_H_
#define QUERN_OPS_REGISTRY_SGLANG_TOKEN_ATTENTION_H_

// Private: the plan of attention over a cache of single tokens, for the
// operators of RegisterSglangAttentionOps.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
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
#include "quern/ops/registry/families/attention/token_cache.h"
#include "quern/ops/registry/reference/attention.h"
#include "quern/ops/registry/sglang/token_writes.h"

namespace quern {

// What an operator was asked for.
struct TokenAttention {
  int64_t tokens = 0, requests = 0;
  int64_t q_heads = 0, kv_heads = 0, head_dim = 0, v_head_dim = 0;
  DType q_dtype = DType::kF32, kv_dtype = DType::kF32, out_dtype = DType::kF32;
  DType new_dtype = DType::kF32, sinks_dtype = DType::kF32;
  float scale = 0, cap = 0;
  int64_t window = 0;  // what SGLang calls so: 0 or less for none
  bool extend = false;
  bool new_keys = false;  // new keys and values are written to the buffers
  // Keys and values are the new ones themselves, and token i is slot i.
  bool new_keys_alone = false;
  bool has_encoder_lens = false, is_cross = false;
  int64_t drafts = 0;  // of each request, in tree_mask

  // Whether new keys go to the slots loc, and not to the last of a request.
  bool has_loc() const { return new_keys && !extend; }
};

struct TokenAttentionArgs {
  AnyTensorView query, key, value, k_buffer, v_buffer, output, loc, unused;
  AnyTensorView req_to_token, req_pool_indices, seq_lens;
  AnyTensorView extend_seq_lens, extend_start_loc, encoder_lens, sinks;
  AnyTensorView tree_mask;
};

// A step must be prepared before it is checked and executed.
class TokenAttentionPlan {
 public:
  using Args = TokenAttentionArgs;

  static absl::StatusOr<TokenAttentionPlan> Create(const TokenAttention& spec,
                                                   bool native) {
    AttentionSpec attention;
    QUERN_ASSIGN_OR_RETURN(
        attention.kv, TokenLayout(spec.kv_dtype, spec.kv_heads, spec.head_dim,
                                  spec.v_head_dim));
    attention.q_heads = spec.q_heads;
    attention.q_dtype = spec.q_dtype;
    attention.out_dtype = spec.out_dtype;
    attention.scale = spec.scale;
    attention.soft_cap = spec.cap;
    if (spec.window > 0) {
      attention.window_left = attention.window_right = spec.window - 1;
    }
    QUERN_ASSIGN_OR_RETURN(const PagedAttentionPlan paged,
                           PagedAttentionPlan::Create(attention));
    TokenAttentionPlan plan(spec, paged, native);
    if (spec.new_keys) {
      QUERN_ASSIGN_OR_RETURN(plan.writes_,
                             TokenWrites::Create(attention.kv, spec.new_dtype));
    }
    return plan;
  }

  const TokenAttention& spec() const { return spec_; }
  const char* target() const { return native_ ? "scalar" : plan_.target(); }
  std::string Explain(int64_t) const {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }

  // Reads the lengths and the slots of a step.
  absl::Status Prepare(const Args& args, Executor& executor) {
    prepared_ = false;
    QUERN_RETURN_IF_ERROR(CheckStepTensors(args));
    const int64_t requests = args.seq_lens.extent(0);
    storage_.q_lens.clear();
    storage_.kv_lens.clear();
    storage_.causal.assign(static_cast<size_t>(requests),
                           spec_.is_cross ? 0 : 1);
    pages_.Clear();
    new_slots_.Clear();
    int64_t tokens = 0;
    for (int64_t b = 0; b < requests; ++b) {
      QUERN_RETURN_IF_ERROR(AddRequest(args, b, tokens));
      tokens += storage_.q_lens.back();
    }
    if (spec_.has_loc()) new_slots_.Read(args.loc);
    QUERN_RETURN_IF_ERROR(SetDrafts(args));
    QUERN_ASSIGN_OR_RETURN(table_, pages_.Build(1, Keys(args).extent(0)));
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

  absl::Status CheckArgs(const Args& args) const {
    if (!prepared_) return NotPrepared();
    QUERN_RETURN_IF_ERROR(CheckStepTensors(args));
    QUERN_RETURN_IF_ERROR(
        CheckEqual(kPlan, "requests of Prepare",
                   static_cast<int64_t>(storage_.kv_lens.size()),
                   args.seq_lens.extent(0), "seq_lens has"));
    for (size_t b = 0; b < storage_.kv_lens.size(); ++b) {
      const Request r = RequestOf(args, static_cast<int64_t>(b));
      if (r.q_len == storage_.q_lens[b] && r.kv_len == storage_.kv_lens[b]) {
        continue;
      }
      return InvalidArgument(kPlan, "request ", b, " has ", r.q_len,
                             " new tokens of ", r.kv_len,
                             "; Prepare was given ", storage_.q_lens[b], " of ",
                             storage_.kv_lens[b]);
    }
    for (size_t i = 0; i < draft_masks_.size(); ++i) {
      if (MaskOf(args, static_cast<int64_t>(i)) == draft_masks_[i]) continue;
      return InvalidArgument(
          kPlan, "row ", i,
          " of tree_mask is not the one that Prepare was given");
    }
    if (args.sinks.rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "sinks", args.sinks,
                                       spec_.sinks_dtype, {spec_.q_heads}));
    }
    QUERN_RETURN_IF_ERROR(CheckKeys(args));
    if (writes_.has_value()) {
      if (spec_.has_loc()) {
        QUERN_RETURN_IF_ERROR(new_slots_.CheckSame(kPlan, args.loc));
      }
      QUERN_RETURN_IF_ERROR(writes_->CheckArgs(NewKeys(args)));
    }
    return plan_.CheckArgs(PagedArgsOf(args));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t, int max_workers) const {
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

  void Execute(const Args& args, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(args));
    const Scratch scratch = LayOut(workspace);
    PagedAttentionArgs paged = PagedArgsOf(args);
    if (args.sinks.rank() != 0) {
      const ScalarRow sinks(args.sinks, 0);
      for (int64_t h = 0; h < spec_.q_heads; ++h) scratch.sinks[h] = sinks[h];
      paged.sinks = absl::MakeConstSpan(scratch.sinks,
                                        static_cast<size_t>(spec_.q_heads));
    }
    if (native_) {
      if (writes_.has_value()) writes_->ExecuteNative(NewKeys(args));
      NativePagedAttention(plan_.spec(), paged, scratch.sums);
    } else {
      if (writes_.has_value()) writes_->Execute(NewKeys(args), executor);
      plan_.Execute(paged, workspace, executor);
    }
  }

 private:
  // The lengths and the slots of one request.
  struct Request {
    int64_t q_len;
    int64_t kv_len;
    int64_t skipped;  // tokens before the first key
  };
  struct Scratch {
    float* sinks;
    double* sums;  // of the reference
  };

  TokenAttentionPlan(const TokenAttention& spec, const PagedAttentionPlan& plan,
                     bool native)
      : spec_(spec), plan_(plan), native_(native) {}

  static constexpr char kPlan[] = "attention";

  static absl::Status NotPrepared() {
    return absl::FailedPreconditionError(absl::StrCat(
        kPlan, ": has no schedule; need a call of Prepare before"));
  }

  template <typename Allocator>
  Scratch LayOut(Allocator& a) const {
    return {
        a.template Allocate<float>("sinks", spec_.q_heads),
        a.template Allocate<double>("sums", native_ ? spec_.v_head_dim : 0)};
  }

  absl::Status CheckStepTensors(const Args& args) const {
    QUERN_RETURN_IF_ERROR(CheckIndexView(
        kPlan, "req_to_token", args.req_to_token, {kAnyExtent, kAnyExtent}));
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(kPlan, "seq_lens", args.seq_lens, {kAnyExtent}));
    const int64_t requests = args.seq_lens.extent(0);
    const std::tuple<const char*, const AnyTensorView&, bool> kOthers[] = {
        {"req_pool_indices", args.req_pool_indices, true},
        {"extend_seq_lens", args.extend_seq_lens, spec_.extend},
        {"extend_start_loc", args.extend_start_loc, spec_.extend},
        {"encoder_lens", args.encoder_lens, spec_.has_encoder_lens}};
    for (const auto& [field, view, read] : kOthers) {
      if (!read) continue;
      QUERN_RETURN_IF_ERROR(CheckIndexView(kPlan, field, view, {requests}));
    }
    if (spec_.has_loc()) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(kPlan, "loc", args.loc, DType::kI64, {requests}));
    }
    if (spec_.drafts == 0) return absl::OkStatus();
    return CheckInput(kPlan, "tree_mask", args.tree_mask, DType::kU8,
                      {requests * spec_.drafts * spec_.drafts});
  }

  // The mask of a new token, whichever its request.
  uint64_t MaskOf(const Args& args, int64_t token) const {
    const auto* row = static_cast<const uint8_t*>(args.tree_mask.data()) +
                      token * spec_.drafts;
    uint64_t mask = 0;
    for (int64_t j = 0; j < spec_.drafts; ++j) {
      if (row[j] != 0) mask |= uint64_t{1} << j;
    }
    return mask;
  }

  // The trees of all requests, whose lengths are set.
  absl::Status SetDrafts(const Args& args) {
    draft_lens_.clear();
    draft_masks_.clear();
    if (spec_.drafts == 0) return absl::OkStatus();
    for (size_t b = 0; b < storage_.q_lens.size(); ++b) {
      QUERN_RETURN_IF_ERROR(CheckEqual(
          kPlan, absl::StrCat("new tokens of request ", b), storage_.q_lens[b],
          spec_.drafts, "tree_mask has drafts for each request"));
      draft_lens_.push_back(spec_.drafts);
      for (int64_t i = 0; i < spec_.drafts; ++i) {
        draft_masks_.push_back(
            MaskOf(args, static_cast<int64_t>(draft_masks_.size())));
      }
    }
    return absl::OkStatus();
  }

  Request RequestOf(const Args& args, int64_t b) const {
    Request r = {1, IndicesOf(args.seq_lens)[b], 0};
    if (spec_.extend) r.q_len = IndicesOf(args.extend_seq_lens)[b];
    if (!spec_.has_encoder_lens) return r;
    const int64_t encoder = IndicesOf(args.encoder_lens)[b];
    (spec_.is_cross ? r.kv_len : r.skipped) = encoder;
    return r;
  }

  // Adds the lengths and the slots of request b, whose queries begin at row
  // `token`.
  absl::Status AddRequest(const Args& args, int64_t b, int64_t token) {
    const AnyTensorView& table = args.req_to_token;
    const Request r = RequestOf(args, b);
    const int64_t row = IndicesOf(args.req_pool_indices)[b];
    if (row < 0 || row >= table.extent(0)) {
      return InvalidArgument(kPlan, "req_pool_indices[", b, "]=", row,
                             "; need a row of the ", table.extent(0),
                             " of req_to_token");
    }
    if (r.q_len < 0 || r.kv_len < 0 || r.skipped < 0 ||
        r.kv_len > table.extent(1) - r.skipped) {
      return InvalidArgument(kPlan, "request ", b, " has ", r.q_len,
                             " new tokens and ", r.kv_len, " keys from token ",
                             r.skipped, " on; need at most the ",
                             table.extent(1), " tokens of req_to_token");
    }
    if (spec_.extend) {
      QUERN_RETURN_IF_ERROR(
          CheckEqual(kPlan, absl::StrCat("extend_start_loc[", b, "]"),
                     IndicesOf(args.extend_start_loc)[b], token,
                     "extend_seq_lens before it add up to"));
    }
    const int64_t slots = Keys(args).extent(0);
    if (spec_.new_keys_alone &&
        (r.kv_len != r.q_len || token > slots - r.q_len)) {
      return InvalidArgument(
          kPlan, "request ", b, " has ", r.kv_len, " keys, of which ", r.q_len,
          " are new; need new ones alone, of ", slots,
          ", because k_extend has other heads than k_buffer");
    }
    const int64_t stride = table.RowStride();
    const auto slot_of = [&](int64_t i) {
      return table.dtype() == DType::kI64
                 ? static_cast<const int64_t*>(table.data())[row * stride + i]
                 : static_cast<const int32_t*>(table.data())[row * stride + i];
    };
    for (int64_t i = 0; i < r.kv_len; ++i) {
      const int64_t slot =
          spec_.new_keys_alone ? token + i : slot_of(r.skipped + i);
      if (slot < 0 || slot >= slots) {
        return InvalidArgument(kPlan, "req_to_token[", row, "][", r.skipped + i,
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

  absl::Status CheckKeys(const Args& args) const {
    const KvLayout& layout = plan_.spec().kv;
    const bool alone = spec_.new_keys_alone;
    QUERN_RETURN_IF_ERROR(CheckInput(
        kPlan, alone ? "k_extend" : "k_buffer", Keys(args), layout.dtype(),
        {kAnyExtent, layout.kv_heads(), layout.head_dim()}));
    return CheckInput(
        kPlan, alone ? "v_extend" : "v_buffer", Values(args), layout.dtype(),
        {Keys(args).extent(0), layout.kv_heads(), layout.v_head_dim()});
  }

  PagedAttentionArgs PagedArgsOf(const Args& args) const {
    PagedAttentionArgs paged;
    paged.q = args.query;
    paged.kv = TokenCache(plan_.spec().kv, Keys(args), Values(args));
    paged.pages = table_;
    paged.schedule = schedule_;
    paged.out = args.output;
    return paged;
  }

  TokenWriteArgs NewKeys(const Args& args) const {
    return {args.key, args.value, args.k_buffer, args.v_buffer,
            new_slots_.slots()};
  }

  const AnyTensorView& Keys(const Args& args) const {
    return spec_.new_keys_alone ? args.key : args.k_buffer;
  }
  const AnyTensorView& Values(const Args& args) const {
    return spec_.new_keys_alone ? args.value : args.v_buffer;
  }

  TokenAttention spec_;
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

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_TOKEN_ATTENTION_H_
