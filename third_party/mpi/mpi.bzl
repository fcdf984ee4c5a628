"""quern_system_mpi: the MPI that is installed, by what its mpicc says.

Only targets tagged "manual" depend on it. Where there is no mpicc the repository
is there all the same, so that every query works; compiling against it says what
to install.
"""

_MISSING = '#error "no mpicc on PATH: apt-get install mpich libmpich-dev"\n'

def _word(flag):
    return '        "%s",\n' % flag

def _quern_system_mpi_impl(ctx):
    compiler = ctx.which("mpicc")
    includes, links = [], []
    if compiler == None:
        ctx.file("include0/mpi.h", _MISSING)
        includes.append("include0")
    else:
        # MPICH and Open MPI both print a line like "gcc -I/usr/include/...
        # -L/usr/lib/... -lmpi".
        shown = ctx.execute([compiler, "-show"])
        if shown.return_code != 0:
            fail("%s -show: %s" % (compiler, shown.stderr))
        for word in shown.stdout.strip().split(" "):
            if word.startswith("-I"):
                name = "include%d" % len(includes)
                ctx.symlink(word[2:], name)
                includes.append(name)
            elif word.startswith("-L") or word.startswith("-l") or word.startswith("-Wl,-rpath"):
                links.append(word)
    ctx.file("BUILD.bazel", """load("@rules_cc//cc:cc_library.bzl", "cc_library")

# Only the C interface is used, because the MPI standard has dropped the C++
# bindings.
cc_library(
    name = "mpi",
    hdrs = glob([{globs}]),
    defines = [
        "MPICH_SKIP_MPICXX",
        "OMPI_SKIP_MPICXX",
    ],
    includes = [
{includes}    ],
    linkopts = [
{links}    ],
    visibility = ["//visibility:public"],
)
""".format(
        globs = ", ".join(['"%s/**/*.h"' % name for name in includes]),
        includes = "".join([_word(name) for name in includes]),
        links = "".join([_word(flag) for flag in links]),
    ))
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)

quern_system_mpi = repository_rule(
    implementation = _quern_system_mpi_impl,
    configure = True,
    environ = ["PATH"],
    local = True,
    doc = "The MPI that is installed, as @mpi//:mpi.",
)
