#!/usr/bin/env bash
# Runs Bazel 7 on this workspace, on a Debian machine whose own Bazel is 4.2.3.
#
# Usage: tools/bazel7.sh [STEP...]        no arguments: all steps, in this order
#   workspace   WORKSPACE: analysis of everything; pins_test
#   bzlmod      MODULE.bazel, from a registry that offers only the versions of
#               third_party/pins.bzl: the same
#   embed       examples/embed_bzlmod: builds and runs it
#   next        bzlmod with what Bazel 8 and 9 changed, as far as Bazel 7 has
#               flags for it: analysis of everything and of examples/embed_bzlmod;
#               every BUILD file loads the rules that it calls
#   shell       no step of the above: a shell there, with $bazel and $flags set
#
# Bazel comes from a newer Debian release (bazel-bootstrap). It is unpacked,
# with all that it depends on, into a folder of the cache; the machine's own
# packages do not change. The first run fetches 0.7 GB through the machine's apt
# mirror and keeps 1.4 GB. Bazel runs offline in that folder (unshare, chroot;
# no root needed) on a copy of this tree, with the release's own compiler. It
# has its own disk cache, because a shared one would mix up the objects of two
# compilers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly cache=${QUERN_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/quern}
readonly home=$cache/bazel7
readonly root=$home/root work=$home/work apt=$home/apt
# The first of these releases whose bazel-bootstrap is newer than 4.2.3 is used.
readonly suites=(forky sid)
readonly packages=(
  bash base-files coreutils diffutils findutils gawk grep gzip sed tar util-linux xz-utils
  bazel-bootstrap
)

die() {
  echo "bazel7: $*" >&2
  exit 1
}

