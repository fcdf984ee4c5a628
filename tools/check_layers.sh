#!/usr/bin/env bash
# Proves the include directions of docs/layers.md in two ways: by the #include
# lines of every tracked source, and with --deps also by the targets below
# //:quern.
#
# Usage: tools/check_layers.sh [--deps]
#        tools/check_layers.sh --self-test   breaks what the check reads, and
#                                            expects that it fails each time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Each folder is followed by the folders that it may include, besides itself.
declare -rA allowed=(
  [core]=""
  [quant]="core"
  [packing]="core"
  [cache]="core quant"
  [gemm]="core quant packing"
  [attention]="core quant cache gemm"
  [ops]="core quant packing cache gemm attention"
  [models]="core quant packing cache gemm attention ops"
  [c]="core quant packing cache gemm attention ops models"
  [examples]="core quant packing cache gemm attention ops models c"
  [tools]="core quant packing cache gemm attention ops models"
  [testing]="core"
)
# Folders below these include one another in the same way; what lies in the folder
# itself is not looked at, but for models/decoder, which has a line, and for
# ops/registry, which all_ops.cc alone joins. A header that has a line of its own
# counts as a folder.
readonly decoder_words="models/decoder/decoder_options.h models/decoder/decoder_work.h"
declare -rA inner=(
  [core/sets]=""
  [core/algorithms]=""
  [core/machine]=""
  [core/threads]="core/machine"
  [core/limits]="core/machine core/sets"
  [attention/kernels]=""
  [attention/schedule]=""
  [gemm/weights]=""
  [gemm/kernels]="gemm/weights"
  [gemm/schedule]="gemm/kernels gemm/weights"
  [gemm/layers]="gemm/schedule gemm/kernels gemm/weights"
  [gemm/onednn]="gemm/layers gemm/kernels gemm/weights"
  [models/gguf]=""
  [models/tokenizer]="models/gguf"
  [models/architectures]="models/gguf"
  [models/decoder/decoder_options.h]=""
  [models/decoder/decoder_work.h]=""
  [models/decoder/loading]="$decoder_words models/architectures models/gguf"
  [models/decoder/memory]="$decoder_words models/architectures"
  [models/decoder/parts]="models/decoder/loading models/decoder/memory models/architectures"
  [models/decoder]="models/decoder/parts models/decoder/loading models/decoder/memory $decoder_words models/architectures models/gguf"
  [c/objects]=""
  [c/model]="c/objects"
  [c/tvm_ffi]=""
  [ops/registry/reference]=""
  [ops/registry/families]="ops/registry/reference"
  [ops/registry/vllm]="ops/registry/families ops/registry/reference"
  [ops/registry/sglang]="ops/registry/families ops/registry/reference"
)
readonly folders="core quant packing cache gemm attention ops c models examples tools testing"
violations=0

violation() {
  echo "layer violation: $*" >&2
  violations=$((violations + 1))
}

contains() { [[ " $1 " == *" $2 "* ]]; }

