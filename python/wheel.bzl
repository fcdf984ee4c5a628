"""The wheel of the package `quern`: a folder with one file, whose name says for which systems it is."""

def _wheel_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    arguments = ctx.actions.args()
    arguments.add(ctx.file.script)
    arguments.add(out.path)
    for target, name in ctx.attr.licenses.items():
        for file in target.files.to_list():
            arguments.add("--license=%s=%s" % (name, file.path))
    arguments.add_all(ctx.files.package)
    ctx.actions.run_shell(
        outputs = [out],
        inputs = ctx.files.package + ctx.files.licenses + [ctx.file.script],
        arguments = [arguments],
        command = 'exec python3 -B "$@"',
        mnemonic = "Wheel",
        progress_message = "Writing the wheel of %s" % ctx.label,
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([out]))]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "licenses": attr.label_keyed_string_dict(allow_files = True, doc = "files, and their names in the wheel"),
        "package": attr.label_list(mandatory = True, allow_files = True, doc = "the files of quern/"),
        "script": attr.label(mandatory = True, allow_single_file = True, doc = "make_wheel.py"),
    },
)
