"""expand_template: a file from a template by string substitution.

Bazel's own skylib has the rule only since 1.3; Debian's Bazel 4.2 comes with
skylib 1.0.
"""

def _expand_template_impl(ctx):
    ctx.actions.expand_template(
        template = ctx.file.template,
        output = ctx.outputs.out,
        substitutions = ctx.attr.substitutions,
    )

expand_template = rule(
    implementation = _expand_template_impl,
    attrs = {
        "template": attr.label(mandatory = True, allow_single_file = True),
        "out": attr.output(mandatory = True),
        "substitutions": attr.string_dict(mandatory = True),
    },
    doc = "Writes `out`: `template` with every key of `substitutions` replaced by its value.",
)

def cmake_config(values, defined, undefined, one, zero):
    """Substitutions for a header that CMake's configure_file would write.

    Args:
      values: macro -> value, for `#cmakedefine MACRO text`; keys hold the text.
      defined: macros of `#cmakedefine MACRO` that are defined.
      undefined: macros of `#cmakedefine MACRO` that are not.
      one: macros of `#cmakedefine01 MACRO` that are 1.
      zero: macros of `#cmakedefine01 MACRO` that are 0.
    Returns:
      A dict for expand_template.
    """

    # Keys end in a newline, because one macro's name may be a prefix of
    # another's.
    result = {}
    for line, value in values.items():
        result["#cmakedefine %s\n" % line] = "#define %s\n" % value
    for macro in defined:
        result["#cmakedefine %s\n" % macro] = "#define %s\n" % macro
    for macro in undefined:
        result["#cmakedefine %s\n" % macro] = "/* #undef %s */\n" % macro
    for macro in one:
        result["#cmakedefine01 %s\n" % macro] = "#define %s 1\n" % macro
    for macro in zero:
        result["#cmakedefine01 %s\n" % macro] = "#define %s 0\n" % macro
    return result
