#ifndef QUERN_MODELS_TOKENIZER_UTF8_H_
#define QUERN_MODELS_TOKENIZER_UTF8_H_

// UTF-8, one character at a time. Unicode 15, table 3-7.

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace quern {

// Length of the character at the front of `text`, which must not be empty: 1 to
// 4 bytes if it is valid, 0 if more bytes could make it valid, -1 if none can.
inline int Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return -1;
  const int length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  for (size_t i = 1; i < static_cast<size_t>(length); ++i) {
    if (i == text.size()) return 0;
    uint8_t low = 0x80, high = 0xbf;
    if (i == 1) {
      if (lead == 0xe0) low = 0xa0;   // not overlong
      if (lead == 0xed) high = 0x9f;  // no surrogates
      if (lead == 0xf0) low = 0x90;
      if (lead == 0xf4) high = 0x8f;  // <= U+10FFFF
    }
    if (byte(i) < low || byte(i) > high) return -1;
  }
  return length;
}

inline bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const int length = Utf8Length(text);
    if (length <= 0) return false;
    text.remove_prefix(static_cast<size_t>(length));
  }
  return true;
}

struct Utf8Char {
  char32_t code_point;
  size_t bytes;
};

// The character at the front of `text`, which must not be empty. A byte that
// begins no valid character counts as one character, U+FFFD.
inline Utf8Char FirstUtf8Char(absl::string_view text) {
  const int length = Utf8Length(text);
  if (length <= 0) return {0xfffd, 1};
  const auto lead = static_cast<uint8_t>(text[0]);
  if (length == 1) return {lead, 1};
  char32_t code_point = lead & (0x7fu >> length);
  for (size_t i = 1; i < static_cast<size_t>(length); ++i) {
    code_point = code_point << 6 | (static_cast<uint8_t>(text[i]) & 0x3fu);
  }
  return {code_point, static_cast<size_t>(length)};
}

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_UTF8_H_
