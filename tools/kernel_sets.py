#!/usr/bin/env python3
"""Compares the machine code of a kernel's instruction sets.

Usage: ./bazelw build -c opt //:quern
       tools/kernel_sets.py [OBJECT...]

Without objects: those of every *_simd.cc below bazel-bin. Each line says of two
sets of AVX-512 which part of the better one's instructions, by whole functions,
the lesser one does not have. `same`: the better one is compiled for nothing
(core/sets), unless its constants differ, because addresses of constants and of
what is called are not compared.
"""

import collections
import pathlib
import re
import subprocess
import sys

PAIRS = (("AVX3_ZEN4", "AVX3_DL"), ("AVX3_ZEN4", "AVX3"), ("AVX3_DL", "AVX3"))


def functions(path):
    """The functions of each set, as counts of their instructions."""
    text = subprocess.run(
        ["objdump", "-d", "-w", "-C", "--no-show-raw-insn", str(path)],
        check=True, capture_output=True, text=True).stdout
    sets = collections.defaultdict(collections.Counter)
    body, found = [], None
    for line in text.splitlines() + ["0 <end>:"]:
        if name := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            if found:
                sets[found[1]][tuple(body)] += 1
            body, found = [], re.search(r"\bN_(AVX3_ZEN4|AVX3_DL|AVX3|AVX2|SSE4|SSE2)\b", name[1])
        elif found and (code := re.match(r"\s+[0-9a-f]+:\s+(\S.*)$", line)):
            code = re.sub(r"\s+#.*|<.*>", "", code[1])
            code = re.sub(r"-?0x[0-9a-f]+\(%rip\)", "(%rip)", code)
            code = re.sub(r"^(j\w+|call)\s+\S+", r"\1", code).strip()
            if not re.match(r"(data16|cs )*nop|xchg +%ax,%ax", code):
                body.append(code)
    return sets


def compared(sets, better, lesser):
    """What `better` has that `lesser` has not."""
    if better not in sets or lesser not in sets:
        return "-"
    size = sum(len(f) * n for f, n in sets[better].items())
    more = sum(len(f) * n for f, n in (sets[better] - sets[lesser]).items())
    return "same" if more == 0 else f"{100 * more / size:.0f} %"


def main(paths):
    paths = [pathlib.Path(p) for p in paths] or sorted(
        p for p in pathlib.Path("bazel-bin").rglob("*_simd*.o") if "external" not in p.parts)
    if not paths:
        sys.exit("kernel_sets: no objects below bazel-bin; build //:quern first")
    for path in paths:
        sets = functions(path)
        parts = [f"{a} and {b}: {compared(sets, a, b)}" for a, b in PAIRS]
        sizes = ", ".join(f"{name} {sum(len(f) * n for f, n in s.items())}" for name, s in sorted(sets.items()))
        print(f"{path.name.split('.')[0]}: {'; '.join(parts)}; instructions: {sizes}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
