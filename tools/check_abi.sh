#!/usr/bin/env bash
# Compares the C interface of libquern.so with c/quern.abi: functions, their
# types, the layout of structs. Programs in C, Rust or Python that were compiled
# for one may not notice that they run on the other.
#
# Usage: tools/check_abi.sh             fails where they differ, and says in what
#        tools/check_abi.sh --update    writes c/quern.abi
#
# Needs abidw and abidiff (Debian: abigail-tools).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly kept=c/quern.abi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# Only our own files of c/ have debug information: they define all functions.
"${QUERN_BAZELW:-./bazelw}" build --noshow_progress --ui_event_filters=-info --strip=never \
  --per_file_copt='^c/.*\.cc$@-g' //c:libquern.so
abidw --exported-interfaces-only --drop-private-types --headers-dir c --no-elf-needed --no-corpus-path \
  --no-comp-dir-path --no-show-locs --type-id-style hash bazel-bin/c/libquern.so >"$dir/built.abi"

if [[ ${1:-} == --update ]]; then
  cp "$dir/built.abi" "$kept"
  exit
fi

# A dump without types would equal nearly everything.
sed "s/name='shape' type-id='[0-9a-f]*'/name='shape' type-id='$(
  sed -n "s/.*type-decl name='double' .* id='\([0-9a-f]*\)'.*/\1/p" "$dir/built.abi"
)'/" "$dir/built.abi" >"$dir/wrong.abi"
if abidiff --harmless "$dir/wrong.abi" "$dir/built.abi" >/dev/null; then
  echo "check_abi: another type of quern_tensor's shape is not noticed" >&2
  exit 1
fi

if ! abidiff --harmless "$kept" "$dir/built.abi"; then
  echo "check_abi: the C interface differs from $kept. If that is meant, say it in CHANGELOG.md," >&2
  echo "and write the new one: tools/check_abi.sh --update" >&2
  exit 1
fi
