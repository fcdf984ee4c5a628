#!/usr/bin/env bash
# How fast is generation where others use the CPUs too? Runs a command that
# prints "N tokens/s" beside busy loops, or under a CPU quota, once with one
# thread and once with the default number of threads, in turn; prints the median
# of each and their ratio.
#
#   tools/busy_machine.sh loads "0 2 8" COMMAND...
#   tools/busy_machine.sh quotas "0.5 1.0 1.5 2.0" COMMAND...   # needs root
#
# e.g.
#   ./bazelw build -c opt //examples/generate
#   tools/busy_machine.sh loads "0 2 8" bazel-bin/examples/generate/generate \
#     --prompt="In the beginning" --max_tokens=256 --temperature=0 --stats
#
# ROUNDS (5) is how often each is run. NICE (0) is the niceness of the command;
# the loops have 0. Between shells, niceness counts only where
# kernel.sched_autogroup_enabled is 0.
set -euo pipefail

(($# >= 3)) || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2; }
readonly kind=$1 values=$2 rounds=${ROUNDS:-5} niceness=${NICE:-0}
shift 2

loops=()
group=
finish() {
  ((${#loops[@]} == 0)) || kill "${loops[@]}" 2>/dev/null || true
  loops=()
  [[ -z $group ]] || rmdir "$group" 2>/dev/null || true
}
trap finish EXIT

# Prints the rate of generation of the command "$@", in tokens/s.
rate() {
  nice -n "$niceness" bash -c '[[ -z $1 ]] || echo $$ >"$1/cgroup.procs"; shift; exec "$@"' \
    _ "$group" "$@" 2>&1 |
    sed -nE 's/.*generation:.* ([0-9.]+) tokens\/s.*/\1/p' | tail -n 1
}

median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

# Makes a group with a quota of $1 CPUs.
limit() {
  local parent
  for parent in /sys/fs/cgroup/cpu /sys/fs/cgroup; do
    [[ -e $parent/cpu.cfs_quota_us || -e $parent/cgroup.controllers ]] && break
  done
  group=$parent/busy_machine.$$
  mkdir -p "$group"
  local -r quota=$(awk -v cpus="$1" 'BEGIN { printf "%d", cpus * 100000 }')
  if [[ -e $group/cpu.cfs_quota_us ]]; then
    echo 100000 >"$group/cpu.cfs_period_us"
    echo "$quota" >"$group/cpu.cfs_quota_us"
  else
    echo "$quota 100000" >"$group/cpu.max"
  fi
}

for value in $values; do
  case $kind in
    loads)
      for ((i = 0; i < value; ++i)); do
        (while :; do :; done) &
        loops+=($!)
      done ;;
    quotas) limit "$value" ;;
    *) echo "$0: '$kind' is neither loads nor quotas" >&2; exit 2 ;;
  esac
  one=() default=()
  for ((round = 0; round < rounds; ++round)); do
    one+=("$(rate "$@" --threads=1)")
    default+=("$(rate "$@")")
  done
  finish
  group=
  awk -v kind="$kind" -v value="$value" -v one="$(printf '%s\n' "${one[@]}" | median)" \
    -v all="$(printf '%s\n' "${default[@]}" | median)" \
    'BEGIN { printf "%s %s: one thread %s tokens/s, default threads %s, ratio %.2f\n", kind, value, one, all, all / one }'
done
