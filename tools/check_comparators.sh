#!/usr/bin/env bash
# Refuses hand-made loops that keep the largest |a - b|, and checks that fail if
# |a - b| > bound. NaN passes nearly every spelling of such a loop, and every
# such check. testing/errors/largest_difference.h keeps the largest difference so that
# NaN does not pass; a check is written `if (!(difference <= bound))`.
#
# Usage: tools/check_comparators.sh [DIR]        every *.cc and *.h below DIR (the
#                                                tree), but for testing, third_party
#        tools/check_comparators.sh --self-test  plants such loops, and breaks its
#                                                own search; each must be noticed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Each file is searched as one line, because a statement may take several. The
# patterns' parts: `b` is a pair of parentheses and all between them. `in` is
# text after an opening parenthesis, up to the closing one or the end of the
# statement. `difference` is the absolute value of an expression with a binary
# minus.
readonly b='(?<b>\((?:[^()]|(?&b))*+\))'
readonly in='(?<in>(?:[^();]|(?&b)|\()*?)'
readonly difference='(?<difference>\bf?abs[fl]?\s*\((?&in)\s-\s)'
readonly patterns=(
  # worst = std::max(worst, std::abs(a - b))
  '\bf?max[fl]?\s*(?:<\w+>\s*)?\((?&in)(?&difference)'
  # d = std::abs(a - b); ... worst = std::max(worst, d)
  '\b(\w+)\s*=\s*(?:std::)?(?&difference)[^;]*;.{0,300}?\bf?max[fl]?\s*(?:<\w+>\s*)?\([^;]*\b\g{-1}\b'
  # d = std::abs(a - b); ... if (d > worst) worst = d
  '\b(\w+)\s*=\s*(?:std::)?(?&difference)[^;]*;.{0,300}?\bif\s*\([^;{]*\b\g{-1}\b[^;{]*\)\s*\{?\s*[\w.\[\]>-]+\s*=\s*\g{-1}\s*;'
  # d = std::abs(a - b); ... worst = d > worst ? d : worst
  '\b(\w+)\s*=\s*(?:std::)?(?&difference)[^;]*;.{0,300}?=\s*[^;]*\b\g{-1}\b[^;]*\?[^;]*\b\g{-1}\b[^;]*;'
  # if (std::abs(a - b) > worst) worst = std::abs(a - b)
  '\bif\s*\((?&in)(?&difference)[^;{]*\{?\s*[\w.\[\]>-]+\s*=\s*(?:std::)?f?abs[fl]?\s*\('
  # d = a - b; ... worst = std::max(worst, std::abs(d))
  '\b(\w+)\s*=\s[^;]*?\s-\s[^;]*;.{0,300}?\bf?max[fl]?\s*(?:<\w+>\s*)?\([^;]*?\bf?abs[fl]?\s*\(\s*\g{-1}\s*\)'
  # if (std::abs(a - b) > bound) fail
  '\bif\s*\((?&in)(?&difference)(?&in)(?:\s*\))+\s*>'
  # d = std::abs(a - b); ... if (d > bound) fail
  '\b(\w+)\s*=\s*(?:std::)?(?&difference)[^;]*;.{0,300}?\bif\s*\([^;{]*?\b\g{-1}\s*>'
  # d = a - b; ... if (std::abs(d) > bound) fail
  '\b(\w+)\s*=\s[^;]*?\s-\s[^;]*;.{0,300}?\bif\s*\([^;{]*?\bf?abs[fl]?\s*\(\s*\g{-1}\s*\)\s*>'
)

# Prints what the patterns find in the files, as "FILE:statement". Exit status
# as of grep: 0 if anything is found, 1 if nothing, more on failure.
search() {
  local found=1 status pattern
  for pattern in "${patterns[@]}"; do
    status=0
    "${QUERN_GREP:-grep}" -zoHP -e "(?s)(?(DEFINE)$b$in$difference)$pattern" -- "$@" || status=$?
    ((status < 2)) || return "$status"
    ((status == 1)) || found=0
  done
  return "$found"
}

check() {
  local root=$1 list found status=0
  list=$(cd "$root" && find . \( -name .git -o -path ./testing -o -path ./third_party \) -prune -o \
    \( -type f -o -type l \) \( -name '*.cc' -o -name '*.h' \) -print | sort) ||
    { echo "comparators: cannot list the files of $root" >&2; return 1; }
  [[ -n $list ]] || { echo "comparators: $root has no *.cc and no *.h to look at" >&2; return 1; }
  local files
  mapfile -t files <<<"$list"
  # A search that does not find this example would find nothing anywhere.
  echo 'worst = std::max(worst, std::abs(a - b));' | search - >/dev/null ||
    { echo "comparators: the search does not find its own example" >&2; return 1; }
  found=$(cd "$root" && search "${files[@]}" | tr '\n\0' ' \n') || status=$?
  ((status < 2)) || { echo "comparators: the search failed in $root" >&2; return 1; }
  if [[ -n $found ]]; then
    echo "hand-made comparisons, which NaN may pass; take testing/errors/largest_difference.h, or !(difference <= bound):" >&2
    sed -E 's#^\./##; s/ +/ /g; s/^/  /' <<<"$found" >&2
    return 1
  fi
  echo "comparators: none made by hand in ${#files[@]} files"
}

