#ifndef QUERN_MODELS_TOKENIZER_UNICODE_CLASS_H_
#define QUERN_MODELS_TOKENIZER_UNICODE_CLASS_H_

// The class of a code point, as tokenizers need it, by Unicode 15.0.

#include <cstdint>

namespace quern {

enum class CharClass : uint8_t {
  kOther,        // others, unassigned, surrogates
  kUpper,        // general categories Lu and Lt
  kLower,        // Ll
  kOtherLetter,  // Lm and Lo
  kMark,         // M*
  kNumber,       // N*
  kPunctuation,  // P*
  kSymbol,       // S*
  kSpace,        // property White_Space, whatever the category
};

// Returns the class of any value, also beyond U+10FFFF. A binary search in
// 2,741 ranges.
CharClass ClassOf(char32_t code_point);

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_UNICODE_CLASS_H_
