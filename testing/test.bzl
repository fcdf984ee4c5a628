"""Tests without the lines that all of them repeat.

quern_cc_test(name = "foo_test", deps = [":foo"]) is a cc_test of foo_test.cc on
GoogleTest with its main().
"""

load("@rules_cc//cc:cc_test.bzl", "cc_test")

# What tests of an operator include: arguments, inputs, oracles and verdicts.
OPERATOR_TEST_DEPS = [
    "//core:dtype",
    "//core:executor",
    "//core:tensor_view",
    "//testing:compare",
    "//testing:data",
    "//testing:guard_buffer",
    "//testing:many_workers",
    "//testing:reference_convert",
    "//testing:reference_gemm",
    "//testing:refusal",
    "//testing:workers",
    "@com_google_absl//absl/status",
    "@com_google_absl//absl/strings",
]

def quern_cc_test(name, deps, srcs = None, **kwargs):
    """Declares a test.

    Args:
      name: of the test.
      deps: what it includes, but for GoogleTest.
      srcs: name + ".cc" by default.
      **kwargs: of cc_test.
    """
    cc_test(
        name = name,
        srcs = srcs or [name + ".cc"],
        deps = deps + [
            "@com_google_googletest//:gtest",
            "@com_google_googletest//:gtest_main",
        ],
        **kwargs
    )
