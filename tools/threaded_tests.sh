#!/usr/bin/env bash
# Prints the labels of the sources of tests that may start threads, one a line:
# those that include, themselves or through other sources, <thread>, <future> or
# Highway's pool of threads. A header that declares what such a source defines
# counts as that source.
#
# With --starters, those of the sources that include one of these themselves.
#
# Dependencies between targets would name nearly all tests, because most tests
# take a common list of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

starters=0
[[ ${1:-} != --starters ]] || starters=1

git ls-files '*.h' '*.cc' ':!examples/embed_*' | awk -v starters="$starters" '
  {
    file = $0
    files[++count] = file
    while ((getline line < file) > 0) {
      if (line ~ /^#include (<thread>|<future>|"hwy\/contrib\/thread_pool)/) {
        reached[file] = 1
      } else if (match(line, /^#include "quern\/[^"]+"/)) {
        included[file, ++includes[file]] = substr(line, 17, RLENGTH - 17)
      }
    }
    close(file)
  }
  # The last slash of a path becomes a colon.
  function label(file) {
    match(file, /[^\/]*$/)
    return "//" substr(file, 1, RSTART - 2) ":" substr(file, RSTART)
  }
  END {
    if (starters) {
      for (file in reached) print label(file)
      exit
    }
    do {
      changed = 0
      for (i = 1; i <= count; ++i) {
        file = files[i]
        if (file in reached) continue
        source = file
        hit = sub(/\.h$/, ".cc", source) && (source in reached)
        for (j = 1; j <= includes[file]; ++j) {
          if (included[file, j] in reached) hit = 1
        }
        if (hit) changed = reached[file] = 1
      }
    } while (changed)
    for (file in reached) {
      if (file !~ /_test\.cc$/) continue
      print label(file)
    }
  }' | sort
