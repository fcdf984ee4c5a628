#!/usr/bin/env python3
"""Writes models/tokenizer/unicode_ranges.h: which code points are letters, numbers and white space.

usage: tools/unicode_ranges.py /usr/share/unicode > models/tokenizer/unicode_ranges.h

Reads UnicodeData.txt (general categories L* and N*) and PropList.txt (the property White_Space) of the folder, which
is that of Debian's package unicode-data. The version written is that of PropList.txt.
"""
import pathlib
import re
import sys

folder = pathlib.Path(sys.argv[1])
proplist = (folder / "PropList.txt").read_text(encoding="utf-8")
version = re.match(r"# PropList-([\d.]+)\.txt", proplist).group(1)

kinds = {}  # code point -> 'L', 'N' or 'S'
first = None
for line in (folder / "UnicodeData.txt").read_text(encoding="utf-8").splitlines():
    code, name, category = line.split(";")[:3]
    code = int(code, 16)
    if name.endswith(", First>"):
        first = code
        continue
    for point in range(code if first is None else first, code + 1):
        if category[0] in "LN":
            kinds[point] = category[0]
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
print(f"""#ifndef QUERN_MODELS_UNICODE_RANGES_H_
#define QUERN_MODELS_UNICODE_RANGES_H_

// Written by tools/unicode_ranges.py from the data files of Unicode {version};
// their licence: third_party/unicode. Letters are the general categories L*,
// numbers N*, spaces the property White_Space.

#include "quern/models/tokenizer/unicode_class.h"

namespace quern::unicode {{

struct Range {{
  char32_t first, last;
  CharClass char_class;
}};

inline constexpr CharClass L = CharClass::kLetter;
inline constexpr CharClass N = CharClass::kNumber;
inline constexpr CharClass S = CharClass::kSpace;

// {len(ranges)} ranges that do not overlap, in ascending order.
// clang-format off
inline constexpr Range kRanges[] = {{
{chr(10).join(lines)}
}};
// clang-format on

}}  // namespace quern::unicode

#endif  // QUERN_MODELS_UNICODE_RANGES_H_""")
