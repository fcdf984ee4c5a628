#include "quern/models/llama_config.h"

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
#include "absl/types/span.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf.h"

namespace quern {
namespace {

constexpr char kOp[] = "llama";
constexpr absl::string_view kQwen2 = "qwen2";
constexpr absl::string_view kQwen3 = "qwen3";
constexpr absl::string_view kGemma2 = "gemma2";
// Far above any model, and low enough that products of two fit in int64.
constexpr int64_t kMaxDim = int64_t{1} << 28;
constexpr int64_t kMaxLayers = 4096;
constexpr absl::string_view kArchitectures =
    "'llama', 'qwen2', 'qwen3' and 'gemma2'";
constexpr char kRopeFactors[] = "rope_freqs.weight";

// Llama 3.1 and later has factors of its rotary frequencies as a tensor.
bool HasRopeFactors(const GgufFile& file, const LlamaConfig& c) {
  return c.architecture == "llama" && file.HasTensor(kRopeFactors);
}

// The keys of one architecture.
class Keys {
 public:
  Keys(const GgufFile& file, absl::string_view architecture)
      : file_(file), prefix_(absl::StrCat(architecture, ".")) {}

  std::string Name(absl::string_view key) const {
    return absl::StrCat(prefix_, key);
  }
  bool Has(absl::string_view key) const { return file_.Has(Name(key)); }

  // The integer of `key`, in [1, max]; or `fallback` if that is not negative
  // and there is no such key.
  absl::StatusOr<int64_t> Int(absl::string_view key, int64_t max,
                              int64_t fallback = -1) const {
    if (fallback >= 0 && !Has(key)) return fallback;
    QUERN_ASSIGN_OR_RETURN(const int64_t value, file_.GetInt(Name(key)));
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, Name(key), value, 1, max));
    return value;
  }

  absl::StatusOr<float> PositiveF32(absl::string_view key) const {
    QUERN_ASSIGN_OR_RETURN(const float value, file_.GetF32(Name(key)));
    if (!std::isfinite(value) || value <= 0) {
      return InvalidArgument(kOp, Name(key), "=", value, "; need a number > 0");
    }
    return value;
  }
  absl::StatusOr<float> PositiveF32(absl::string_view key,
                                    float fallback) const {
    if (!Has(key)) return fallback;
    return PositiveF32(key);
  }

