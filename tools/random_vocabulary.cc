#include "quern/tools/random_vocabulary.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "quern/models/tokenizer/byte_bpe.h"
#include "quern/tools/gguf_writer.h"

namespace quern {
namespace {

constexpr int64_t kBytePieces = 256;
constexpr int64_t kFirstByte = 3;  // after <unk> <s> </s>
constexpr int64_t kSpacePiece = kFirstByte + kBytePieces;
static_assert(kMinRandomVocab == kSpacePiece + 1);

// Values of tokenizer.ggml.token_type; see models/tokenizer/tokenizer.h.
constexpr int32_t kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6;

// Writes a vocabulary like Qwen's: byte-level pieces, one control token that
// ends a text, and no token in front.
void AddBytePieceKeys(int64_t vocab, GgufFileWriter& w) {
  std::vector<std::string> pieces;
  for (int byte = 0; byte < kBytePieces; ++byte) {
    const char c = static_cast<char>(byte);
    pieces.push_back(PrintableBytes(absl::string_view(&c, 1)));
  }
  const std::string space = PrintableBytes(" ");
  pieces.push_back(space + "t");
  std::vector<int32_t> types(pieces.size(), kNormal);
  const auto end = static_cast<uint32_t>(pieces.size());
  pieces.push_back("<|endoftext|>");
  types.push_back(kControl);
  for (auto id = static_cast<int64_t>(pieces.size()); id < vocab; ++id) {
    pieces.push_back(absl::StrCat(space, "w", id));
    types.push_back(kNormal);
  }
  w.KeyString("tokenizer.ggml.model", "gpt2");
  w.KeyString("tokenizer.ggml.pre", "qwen2");
  w.KeyStrings("tokenizer.ggml.tokens", pieces);
  w.KeyI32s("tokenizer.ggml.token_type", types);
  w.KeyStrings("tokenizer.ggml.merges", {space + " t"});
  w.KeyU32("tokenizer.ggml.eos_token_id", end);
  w.KeyU32("tokenizer.ggml.eot_token_id", end);
  w.KeyU32("tokenizer.ggml.eom_token_id", end);
  w.KeyBool("tokenizer.ggml.add_bos_token", false);
}

void AddSentencePieceKeys(int64_t vocab, GgufFileWriter& w) {
  std::vector<std::string> pieces = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {kUnknown, kControl, kControl};
  for (int byte = 0; byte < kBytePieces; ++byte) {
    pieces.push_back(absl::StrFormat("<0x%02X>", byte));
    types.push_back(kByte);
  }
  constexpr absl::string_view kSpace = "\xe2\x96\x81";  // U+2581
  for (int64_t id = kSpacePiece; id < vocab; ++id) {
    pieces.push_back(id == kSpacePiece ? std::string(kSpace)
                                       : absl::StrCat(kSpace, "w", id));
    types.push_back(kNormal);
  }
  std::vector<float> scores;
  for (int64_t id = 0; id < vocab; ++id) {
    scores.push_back(
        static_cast<float>(std::min(kSpacePiece - id, int64_t{0})));
  }
  w.KeyString("tokenizer.ggml.model", "llama");
  w.KeyString("tokenizer.ggml.pre", "default");
  w.KeyStrings("tokenizer.ggml.tokens", pieces);
  w.KeyF32s("tokenizer.ggml.scores", scores);
  w.KeyI32s("tokenizer.ggml.token_type", types);
  w.KeyU32("tokenizer.ggml.unknown_token_id", 0);
  w.KeyU32("tokenizer.ggml.bos_token_id", 1);
  w.KeyU32("tokenizer.ggml.eos_token_id", 2);
  w.KeyBool("tokenizer.ggml.add_bos_token", true);
  w.KeyBool("tokenizer.ggml.add_eos_token", false);
}

}  // namespace

void AddVocabularyKeys(absl::string_view architecture, int64_t vocab,
                       GgufFileWriter& w) {
  if (absl::StartsWith(architecture, "qwen")) {
    AddBytePieceKeys(vocab, w);
  } else {
    AddSentencePieceKeys(vocab, w);
  }
}

}  // namespace quern
