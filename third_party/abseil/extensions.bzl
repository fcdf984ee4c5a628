"""What third_party/pins.bzl adds to Abseil's BUILD files for units.bzl.

A WORKSPACE reads this file before it knows any rules, so it loads none.
"""

# Packages whose headers the units include.
ABSEIL_PACKAGES = ["absl/" + folder for folder in [
    "algorithm",
    "base",
    "cleanup",
    "container",
    "crc",
    "debugging",
    "functional",
    "hash",
    "memory",
    "meta",
    "numeric",
    "profiling",
    "status",
    "strings",
    "synchronization",
    "time",
    "time/internal/cctz",
    "types",
    "utility",
]]

_LOAD = 'load("@quern//third_party/abseil:units.bzl", "%s", "%s")'

# BUILD file of the archive -> what is put before it and after it.
ABSEIL_EXTENSIONS = {package + "/BUILD.bazel": [_LOAD % ("cc_library", "headers"), "headers()"] for package in ABSEIL_PACKAGES}
ABSEIL_EXTENSIONS["BUILD.bazel"] = ['load("@quern//third_party/abseil:units.bzl", "units")', "units()"]
