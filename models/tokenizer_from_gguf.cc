#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf.h"
#include "quern/models/tokenizer.h"
#include "quern/models/word_split.h"

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
    "<|end|>",          // Phi 3
    "<end_of_turn>",    // Gemma
};

bool IsSpecial(TokenType type) {
  return type == TokenType::kControl || type == TokenType::kUserDefined;
}

// Sets end_ids, and makes control tokens of user-defined pieces that end a
// text.
absl::Status ReadEnds(const GgufFile& file, TokenizerSpec& spec) {
  const auto last = static_cast<int64_t>(spec.pieces.size()) - 1;
  for (const char* key :
       {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (!file.Has(key)) continue;
    QUERN_ASSIGN_OR_RETURN(const int64_t value, file.GetInt(key));
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, key, value, 0, last));
    spec.end_ids.push_back(static_cast<int32_t>(value));
  }
  const size_t typed = std::min(spec.pieces.size(), spec.types.size());
  for (size_t id = 0; id < typed; ++id) {
    if (IsSpecial(spec.types[id]) &&
        std::find(std::begin(kEndPieces), std::end(kEndPieces),
                  spec.pieces[id]) != std::end(kEndPieces)) {
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
  QUERN_ASSIGN_OR_RETURN(const absl::string_view pre,
                         file.GetString("tokenizer.ggml.pre"));
  if (pre == "qwen2") {
    spec.word_rules = WordRules::kQwen2;
  } else if (pre == "llama-bpe" || pre == "lfm2") {
    spec.word_rules = WordRules::kLlama3;
  } else if (pre == "deepseek-llm") {
    spec.word_rules = WordRules::kDeepSeekLlm;
  } else if (pre == "gpt-2") {
    spec.word_rules = WordRules::kGpt2;
  } else {
    return Unimplemented(kOp, "tokenizer.ggml.pre is '",
                         absl::CHexEscape(pre.substr(0, 64)),
                         "'; need 'qwen2', 'llama-bpe', 'lfm2', 'deepseek-llm' "
                         "or 'gpt-2'");
  }
  // There is no default, because the token that ends a text differs between
  // models.
  QUERN_RETURN_IF_ERROR(file.GetInt("tokenizer.ggml.eos_token_id").status());
  spec.bos_id = -1;
  spec.add_bos = spec.word_rules == WordRules::kLlama3;
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
