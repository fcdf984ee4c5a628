#!/usr/bin/env bash
# Writes quern-VERSION.tar.gz, what a WORKSPACE or MODULE.bazel names as an
# archive, from a commit, and prints its sha256 and integrity. The bytes depend on
# the commit alone: not on the time, the user, the umask or what lies uncommitted.
#
# Usage: tools/release_archive.sh [--commit=HEAD] [--out=.]
set -euo pipefail
commit=HEAD out=$PWD
for argument in "$@"; do
  case $argument in
    --commit=?*) commit=${argument#*=} ;;
    --out=?*) out=$(cd -- "${argument#*=}" && pwd) ;;
    *) echo "release_archive: '$argument'; need --commit=COMMIT and --out=DIR, or nothing" >&2 && exit 2 ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."

commit=$(git rev-parse --verify --quiet "$commit^{commit}") ||
  { echo "release_archive: --commit names no commit of this repository" >&2; exit 1; }
version=$(git show "$commit:core/version.h" | sed -nE 's/^#define QUERN_VERSION_STRING "([0-9.]+(-dev)?)"$/\1/p')
[[ -n $version ]] || { echo "release_archive: core/version.h of $commit has no version" >&2; exit 1; }

file=$out/quern-$version.tar.gz
# The tar.* settings of a user could change modes and owners. gzip -n leaves out
# name and time.
git -c tar.umask=0022 archive --format=tar --prefix="quern-$version/" "$commit" | gzip -9n >"$file"
sum=$(sha256sum <"$file")
sum=${sum%% *}
integrity=sha256-$(printf "$(sed 's/../\\x&/g' <<<"$sum")" | base64 -w 0)
cat <<end
$file
sha256 = "$sum"
integrity = "$integrity"
strip_prefix = "quern-$version"
end
[[ $version != *-dev ]] ||
  echo "release_archive: $version is no release; core/version.h says which will be the next" >&2
