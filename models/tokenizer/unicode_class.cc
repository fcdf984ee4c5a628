#include "quern/models/tokenizer/unicode_class.h"

#include <algorithm>
#include <iterator>

#include "quern/models/tokenizer/unicode_ranges.h"

namespace quern {

CharClass ClassOf(char32_t code_point) {
  const auto* const range = std::lower_bound(
      std::begin(unicode::kRanges), std::end(unicode::kRanges), code_point,
      [](const unicode::Range& r, char32_t c) { return r.last < c; });
  return range != std::end(unicode::kRanges) && range->first <= code_point
             ? range->char_class
             : CharClass::kOther;
}

}  // namespace quern
