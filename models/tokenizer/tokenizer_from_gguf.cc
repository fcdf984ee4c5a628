#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/tokenizer/tokenizer.h"
#include "quern/models/tokenizer/word_split.h"

namespace quern {
namespace {

constexpr char kOp[] = "tokenizer";

// Pieces that end a text or a turn in families of models. Files name one of
// them in eos_token_id, and often none of the others.
constexpr absl::string_view kEndPieces[] = {
    "<|eot_id|>",       // Llama 3: end of turn
    "<|eom_id|>",       // Llama 3: end of message, before a tool's answer
    "<|end_of_text|>",  // Llama 3
    "<|im_end|>",       // Qwen and others of ChatML
    "<|endoftext|>",    // GPT-2, Qwen
    "<|end|>",          // Phi 3; in gpt-oss it ends a part of a turn
    "<|return|>",       // gpt-oss
    "<|call|>",         // gpt-oss, before a tool's answer
    "<end_of_turn>",    // Gemma
    "<turn|>",          // Gemma 4
    "<EOT>",            // DeepSeek's coders
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  // DeepSeek
    "[EOS]",                                    // Ministral and others
};

bool EndsText(absl::string_view piece, bool has_return) {
  if (has_return && piece == "<|end|>") return false;
  return std::find(std::begin(kEndPieces), std::end(kEndPieces), piece) !=
         std::end(kEndPieces);
}

// A name of tokenizer.ggml.pre. Several models' words are cut alike.
struct Pre {
  absl::string_view name;
  WordRules rules;
  bool whole_words;  // whether a word that is a piece is that piece
  bool adds_bos;  // whether a text begins with bos where no key says otherwise
};
constexpr Pre kPres[] = {
    {"llama-bpe", WordRules::kLlama3, true, true},
    {"llama3", WordRules::kLlama3, true, true},
    {"llama-v3", WordRules::kLlama3, true, true},
    {"lfm2", WordRules::kLlama3, true, true},
    {"falcon3", WordRules::kLlama3, true, true},
    {"falcon-h1", WordRules::kLlama3, true, true},
    {"pixtral", WordRules::kLlama3, true, true},
    {"midm-2.0", WordRules::kLlama3, true, true},
    {"dbrx", WordRules::kLlama3, false, false},
    {"smaug-bpe", WordRules::kLlama3, false, false},
    {"chatglm-bpe", WordRules::kLlama3, false, false},
    {"glm4", WordRules::kLlama3, false, false},
    {"tekken", WordRules::kTekken, true, true},
    {"qwen2", WordRules::kQwen2, false, false},
    {"deepseek-r1-qwen", WordRules::kQwen2, false, false},
    {"megrez", WordRules::kQwen2, false, false},
    {"stablelm2", WordRules::kQwen2, false, false},
    {"hunyuan", WordRules::kQwen2, false, false},
    {"solar-open", WordRules::kQwen2, false, false},
    {"kormo", WordRules::kQwen2, false, false},
    {"grok-2", WordRules::kQwen2, false, false},
    {"bailingmoe", WordRules::kQwen2, false, false},
    {"qwen35", WordRules::kQwen35, false, false},
    {"seed-coder", WordRules::kSeedCoder, false, false},
    {"gpt-4o", WordRules::kGpt4o, true, false},
    {"llama4", WordRules::kGpt4o, true, false},
    {"kanana2", WordRules::kGpt4o, true, false},
    {"minimax-m2", WordRules::kGpt4o, true, false},
    {"gpt-2", WordRules::kGpt2, false, false},
    {"phi-2", WordRules::kGpt2, false, false},
    {"exaone4", WordRules::kGpt2, false, false},
    {"olmo", WordRules::kGpt2, false, false},
    {"mpt", WordRules::kGpt2, false, false},
    {"gigachat", WordRules::kGpt2, false, false},
    {"a.x-4.0", WordRules::kGpt2, false, false},
    {"mellum", WordRules::kGpt2, false, false},
    {"jais", WordRules::kGpt2, false, false},
    {"trillion", WordRules::kGpt2, false, false},
    {"granite-docling", WordRules::kGpt2, false, false},
    {"smollm", WordRules::kGpt2Digits, false, false},
    {"refact", WordRules::kGpt2Digits, false, false},
    {"starcoder", WordRules::kGpt2Digits, false, false},
    {"command-r", WordRules::kGpt2Digits, false, false},
    {"codeshell", WordRules::kGpt2Digits, false, false},
    {"exaone", WordRules::kGpt2Digits, false, false},
    {"minerva-7b", WordRules::kGpt2Digits, false, false},
    {"mellum2", WordRules::kGpt2Digits, false, false},
    {"deepseek-v3", WordRules::kDeepSeekV3, false, false},
    {"hunyuan-dense", WordRules::kDeepSeekV3, false, false},
    {"joyai-llm", WordRules::kDeepSeekV3, false, false},
    {"deepseek-llm", WordRules::kDeepSeekLlm, false, false},
};

absl::StatusOr<const Pre*> ReadPre(const GgufFile& file) {
  constexpr char kKey[] = "tokenizer.ggml.pre";
  if (!file.Has(kKey)) {
    return InvalidArgument(kOp, "no key '", kKey,
                           "', which says how text is cut into words; need a "
                           "file from a newer converter");
  }
  QUERN_ASSIGN_OR_RETURN(const absl::string_view name, file.GetString(kKey));
  for (const Pre& pre : kPres) {
    if (pre.name == name) return &pre;
  }
  return Unimplemented(
      kOp, kKey, " is '", absl::CHexEscape(name.substr(0, 64)),
      "'; need one of ",
      absl::StrJoin(kPres, ", ", [](std::string* out, const Pre& pre) {
        absl::StrAppend(out, pre.name);
      }));
}

bool IsSpecial(TokenType type) {
  return type == TokenType::kControl || type == TokenType::kUserDefined;
}

// Sets end_ids, and makes control tokens of user-defined pieces that end a
// text.
absl::Status ReadEnds(const GgufFile& file, TokenizerSpec& spec) {
  const auto last = static_cast<int64_t>(spec.pieces.size()) - 1;
  const bool has_return = std::find(spec.pieces.begin(), spec.pieces.end(),
                                    "<|return|>") != spec.pieces.end();
  for (const char* key :
       {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (!file.Has(key)) continue;
    QUERN_ASSIGN_OR_RETURN(const int64_t value, file.GetInt(key));
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, key, value, 0, last));
    if (has_return && spec.pieces[static_cast<size_t>(value)] == "<|end|>") {
      continue;
    }
    spec.end_ids.push_back(static_cast<int32_t>(value));
  }
  const size_t typed = std::min(spec.pieces.size(), spec.types.size());
  for (size_t id = 0; id < typed; ++id) {
    if (IsSpecial(spec.types[id]) && EndsText(spec.pieces[id], has_return)) {
      spec.end_ids.push_back(static_cast<int32_t>(id));
    }
  }
  std::vector<int32_t> ends = spec.end_ids;
  ends.push_back(spec.eos_id);
  for (const int32_t id : ends) {
    // An id outside the vocabulary is left for Tokenizer::Create to refuse.
    if (static_cast<size_t>(id) < typed &&
        spec.types[static_cast<size_t>(id)] == TokenType::kUserDefined) {
      spec.types[static_cast<size_t>(id)] = TokenType::kControl;
    }
  }
  return absl::OkStatus();
}

absl::Status ReadSentencePieces(const GgufFile& file, TokenizerSpec& spec) {
  QUERN_ASSIGN_OR_RETURN(spec.scores, file.GetF32s("tokenizer.ggml.scores"));
  return absl::OkStatus();
}

absl::Status ReadBytePieces(const GgufFile& file, TokenizerSpec& spec) {
  spec.kind = TokenizerKind::kByteBpe;
  QUERN_ASSIGN_OR_RETURN(const Pre* pre, ReadPre(file));
  spec.word_rules = pre->rules;
  spec.whole_words = pre->whole_words;
  spec.add_bos = pre->adds_bos;
  // There is no default, because the token that ends a text differs between
  // models.
  QUERN_RETURN_IF_ERROR(file.GetInt("tokenizer.ggml.eos_token_id").status());
  spec.bos_id = -1;
  QUERN_ASSIGN_OR_RETURN(const std::vector<absl::string_view> merges,
                         file.GetStrings("tokenizer.ggml.merges"));
  spec.merges.assign(merges.begin(), merges.end());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Tokenizer> Tokenizer::Create(const GgufFile& file) {
  QUERN_ASSIGN_OR_RETURN(const absl::string_view model,
                         file.GetString("tokenizer.ggml.model"));
  if (model != "llama" && model != "gpt2") {
    return Unimplemented(kOp, "tokenizer.ggml.model is '",
                         absl::CHexEscape(model.substr(0, 64)),
                         "'; need 'llama' or 'gpt2'");
  }
  TokenizerSpec spec;
  QUERN_ASSIGN_OR_RETURN(const std::vector<absl::string_view> pieces,
                         file.GetStrings("tokenizer.ggml.tokens"));
  spec.pieces.assign(pieces.begin(), pieces.end());
  QUERN_RETURN_IF_ERROR(model == "gpt2" ? ReadBytePieces(file, spec)
                                        : ReadSentencePieces(file, spec));
  QUERN_ASSIGN_OR_RETURN(const std::vector<int32_t> types,
                         file.GetI32s("tokenizer.ggml.token_type"));
  for (const int32_t type : types) {
    spec.types.push_back(static_cast<TokenType>(type));
  }
  for (const auto& [key, id] :
       {std::pair<const char*, int32_t*>{"tokenizer.ggml.bos_token_id",
                                         &spec.bos_id},
        {"tokenizer.ggml.eos_token_id", &spec.eos_id}}) {
    if (!file.Has(key)) continue;
    QUERN_ASSIGN_OR_RETURN(const int64_t value, file.GetInt(key));
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, key, value, 0, std::numeric_limits<int32_t>::max()));
    *id = static_cast<int32_t>(value);
  }
  QUERN_RETURN_IF_ERROR(ReadEnds(file, spec));
  for (const auto& [key, flag] :
       {std::pair<const char*, bool*>{"tokenizer.ggml.add_space_prefix",
                                      &spec.add_space_prefix},
        {"tokenizer.ggml.add_bos_token", &spec.add_bos}}) {
    if (!file.Has(key)) continue;
    QUERN_ASSIGN_OR_RETURN(*flag, file.GetBool(key));
  }
  return Create(std::move(spec));
}

}  // namespace quern
