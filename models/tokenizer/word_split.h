#ifndef QUERN_MODELS_TOKENIZER_WORD_SPLIT_H_
#define QUERN_MODELS_TOKENIZER_WORD_SPLIT_H_

// How byte-level BPE cuts a text into words, which no token crosses: rules of
// models' tokenizers, as regular expressions. L, M, N, P, S are general
// categories, \s is white space, and \S anything else. A word is what the first
// of these matches where the last word ended; everything is greedy:
//
//   kQwen2    C  B? L+  N       _? [^\s L N]+ [\r\n]*      \s* [\r\n]+  E  \s+
//   kLlama3   C  B? L+  N{1,3}  _? [^\s L N]+ [\r\n]*      \s* [\r\n]+  E  \s+
//   kQwen35   C  B? [L M]+  N   _? [^\s L M N]+ [\r\n]*    \s* [\r\n]+  E  \s+
//   kSeedCoder  C  B? L+  N     _? [^\s L N]+ (no \r, \n)  \s* [\r\n]+  E  \s+
//   kTekken   B? U* D+  B? U+ D*  N
//                               _? [^\s L N]+ [\r\n/]*     \s* [\r\n]+  E  \s+
//   kGpt4o    B? U* D+ C?  B? U+ D* C?  N{1,3}
//                               _? [^\s L N]+ [\r\n/]*     \s* [\r\n]+  E  \s+
//   kGpt2     c  _? L+  _? N+   _? [^\s L N]+                           E  \s+
//
//   _  the space U+0020            B  [^\r\n L N], any character but these
//   C  's 't 're 've 'm 'll 'd, upper case too, by Unicode's simple case
//      folding, in which U+017F is an s; c only lower case
//   U  upper-case letters (Lu, Lt), letters without case (Lm, Lo), and M
//   D  lower-case letters (Ll), letters without case, and M
//   E  \s+ that \S does not follow: of a longer run, all but its last
//
// Two rules cut parts off the text first, each of which is matched as if it was
// a text of its own, and so is what lies between them:
//
//   kGpt2Digits   each N; matched as kGpt2
//   kDeepSeekV3   N{1,3}, and runs of U+4E00..U+9FA5 and U+3040..U+30FF;
//                 matched by
//                 X [A-Za-z]+   [^\r\n L P S]? [L M]+   _? [P S]+ [\r\n]*
//                 \s* [\r\n]+   E   \s+
//                 where X is a mark of ASCII, such as !
//
// A run of characters that nothing matches is a word, too.
//
// The rules kDeepSeekLlm are of another kind (deepseek_words.h).
//
// The words together are the text. A byte that is not part of valid UTF-8
// counts as U+FFFD, which is in S.

#include <cstddef>

#include "absl/strings/string_view.h"

namespace quern {

enum class WordRules {
  kQwen2,
  kLlama3,
  kQwen35,
  kSeedCoder,
  kTekken,
  kGpt4o,
  kGpt2,
  kGpt2Digits,
  kDeepSeekV3,
  kDeepSeekLlm,
};

// Length in bytes of the first word of `text`: at least 1 unless text is empty.
size_t FirstWordBytes(WordRules rules, absl::string_view text);

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_WORD_SPLIT_H_
