#!/usr/bin/env bash
# Usage: fetch_source.sh NAME=VERSION FILE SHA256 DESTINATION
#
# Puts FILE, the upstream archive of a Debian 13 source package, into the folder
# DESTINATION. Uses a private apt state, so that it needs no root and leaves the
# machine's package sources unchanged. Archives are kept in the user's cache
# folder; an archive that does not match SHA256 is deleted. Because of that
# check the package index need not be authenticated.
set -euo pipefail

readonly package=$1 file=$2 sha256=$3 destination=$4
readonly suite=trixie
readonly cache=${QUERN_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/quern}
readonly archives=$cache/archives state=$cache/apt

fail() {
  echo "$*" >&2
  exit 1
}

# Succeeds if $1 matches SHA256; otherwise deletes it and prints an error.
verify() {
  local actual
  actual=$(sha256sum <"$1")
  [[ ${actual%% *} != "$sha256" ]] || return 0
  rm -f "$1"
  echo "$1: sha256 mismatch, deleted; expected $sha256, actual ${actual%% *}" >&2
  return 1
}

mkdir -p "$destination" "$archives" "$state/lists/partial" "$state/cache/archives/partial"
exec 9>"$cache/apt.lock"
flock 9 || fail "cannot lock $cache/apt.lock"

if [[ ! -s $archives/$file ]] || ! verify "$archives/$file"; then
  command -v apt-get >/dev/null ||
    fail "apt-get not found: this machine has no Debian source packages"
  # Mirrors that this machine's apt uses, those of the main archive first.
  mapfile -t sites < <(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null |
    sort -u | grep -E '/debian/?$' || true)
  ((${#sites[@]})) || mapfile -t sites < <(
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
      sed -nE 's/^deb(-src)? +(\[[^]]*\] +)?([^ ]+) .*/\3/p'
    { cat /etc/apt/sources.list.d/*.sources 2>/dev/null || true; } |
      sed -nE 's/^URIs: *([^ ]+).*/\1/p'
  )
  ((${#sites[@]})) || fail "apt on this machine names no Debian mirror"

  options=(
    -qq
    -o "Dir::Etc::SourceList=$state/sources.list"
    -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$state/lists"
    -o "Dir::Cache=$state/cache"
    -o APT::Sandbox::User=
    -o Acquire::Languages=none
    -o Acquire::Retries=3
  )
  log=$state/log
  fetched=
  for site in "${sites[@]}"; do
    echo "deb-src [trusted=yes] $site $suite main" >"$state/sources.list"
    apt-get "${options[@]}" update >"$log" 2>&1 || continue
    (cd "$state" && apt-get "${options[@]}" source --download-only --tar-only "$package") >>"$log" 2>&1 || continue
    [[ -s $state/$file ]] || continue
    verify "$state/$file" || exit 1
    mv "$state/$file" "$archives/$file"
    fetched=1
    break
  done
  [[ -n $fetched ]] || fail "$package not found in $suite of: ${sites[*]}; apt said: $(tail -n 3 "$log" | tr '\n' ' ')"
fi
cp "$archives/$file" "$destination/$file"
