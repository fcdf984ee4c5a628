#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/attention/schedule.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/sglang_ops.h"
#include "quern/ops/registry/sglang_token_attention.h"

namespace quern {
namespace {

using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kDecode[] = "decode_attention_cpu";
constexpr char kExtend[] = "extend_attention_cpu";

// What both operators know of the requests of a step.
struct StepMetas {
  const TensorMeta& req_to_token;
  const TensorMeta& req_pool_indices;
  const TensorMeta& seq_lens;
  const MaybeMeta& encoder_lens;
};

absl::Status CheckIndices(absl::string_view op, absl::string_view field,
                          const TensorMeta& meta, int64_t requests) {
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(op, field, meta));
  if (meta.extents == std::vector<int64_t>{requests}) return absl::OkStatus();
  return InvalidArgument(op, field, " is not [", requests,
                         "], one for each request");
}
absl::Status CheckStep(absl::string_view op, const StepMetas& m,
                       bool is_cross_attn) {
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(op, "req_to_token", m.req_to_token));
  if (m.req_to_token.extents.size() != 2) {
    return InvalidArgument(op, "req_to_token is not [requests, tokens]");
  }
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(op, "seq_lens", m.seq_lens));
  if (m.seq_lens.extents.size() != 1) {
    return InvalidArgument(op, "seq_lens is not [requests]");
  }
  const int64_t requests = m.seq_lens.extents[0];
  QUERN_RETURN_IF_ERROR(
      CheckIndices(op, "req_pool_indices", m.req_pool_indices, requests));
  if (m.encoder_lens.has_value()) {
    return CheckIndices(op, "encoder_lens", *m.encoder_lens, requests);
  }
  if (!is_cross_attn) return absl::OkStatus();
  return InvalidArgument(op,
                         "encoder_lens is missing; need it with is_cross_attn");
}

absl::Status CheckBothOrNone(absl::string_view op, const MaybeMeta& key,
                             const MaybeMeta& value) {
  if (value.has_value() == key.has_value()) return absl::OkStatus();
  return InvalidArgument(op, "need both new keys and new values, or none");
}

// New keys and values for `tokens` tokens come both or not at all.
absl::Status SetNewKeys(const MaybeMeta& key, const MaybeMeta& value,
                        int64_t tokens, TokenAttention& a) {
  a.new_keys = key.has_value();
  QUERN_RETURN_IF_ERROR(CheckBothOrNone(a.op, key, value));
  if (!key.has_value()) return absl::OkStatus();
  a.new_dtype = key->dtype;
  const auto rows = [&](const TensorMeta& buffer) {
    return TensorMeta{key->dtype,
                      {tokens, buffer.extents[1], buffer.extents[2]}};
  };
  if (*key == rows(a.k) && *value == rows(a.v)) return absl::OkStatus();
  return InvalidArgument(a.op, "new keys and values are not [", tokens, ", ",
                         a.k.extents[1], ", ", a.k.extents[2], "] and [",
                         tokens, ", ", a.v.extents[1], ", ", a.v.extents[2],
                         "] of one dtype, as the buffers are");
}

// Whether the new keys have another number of heads than the buffers, as in a
// prefill of MLA, whose buffers have the one head that decode reads.
bool HeadsDiffer(const MaybeMeta& key, const TensorMeta& buffer) {
  return key.has_value() && key->extents.size() == 3 &&
         buffer.extents.size() == 3 && key->extents[1] != buffer.extents[1];
}

// The new keys and values, for `tokens` tokens, take the place of the buffers:
// token i is slot i.
absl::Status UseNewKeysAlone(const TensorMeta& key, const MaybeMeta& value,
                             int64_t tokens, TokenAttention& a) {
  QUERN_RETURN_IF_ERROR(CheckBothOrNone(a.op, key, value));
  a.k = key;
  a.v = *value;
  a.k_buffer = a.key;
  a.v_buffer = a.value;
  a.k_name = "k_extend";
  a.v_name = "v_extend";
  a.new_keys_alone = true;
  if (key.extents[0] == tokens) return absl::OkStatus();
  return InvalidArgument(a.op, "k_extend has ", key.extents[0],
                         " tokens; need ", tokens, ", as q_extend");
}

// Each request has a tree of as many drafts, or there is none.
absl::Status SetTrees(const MaybeMeta& tree_mask, int64_t requests,
                      TokenAttention& a) {
  if (!tree_mask.has_value()) return absl::OkStatus();
  if (a.is_cross) {
    return InvalidArgument(a.op,
                           "tree_mask is given; need none with is_cross_attn");
  }
  const int64_t tokens = a.q.extents[0];
  const int64_t drafts = requests == 0 ? 0 : tokens / requests;
  if (drafts * requests != tokens || drafts > AttentionSchedule::kMaxDrafts) {
    return InvalidArgument(a.op, "tree_mask is given for ", tokens,
                           " new tokens of ", requests,
                           " requests; need as many for each, at most ",
                           AttentionSchedule::kMaxDrafts);
  }
  if (!(*tree_mask == TensorMeta{DType::kU8, {tokens * drafts}})) {
    return InvalidArgument(a.op, "tree_mask is not u8[", tokens * drafts,
                           "], a row of ", drafts, " for each new token");
  }
  a.tree_mask = 13;
  a.drafts = drafts;
  return absl::OkStatus();
}

