#!/usr/bin/env bash
# Lists the slowest actions of a Bazel profile, in seconds of wall time, and what
# all of them took together.
#
# Usage: ./bazelw build --profile=FILE.gz TARGETS...
#        tools/slowest_actions.sh FILE.gz [COUNT]
#
# Compare times within one profile only, because wall time on a busy machine is
# a multiple of CPU time. Actions that came from a cache take so little time
# that they do not appear.
set -euo pipefail

readonly profile=${1:?usage: tools/slowest_actions.sh FILE.gz [COUNT]} count=${2:-10}
actions=$(gzip -dc "$profile" |
  sed -nE 's/.*"cat":"action processing","name":"([^"]*)".*"dur":([0-9]+).*/\2 \1/p' | sort -rn)
[[ -n $actions ]] || { echo "$profile holds no actions" >&2; exit 1; }
awk '{ all += $1; if (NR <= '"$count"') printf "%8.1f s  %s\n", $1 / 1e6, substr($0, index($0, " ") + 1) }
     END { printf "%8.1f s  all %d actions\n", all / 1e6, NR }' <<<"$actions"
