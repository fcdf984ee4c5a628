#!/usr/bin/env bash
# Prints what a page tells its reader to do, as a Bash script: a block that begins
# with ```LANGUAGE file=NAME is written to the file NAME, and the lines of a block
# that begins with ```sh are run, in the order of the page.
#
# Usage: tools/page_script.sh PAGE
#        tools/page_script.sh --output PAGE   prints the blocks ```text instead:
#                                             what the page says that it prints
set -euo pipefail
wanted=script
[[ ${1:-} != --output ]] || { wanted=output && shift; }
page=$1
found=0 kind='' fence=$'^```([a-z]+)( file=([A-Za-z0-9._-]+))?$'
[[ $wanted == output ]] || echo 'set -euo pipefail'
while IFS= read -r line; do
  if [[ -n $kind ]]; then
    if [[ $line == '```' ]]; then
      [[ $kind != file ]] || echo 'end_of_the_file'
      kind=''
    elif [[ $kind != other ]]; then
      printf '%s\n' "$line"
    fi
  elif [[ $line =~ $fence ]]; then
    kind=other
    case $wanted:${BASH_REMATCH[1]}:${BASH_REMATCH[3]} in
      output:text:) kind=output ;;
      script:sh:) kind=commands ;;
      script:*:?*) kind=file && echo "cat >'${BASH_REMATCH[3]}' <<'end_of_the_file'" ;;
    esac
    [[ $kind == other ]] || found=1
  elif [[ $line == '```'* ]]; then
    echo "$page: neither a block nor its end: $line" >&2
    exit 1
  fi
done <"$page"
((found)) || { echo "$page: no block of $wanted found" >&2; exit 1; }
[[ -z $kind ]] || { echo "$page: the last block does not end" >&2; exit 1; }
