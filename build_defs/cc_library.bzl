"""A cc_library whose headers are included below quern/.

quern_cc_library(name = "linear", hdrs = ["linear.h"], ...) in //gemm is included
as "quern/gemm/linear.h", here and in a repository that embeds Quern, whose own
gemm/linear.h may exist beside it.
"""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("//third_party:unity.bzl", "joined_source")

def quern_cc_library(name, srcs = [], hdrs = [], textual_hdrs = [], deps = [], features = [], together = [], distinct = [], **kwargs):
    """Declares a library.

    Args:
      name: of the library.
      srcs: sources, and headers that no other target may include.
      hdrs: headers, each of which compiles alone.
      textual_hdrs: headers that do not compile alone, such as -inl.h.
      deps: what srcs and hdrs include.
      features: of cc_library.
      together: sources that are compiled as one file. A source of ours compiles in
        a second, nearly all of which goes to the header of absl::Status.
      distinct: names of internal linkage that several of them define.
      **kwargs: of cc_library.
    """
    private_hdrs = [src for src in srcs if src.endswith(".h")]

    # Bazel applies include_prefix to hdrs alone, not to srcs and textual_hdrs.
    if private_hdrs:
        cc_library(
            name = name + "_private_hdrs",
            testonly = kwargs.get("testonly", False),
            hdrs = private_hdrs + hdrs,
            include_prefix = "quern",
            strip_include_prefix = "/",
            visibility = ["//visibility:private"],
            deps = deps,
        )
        deps = deps + [":" + name + "_private_hdrs"]
    if textual_hdrs:
        features = features + ["-parse_headers"]
    if together:
        joined_source(
            name = name + "_together",
            srcs = together,
            distinct = distinct,
        )
        srcs = srcs + [":" + name + "_together"]
    cc_library(
        name = name,
        srcs = [src for src in srcs if not src.endswith(".h")],
        hdrs = hdrs + textual_hdrs,
        features = features,
        include_prefix = "quern",
        strip_include_prefix = "/",
        deps = deps,
        **kwargs
    )