apt_() {
  local command=$1
  shift
  "$command" -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$apt/lists" -o Dir::State::Status="$apt/status" -o Dir::Cache="$apt/cache" \
    -o APT::Sandbox::User= -o APT::Install-Recommends=0 -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}

# Sets `suite` and `version`, and leaves apt's lists pointing there.
find_release() {
  local sites site keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  command -v apt-get >/dev/null || die "no apt-get on this machine"
  mapfile -t sites < <(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | sort -u | grep -E '/debian/?$' || true)
  ((${#sites[@]})) || die "apt on this machine names no Debian mirror; run apt-get update"
  [[ -r $keyring ]] || die "$keyring is missing; install debian-archive-keyring"
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
  : >"$apt/status"
  for suite in "${suites[@]}"; do
    for site in "${sites[@]}"; do
      echo "deb [signed-by=$keyring] $site $suite main" >"$apt/sources.list"
      apt_ apt-get -qq update >"$apt/log" 2>&1 || continue
      version=$(apt_ apt-cache policy bazel-bootstrap | sed -nE 's/^ *Candidate: *//p')
      [[ -z $version || $version == [0-6].* || $version == "(none)" ]] || return 0
    done
  done
  die "no Bazel 7 or later in ${suites[*]} of ${sites[*]}; the last offers '${version:-}'; apt said: $(tail -n 2 "$apt/log" | tr '\n' ' ')"
}

# Makes the folder with Bazel. A second call returns at once.
make_root() {
  local -r wanted="${packages[*]}"
  [[ ! -f $root/wanted || $(<"$root/wanted") != "$wanted" ]] || return 0
  find_release
  echo "bazel7: fetching bazel-bootstrap $version of $suite, and what it depends on"
  apt_ apt-get -qq -y install --download-only "${packages[@]}" >"$apt/log" 2>&1 ||
    die "could not fetch bazel-bootstrap: $(tail -n 3 "$apt/log" | tr '\n' ' ')"
  rm -rf "$root" "$root.new"
  mkdir -p "$root.new"
  local package
  # base-files comes first, because it makes /bin and /lib links into /usr.
  for package in "$apt"/cache/archives/base-files_*.deb "$apt"/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$root.new" || die "cannot unpack $package"
  done
  # These links would be made by the packages' install scripts.
  ln -sf gawk "$root.new/usr/bin/awk"
  mkdir -p "$root.new/quern"
  echo "$version" >"$root.new/version"
  echo "$wanted" >"$root.new/wanted"
  mv "$root.new" "$root"
  rm -rf "$apt/cache/archives"
}

# Copies this tree, including uncommitted changes.
copy_tree() {
  rm -rf "$work/src"
  mkdir -p "$work/src"
  git ls-files -z --cached --others --exclude-standard |
    tar -c --null --ignore-failed-read -T - 2>/dev/null | tar -x -C "$work/src"
}

# Prints NAME PACKAGE=VERSION FILE SHA256 FOLDER for each pinned archive.
pins() {
  awk -F'"' '
    /^    "[a-z_]+": dict\(/ { name = $2 }
    / strip_prefix = /         { folder = $2 }
    / debian_source = /        { source = $2 }
    / debian_file = /          { file = $2 }
    / debian_sha256 = /        { sha256 = $2 }
    / debian_strip_prefix = /  { folder = $2 }
    /^    \),/ && source       { print name, source, file, sha256, folder; source = "" }
  ' third_party/pins.bzl
}

# Puts the archives where third_party/archive.bzl looks for them first.
fetch_archives() {
  local name source file sha256 folder
  while read -r name source file sha256 folder; do
    [[ -s $work/archives/$file ]] && [[ $(sha256sum <"$work/archives/$file") == "$sha256 "* ]] && continue
    QUERN_CACHE=$cache third_party/fetch_source.sh "$source" "$file" "$sha256" "$work/archives" ||
      die "no archive of $name"
  done < <(pins)
}

# Registers module $1 in version $2 from the folder $3; its MODULE.bazel is read
# from standard input.
register() {
  local -r directory=$work/registry/modules/$1/$2
  mkdir -p "$directory"
  printf '{"type": "local_path", "path": "%s"}\n' "$3" >"$directory/source.json"
  cat >"$directory/MODULE.bazel"
}

# Makes a registry with exactly the pinned version of each module, so that a
# bazel_dep on another version fails. Each module's own bazel_deps are those of
# its archive. Abseil's version is changed, because GoogleTest 1.16.0 names a
# newer one than is pinned.
make_registry() {
  local name source file sha256 folder module version
  rm -rf "$work/registry"
  mkdir -p "$work/registry/modules" "$work/sources"
  echo '{}' >"$work/registry/bazel_registry.json"
  while read -r name source file sha256 folder; do
    case $name in
      com_google_absl) module=abseil-cpp ;;
      com_google_benchmark) module=google_benchmark ;;
      com_google_googletest) module=googletest ;;
      *) continue ;;
    esac
    version=${folder##*-}
    if [[ ! -d $work/sources/$folder ]]; then
      tar -x -C "$work/sources" -f "$work/archives/$file"
    fi
    sed -E '/name = "abseil-cpp"/,/\)/s/version = "[^"]*"/version = "20240722.0"/; s/version = "1\.15\.2"/version = "1.16.0"/' \
      "$work/sources/$folder/MODULE.bazel" | register "$module" "$version" "/quern/sources/$folder"
  done < <(pins)
}

# Stubs for modules that others name but no C++ target needs. bazel_tools takes
# any version of the first five; GoogleBenchmark's archive names one version of
# the other two. Prints the overrides.
make_stubs() {
  local module version directory
  for module in apple_support buildozer protobuf re2 zlib libpfm-4.11.0 rules_foreign_cc-0.10.1; do
    version=${module##*-}
    directory=$work/stubs/${module%-*}
    mkdir -p "$directory"
    if [[ $version == "$module" ]]; then
      echo "module(name = \"$module\")" >"$directory/MODULE.bazel"
      echo "common:modules --override_module=$module=/quern/stubs/$module"
    else
      echo "module(name = \"${module%-*}\", version = \"$version\")" >"$directory/MODULE.bazel"
      register "${module%-*}" "$version" "/quern/stubs/${module%-*}" <"$directory/MODULE.bazel"
    fi
    : >"$directory/BUILD"
  done
}

write_rc() {
  local -r rules=/usr/share/bazel/rules tools=/usr/share/bazel/tools
  {
    echo "# Written by tools/bazel7.sh.
common:workspace --noenable_bzlmod --enable_workspace
common:workspace --override_repository=rules_cc=$rules/cc
common:workspace --override_repository=rules_java=$rules/java
common:workspace --override_repository=rules_license=$rules/license
common:workspace --override_repository=rules_proto=$rules/proto
common:workspace --override_repository=rules_python=$rules/python
common:workspace --override_repository=bazel_features=$tools/features
common:workspace --override_repository=bazel_skylib=$tools/skylib
common:workspace --override_repository=platforms=$tools/platforms

common:modules --enable_bzlmod --lockfile_mode=off --registry=file:///quern/registry
common:next --config=modules --noenable_workspace
common:next --incompatible_autoload_externally=
common:next --incompatible_disable_native_repo_rules
common:next --incompatible_use_plus_in_repo_names

common --noshow_progress --curses=no --ui_event_filters=-info
# Bazel 7 parses each header alone where a package asks for it; Abseil's ask too.
build --features=-parse_headers
build --nosandbox_debug --jobs=${QUERN_BAZEL7_JOBS:-$(nproc)}"
    make_stubs
  } >"$work/bazelrc"
}

# Runs the bash script $1 inside the folder, in the copy of the tree. Bazel's
# server ends with it, because the script is the first process of its own
# process namespace.
enter() {
  local user=()
  ((EUID == 0)) || user=(--user --map-root-user)
  unshare "${user[@]}" --mount --pid --fork --kill-child bash -c '
    set -e
    mount --rbind /dev "$1/dev"
    mount -t proc proc "$1/proc"
    mkdir -p "$1/quern"
    mount --rbind "$2" "$1/quern"
    exec chroot "$1" /usr/bin/env -i HOME=/quern USER=root TERM=dumb PATH=/usr/sbin:/usr/bin \
      JAVA_HOME=/usr/lib/jvm/default-java QUERN_CACHE=/quern QUERN_ARCHIVE_SOURCE=distribution \
      bash -c "cd /quern/src; $3"' - "$root" "$work" "
    set -e
    bazel='bazelw --output_user_root=/quern/output --bazelrc=/quern/bazelrc'
    test=//third_party:pins_test
    $1"
}

step_workspace() {
  enter './$bazel build --config=workspace --nobuild //...
         ./$bazel test --config=workspace $test'
}

step_bzlmod() {
  enter './$bazel build --config=modules --nobuild //...
         ./$bazel test --config=modules $test'
}

# Runs without WORKSPACE, because this release adds Java toolchains to it that
# it would fetch.
step_embed() {
  enter 'cd examples/embed_bzlmod
         ../../$bazel run --config=modules --noenable_workspace //:main'
}

# Bazel 9 has no built-in C++ rules, so a BUILD file that calls one without
# loading it fails there. The flag by which Bazel 7 could check this breaks its
# own rules_cc.
check_loads() {
  local -r builtin=" alias config_setting constraint_value exports_files filegroup genrule label_flag licenses load package package_group test_suite "
  local files file rule status=0
  files=$(git ls-files '*BUILD' '*BUILD.bazel' ':!third_party/rules_cc_compat') && [[ -n $files ]] ||
    { echo "git names no BUILD files"; return 1; }
  while IFS= read -r file; do
    while IFS= read -r rule; do
      [[ $builtin == *" $rule "* ]] && continue
      grep -qE "^load\(.*\"$rule\"|^def $rule\(" "$file" ||
        { echo "$file calls $rule without loading it"; status=1; }
    done < <(sed -nE 's/^([a-z_]+)\(.*/\1/p' "$file" | sort -u)
  done <<<"$files"
  return $status
}

step_next() {
  check_loads &&
    enter './$bazel build --config=next --nobuild //...
           cd examples/embed_bzlmod
           ../../$bazel build --config=next --nobuild //:main'
}

step_shell() { enter 'bash -i'; }

readonly steps=(workspace bzlmod embed next)
for step in "$@"; do
  [[ " ${steps[*]} shell " == *" $step "* ]] || die "no step '$step'; steps: ${steps[*]} shell"
done
mkdir -p "$work"
exec 8>"$home/lock"
flock -n 8 || die "another tools/bazel7.sh is running ($home/lock)"
make_root
copy_tree
fetch_archives
make_registry
write_rc
echo "bazel7: bazel-bootstrap $(<"$root/version")"
failed=0
for step in "${@:-${steps[@]}}"; do
  start=$SECONDS
  if "step_$step"; then
    echo "bazel7: ok      $step ($((SECONDS - start)) s)"
  else
    failed=$((failed + 1))
    echo "bazel7: FAILED  $step ($((SECONDS - start)) s)"
  fi
done
((failed == 0))
