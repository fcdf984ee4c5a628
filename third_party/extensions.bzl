"""The pinned archives as a module extension. Bazel 4.2 must never load this."""

load("//third_party:archive.bzl", "quern_archive")
load("//third_party:pins.bzl", "ARCHIVES")
load("//third_party/mpi:mpi.bzl", "quern_system_mpi")

# The other archives are in the Bazel Central Registry and come from
# MODULE.bazel.
_FROM_PINS = ["eigen", "highway", "onednn"]

def _archives_impl(_module_ctx):
    for name in _FROM_PINS:
        quern_archive(name = name, **ARCHIVES[name])
    quern_system_mpi(name = "mpi")

archives = module_extension(implementation = _archives_impl)
