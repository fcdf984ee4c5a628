#!/usr/bin/env bash
# Installs the C interface: headers, libraries, and what pkg-config and CMake
# need to find them. Nothing that it writes holds the path of DIR, so the
# directory may be moved afterwards.
#
# Usage: ./bazelw run //:install -- --prefix=DIR [--libdir=lib]
#   --prefix=DIR   where include/, lib/ and share/ go; made if it is not there
#   --libdir=lib   the folder of libraries below DIR, such as lib64
#
# Runs in the folder that has c/, core/ and tools/ in it.
set -euo pipefail

die() {
  echo "install: $*" >&2
  exit 2
}

prefix='' libdir=lib
for argument in "$@"; do
  case $argument in
    --prefix=*) prefix=${argument#*=} ;;
    --libdir=*) libdir=${argument#*=} ;;
    *) die "unknown argument '$argument'; need --prefix=DIR and perhaps --libdir=lib" ;;
  esac
done
[[ -n $prefix ]] || die "no directory; need --prefix=DIR"
[[ $libdir =~ ^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$ && /$libdir/ != */../* && /$libdir/ != */./* ]] ||
  die "--libdir=$libdir; need folders below the prefix, such as lib64"
# Bazel runs programs in a folder of its own; a relative path is the user's.
[[ $prefix == /* ]] || prefix=${BUILD_WORKING_DIRECTORY:-$PWD}/$prefix

readonly static=tools/install/libquern.a
for file in c/quern.h c/libquern.so c/libquern_tvm_ffi.so "$static" core/version.h tools/install/quern.pc.in LICENSE; do
  [[ -f $file ]] || die "no $file in $PWD; run it as ./bazelw run //:install -- --prefix=DIR"
done
version=$(sed -nE 's/^#define QUERN_VERSION_STRING "([0-9.]+(-dev)?)"$/\1/p' core/version.h)
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+(-dev)?$ ]] || die "core/version.h has no version"

# The way from the folder of libraries to the prefix: ".." for each part.
up=$(sed -E 's#[^/]+#..#g' <<<"$libdir")

# Copies file $1 to $2 below the prefix. Whoever has mapped the old file keeps
# it, because `install` writes a new one.
copy() { install -D -m "${3:-644}" -- "$1" "$prefix/$2"; }

# Writes $2 below the prefix from the template tools/install/$1.
expand() {
  local text
  text=$(sed -e "s|@VERSION@|$version|g" -e "s|@LIBDIR@|$libdir|g" -e "s|@UP@|$up|g" "tools/install/$1")
  [[ $text != *@[A-Z]*@* ]] || die "tools/install/$1 has a name that is not replaced"
  install -D -m 644 /dev/stdin "$prefix/$2" <<<"$text"
}

for header in c/quern*.h; do copy "$header" "include/quern/$header"; done
copy c/libquern.so "$libdir/libquern.so" 755
copy c/libquern_tvm_ffi.so "$libdir/libquern_tvm_ffi.so" 755
copy "$static" "$libdir/libquern.a"
copy LICENSE share/doc/quern/LICENSE
for name in quern quern-static; do
  expand "$name.pc.in" "$libdir/pkgconfig/$name.pc"
done
for name in quern-config quern-config-version; do
  expand "$name.cmake.in" "$libdir/cmake/quern/$name.cmake"
done
echo "install: Quern $version is in $prefix"
