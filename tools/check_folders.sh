#!/usr/bin/env bash
# Fails where a folder has more than 45 files that git tracks, tests and BUILD
# included: a listing should show what a folder is made of. Such a folder is
# divided by what its files are about; there is no list of exceptions.
#
# Usage: tools/check_folders.sh [--self-test]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly most=45

# Reads paths, one a line, and prints the folders that have too many files.
too_large() {
  awk -v most=$most '
    { sub(/\/?[^\/]*$/, ""); ++count[$0 == "" ? "." : $0] }
    END {
      for (folder in count) {
        if (count[folder] > most) {
          print folder ": " count[folder] " files; need at most " most
        }
      }
    }' | sort
}

self_test() {
  local said
  said=$(for i in {1..45}; do echo "a/$i.h"; done; for i in {1..46}; do echo "a/b/$i.h"; echo "$i.md"; done) ||
    exit 1
  said=$(too_large <<<"$said")
  [[ $said == $'.: 46 files; need at most 45\na/b: 46 files; need at most 45' ]] ||
    { echo "self-test: of folders with 45 and 46 files it says: $said" >&2; exit 1; }
  # A folder of this tree with as many files more.
  said=$({ git ls-files; for i in {1..45}; do echo "core/$i.h"; done; } | too_large)
  [[ $said == core:* ]] || { echo "self-test: of core with 45 files more it says: $said" >&2; exit 1; }
  echo "check_folders: self-test of 3 folders"
}

if [[ ${1:-} == --self-test ]]; then
  self_test
  exit
fi
paths=$(git ls-files)
[[ -n $paths ]] || { echo "git lists no files" >&2; exit 1; }
found=$(too_large <<<"$paths")
[[ -z $found ]] || { echo "$found" >&2; exit 1; }
echo "folders: none has more than $most files"
