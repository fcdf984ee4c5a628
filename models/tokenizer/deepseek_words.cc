#include "quern/models/tokenizer/deepseek_words.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "absl/strings/string_view.h"
#include "quern/models/tokenizer/unicode_class.h"
#include "quern/models/tokenizer/utf8.h"

namespace quern {
namespace {

struct Range {
  char32_t first, last;
};

// Letters of general categories Lu, Ll and Lt, as DeepSeek's files list them:
// without Armenian's and Georgian's small letters, among others.
constexpr Range kCased[] = {
    {0x41, 0x5a},       {0x61, 0x7a},       {0xb5, 0xb5},
    {0xc0, 0xd6},       {0xd8, 0xf6},       {0xf8, 0x1ba},
    {0x1bc, 0x1bf},     {0x1c4, 0x293},     {0x295, 0x2af},
    {0x370, 0x373},     {0x376, 0x377},     {0x37b, 0x37d},
    {0x37f, 0x37f},     {0x386, 0x386},     {0x388, 0x38a},
    {0x38c, 0x38c},     {0x38e, 0x3a1},     {0x3a3, 0x3f5},
    {0x3f7, 0x481},     {0x48a, 0x52f},     {0x531, 0x556},
    {0x10a0, 0x10c5},   {0x13a0, 0x13f5},   {0x13f8, 0x13fd},
    {0x1c90, 0x1cba},   {0x1cbd, 0x1cbf},   {0x1d00, 0x1d2b},
    {0x1d6b, 0x1d77},   {0x1d79, 0x1d9a},   {0x1e00, 0x1f15},
    {0x1f18, 0x1f1d},   {0x1f20, 0x1f45},   {0x1f48, 0x1f4d},
    {0x1f50, 0x1f57},   {0x1f59, 0x1f59},   {0x1f5b, 0x1f5b},
    {0x1f5d, 0x1f5d},   {0x1f5f, 0x1f7d},   {0x1f80, 0x1fb4},
    {0x1fb6, 0x1fbc},   {0x1fbe, 0x1fbe},   {0x1fc2, 0x1fc4},
    {0x1fc6, 0x1fcc},   {0x1fd0, 0x1fd3},   {0x1fd6, 0x1fdb},
    {0x1fe0, 0x1fec},   {0x1ff2, 0x1ff4},   {0x1ff6, 0x1ffc},
    {0x2102, 0x2102},   {0x2107, 0x2107},   {0x210a, 0x2113},
    {0x2115, 0x2115},   {0x2119, 0x211d},   {0x2124, 0x2124},
    {0x2126, 0x2126},   {0x2128, 0x2128},   {0x212a, 0x212d},
    {0x212f, 0x2134},   {0x2139, 0x2139},   {0x213c, 0x213f},
    {0x2145, 0x2149},   {0x214e, 0x214e},   {0x2183, 0x2184},
    {0x2c00, 0x2c7b},   {0x2c7e, 0x2ce4},   {0x2ceb, 0x2cee},
    {0x2cf2, 0x2cf3},   {0xa640, 0xa66d},   {0xa680, 0xa69b},
    {0xa722, 0xa76f},   {0xa771, 0xa787},   {0xa78b, 0xa78e},
    {0xab70, 0xabbf},   {0xfb00, 0xfb06},   {0xfb13, 0xfb17},
    {0xff21, 0xff3a},   {0xff41, 0xff5a},   {0x10400, 0x1044f},
    {0x104b0, 0x104d3}, {0x104d8, 0x104fb}, {0x10c80, 0x10cb2},
    {0x10cc0, 0x10cf2}, {0x118a0, 0x118df}, {0x1e900, 0x1e943}};

bool IsCased(char32_t c) {
  const Range* const range = std::lower_bound(
      std::begin(kCased), std::end(kCased), c,
      [](const Range& r, char32_t value) { return r.last < value; });
  return range != std::end(kCased) && range->first <= c;
}

bool IsIn(char32_t c, char32_t first, char32_t last) {
  return first <= c && c <= last;
}

// A character of the text; past the end of the text it has no bytes and is of
// no class.
struct Char {
  size_t bytes = 0;
  bool newline = false, space = false, cased = false, mark = false;
  bool wide = false, number = false;
};

Char CharAt(absl::string_view text, size_t at) {
  if (at >= text.size()) return {};
  const auto [c, bytes] = FirstUtf8Char(text.substr(at));
  Char result;
  result.bytes = bytes;
  result.newline = c == '\r' || c == '\n';
  result.space = ClassOf(c) == CharClass::kSpace;
  result.number = ClassOf(c) == CharClass::kNumber;
  result.cased = IsCased(c);
  result.mark = IsIn(c, 0x21, 0x2f) || IsIn(c, 0x3a, 0x7e) ||
                IsIn(c, 0xff01, 0xff0f) || IsIn(c, 0xff1a, 0xff5e) ||
                IsIn(c, 0x2018, 0x201f) || IsIn(c, 0x3000, 0x3002);
  result.wide = IsIn(c, 0x800, 0x9fa5) || IsIn(c, 0xac00, 0xd7ff);
  return result;
}

// Four neighbouring characters. They tell whether a word ends between the first
// two, but for white space, which may be followed by the end of a piece. So a
// word can be found without what lies in front of it, in time that is linear in
// its length and that of the white space behind it.
class Neighbours {
 public:
  Neighbours(absl::string_view text, size_t at) : text_(text), next_(at) {
    for (int i = 0; i < 4; ++i) Advance();
  }

  const Char& a() const { return a_; }
  const Char& b() const { return b_; }
  void Advance() {
    a_ = b_;
    b_ = c_;
    c_ = d_;
    d_ = CharAt(text_, next_);
    next_ += d_.bytes;
  }

  // Whether a word ends between the first two.
  bool Cut() const {
    return CutByThree() || (!a_.space && b_.space && SpacesEndPiece()) ||
           a_.wide != b_.wide || a_.number != b_.number;
  }

 private:
  // Whether one of the first three patterns cuts.
  bool CutByThree() const {
    if (b_.bytes == 0 || a_.newline || b_.newline) return true;
    if (CutsAtCased(a_, b_, c_)) return true;
    if (a_.mark) return !b_.mark;
    if (b_.mark) return !a_.space;
    return b_.space && c_.mark && !CutsAtCased(b_, c_, d_);
  }

  // Whether the second pattern cuts between x and y, which z follows.
  static bool CutsAtCased(const Char& x, const Char& y, const Char& z) {
    if (x.cased) return !y.cased;
    return y.cased ? !x.space : y.space && z.cased;
  }

  // Whether the white space that begins with the second character reaches the
  // end of a piece that the first three patterns leave.
  bool SpacesEndPiece() const {
    Neighbours at = *this;
    do {
      at.Advance();
      if (at.CutByThree()) return true;
    } while (at.b_.space);
    return false;
  }

  absl::string_view text_;
  size_t next_;
  Char a_, b_, c_, d_;
};

}  // namespace

size_t FirstDeepSeekWordBytes(absl::string_view text) {
  Neighbours at(text, 0);
  size_t bytes = at.a().bytes;
  for (; !at.Cut(); at.Advance()) bytes += at.b().bytes;
  return bytes;
}

}  // namespace quern
