"""unity_library and joined_source: many sources compiled as few.

For sources of third parties that each parse megabytes of headers to compile a
few functions: a unit of twenty costs little more than one of them.
"""

load("@rules_cc//cc:cc_library.bzl", "cc_library")

def _unity_source_impl(ctx):
    lines = ['#include "%s"' % header for header in ctx.attr.first]
    for i, source in enumerate(ctx.files.srcs):
        lines += ["#define %s %s_%d" % (name, name, i) for name in ctx.attr.distinct]
        lines.append('#include "%s"' % source.owner.name)
        lines += ["#undef %s" % name for name in ctx.attr.distinct + ctx.attr.undef]
    out = ctx.actions.declare_file(ctx.label.name + ".cpp")
    ctx.actions.write(output = out, content = "\n".join(lines) + "\n")
    return [DefaultInfo(files = depset([out]))]

_unity_source = rule(
    implementation = _unity_source_impl,
    attrs = {
        "srcs": attr.label_list(mandatory = True, allow_files = True),
        "first": attr.string_list(),
        "distinct": attr.string_list(),
        "undef": attr.string_list(),
    },
    doc = "Writes NAME.cpp, which includes `srcs` by their paths in the repository.",
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
            _unity_source(
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

def _joined_source_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".cc")
    commands = []
    for i, source in enumerate(ctx.files.srcs):
        package, name = source.owner.package, source.owner.name
        lines = ["#define %s %s_%d" % (word, word, i) for word in ctx.attr.distinct]
        lines.append('#line 1 "%s"' % (package + "/" + name if package else name))
        commands += ["echo '%s'" % line for line in lines]
        commands.append("cat '%s'" % source.path)
        commands += ["echo '#undef %s'" % word for word in ctx.attr.distinct]
    ctx.actions.run_shell(
        inputs = ctx.files.srcs,
        outputs = [out],
        command = "{ %s; } >'%s'" % (" && ".join(commands), out.path),
        mnemonic = "JoinSources",
        progress_message = "Joining %{label}",
    )
    return [DefaultInfo(files = depset([out]))]

joined_source = rule(
    implementation = _joined_source_impl,
    attrs = {
        "srcs": attr.label_list(mandatory = True, allow_files = True),
        "distinct": attr.string_list(doc = "names of internal linkage that several sources define"),
    },
    doc = "Writes NAME.cc, the text of all `srcs`. Unlike unity_library it needs no source where NAME.cc is compiled, so that those who depend on the library see no new files.",
)