absl::StatusOr<TokenAttention> DecodeOf(
    const TensorMeta& query, const MutatedMeta& k_buffer,
    const MutatedMeta& v_buffer, const MutatedMeta& output,
    const MaybeMeta& key, const MaybeMeta& value, const MaybeMeta& loc,
    const MaybeMeta&, const TensorMeta& req_to_token,
    const TensorMeta& req_pool_indices, const TensorMeta& seq_lens,
    double sm_scale, double logit_cap, bool is_cross_attn,
    int64_t sliding_window, const MaybeMeta& encoder_lens,
    const MaybeMeta& sinks) {
  TokenAttention a = {};
  a.op = kDecode;
  a.query = 0;
  a.k_buffer = 1;
  a.v_buffer = 2;
  a.output = 3;
  a.key = 4;
  a.value = 5;
  a.loc = 6;
  a.req_to_token = 8;
  a.req_pool_indices = 9;
  a.seq_lens = 10;
  a.extend_seq_lens = a.extend_start_loc = TokenAttention::kNone;
  a.encoder_lens = 11;
  a.sinks = 12;
  a.count = 13;
  a.q = query;
  a.k = k_buffer;
  a.v = v_buffer;
  a.out = output;
  a.sinks_meta = sinks;
  a.has_encoder_lens = encoder_lens.has_value();
  a.is_cross = is_cross_attn;
  a.scale = sm_scale;
  a.cap = logit_cap;
  a.window = sliding_window;
  QUERN_RETURN_IF_ERROR(CheckTokenAttention(a));
  QUERN_RETURN_IF_ERROR(CheckStep(
      kDecode, {req_to_token, req_pool_indices, seq_lens, encoder_lens},
      is_cross_attn));
  if (query.extents[0] != seq_lens.extents[0]) {
    return InvalidArgument(kDecode, "query has ", query.extents[0],
                           " tokens; need ", seq_lens.extents[0],
                           ", one for each request");
  }
  QUERN_RETURN_IF_ERROR(SetNewKeys(key, value, query.extents[0], a));
  if (!key.has_value()) {
    // loc is not read without new keys.
    a.loc = TokenAttention::kNone;
    return a;
  }
  if (!loc.has_value() ||
      !(*loc == TensorMeta{DType::kI64, {query.extents[0]}})) {
    return InvalidArgument(kDecode, "loc is not i64[", query.extents[0],
                           "], the slots of key and value");
  }
  return a;
}

absl::StatusOr<TokenAttention> ExtendOf(
    const TensorMeta& q_extend, const MaybeMeta& k_extend,
    const MaybeMeta& v_extend, const MutatedMeta& o_extend,
    const MutatedMeta& k_buffer, const MutatedMeta& v_buffer,
    const TensorMeta& req_to_token, const TensorMeta& req_pool_indices,
    const TensorMeta& seq_lens, const TensorMeta& extend_seq_lens,
    const TensorMeta& extend_start_loc, int64_t, double sm_scale,
    double logit_cap, bool is_cross_attn, int64_t sliding_window,
    const MaybeMeta& encoder_lens, const MaybeMeta& sinks,
    const MaybeMeta& tree_mask) {
  TokenAttention a = {};
  a.op = kExtend;
  a.query = 0;
  a.key = 1;
  a.value = 2;
  a.output = 3;
  a.k_buffer = 4;
  a.v_buffer = 5;
  a.loc = TokenAttention::kNone;
  a.req_to_token = 6;
  a.req_pool_indices = 7;
  a.seq_lens = 8;
  a.extend_seq_lens = 9;
  a.extend_start_loc = 10;
  a.encoder_lens = 11;
  a.sinks = 12;
  a.count = 14;
  a.q = q_extend;
  a.k = k_buffer;
  a.v = v_buffer;
  a.out = o_extend;
  a.sinks_meta = sinks;
  a.has_encoder_lens = encoder_lens.has_value();
  a.is_cross = is_cross_attn;
  a.scale = sm_scale;
  a.cap = logit_cap;
  a.window = sliding_window;
  if (!is_cross_attn && HeadsDiffer(k_extend, k_buffer)) {
    QUERN_RETURN_IF_ERROR(
        UseNewKeysAlone(*k_extend, v_extend,
                        q_extend.extents.empty() ? 0 : q_extend.extents[0], a));
  }
  QUERN_RETURN_IF_ERROR(CheckTokenAttention(a));
  QUERN_RETURN_IF_ERROR(CheckStep(
      kExtend, {req_to_token, req_pool_indices, seq_lens, encoder_lens},
      is_cross_attn));
  QUERN_RETURN_IF_ERROR(CheckIndices(kExtend, "extend_seq_lens",
                                     extend_seq_lens, seq_lens.extents[0]));
  QUERN_RETURN_IF_ERROR(CheckIndices(kExtend, "extend_start_loc",
                                     extend_start_loc, seq_lens.extents[0]));
  QUERN_RETURN_IF_ERROR(SetTrees(tree_mask, seq_lens.extents[0], a));
  // The keys of an encoder are in the buffers already: k_extend is not read.
  if (!is_cross_attn && !a.new_keys_alone) {
    QUERN_RETURN_IF_ERROR(
        SetNewKeys(k_extend, v_extend, q_extend.extents[0], a));
  }
  return a;
}

