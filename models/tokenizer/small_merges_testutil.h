#ifndef QUERN_MODELS_TOKENIZER_SMALL_MERGES_TESTUTIL_H_
#define QUERN_MODELS_TOKENIZER_SMALL_MERGES_TESTUTIL_H_

// A byte-level vocabulary of a few merges, for tests of the tokenizer.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "quern/models/tokenizer/byte_bpe.h"
#include "quern/models/tokenizer/tokenizer.h"

namespace quern {

// A vocabulary with the 256 bytes as 0 to 255, the results of `merges` from 256
// on, then <|end|> and <|end|>s (control) and <tool> (user-defined).
inline TokenizerSpec SmallSpec(const std::vector<std::string>& merges) {
  TokenizerSpec spec;
  spec.kind = TokenizerKind::kByteBpe;
  for (int byte = 0; byte < 256; ++byte) {
    spec.pieces.push_back(
        PrintableBytes(std::string(1, static_cast<char>(byte))));
  }
  for (const std::string& merge : merges) {
    spec.pieces.push_back(absl::StrJoin(absl::StrSplit(merge, ' '), ""));
  }
  spec.types.assign(spec.pieces.size(), TokenType::kNormal);
  spec.bos_id = spec.eos_id = static_cast<int32_t>(spec.pieces.size());
  for (const char* control : {"<|end|>", "<|end|>s"}) {
    spec.pieces.push_back(control);
    spec.types.push_back(TokenType::kControl);
  }
  spec.pieces.push_back("<tool>");
  spec.types.push_back(TokenType::kUserDefined);
  spec.add_bos = false;
  spec.merges = merges;
  return spec;
}

// "\u0120" is the printable form of a space.
inline const std::vector<std::string>& SmallMerges() {
  static const auto* const merges = new std::vector<std::string>{
      "t h", "th e", "\u0120 the", "i n", "a a", "aa a", "a b", "b a", "ab a"};
  return *merges;
}
inline constexpr int32_t kThe = 257, kSpaceThe = 258, kIn = 259, kAa = 260,
                         kAaa = 261;
inline constexpr int32_t kEnd = 265, kEndS = 266, kTool = 267;

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_SMALL_MERGES_TESTUTIL_H_
