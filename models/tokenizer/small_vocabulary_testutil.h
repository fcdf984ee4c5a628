#ifndef QUERN_MODELS_TOKENIZER_SMALL_VOCABULARY_TESTUTIL_H_
#define QUERN_MODELS_TOKENIZER_SMALL_VOCABULARY_TESTUTIL_H_

// A vocabulary of pieces with scores, for tests of the tokenizer.

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "quern/models/tokenizer/tokenizer.h"

namespace quern {

// A vocabulary of <unk>, <s>, </s> and the bytes, then `pieces` with their
// scores as normal pieces.
inline TokenizerSpec SmallSpec(
    const std::vector<std::pair<std::string, float>>& pieces) {
  TokenizerSpec spec;
  spec.pieces = {"<unk>", "<s>", "</s>"};
  spec.types = {TokenType::kUnknown, TokenType::kControl, TokenType::kControl};
  for (int byte = 0; byte < 256; ++byte) {
    spec.pieces.push_back(absl::StrFormat("<0x%02X>", byte));
    spec.types.push_back(TokenType::kByte);
  }
  spec.scores.resize(spec.pieces.size());
  for (const auto& [piece, score] : pieces) {
    spec.pieces.push_back(piece);
    spec.types.push_back(TokenType::kNormal);
    spec.scores.push_back(score);
  }
  return spec;
}

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_SMALL_VOCABULARY_TESTUTIL_H_
