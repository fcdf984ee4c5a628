#!/usr/bin/env bash
# Proves that every Execute checks its arguments in debug builds. Each noexcept
# function that is named Execute... or takes an Executor must call
# QUERN_DCHECK_OK(...), or consist of one call of another Execute, which does.
#
# Usage: tools/check_execute.sh [FILE...]     default: the library's sources
#
# Reads sources as clang-format leaves them: a body ends with a brace at the
# indent of its function's first line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Private functions whose callers have already checked the arguments.
readonly checked_by_callers="
  PackedMatmul::Execute
  ParallelLmHeadPlan::OwnLogits
"

# Prints "file:line: function" for each function without a check, then "N
# functions".
scan() {
  awk -v known="$checked_by_callers" '
    BEGIN { split(known, names, /[ \n]+/); for (i in names) skip[names[i]] = 1 }
    FNR == 1 { signature = ""; in_body = 0 }
    in_body {
      if (index($0, indent "}") == 1) {
        in_body = 0
        statements = gsub(/;/, ";", body)
        if (body !~ /QUERN_DCHECK_OK\(/ && !(name in skip) &&
            !(statements == 1 && body ~ /Execute[A-Za-z0-9]*\(/)) {
          print FILENAME ":" line ": " name
        }
        signature = ""
      } else {
        body = body $0
      }
      next
    }
    /^[ ]*\/\// || /^[ ]*$/ || /^#/ { signature = ""; next }
    {
      if (signature == "") { line = FNR; match($0, /^ */); indent = substr($0, 1, RLENGTH) }
      signature = signature " " $0
    }
    /noexcept( override)?( final)? \{$/ {
      if (match(signature, /[A-Za-z0-9_:]+\(/)) {
        name = substr(signature, RSTART, RLENGTH - 1)
        if (name ~ /(^|::)Execute[A-Za-z0-9]*$/ || signature ~ /Executor&/) {
          ++functions; in_body = 1; body = ""
          next
        }
      }
    }
    /[;{}:]$/ { signature = "" }
    END { print functions + 0 " functions" }
  ' "$@"
}

# The scan must find the planted functions without a check, and no others.
self_test() {
  local found
  found=$(scan <(printf '%s\n' \
    'void Bad::Execute(const A& a,' \
    '                  Executor& executor) const noexcept {' \
    '  Run(a);' '}' '' \
    'void Bad::Pack(const A& a, Executor& e) noexcept {' '  Run(a);' '}' '' \
    'void Good::Execute(const A& a, Executor& e) const noexcept {' \
    '  QUERN_DCHECK_OK(CheckArgs(a));' '  Run(a);' '}' '' \
    '  void Execute(const A& a) const noexcept override {' \
    '    plan_.ExecuteAll(a);' '  }') | sed 's/.*: //' | paste -sd' ')
  [[ $found == "Bad::Execute Bad::Pack 4 functions" ]] ||
    { echo "check_execute: the scan is broken, it found: $found" >&2; exit 1; }
}

self_test
files=("$@")
if ((${#files[@]} == 0)); then
  mapfile -t files < <(git ls-files attention cache core gemm ops packing quant |
    grep -E '\.(cc|h)$' | grep -vE '_(test|bench|testutil)\.(cc|h)$')
fi
found=$(scan "${files[@]}")
missing=$(grep -v ' functions$' <<<"$found" || true)
if [[ -n $missing ]]; then
  printf '%s\n' "$missing" >&2
  echo "need QUERN_DCHECK_OK(CheckArgs(...)) in each of these" >&2
  exit 1
fi
count=${found##*$'\n'}
(($# > 0 || ${count%% *} >= 50)) ||
  { echo "check_execute: $count found; need 50 or more" >&2; exit 1; }
echo "execute: all $count check their arguments in debug builds"
