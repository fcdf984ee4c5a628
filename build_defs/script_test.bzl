"""A test that is a script, for every Bazel: 9 has no sh_test of its own."""

def _script_test_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.symlink(output = out, target_file = ctx.file.src, is_executable = True)
    return [DefaultInfo(
        executable = out,
        runfiles = ctx.runfiles(files = ctx.files.data),
    )]

script_test = rule(
    implementation = _script_test_impl,
    attrs = {
        "src": attr.label(mandatory = True, allow_single_file = True),
        "data": attr.label_list(allow_files = True),
    },
    test = True,
    doc = "Runs the script `src`, which is executable, beside its files. Takes `args`, `size` and `tags` as all tests do.",
)
