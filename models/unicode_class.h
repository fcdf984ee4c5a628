#ifndef QUERN_MODELS_UNICODE_CLASS_H_
#define QUERN_MODELS_UNICODE_CLASS_H_

// What a tokenizer has to know about a code point, by Unicode 15.0.

namespace quern {

enum class CharClass {
  kOther,   // with all that is not assigned, and surrogates
  kLetter,  // general category L*
  kNumber,  // general category N*
  kSpace,   // property White_Space
};

// For any value, also beyond U+10FFFF. A binary search in 806 ranges.
CharClass ClassOf(char32_t code_point);

}  // namespace quern

#endif  // QUERN_MODELS_UNICODE_CLASS_H_
