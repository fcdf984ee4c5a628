"""unity_library: a cc_library that compiles many sources as few.

For sources of third parties that each parse megabytes of headers to compile a
few functions: a unit of twenty costs little more than one of them.
"""

load("@rules_cc//cc:cc_library.bzl", "cc_library")

def _path(label):
    return (label.package + "/" if label.package else "") + label.name

def _unity_source_impl(ctx):
    lines = ['#include "%s"' % header for header in ctx.attr.first]
    for i, path in enumerate([_path(source.owner) for source in ctx.files.srcs] + ctx.attr.paths):
        lines += ["#define %s %s_%d" % (name, name, i) for name in ctx.attr.distinct]
        lines.append('#include "%s"' % path)
        lines += ["#undef %s" % name for name in ctx.attr.distinct + ctx.attr.undef]
    out = ctx.actions.declare_file(ctx.label.name + ".cpp")
    ctx.actions.write(output = out, content = "\n".join(lines) + "\n")
    return [DefaultInfo(files = depset([out]))]

unity_source = rule(
    implementation = _unity_source_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = True),
        "paths": attr.string_list(doc = "sources of other packages, by their paths in the repository"),
        "first": attr.string_list(),
        "distinct": attr.string_list(),
        "undef": attr.string_list(),
    },
    doc = "Writes NAME.cpp, which includes `srcs` and `paths` by their paths in the repository.",
)

def unit(srcs, parts = 1, first = [], distinct = [], undef = []):
    """Sources that are compiled together.

    Args:
      srcs: files of the package, each named in one unit of a library.
      parts: number of compilations that share the sources, in the order of the paths.
      first: headers that are included before all sources, so that no
        using-directive of a source reaches them.
      distinct: names of internal linkage that several sources define.
      undef: macros that a source leaves defined and another uses as a name or
        defines otherwise.
    Returns:
      A struct for unity_library.
    """
    return struct(srcs = srcs, parts = parts, first = first, distinct = distinct, undef = undef)

def unity_library(name, units, alone = [], each_alone = False, textual_hdrs = [], **kwargs):
    """A cc_library of the sources of all units.

    Args:
      name: of the library; NAME_UNIT_0.cpp is the first part of a unit.
      units: name -> unit().
      alone: sources of the units that are compiled by themselves.
      each_alone: compiles every source by itself.
      textual_hdrs: as in cc_library.
      **kwargs: as in cc_library.
    """
    every = []
    for u in units.values():
        every += u.srcs
    twice = [src for i, src in enumerate(every) if src in every[:i]]
    unknown = [src for src in alone if src not in every]
    if twice or unknown:
        fail("%s: in two units: %s; alone, but in no unit: %s" % (name, twice, unknown))
    if each_alone:
        cc_library(name = name, srcs = every, textual_hdrs = textual_hdrs, **kwargs)
        return

    parts = []
    for unit_name, u in units.items():
        srcs = sorted([src for src in u.srcs if src not in alone])
        each = (len(srcs) + u.parts - 1) // u.parts
        for part in range(u.parts):
            parts.append("%s_%s_%d" % (name, unit_name, part))
            unity_source(
                name = parts[-1],
                srcs = srcs[part * each:(part + 1) * each],
                first = u.first,
                distinct = u.distinct,
                undef = u.undef,
            )
    cc_library(
        name = name,
        srcs = alone + [":" + part for part in parts],
        textual_hdrs = textual_hdrs + [src for src in every if src not in alone],
        **kwargs
    )
