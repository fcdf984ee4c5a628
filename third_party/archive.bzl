"""quern_archive: a pinned source archive, from upstream or from the distribution.

Tried in this order:
  1. the upstream release (`urls`, `sha256`);
  2. the same version from Debian's source packages (`debian_source`,
     `debian_file`, `debian_sha256`), through the machine's own apt mirror and
     without root; see third_party/fetch_source.sh.

Each archive has its own sha256. A mismatch is an error that names the file and
both hashes; it never falls through to the next source.

$QUERN_ARCHIVE_SOURCE = upstream | distribution restricts the search to one.
"""

def _verify(file, expected, actual):
    if actual != expected:
        fail("%s: sha256 mismatch\n  expected %s\n  actual   %s" % (file, expected, actual))

def _upstream(ctx):
    """Returns None on success, else why upstream could not be reached."""
    for url in ctx.attr.urls:
        # No sha256 argument: with allow_fail a wrong hash would look like a
        # network failure. The hash is checked below, where it can be named.
        result = ctx.download(url, output = "upstream_archive", allow_fail = True)
        if not result.success:
            continue
        _verify(url, ctx.attr.sha256, result.sha256)
        ctx.delete("upstream_archive")

        # The second call is served from Bazel's repository cache by its hash.
        ctx.download_and_extract(
            url,
            sha256 = ctx.attr.sha256,
            stripPrefix = ctx.attr.strip_prefix,
        )
        return None
    return "not reachable: " + ", ".join(ctx.attr.urls)

def _distribution(ctx):
    """Returns None on success, else why the distribution could not help."""
    if not ctx.attr.debian_source:
        return "no distribution source package is pinned"
    script = ctx.path(ctx.attr._fetch_source)
    result = ctx.execute(
        ["bash", str(script), ctx.attr.debian_source, ctx.attr.debian_file, ctx.attr.debian_sha256, str(ctx.path("distribution"))],
        timeout = 600,
        quiet = True,
    )
    if result.return_code != 0:
        return result.stderr.strip()
    archive = "distribution/" + ctx.attr.debian_file

    digest = ctx.execute(["sha256sum", str(ctx.path(archive))])
    if digest.return_code != 0:
        return digest.stderr.strip()
    _verify(ctx.attr.debian_file, ctx.attr.debian_sha256, digest.stdout.split(" ")[0])
    ctx.extract(archive, stripPrefix = ctx.attr.debian_strip_prefix or ctx.attr.strip_prefix)
    ctx.delete("distribution")
    return None

def _quern_archive_impl(ctx):
    only = ctx.os.environ.get("QUERN_ARCHIVE_SOURCE", "")
    if only not in ["", "upstream", "distribution"]:
        fail("QUERN_ARCHIVE_SOURCE=%s; need upstream or distribution" % only)
    reasons = []
    fetched = False
    for name, fetch in [("upstream", _upstream), ("distribution", _distribution)]:
        if fetched or (only and only != name):
            continue
        ctx.report_progress("fetching %s from %s" % (ctx.name, name))
        reason = fetch(ctx)
        fetched = reason == None
        if not fetched:
            reasons.append("  %s: %s" % (name, reason))
    if not fetched:
        fail("%s could not be fetched:\n%s" % (ctx.name, "\n".join(reasons)))
    if ctx.attr.build_file:
        # The archive may hold a BUILD.bazel, which would win over BUILD.
        ctx.delete("BUILD.bazel")
        ctx.delete("BUILD")
        ctx.symlink(ctx.attr.build_file, "BUILD.bazel")
    for path, lines in ctx.attr.extend.items():
        own = ctx.read(path)
        ctx.delete(path)
        ctx.file(path, lines[0] + "\n\n" + own + "\n" + lines[1] + "\n")
    if not ctx.path("WORKSPACE").exists:
        ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)

quern_archive = repository_rule(
    implementation = _quern_archive_impl,
    attrs = {
        "urls": attr.string_list(mandatory = True),
        "sha256": attr.string(mandatory = True),
        "strip_prefix": attr.string(),
        "debian_source": attr.string(doc = "NAME=VERSION of the source package"),
        "debian_file": attr.string(doc = "name of its .orig archive"),
        "debian_sha256": attr.string(),
        "debian_strip_prefix": attr.string(doc = "default: strip_prefix"),
        "build_file": attr.label(allow_single_file = True, doc = "overlay; default: the archive's own"),
        "extend": attr.string_list_dict(doc = "BUILD file of the archive -> [what is put before it, what is put after it]"),
        "_fetch_source": attr.label(default = "//third_party:fetch_source.sh", allow_single_file = True),
    },
    environ = ["QUERN_ARCHIVE_SOURCE"],
    doc = "Source archive pinned by sha256, from upstream or from the distribution's source packages.",
)