  // Unimplemented, if there is scaling of rotary positions.
  absl::Status CheckNoRopeScaling() const {
    if (const char* key = "rope.scaling.type"; Has(key)) {
      QUERN_ASSIGN_OR_RETURN(const absl::string_view scaling,
                             file_.GetString(Name(key)));
      if (scaling == "none") return absl::OkStatus();
      return Unimplemented(kOp, Name(key), " is '",
                           absl::CHexEscape(scaling.substr(0, 64)),
                           "'; need 'none'");
    }
    // Factors are linear ones, unless told.
    for (const char* key : {"rope.scaling.factor", "rope.scale_linear"}) {
      if (!Has(key)) continue;
      QUERN_ASSIGN_OR_RETURN(const float factor, file_.GetF32(Name(key)));
      if (factor != 1.0f && factor != 0.0f) {  // 0: none either
        return Unimplemented(kOp, Name(key), "=", factor, "; need 1");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckNoExperts() const {
    if (!Has("expert_count")) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(const int64_t experts,
                           file_.GetInt(Name("expert_count")));
    if (experts == 0) return absl::OkStatus();
    return Unimplemented(kOp, Name("expert_count"), "=", experts, "; need 0");
  }

 private:
  const GgufFile& file_;
  std::string prefix_;
};

// What a refusal of a tensor ends with.
std::string FileAndSupported(const GgufFile& file) {
  return absl::StrCat("; the file is ", file.Describe(), "; supported are ",
                      kArchitectures, " in F32, F16, BF16 and Q8_0");
}

absl::StatusOr<const GgufTensor*> FindTensor(const GgufFile& file,
                                             absl::string_view name) {
  if (file.HasTensor(name)) return file.FindTensor(name);
  return absl::NotFoundError(
      absl::StrCat(kOp, ": no tensor '", name, "'", FileAndSupported(file)));
}

absl::Status CheckShape(const GgufFile& file, absl::string_view name,
                        const std::vector<int64_t>& dims) {
  QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor, FindTensor(file, name));
  if (tensor->dims != dims) {
    return InvalidArgument(kOp, name, " has dimensions [",
                           absl::StrJoin(tensor->dims, ", "), "]; need [",
                           absl::StrJoin(dims, ", "), "]");
  }
  return absl::OkStatus();
}

struct Wanted {
  std::string name;
  std::vector<int64_t> dims;
};

std::vector<Wanted> WantedOfModel(const GgufFile& file, const LlamaConfig& c) {
  std::vector<Wanted> wanted = {
      {"token_embd.weight", {c.hidden, c.vocab}},
      {"output_norm.weight", {c.hidden}},
  };
  if (HasOutputWeight(file) && c.architecture != kGemma2) {  // tied
    wanted.push_back({"output.weight", {c.hidden, c.vocab}});
  }
  if (HasRopeFactors(file, c)) {
    wanted.push_back({kRopeFactors, {c.rope_dim / 2}});
  }
  return wanted;
}

std::vector<Wanted> WantedOfLayer(const LlamaConfig& c, int64_t layer) {
  const std::string blk = absl::StrCat("blk.", layer, ".");
  std::vector<Wanted> wanted = {
      {blk + "attn_norm.weight", {c.hidden}},
      {blk + "attn_q.weight", {c.hidden, c.q_cols()}},
      {blk + "attn_k.weight", {c.hidden, c.kv_cols()}},
      {blk + "attn_v.weight", {c.hidden, c.kv_cols()}},
      {blk + "attn_output.weight", {c.q_cols(), c.hidden}},
      {blk + "ffn_norm.weight", {c.hidden}},
      {blk + "ffn_gate.weight", {c.hidden, c.ffn}},
      {blk + "ffn_up.weight", {c.hidden, c.ffn}},
      {blk + "ffn_down.weight", {c.ffn, c.hidden}},
  };
  if (c.qkv_bias) {
    wanted.push_back({blk + "attn_q.bias", {c.q_cols()}});
    wanted.push_back({blk + "attn_k.bias", {c.kv_cols()}});
    wanted.push_back({blk + "attn_v.bias", {c.kv_cols()}});
  }
  if (c.head_norms) {
    wanted.push_back({blk + "attn_q_norm.weight", {c.head_dim}});
    wanted.push_back({blk + "attn_k_norm.weight", {c.head_dim}});
  }
  if (c.post_norms) {
    wanted.push_back({blk + "post_attention_norm.weight", {c.hidden}});
    wanted.push_back({blk + "post_ffw_norm.weight", {c.hidden}});
  }
  return wanted;
}

absl::Status CheckTensors(const GgufFile& file, const LlamaConfig& c) {
  // Names of what was found: a file that claims thousands of layers and has
  // none is refused at the first.
  std::vector<std::string> names;
  const auto check = [&](const std::vector<Wanted>& wanted) {
    for (const Wanted& tensor : wanted) {
      QUERN_RETURN_IF_ERROR(CheckShape(file, tensor.name, tensor.dims));
      names.push_back(tensor.name);
    }
    return absl::OkStatus();
  };
  QUERN_RETURN_IF_ERROR(check(WantedOfModel(file, c)));
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    QUERN_RETURN_IF_ERROR(check(WantedOfLayer(c, layer)));
  }
  if (file.tensors().size() == names.size()) return absl::OkStatus();
  // Names are distinct, so one is not among those wanted.
  std::sort(names.begin(), names.end());
  for (const GgufTensor& tensor : file.tensors()) {
    if (!std::binary_search(names.begin(), names.end(), tensor.name)) {
      return Unimplemented(kOp, "tensor '", absl::CHexEscape(tensor.name),
                           "' is not part of a plain ", c.architecture, " of ",
                           c.layers, " layers", FileAndSupported(file));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadRopeFactors(const GgufFile& file, LlamaConfig& c) {
  if (!HasRopeFactors(file, c)) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor,
                         file.FindTensor(kRopeFactors));
  if (tensor->type != GgufTensorType::kF32) {
    return InvalidArgument(kOp, kRopeFactors, " has type ",
                           GgufTensorTypeName(tensor->type), "; need F32");
  }
  std::vector<float> factors(static_cast<size_t>(tensor->elements));
  QUERN_RETURN_IF_ERROR(file.ReadRows(*tensor, 0, absl::MakeSpan(factors)));
  for (size_t j = 0; j < factors.size(); ++j) {
    if (!std::isfinite(factors[j]) || factors[j] <= 0) {
      return InvalidArgument(kOp, kRopeFactors, "[", j, "]=", factors[j],
                             "; need a finite number > 0");
    }
  }
  c.rope_factors.assign(factors.begin(), factors.end());
  return absl::OkStatus();
}

absl::Status ReadShape(const Keys& keys, LlamaConfig& c) {
  QUERN_ASSIGN_OR_RETURN(c.context, keys.Int("context_length", kMaxDim));
  QUERN_ASSIGN_OR_RETURN(c.hidden, keys.Int("embedding_length", kMaxDim));
  QUERN_ASSIGN_OR_RETURN(c.layers, keys.Int("block_count", kMaxLayers));
  QUERN_ASSIGN_OR_RETURN(c.ffn, keys.Int("feed_forward_length", kMaxDim));
  QUERN_ASSIGN_OR_RETURN(c.q_heads, keys.Int("attention.head_count", kMaxDim));
  QUERN_ASSIGN_OR_RETURN(
      c.kv_heads, keys.Int("attention.head_count_kv", kMaxDim, c.q_heads));
  if (c.q_heads % c.kv_heads != 0) {
    return InvalidArgument(kOp, keys.Name("attention.head_count="), c.q_heads,
                           "; need a multiple of head_count_kv=", c.kv_heads);
  }
  QUERN_ASSIGN_OR_RETURN(c.head_dim, keys.Int("attention.key_length", kMaxDim,
                                              c.hidden / c.q_heads));
  if (c.head_dim == 0 ||
      (!keys.Has("attention.key_length") && c.hidden % c.q_heads != 0)) {
    return InvalidArgument(kOp, keys.Name("embedding_length="), c.hidden,
                           "; need a multiple of head_count=", c.q_heads);
  }
  // The product is bounded, so that no size of a step overflows.
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, keys.Name("attention.head_count * key_length"),
                 c.q_cols(), 1, kMaxDim));
  QUERN_ASSIGN_OR_RETURN(const int64_t v_dim, keys.Int("attention.value_length",
                                                       kMaxDim, c.head_dim));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, keys.Name("attention.value_length"),
                                   v_dim, c.head_dim, "the keys have"));
  QUERN_ASSIGN_OR_RETURN(
      c.rope_dim, keys.Int("rope.dimension_count", c.head_dim, c.head_dim));
  if (c.rope_dim % 2 != 0) {
    return InvalidArgument(kOp, keys.Name("rope.dimension_count="), c.rope_dim,
                           "; need an even number");
  }
  QUERN_ASSIGN_OR_RETURN(c.rope_base,
                         keys.PositiveF32("rope.freq_base", 10000.0f));
  QUERN_ASSIGN_OR_RETURN(c.norm_eps,
                         keys.PositiveF32("attention.layer_norm_rms_epsilon"));
  return absl::OkStatus();
}

