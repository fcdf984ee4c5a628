#ifndef QUERN_MODELS_TOKENIZER_WORD_SPLIT_H_
#define QUERN_MODELS_TOKENIZER_WORD_SPLIT_H_

// How byte-level BPE cuts a text into words, which no token crosses. A word is
// the first of these that matches where the last word ended (L letter, N
// number, \s white space, \S anything else than that; everything is greedy):
//
//              kQwen2                    kLlama3              kGpt2
//   1  's 't 're 've 'm 'll 'd, upper case too (kGpt2: lower case only)
//   2  [^\r\n L N]? L+           [^\r\n L N]? L+       U+20? L+
//   3  N                         N{1,3}                U+20? N+
//   4  U+20? [^\s L N]+ [\r\n]*  U+20? [^\s L N]+ [\r\n]*  U+20? [^\s L N]+
//   5  \s* [\r\n]+               \s* [\r\n]+           -
//   6  \s+ that \S does not follow: of a longer run, all but its last
//   7  \s+
//
// Some rule matches at every character, so the words together are the text. A
// byte that is not part of valid UTF-8 counts as a character of no class.
// "Upper case too" means Unicode's simple case folding, by which U+017F is an
// s. The rules kDeepSeekLlm are of another kind (deepseek_words.h).

#include <cstddef>

#include "absl/strings/string_view.h"

namespace quern {

enum class WordRules { kQwen2, kLlama3, kGpt2, kDeepSeekLlm };

// Length in bytes of the first word of `text`: at least 1 unless text is empty.
size_t FirstWordBytes(WordRules rules, absl::string_view text);

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_WORD_SPLIT_H_
