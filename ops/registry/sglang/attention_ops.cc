#include <cstdint>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "quern/attention/schedule.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/ops/registry/sglang/token_attention.h"

namespace quern {
namespace {

using Spec = TokenAttention;
using Args = TokenAttentionArgs;
using Op = OpDeclaration<TokenAttentionPlan, Spec, Args>;

// Keys, values, queries and results, by what the schema calls them.
absl::Status FillKeys(Spec& s, const OpCall& call, const char* k, const char* v,
                      const char* q, const char* out) {
  const TensorMeta &keys = *call.Tensor(k), &values = *call.Tensor(v);
  if (keys.extents.size() != 3 || values.extents.size() != 3) {
    return InvalidArgument(call.op(), k, " is ", PrintMeta(keys), " and ", v,
                           " is ", PrintMeta(values),
                           "; need [slots, kv_heads, head_dim]");
  }
  s.kv_dtype = keys.dtype;
  s.kv_heads = keys.extents[1];
  s.head_dim = keys.extents[2];
  s.v_head_dim = values.extents[2];
  QUERN_RETURN_IF_ERROR(
      CheckMeta(call.op(), v, values,
                {keys.dtype, {keys.extents[0], s.kv_heads, s.v_head_dim}},
                absl::StrCat(", as ", k, " is ", PrintMeta(keys))));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(call.op(), k, keys.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckExtents(call.op(), q, *call.Tensor(q),
                                     {s.tokens, s.q_heads, s.head_dim}));
  return CheckExtents(call.op(), out, *call.Tensor(out),
                      {s.tokens, s.q_heads, s.v_head_dim});
}

absl::Status CheckBothOrNone(const OpCall& call, const char* key,
                             const char* value) {
  if (call.has(key) == call.has(value)) return absl::OkStatus();
  return InvalidArgument(call.op(),
                         "need both new keys and new values, or none");
}

// New keys and values, one for each token, which are written to the buffers.
absl::Status FillNewKeys(Spec& s, const OpCall& call, const char* key,
                         const char* value) {
  QUERN_RETURN_IF_ERROR(CheckBothOrNone(call, key, value));
  s.new_keys = call.has(key);
  if (!s.new_keys) return absl::OkStatus();
  s.new_dtype = call.Tensor(key)->dtype;
  QUERN_RETURN_IF_ERROR(CheckExtents(call.op(), key, *call.Tensor(key),
                                     {s.tokens, s.kv_heads, s.head_dim},
                                     ", as the buffers are"));
  return CheckMeta(call.op(), value, *call.Tensor(value),
                   {s.new_dtype, {s.tokens, s.kv_heads, s.v_head_dim}},
                   ", as the keys and the buffers are");
}

// The requests of a step: one for each element of a member.
Op& Requests(Op& op, int64_t Spec::*requests) {
  return op
      .In("req_to_token", &Args::req_to_token, {kAny, kAny}, IndexDType<Spec>())
      .In("req_pool_indices", &Args::req_pool_indices, {requests},
          IndexDType<Spec>())
      .In("seq_lens", &Args::seq_lens, {requests}, IndexDType<Spec>());
}

absl::Status FillEncoder(Spec& s, const OpCall& call) {
  s.has_encoder_lens = call.has("encoder_lens");
  if (s.has_encoder_lens || !s.is_cross) return absl::OkStatus();
  return InvalidArgument(call.op(),
                         "encoder_lens is missing; need it with is_cross_attn");
}
Op& Terms(Op& op, int64_t Spec::*requests) {
  return op.Need("sm_scale", &Spec::scale)
      .Attr("logit_cap", 0.0, &Spec::cap)
      .Attr("is_cross_attn", false, &Spec::is_cross)
      .Attr("sliding_window", int64_t{0}, &Spec::window)
      .Maybe("encoder_lens", &Args::encoder_lens, {requests},
             IndexDType<Spec>())
      .Then(&FillEncoder)
      .Maybe("sinks", &Args::sinks, {&Spec::q_heads},
             OpDType<Spec>::OneOf(
                 {std::begin(kFloatDTypes), std::end(kFloatDTypes)},
                 {&Spec::sinks_dtype}));
}

// What ends both declarations. Without new keys the buffers are only read, and
// values may be columns of keys.
Op& Attention(Op& op) {
  const auto by = [](bool native) {
    return [native](const Spec& spec, const OpCall&) {
      return TokenAttentionPlan::Create(spec, native);
    };
  };
  return op.InPlace("k_buffer", "v_buffer")
      .Provider("simd", by(false))
      .Provider("reference", by(true))
      .Layer();
}

absl::Status FillDecode(Spec& s, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(
      FillKeys(s, call, "k_buffer", "v_buffer", "query", "output"));
  QUERN_RETURN_IF_ERROR(FillNewKeys(s, call, "key", "value"));
  // loc is not read without new keys.
  if (!s.new_keys) return absl::OkStatus();
  constexpr char kWhy[] = ", the slots of key and value";
  if (!call.has("loc")) {
    return InvalidArgument(call.op(), "loc is missing; need i64[", s.tokens,
                           "]", kWhy);
  }
  return CheckMeta(call.op(), "loc", *call.Tensor("loc"),
                   {DType::kI64, {s.tokens}}, kWhy);
}

absl::Status AddDecode(OpRegistry& registry) {
  Op op("decode_attention_cpu");
  op.In("query", &Args::query, {&Spec::tokens, &Spec::q_heads, kAny},
        &Spec::q_dtype)
      .Word("q", "query")
      .InOut("k_buffer", &Args::k_buffer, nullptr)
      .InOut("v_buffer", &Args::v_buffer, nullptr)
      .InOut("output", &Args::output, nullptr, {}, &Spec::out_dtype)
      .Word("out", "output")
      .Maybe("key", &Args::key)
      .Maybe("value", &Args::value)
      .Maybe("loc", &Args::loc)
      .Maybe("attn_logits", &Args::unused);
  return Attention(Terms(Requests(op, &Spec::tokens), &Spec::tokens))
      .Then(&FillDecode)
      .Example({{"query", {2, 2, 16}},
                {"k_buffer", {64, 1, 16}},
                {"v_buffer", {64, 1, 16}},
                {"output", {2, 2, 16}},
                {"req_to_token", {4, 32}, DType::kI32},
                {"req_pool_indices", {2}, DType::kI64},
                {"seq_lens", {2}, DType::kI64},
                {"sm_scale", 0.25}})
      .AddTo(registry);
}

// Each request has a tree of as many drafts, or there is none.
absl::Status FillTrees(Spec& s, const OpCall& call) {
  if (!call.has("tree_mask")) return absl::OkStatus();
  if (s.is_cross) {
    return InvalidArgument(call.op(),
                           "tree_mask is given; need none with is_cross_attn");
  }
  s.drafts = s.requests == 0 ? 0 : s.tokens / s.requests;
  if (s.drafts * s.requests != s.tokens ||
      s.drafts > AttentionSchedule::kMaxDrafts) {
    return InvalidArgument(call.op(), "tree_mask is given for ", s.tokens,
                           " new tokens of ", s.requests,
                           " requests; need as many for each, at most ",
                           AttentionSchedule::kMaxDrafts);
  }
  return CheckMeta(
      call.op(), "tree_mask", *call.Tensor("tree_mask"),
      {DType::kU8, {s.tokens * s.drafts}},
      absl::StrCat(", a row of ", s.drafts, " for each new token"));
}

// Whether the new keys have another number of heads than the buffers, as in a
// prefill of MLA, whose buffers have the one head that decode reads.
bool HeadsDiffer(const TensorMeta* key, const TensorMeta& buffer) {
  return key != nullptr && key->extents.size() == 3 &&
         buffer.extents.size() == 3 && key->extents[1] != buffer.extents[1];
}

absl::Status FillExtend(Spec& s, const OpCall& call) {
  const TensorMeta* const key = call.Tensor("k_extend");
  s.new_keys_alone = !s.is_cross && HeadsDiffer(key, *call.Tensor("k_buffer"));
  if (s.new_keys_alone) {
    QUERN_RETURN_IF_ERROR(CheckBothOrNone(call, "k_extend", "v_extend"));
    QUERN_RETURN_IF_ERROR(CheckEqual(call.op(), "tokens of k_extend",
                                     key->extents[0], s.tokens,
                                     "q_extend has"));
    return FillKeys(s, call, "k_extend", "v_extend", "q_extend", "o_extend");
  }
  QUERN_RETURN_IF_ERROR(
      FillKeys(s, call, "k_buffer", "v_buffer", "q_extend", "o_extend"));
  // The keys of an encoder are in the buffers already: k_extend is not read.
  if (s.is_cross) return absl::OkStatus();
  return FillNewKeys(s, call, "k_extend", "v_extend");
}

absl::Status AddExtend(OpRegistry& registry) {
  Op op("extend_attention_cpu");
  op.In("q_extend", &Args::query, {&Spec::tokens, &Spec::q_heads, kAny},
        &Spec::q_dtype)
      .Word("q", "q_extend")
      .Maybe("k_extend", &Args::key)
      .Maybe("v_extend", &Args::value)
      .InOut("o_extend", &Args::output, nullptr, {}, &Spec::out_dtype)
      .Word("out", "o_extend")
      .InOut("k_buffer", &Args::k_buffer, nullptr)
      .InOut("v_buffer", &Args::v_buffer, nullptr)
      .Given(&Spec::extend, true);
  Requests(op, &Spec::requests)
      .In("extend_seq_lens", &Args::extend_seq_lens, {&Spec::requests},
          IndexDType<Spec>())
      .In("extend_start_loc", &Args::extend_start_loc, {&Spec::requests},
          IndexDType<Spec>())
      .Attr("max_len_extend", int64_t{0});
  return Attention(Terms(op, &Spec::requests))
      .Maybe("tree_mask", &Args::tree_mask)
      .Then(&FillTrees)
      .Then(&FillExtend)
      .Example({{"q_extend", {4, 2, 16}},
                {"k_extend", {4, 1, 16}},
                {"v_extend", {4, 1, 16}},
                {"o_extend", {4, 2, 16}},
                {"k_buffer", {64, 1, 16}},
                {"v_buffer", {64, 1, 16}},
                {"req_to_token", {4, 32}, DType::kI32},
                {"req_pool_indices", {2}, DType::kI64},
                {"seq_lens", {2}, DType::kI64},
                {"extend_seq_lens", {2}, DType::kI32},
                {"extend_start_loc", {2}, DType::kI32},
                {"sm_scale", 0.25}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangAttentionOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddDecode(registry));
  return AddExtend(registry);
}

}  // namespace quern
