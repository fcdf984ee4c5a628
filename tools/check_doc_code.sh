#!/usr/bin/env bash
# Checks that a document shows what a program says: every block of the document
# that begins with ```c, ```cpp, ```cmake, ```ini, ```python or ```starlark must
# stand, line by line, in one of the files.
#
# Usage: tools/check_doc_code.sh DOCUMENT FILE...
set -euo pipefail
document=$1
shift
blocks=0 missing=0 block='' inside=0
while IFS= read -r line; do
  case $line in
    '```c' | '```cpp' | '```cmake' | '```ini' | '```python' | '```starlark') inside=1 block='' && continue ;;
    '```')
      if ((inside)); then
        inside=0 found=0
        blocks=$((blocks + 1))
        for file in "$@"; do
          # The newlines before and after make the block match whole lines only.
          [[ $'\n'$(<"$file")$'\n' != *$'\n'"$block"* ]] || found=1
        done
        if ((!found)); then
          missing=$((missing + 1))
          echo "$document shows what none of $* has:" >&2
          echo "$block" >&2
        fi
      fi
      continue
      ;;
  esac
  if ((inside)); then block+=$line$'\n'; fi
done <"$document"
if ((blocks == 0)); then
  echo "$document: no block of code found" >&2
  exit 1
fi
((missing == 0)) || exit 1
echo "$document: $blocks blocks of code are those of $*"