# Tests, benchmarks and sources that are testonly by their name may include
# //testing.
is_test() { [[ $1 =~ (_test|_bench|_smoke|_testutil|testing)[a-z_]*\.(c|cc|h)$ || $1 == testing/* || $1 == */testing/* || $1 == tools/* ]]; }

# The line of `inner` that the path $1 belongs to; empty if there is none.
inner_of() {
  case $1 in
    ops/registry/families/*) echo ops/registry/families ;;
    models/decoder/decoder_options.cc) echo models/decoder/decoder_options.h ;;
    *.h) if [[ -v inner[$1] ]]; then echo "$1"; elif [[ -v inner[${1%/*}] ]]; then echo "${1%/*}"; fi ;;
    *) [[ ! -v inner[${1%/*}] ]] || echo "${1%/*}" ;;
  esac
}

check_inner() {
  local -r from=$(inner_of "$1") to=$(inner_of "$2")
  [[ -n $to && $to != "$from" ]] || return 0
  case $1 in
    ops/registry/all_ops.cc) return 0 ;;
    ops/registry/*/*) ;;
    ops/registry/*) violation "$1 includes $2: ops/registry may include none of its folders"; return ;;
  esac
  [[ -z $from ]] || contains "${inner[$from]}" "$to" ||
    violation "$1 includes $2: $from may include only: ${inner[$from]:-nothing}"
}

check_includes() {
  local includes file line target folder
  includes=$(git grep -E '^[[:space:]]*#[[:space:]]*include[[:space:]]+"' -- '*.h' '*.cc' '*.c') ||
    { violation "git finds no #include in the sources"; return; }
  while IFS=: read -r file line; do
    folder=${file%%/*}
    [[ -v allowed[$folder] ]] || continue
    case $file in examples/embed_*) continue ;; esac
    line=${line#*\"}
    line=${line%%\"*}
    # In an embedder's repository, a path without the prefix would find the
    # embedder's file of that name.
    if contains "$folders" "${line%%/*}" && [[ ${line%%/*} != examples ]]; then
      violation "$file includes $line: write quern/$line"
    fi
    line=${line#quern/}
    target=${line%%/*}
    if [[ $target == oneapi && $file != gemm/onednn/* ]]; then
      violation "$file includes $line: only gemm/onednn may include oneDNN"
    elif [[ $line == Eigen/* && $folder != testing ]]; then
      violation "$file includes $line: only testing may include Eigen"
    fi
    contains "$folders" "$target" || continue
    if [[ $target == "$folder" ]]; then
      is_test "$file" || check_inner "$file" "$line"
      continue
    fi
    [[ $target == testing ]] && is_test "$file" && continue
    contains "${allowed[$folder]}" "$target" ||
      violation "$file includes $line: $folder may include only: ${allowed[$folder]:-nothing}"
  done <<<"$includes"
}

# Checks the edges between targets, as Bazel sees them, reduced to folders.
check_deps() {
  local graph edges from to
  graph=$("${QUERN_BAZELW:-./bazelw}" query --noshow_progress --ui_event_filters=-info --output=graph --nograph:factored \
    'kind(cc_library, filter("^//", deps(//:quern)))') || { violation "the query of //:quern failed"; return; }
  edges=$(sed -nE 's#^ *"//([a-z_]+)[^"]*" -> "//([a-z_]+)[^"]*".*#\1 \2#p' <<<"$graph" | sort -u)
  [[ -n $edges ]] || { violation "the query of //:quern shows no dependency between folders"; return; }
  while read -r from to; do
    [[ $from == "$to" ]] && continue
    [[ -v allowed[$from] ]] || { violation "//:quern reaches //$from"; continue; }
    contains "${allowed[$from]}" "$to" || violation "//$from depends on //$to"
  done <<<"$edges"
}

# Succeeds if --deps, with the given NAME=VALUE environment, fails with a
# message that contains WORDS ($1).
must_fail() {
  local said
  if said=$(env "${@:2}" tools/check_layers.sh --deps 2>&1) || [[ $said != *"$1"* ]]; then
    echo "self-test: with ${*:2}: expected a failure that says '$1', got: $said" >&2
    violations=$((violations + 1))
  fi
}

self_test() {
  local dir said words
  dir=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$dir'" EXIT
  # Writes a stub of bazelw whose query prints $1.
  stub() {
    printf '#!/bin/sh\ncat <<"end"\n%s\nend\n' "$1" >"$dir/bazelw"
    chmod +x "$dir/bazelw"
  }
  stub '  "//quant:convert" -> "//core:dtype"'
  said=$(env QUERN_BAZELW="$dir/bazelw" tools/check_layers.sh --deps 2>&1) ||
    violation "self-test: fails without a reason: $said"
  stub '  "//core:dtype" -> "//quant:convert"'
  must_fail "//core depends on //quant" QUERN_BAZELW="$dir/bazelw"
  stub '  "//core:dtype" -> "//testing:data"'
  must_fail "//core depends on //testing" QUERN_BAZELW="$dir/bazelw"
  stub 'digraph mygraph { }'
  must_fail "shows no dependency" QUERN_BAZELW="$dir/bazelw"
  must_fail "the query of //:quern failed" QUERN_BAZELW=false
  must_fail "the query of //:quern failed" QUERN_BAZELW="$dir/none"
  stub '  "//quant:convert" -> "//core:dtype"'
  must_fail "git finds no #include" QUERN_BAZELW="$dir/bazelw" GIT_DIR="$dir"
  git init -q "$dir/empty"
  must_fail "git finds no #include" QUERN_BAZELW="$dir/bazelw" GIT_DIR="$dir/empty/.git"
  # A tree with one source, whose include points up.
  mkdir -p "$dir/up/tools" "$dir/up/core"
  cp tools/check_layers.sh "$dir/up/tools"
  echo '#include "quern/gemm/linear.h"' >"$dir/up/core/dtype.h"
  git -C "$dir/up" init -q
  git -C "$dir/up" add .
  said=$("$dir/up/tools/check_layers.sh" 2>&1) && violation "self-test: an include that points up passes"
  contains "$said" "gemm/linear.h:" || violation "self-test: of an include that points up it says: $said"
  # The same include in a source in C.
  git -C "$dir/up" mv core/dtype.h core/dtype.c
  said=$("$dir/up/tools/check_layers.sh" 2>&1) && violation "self-test: an include in C that points up passes"
  contains "$said" "core/dtype.c includes gemm/linear.h:" || violation "self-test: of an include in C that points up it says: $said"
  git -C "$dir/up" mv core/dtype.c core/dtype.h
  # The same tree, whose include now points down but lacks the prefix.
  mkdir "$dir/up/gemm"
  echo '#include "core/dtype.h"' >"$dir/up/gemm/linear.h"
  echo '#include <cstdint>' >"$dir/up/core/dtype.h"
  git -C "$dir/up" add .
  said=$("$dir/up/tools/check_layers.sh" 2>&1) && violation "self-test: an include without quern/ passes"
  contains "$said" "core/dtype.h:" || violation "self-test: about an include without quern/ it says: $said"
  # Folders of one folder.
  mkdir -p "$dir/up/gemm/kernels" "$dir/up/ops/registry" "$dir/up/models/decoder/loading"
  echo '#include "quern/gemm/layers/layer.h"' >"$dir/up/gemm/kernels/tile.h"
  echo '#include "quern/ops/registry/vllm/linear.h"' >"$dir/up/ops/registry/op_table.h"
  printf '#include "quern/models/decoder/decoder%s.h"\n' "" _work >"$dir/up/models/decoder/loading/matrix.h"
  echo '#include <cstdint>' >"$dir/up/gemm/linear.h"
  git -C "$dir/up" add .
  said=$("$dir/up/tools/check_layers.sh" 2>&1) && violation "self-test: includes of folders above pass"
  for words in gemm/layers/layer.h ops/registry/vllm/linear.h models/decoder/decoder.h; do
    contains "$said" "$words:" || violation "self-test: of an include of $words, which is above, it says: $said"
  done
  ! contains "$said" "models/decoder/decoder_work.h:" || violation "self-test: a header with a line of its own is refused: $said"
}

case ${1:-} in
  --self-test)
    self_test
    ((violations == 0)) || exit 1
    echo "layers: self-test of 12 broken checks"
    exit
    ;;
  --deps) check_includes && check_deps ;;
  *) check_includes ;;
esac
((violations == 0)) || { echo "$violations layer violations" >&2; exit 1; }
echo "layers: every include and dependency points down"
