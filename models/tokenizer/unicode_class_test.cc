#include "quern/models/tokenizer/unicode_class.h"

#include <cstddef>
#include <iterator>

#include "gtest/gtest.h"
#include "quern/models/tokenizer/unicode_ranges.h"

namespace quern {
namespace {

TEST(UnicodeClassTest, RangesAscendAndDoNotTouchTheirOwnKind) {
  for (size_t i = 0; i < std::size(unicode::kRanges); ++i) {
    const unicode::Range& range = unicode::kRanges[i];
    EXPECT_LE(range.first, range.last);
    EXPECT_NE(range.char_class, CharClass::kOther);
    if (i == 0) continue;
    const unicode::Range& before = unicode::kRanges[i - 1];
    EXPECT_LT(before.last, range.first);
    EXPECT_FALSE(before.last + 1 == range.first &&
                 before.char_class == range.char_class);
  }
}

// The ends of ranges, and the code points next to them.
TEST(UnicodeClassTest, KnowsTheClassOfCodePoints) {
  const struct {
    CharClass expected;
    char32_t code_point;
  } kCases[] = {{CharClass::kOther, 0},
                {CharClass::kOther, 8},
                {CharClass::kSpace, '\t'},
                {CharClass::kSpace, '\r'},
                {CharClass::kOther, 0xe},
                {CharClass::kSpace, ' '},
                {CharClass::kPunctuation, '/'},
                {CharClass::kNumber, '0'},
                {CharClass::kNumber, '9'},
                {CharClass::kPunctuation, ':'},
                {CharClass::kPunctuation, '@'},
                {CharClass::kUpper, 'A'},
                {CharClass::kLower, 'z'},
                {CharClass::kPunctuation, '{'},
                {CharClass::kOther, 0x84},
                {CharClass::kSpace, 0x85},
                {CharClass::kSpace, 0xa0},
                {CharClass::kOtherLetter, 0xaa},
                {CharClass::kNumber, 0xb2},        // superscript two: No
                {CharClass::kSymbol, 0xd7},        // multiplication sign
                {CharClass::kMark, 0x301},         // combining acute: Mn
                {CharClass::kOtherLetter, 0x5d0},  // alef
                {CharClass::kNumber, 0x669},       // Arabic nine
                {CharClass::kMark, 0x94d},         // virama
                {CharClass::kSpace, 0x1680},
                {CharClass::kOther, 0x200b},
                {CharClass::kSpace, 0x200a},
                {CharClass::kSpace, 0x2029},
                {CharClass::kNumber, 0x2163},  // Roman four: Nl
                {CharClass::kSpace, 0x3000},
                {CharClass::kPunctuation, 0x3001},
                {CharClass::kOtherLetter, 0x3005},
                {CharClass::kNumber, 0x3007},
                {CharClass::kOtherLetter, 0x4e00},
                {CharClass::kOtherLetter, 0x9fff},
                {CharClass::kOtherLetter, 0xac00},
                {CharClass::kOther, 0xd800},
                {CharClass::kOther, 0xfeff},
                {CharClass::kSymbol, 0xfffd},
                {CharClass::kNumber, 0xff11},  // full-width one
                {CharClass::kUpper, 0x1d400},
                {CharClass::kNumber, 0x1d7ff},
                {CharClass::kSymbol, 0x1f600},  // an emoji
                {CharClass::kOtherLetter, 0x2a6df},
                {CharClass::kOther, 0x2a6e0},
                {CharClass::kOtherLetter, 0x323af},  // the last letter
                {CharClass::kOther, 0x323b0},
                {CharClass::kOther, 0x10ffff},
                {CharClass::kOther, 0xffffffff},
                {CharClass::kUpper, 0x1c5},        // Dz with caron: Lt
                {CharClass::kOtherLetter, 0x2b0},  // modifier h: Lm
                {CharClass::kSymbol, 0x309b},
                {CharClass::kMark, 0x3099},
                {CharClass::kPunctuation, 0x30fb}};
  for (const auto& c : kCases) {
    EXPECT_EQ(ClassOf(c.code_point), c.expected)
        << std::hex << static_cast<unsigned>(c.code_point);
  }
}

// The number of code points in each class, as counted from the data files.
TEST(UnicodeClassTest, CountsAreThoseOfUnicode15) {
  int counts[9] = {};
  for (char32_t c = 0; c <= 0x10ffff; ++c) {
    ++counts[static_cast<int>(ClassOf(c))];
  }
  const auto count = [&](CharClass c) { return counts[static_cast<int>(c)]; };
  EXPECT_EQ(count(CharClass::kUpper), 1862);
  EXPECT_EQ(count(CharClass::kLower), 2233);
  EXPECT_EQ(count(CharClass::kOtherLetter), 132009);
  EXPECT_EQ(count(CharClass::kMark), 2450);
  EXPECT_EQ(count(CharClass::kNumber), 1831);
  EXPECT_EQ(count(CharClass::kPunctuation), 842);
  EXPECT_EQ(count(CharClass::kSymbol), 7770);
  EXPECT_EQ(count(CharClass::kSpace), 25);
}

}  // namespace
}  // namespace quern
