#!/usr/bin/env python3
"""Writes models/tokenizer/unicode_ranges.h: classes of code points, such as letters, numbers and white space.

usage: tools/unicode_ranges.py /usr/share/unicode > models/tokenizer/unicode_ranges.h

Reads UnicodeData.txt (general categories) and PropList.txt (the property White_Space) of the folder, which is that of
Debian's package unicode-data. The version written is that of PropList.txt.
"""
import pathlib
import re
import sys

folder = pathlib.Path(sys.argv[1])
proplist = (folder / "PropList.txt").read_text(encoding="utf-8")
version = re.match(r"# PropList-([\d.]+)\.txt", proplist).group(1)

# General categories, and the class's name in the table.
CLASS_OF = {"Lu": "U", "Lt": "U", "Ll": "L", "Lm": "O", "Lo": "O", "M": "M", "N": "N", "P": "P", "S": "Y"}

kinds = {}  # code point -> a name of CLASS_OF, or "S"
first = None
for line in (folder / "UnicodeData.txt").read_text(encoding="utf-8").splitlines():
    code, name, category = line.split(";")[:3]
    code = int(code, 16)
    if name.endswith(", First>"):
        first = code
        continue
    for point in range(code if first is None else first, code + 1):
        if kind := CLASS_OF.get(category) or CLASS_OF.get(category[0]):
            kinds[point] = kind
    first = None
for begin, end in re.findall(r"^([0-9A-F]+)(?:\.\.([0-9A-F]+))? *; White_Space\b", proplist, re.MULTILINE):
    for point in range(int(begin, 16), int(end or begin, 16) + 1):
        assert point not in kinds
        kinds[point] = "S"

ranges = []
for point in sorted(kinds):
    if ranges and ranges[-1][1] == point - 1 and ranges[-1][2] == kinds[point]:
        ranges[-1][1] = point
    else:
        ranges.append([point, point, kinds[point]])

items = [f"{{0x{begin:X}, 0x{end:X}, {kind}}}," for begin, end, kind in ranges]
lines = [""]
for item in items:
    if len(lines[-1]) + 1 + len(item) > 80:
        lines.append("")
    lines[-1] += (" " if lines[-1] else "    ") + item
print(f"""#ifndef QUERN_MODELS_TOKENIZER_UNICODE_RANGES_H_
#define QUERN_MODELS_TOKENIZER_UNICODE_RANGES_H_

// Written by tools/unicode_ranges.py from the data files of Unicode {version};
// their licence: third_party/unicode.

#include "quern/models/tokenizer/unicode_class.h"

namespace quern::unicode {{

struct Range {{
  char32_t first, last;
  CharClass char_class;
}};

inline constexpr CharClass U = CharClass::kUpper;
inline constexpr CharClass L = CharClass::kLower;
inline constexpr CharClass O = CharClass::kOtherLetter;
inline constexpr CharClass M = CharClass::kMark;
inline constexpr CharClass N = CharClass::kNumber;
inline constexpr CharClass P = CharClass::kPunctuation;
inline constexpr CharClass Y = CharClass::kSymbol;
inline constexpr CharClass S = CharClass::kSpace;

// {len(ranges)} ranges that do not overlap, in ascending order.
// clang-format off
inline constexpr Range kRanges[] = {{
{chr(10).join(lines)}
}};
// clang-format on

}}  // namespace quern::unicode

#endif  // QUERN_MODELS_TOKENIZER_UNICODE_RANGES_H_""")
