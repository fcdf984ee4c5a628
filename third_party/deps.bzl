"""The third-party code of Quern for a WORKSPACE build: call quern_deps().

Each repository is declared with maybe(): a larger repository that already has
one under the same name keeps its own. MODULE.bazel names the same versions, which
//third_party:pins_test compares.
"""

load("@bazel_tools//tools/build_defs/repo:http.bzl", "http_archive")
load("@bazel_tools//tools/build_defs/repo:utils.bzl", "maybe")
load("//third_party:archive.bzl", "quern_archive")
load("//third_party:pins.bzl", "ARCHIVES", "RULES")
load("//third_party/mpi:mpi.bzl", "quern_system_mpi")

def quern_deps():
    for name, attrs in RULES.items():
        maybe(http_archive, name = name, **attrs)
    for name, attrs in ARCHIVES.items():
        maybe(quern_archive, name = name, **attrs)
    maybe(quern_system_mpi, name = "mpi")
