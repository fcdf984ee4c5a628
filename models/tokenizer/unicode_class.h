#ifndef QUERN_MODELS_TOKENIZER_UNICODE_CLASS_H_
#define QUERN_MODELS_TOKENIZER_UNICODE_CLASS_H_

// The class of a code point, as tokenizers need it, by Unicode 15.0.

namespace quern {

enum class CharClass {
  kOther,   // others, unassigned, surrogates
  kLetter,  // general category L*
  kNumber,  // general category N*
  kSpace,   // property White_Space
};

// Returns the class of any value, also beyond U+10FFFF. A binary search in 806
// ranges.
CharClass ClassOf(char32_t code_point);

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_UNICODE_CLASS_H_
