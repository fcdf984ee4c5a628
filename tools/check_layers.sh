#!/usr/bin/env bash
# Proves the include directions of docs/layers.md, twice: by the #include lines
# of every tracked source, and, with --deps, by the targets below //:quern.
#
# Usage: tools/check_layers.sh [--deps]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# folder: folders that it may include, besides itself.
declare -rA allowed=(
  [core]=""
  [quant]="core"
  [packing]="core"
  [cache]="core quant"
  [gemm]="core quant packing"
  [attention]="core quant cache gemm"
  [ops]="core quant packing cache gemm attention"
  [models]="core quant packing cache gemm attention ops"
  [examples]="core quant packing cache gemm attention ops models"
  [tools]="core quant packing cache gemm attention ops models"
  [testing]="core"
)
readonly folders="core quant packing cache gemm attention ops models examples tools testing"
violations=0

violation() {
  echo "layer violation: $*" >&2
  violations=$((violations + 1))
}

contains() { [[ " $1 " == *" $2 "* ]]; }

# Tests and benchmarks (and what is testonly by its name) may see //testing.
is_test() { [[ $1 =~ (_test|_bench|_smoke|_testutil|testing)[a-z_]*\.(cc|h)$ || $1 == testing/* || $1 == tools/* ]]; }

check_includes() {
  local file line target folder
  while IFS= read -r file; do
    folder=${file%%/*}
    [[ -v allowed[$folder] ]] || continue
    case $file in examples/embed_*) continue ;; esac
    while IFS= read -r line; do
      target=${line%%/*}
      if [[ $target == oneapi && $file != gemm/onednn/* ]]; then
        violation "$file includes $line: only gemm/onednn may include oneDNN"
      elif [[ $line == Eigen/* && $folder != testing ]]; then
        violation "$file includes $line: only testing may include Eigen"
      fi
      contains "$folders" "$target" || continue
      [[ $target == "$folder" ]] && continue
      [[ $target == testing ]] && is_test "$file" && continue
      contains "${allowed[$folder]}" "$target" ||
        violation "$file includes $line: $folder may include only: ${allowed[$folder]:-nothing}"
    done < <(sed -nE 's/^[[:space:]]*#[[:space:]]*include[[:space:]]+"([^"]+)".*/\1/p' "$file")
  done < <(git ls-files '*.h' '*.cc')
}

# Edges between targets, as Bazel sees them, reduced to folders.
check_deps() {
  local from to
  while read -r from to; do
    [[ $from == "$to" ]] && continue
    [[ -v allowed[$from] ]] || { violation "//:quern reaches //$from"; continue; }
    contains "${allowed[$from]}" "$to" || violation "//$from depends on //$to"
  done < <(./bazelw query --noshow_progress --ui_event_filters=-info --output=graph --nograph:factored \
    'kind(cc_library, filter("^//", deps(//:quern)))' 2>/dev/null |
    sed -nE 's#^ *"//([a-z_]+)[^"]*" -> "//([a-z_]+)[^"]*".*#\1 \2#p' | sort -u)
}

check_includes
[[ ${1:-} == --deps ]] && check_deps
((violations == 0)) || { echo "$violations layer violations" >&2; exit 1; }
echo "layers: every include and dependency points down"