// The functions that a registry needs for an operator described by kDescribe.
template <auto kDescribe>
struct OpOf;
template <class... A, absl::StatusOr<TokenAttention> (*kDescribe)(A...)>
struct OpOf<kDescribe> {
  static Metas Shapes(A... args) {
    QUERN_RETURN_IF_ERROR(kDescribe(args...).status());
    return std::vector<TensorMeta>();
  }
  template <bool kNative>
  static Bound Make(A... args) {
    QUERN_ASSIGN_OR_RETURN(const TokenAttention a, kDescribe(args...));
    return BindTokenAttention(a, kNative);
  }
};

template <auto kDescribe>
absl::Status Register(OpRegistry& r, absl::string_view op,
                      absl::string_view schema, OpExample example) {
  using Op = OpOf<kDescribe>;
  QUERN_RETURN_IF_ERROR(r.Define<&Op::Shapes>(schema, example, OpKind::kLayer));
  // Without new keys the buffers are only read, and values may be columns of
  // keys.
  QUERN_RETURN_IF_ERROR(r.Declare(op, {{{"k_buffer", "v_buffer"}}}));
  QUERN_RETURN_IF_ERROR((r.Add<&Op::template Make<false>>(op, "simd")));
  return r.Add<&Op::template Make<true>>(op, OpRegistry::kReference);
}

NamedArgs DecodeExample(DType dtype) {
  return {{"query", TensorMeta{dtype, {2, 2, 16}}},
          {"k_buffer", TensorMeta{dtype, {64, 1, 16}}},
          {"v_buffer", TensorMeta{dtype, {64, 1, 16}}},
          {"output", TensorMeta{dtype, {2, 2, 16}}},
          {"req_to_token", TensorMeta{DType::kI32, {4, 32}}},
          {"req_pool_indices", TensorMeta{DType::kI64, {2}}},
          {"seq_lens", TensorMeta{DType::kI64, {2}}},
          {"sm_scale", 0.25}};
}
NamedArgs ExtendExample(DType dtype) {
  return {{"q_extend", TensorMeta{dtype, {4, 2, 16}}},
          {"k_extend", TensorMeta{dtype, {4, 1, 16}}},
          {"v_extend", TensorMeta{dtype, {4, 1, 16}}},
          {"o_extend", TensorMeta{dtype, {4, 2, 16}}},
          {"k_buffer", TensorMeta{dtype, {64, 1, 16}}},
          {"v_buffer", TensorMeta{dtype, {64, 1, 16}}},
          {"req_to_token", TensorMeta{DType::kI32, {4, 32}}},
          {"req_pool_indices", TensorMeta{DType::kI64, {2}}},
          {"seq_lens", TensorMeta{DType::kI64, {2}}},
          {"extend_seq_lens", TensorMeta{DType::kI32, {2}}},
          {"extend_start_loc", TensorMeta{DType::kI32, {2}}},
          {"sm_scale", 0.25}};
}

}  // namespace

absl::Status RegisterSglangAttentionOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(Register<&DecodeOf>(
      r, kDecode,
      "decode_attention_cpu(Tensor query, Tensor(a1!) k_buffer, "
      "Tensor(a2!) v_buffer, Tensor(a3!) output, Tensor? key, Tensor? value, "
      "Tensor? loc, Tensor? attn_logits, Tensor req_to_token, "
      "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, "
      "float logit_cap=0.0, bool is_cross_attn=False, "
      "int sliding_window=0, Tensor? encoder_lens, Tensor? sinks) -> ()",
      &DecodeExample));
  return Register<&ExtendOf>(
      r, kExtend,
      "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, "
      "Tensor? v_extend, Tensor(a3!) o_extend, Tensor(a4!) k_buffer, "
      "Tensor(a5!) v_buffer, Tensor req_to_token, Tensor req_pool_indices, "
      "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
      "int max_len_extend=0, float sm_scale, float logit_cap=0.0, "
      "bool is_cross_attn=False, int sliding_window=0, "
      "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask) -> ()",
      &ExtendExample);
}

}  // namespace quern
