#ifndef QUERN_MODELS_TOKENIZER_DEEPSEEK_WORDS_H_
#define QUERN_MODELS_TOKENIZER_DEEPSEEK_WORDS_H_

// Private: the words of WordRules::kDeepSeekLlm, the pre-tokenizer of
// DeepSeek-LLM and DeepSeek-V2. Six patterns divide a text one after another.
// Each cuts every piece that the patterns above it have left, before and behind
// each match; everything is greedy, and what lies between two matches is a
// piece too:
//
//   1  [\r\n]
//   2  \s? A+    A: cased letters, those that kCased lists
//   3  \s? P+    P: U+0021..U+002F, U+003A..U+007E (Latin letters, too), their
//               full-width forms U+FF01..U+FF0F and U+FF1A..U+FF5E,
//               U+2018..U+201F, and U+3000..U+3002
//   4  \s+ at the end of a piece
//   5  C+        C: U+0800..U+9FA5 and U+AC00..U+D7FF
//   6  N+        N: general category N*; \s: property White_Space
//
// The third pattern also cuts the words of the second: a letter with an accent
// is cut off from Latin letters without one.

#include <cstddef>

#include "absl/strings/string_view.h"

namespace quern {

// Length in bytes of the first word of `text`, which must not be empty. A byte
// that is not part of valid UTF-8 counts as a character of no class.
size_t FirstDeepSeekWordBytes(absl::string_view text);

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_DEEPSEEK_WORDS_H_
