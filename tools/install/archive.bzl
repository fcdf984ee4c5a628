"""Rules of the installation: an archive of everything that a library needs, and
a script with its files.
"""

load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

def _whole_archive_impl(ctx):
    objects = []
    for dep in ctx.attr.deps:
        for linked in dep[CcInfo].linking_context.linker_inputs.to_list():
            for library in linked.libraries:
                found = library.pic_objects or library.objects
                if not found:
                    fail("%s has no object files for %s" % (linked.owner, ctx.label))
                objects += found
    out = ctx.actions.declare_file(ctx.attr.out)
    arguments = ctx.actions.args()
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    arguments.add_all(objects)

    # q appends: several folders have an object of the same name, and r would
    # keep the last alone. D leaves out the time.
    ctx.actions.run_shell(
        outputs = [out],
        inputs = objects,
        arguments = [out.path, arguments],
        command = 'rm -f "$1" && exec ar qcsD "$@"',
        mnemonic = "WholeArchive",
        progress_message = "Archiving %s" % out.short_path,
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([out]))]

whole_archive = rule(
    implementation = _whole_archive_impl,
    attrs = {
        "deps": attr.label_list(mandatory = True, providers = [CcInfo]),
        "out": attr.string(mandatory = True),
    },
    doc = "Writes `out`: one archive of the object files of `deps` and of all that they depend on.",
)

def _runnable_script_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".run")
    ctx.actions.symlink(output = out, target_file = ctx.file.src, is_executable = True)
    return [DefaultInfo(
        executable = out,
        runfiles = ctx.runfiles(files = ctx.files.data),
    )]

runnable_script = rule(
    implementation = _runnable_script_impl,
    attrs = {
        "src": attr.label(mandatory = True, allow_single_file = True),
        "data": attr.label_list(allow_files = True),
    },
    executable = True,
    doc = "A shell script that `bazel run` runs beside its files. Bazel 9 has no sh_binary of its own.",
)