absl::Status ReadVocab(const GgufFile& file, const Keys& keys, LlamaConfig& c) {
  QUERN_ASSIGN_OR_RETURN(const GgufTensor* embedding,
                         FindTensor(file, "token_embd.weight"));
  c.vocab = embedding->rows();
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "vocabulary", c.vocab, 1, kMaxDim));
  QUERN_ASSIGN_OR_RETURN(const int64_t vocab,
                         keys.Int("vocab_size", kMaxDim, c.vocab));
  return CheckEqual(kOp, keys.Name("vocab_size"), vocab, c.vocab,
                    "token_embd.weight has rows");
}

// What the architecture does unlike Llama.
absl::Status ReadDifferences(const Keys& keys, LlamaConfig& c) {
  if (c.architecture == kQwen2) {
    c.rope_style = RotaryStyle::kHalves;
    c.qkv_bias = true;
  }
  if (c.architecture == kQwen3) {
    c.rope_style = RotaryStyle::kHalves;
    c.head_norms = true;
  }
  if (c.architecture == kGemma2) {
    c.rope_style = RotaryStyle::kHalves;
    c.post_norms = true;
    c.activation = LinearActivation::kGeluTanhAndMul;
    c.embedding_scale =
        static_cast<float>(std::sqrt(static_cast<double>(c.hidden)));
    // The file does not tell the divisor of queries: it is head_dim, but for
    // the model of 27 billion weights, known by its layers.
    constexpr int64_t kLayersOf27B = 46;
    if (c.layers == kLayersOf27B) {
      c.attention_scale = static_cast<float>(std::sqrt(
          static_cast<double>(c.q_heads) / static_cast<double>(c.hidden)));
    }
    QUERN_ASSIGN_OR_RETURN(c.attention_cap,
                           keys.PositiveF32("attn_logit_softcapping"));
    QUERN_ASSIGN_OR_RETURN(c.logit_cap,
                           keys.PositiveF32("final_logit_softcapping"));
    QUERN_ASSIGN_OR_RETURN(c.window,
                           keys.Int("attention.sliding_window", kMaxDim));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LlamaConfig> LlamaConfig::Create(const GgufFile& file) {
  QUERN_ASSIGN_OR_RETURN(const absl::string_view architecture,
                         file.GetString("general.architecture"));
  if (architecture != "llama" && architecture != kQwen2 &&
      architecture != kQwen3 && architecture != kGemma2) {
    return Unimplemented(kOp, "general.architecture is '",
                         absl::CHexEscape(architecture.substr(0, 64)),
                         "'; need 'llama', 'qwen2', 'qwen3' or 'gemma2'");
  }
  const Keys keys(file, architecture);
  QUERN_RETURN_IF_ERROR(keys.CheckNoRopeScaling());
  QUERN_RETURN_IF_ERROR(keys.CheckNoExperts());

  LlamaConfig c;
  c.architecture = std::string(architecture);
  if (file.Has("general.name")) {
    QUERN_ASSIGN_OR_RETURN(const absl::string_view name,
                           file.GetString("general.name"));
    c.name = absl::CHexEscape(name.substr(0, 64));
  }
  QUERN_RETURN_IF_ERROR(ReadShape(keys, c));
  QUERN_RETURN_IF_ERROR(ReadDifferences(keys, c));
  QUERN_RETURN_IF_ERROR(ReadVocab(file, keys, c));
  QUERN_RETURN_IF_ERROR(CheckTensors(file, c));
  QUERN_RETURN_IF_ERROR(ReadRopeFactors(file, c));
  return c;
}

}  // namespace quern