# Succeeds if the check of DIR ($1) fails with a message that contains $2.
must_fail() {
  local said
  if said=$(check "$1" 2>&1) || [[ $said != *"$2"* ]]; then
    echo "self-test: $3: expected a failure that says '$2', got: $said" >&2
    return 1
  fi
}

self_test() {
  local dir
  dir=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$dir'" EXIT
  local -r planted=(
    'worst = std::max(worst, std::abs(a - b));'
    $'worst = std::max(\n    worst,\n    std::abs(sum / weights - double{*actual++}));'
    'worst = std::max<double>(std::fabs(double(a) - double(b)), worst);'
    'worst = std::max(worst, static_cast<double>(std::abs(a[i] - b[i])));'
    'worst = fmax(worst, fabs(a - b));'
    'worst = fmaxf(fabsf(a - b), worst);'
    'const double d = std::fabs(static_cast<double>(a[i]) - b[i]); if (!(d <= worst)) worst = d;'
    $'const double error =\n    std::abs(a - b);\nif (error > w.worst) {\n  w.worst = error;\n}'
    'const double d = std::abs(a - b); sum += d; worst = std::max(worst, d);'
    'const double d = std::abs(a - b); worst = d > worst ? d : worst;'
    'if (std::abs(a - b) > worst) worst = std::abs(a - b);'
    'const double d = a[i] - double{b[i]}; worst = std::max(worst, std::fabs(d));'
    $'const double error =\n    expected - actual;\nsum += error;\nworst = std::max<double>(std::abs(error), worst);'
    'if (std::abs(a[i] - b[i]) > bound) FAIL();'
    'if (ok && static_cast<double>(std::fabs(a - f(b, c))) >= bound) return false;'
    'const double d = std::abs(a - b); if (d > bound) { FAIL() << d; }'
    'const double d = std::abs(a - b); sum += d; if (n > 0 && d >= bound) ++failures;'
    'const double d = a - b; sum += d; if (std::abs(d) > bound) return false;'
  )
  local -r innocent='double Most(double x) { return std::max(most, std::abs(x)); }
// None of these keeps a largest difference, or fails where it is above a bound.
double LogSum() { return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b))); }
double Steps() { const double d = std::abs(a - b); sum += d; return std::min(most, d); }
void Judge() { if (!(std::abs(a - b) <= bound)) failures = failures + 1; }
void JudgeStored() { const double d = a - b; if (!(std::abs(d) <= bound)) failures = failures + 1; }
void JudgeLater() { const double e = std::abs(a - b); if (!(e <= bound) && size > 4) failures = failures + 1; }
void Larger() { const double f = a - b; if (std::abs(g) > f) steps = steps + 1; }
'
  local status=0 form
  must_fail "$dir" "no *.cc and no *.h" "an empty folder" || status=1
  mkdir "$dir/testing" "$dir/folder"
  printf '%s\n' "${planted[@]}" >"$dir/testing/allowed.h"
  must_fail "$dir" "no *.cc and no *.h" "testing alone" || status=1
  printf '%s' "$innocent" >"$dir/folder/clean.cc"
  check "$dir" >/dev/null || { echo "self-test: the check fails without a reason" >&2; status=1; }
  for form in "${planted[@]}"; do
    printf '%s' "$innocent$form" >"$dir/folder/planted.h"
    must_fail "$dir" "folder/planted.h" "$form" || status=1
  done
  rm "$dir/folder/planted.h"
  ln -s nowhere "$dir/folder/dangling.cc"
  must_fail "$dir" "the search failed" "a file that cannot be read" || status=1
  rm "$dir/folder/dangling.cc"
  QUERN_GREP=false must_fail "$dir" "its own example" "a search that finds nothing" || status=1
  QUERN_GREP=$dir/none must_fail "$dir" "its own example" "no search" || status=1
  ((status == 0)) || return 1
  echo "comparators: self-test of ${#planted[@]} planted loops and 5 broken searches"
}

case ${1:-} in
  --self-test) self_test ;;
  *) check "${1:-.}" ;;
esac
