#include "models/llama_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "core/status_macros.h"
#include "models/gguf.h"

namespace quern {
namespace {

constexpr char kOp[] = "llama";
// Far above any model, and low enough that products of two fit in int64.
constexpr int64_t kMaxDim = int64_t{1} << 28;
constexpr int64_t kMaxLayers = 4096;

// The integer of `key`, or `fallback` if that is not negative and there is no
// such key.
absl::StatusOr<int64_t> Int(const GgufFile& file, absl::string_view key,
                            int64_t max, int64_t fallback = -1) {
  if (fallback >= 0 && !file.Has(key)) return fallback;
  QUERN_ASSIGN_OR_RETURN(const int64_t value, file.GetInt(key));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, key, value, 1, max));
  return value;
}

absl::StatusOr<float> PositiveF32(const GgufFile& file, absl::string_view key,
                                  float fallback) {
  if (!file.Has(key)) return fallback;
  QUERN_ASSIGN_OR_RETURN(const float value, file.GetF32(key));
  if (!std::isfinite(value) || value <= 0) {
    return InvalidArgument(kOp, key, "=", value, "; need a number > 0");
  }
  return value;
}

absl::Status CheckShape(const GgufFile& file, absl::string_view name,
                        const std::vector<int64_t>& dims) {
  QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor, file.FindTensor(name));
  if (tensor->dims != dims) {
    return InvalidArgument(kOp, name, " has dimensions [",
                           absl::StrJoin(tensor->dims, ", "), "]; need [",
                           absl::StrJoin(dims, ", "), "]");
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(const GgufFile& file, const LlamaConfig& c) {
  struct Wanted {
    std::string name;
    std::vector<int64_t> dims;
  };
  std::vector<Wanted> wanted = {
      {"token_embd.weight", {c.hidden, c.vocab}},
      {"output_norm.weight", {c.hidden}},
  };
  if (HasOutputWeight(file)) {
    wanted.push_back({"output.weight", {c.hidden, c.vocab}});
  }
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string blk = absl::StrCat("blk.", layer, ".");
    wanted.push_back({blk + "attn_norm.weight", {c.hidden}});
    wanted.push_back({blk + "attn_q.weight", {c.hidden, c.q_cols()}});
    wanted.push_back({blk + "attn_k.weight", {c.hidden, c.kv_cols()}});
    wanted.push_back({blk + "attn_v.weight", {c.hidden, c.kv_cols()}});
    wanted.push_back({blk + "attn_output.weight", {c.q_cols(), c.hidden}});
    wanted.push_back({blk + "ffn_norm.weight", {c.hidden}});
    wanted.push_back({blk + "ffn_gate.weight", {c.hidden, c.ffn}});
    wanted.push_back({blk + "ffn_up.weight", {c.hidden, c.ffn}});
    wanted.push_back({blk + "ffn_down.weight", {c.ffn, c.hidden}});
  }
  for (const Wanted& tensor : wanted) {
    QUERN_RETURN_IF_ERROR(CheckShape(file, tensor.name, tensor.dims));
  }
  if (file.tensors().size() == wanted.size()) return absl::OkStatus();
  // Names are distinct, so one is not among those wanted.
  std::vector<std::string> names;
  for (const Wanted& tensor : wanted) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  for (const GgufTensor& tensor : file.tensors()) {
    if (!std::binary_search(names.begin(), names.end(), tensor.name)) {
      return Unimplemented(kOp, "tensor '", absl::CHexEscape(tensor.name),
                           "' is not part of a plain Llama of ", c.layers,
                           " layers");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LlamaConfig> LlamaConfig::Create(const GgufFile& file) {
  QUERN_ASSIGN_OR_RETURN(const absl::string_view architecture,
                         file.GetString("general.architecture"));
  if (architecture != "llama") {
    return Unimplemented(kOp, "general.architecture is '",
                         absl::CHexEscape(architecture.substr(0, 64)),
                         "'; need 'llama'");
  }
  bool scales = true;  // the factors below are linear ones, unless told
  if (file.Has("llama.rope.scaling.type")) {
    QUERN_ASSIGN_OR_RETURN(const absl::string_view scaling,
                           file.GetString("llama.rope.scaling.type"));
    if (scaling != "none") {
      return Unimplemented(kOp, "llama.rope.scaling.type is '",
                           absl::CHexEscape(scaling.substr(0, 64)),
                           "'; need 'none'");
    }
    scales = false;
  }
  for (const char* key :
       {"llama.rope.scaling.factor", "llama.rope.scale_linear"}) {
    if (!scales || !file.Has(key)) continue;
    QUERN_ASSIGN_OR_RETURN(const float factor, file.GetF32(key));
    if (factor != 1.0f && factor != 0.0f) {  // 0: none either
      return Unimplemented(kOp, key, "=", factor, "; need 1");
    }
  }
  if (file.Has("llama.expert_count")) {
    QUERN_ASSIGN_OR_RETURN(const int64_t experts,
                           file.GetInt("llama.expert_count"));
    if (experts != 0) {
      return Unimplemented(kOp, "llama.expert_count=", experts, "; need 0");
    }
  }

  LlamaConfig c;
  if (file.Has("general.name")) {
    QUERN_ASSIGN_OR_RETURN(const absl::string_view name,
                           file.GetString("general.name"));
    c.name = absl::CHexEscape(name.substr(0, 64));
  }
  QUERN_ASSIGN_OR_RETURN(c.context, Int(file, "llama.context_length", kMaxDim));
  QUERN_ASSIGN_OR_RETURN(c.hidden,
                         Int(file, "llama.embedding_length", kMaxDim));
  QUERN_ASSIGN_OR_RETURN(c.layers, Int(file, "llama.block_count", kMaxLayers));
  QUERN_ASSIGN_OR_RETURN(c.ffn,
                         Int(file, "llama.feed_forward_length", kMaxDim));
  QUERN_ASSIGN_OR_RETURN(c.q_heads,
                         Int(file, "llama.attention.head_count", kMaxDim));
  QUERN_ASSIGN_OR_RETURN(c.kv_heads, Int(file, "llama.attention.head_count_kv",
                                         kMaxDim, c.q_heads));
  if (c.q_heads % c.kv_heads != 0) {
    return InvalidArgument(kOp, "llama.attention.head_count=", c.q_heads,
                           "; need a multiple of head_count_kv=", c.kv_heads);
  }
  QUERN_ASSIGN_OR_RETURN(c.head_dim, Int(file, "llama.attention.key_length",
                                         kMaxDim, c.hidden / c.q_heads));
  if (c.head_dim == 0 ||
      (!file.Has("llama.attention.key_length") && c.hidden % c.q_heads != 0)) {
    return InvalidArgument(kOp, "llama.embedding_length=", c.hidden,
                           "; need a multiple of head_count=", c.q_heads);
  }
  QUERN_ASSIGN_OR_RETURN(
      const int64_t v_dim,
      Int(file, "llama.attention.value_length", kMaxDim, c.head_dim));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "llama.attention.value_length", v_dim,
                                   c.head_dim, "the keys have"));
  QUERN_ASSIGN_OR_RETURN(c.rope_dim, Int(file, "llama.rope.dimension_count",
                                         c.head_dim, c.head_dim));
  if (c.rope_dim % 2 != 0) {
    return InvalidArgument(kOp, "llama.rope.dimension_count=", c.rope_dim,
                           "; need an even number");
  }
  QUERN_ASSIGN_OR_RETURN(c.rope_base,
                         PositiveF32(file, "llama.rope.freq_base", 10000.0f));
  QUERN_RETURN_IF_ERROR(
      file.GetF32("llama.attention.layer_norm_rms_epsilon").status());
  QUERN_ASSIGN_OR_RETURN(
      c.norm_eps,
      PositiveF32(file, "llama.attention.layer_norm_rms_epsilon", 0));
  QUERN_ASSIGN_OR_RETURN(const GgufTensor* embedding,
                         file.FindTensor("token_embd.weight"));
  c.vocab = embedding->rows();
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "vocabulary", c.vocab, 1, kMaxDim));
  QUERN_ASSIGN_OR_RETURN(const int64_t vocab,
                         Int(file, "llama.vocab_size", kMaxDim, c.vocab));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "llama.vocab_size", vocab, c.vocab,
                                   "token_embd.weight has rows"));
  QUERN_RETURN_IF_ERROR(CheckTensors(file, c));
  return c;
}

}  // namespace quern
