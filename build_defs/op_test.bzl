"""A cc_test of operators by name: op_test(name = "norm_ops_test", deps = [...]) runs
norm_ops_test.cc, which makes operators, gives them tensors and is refused."""

load("@rules_cc//cc:cc_test.bzl", "cc_test")

_OF_EVERY_TEST = [
    "//core:dtype",
    "//core:tensor_view",
    "//ops/registry:op_dispatcher",
    "//ops/registry:op_policy",
    "//ops/registry:op_registry",
    "//testing:refusal",
    "@com_google_absl//absl/status",
    "@com_google_googletest//:gtest",
    "@com_google_googletest//:gtest_main",
]

def op_test(name, deps, size = "small", **kwargs):
    """Declares a test of one source, which has the test's name.

    Args:
      name: of the test.
      deps: what the source includes besides what every such test does.
      size: of cc_test.
      **kwargs: of cc_test.
    """
    cc_test(
        name = name,
        size = size,
        srcs = [name + ".cc"],
        deps = deps + _OF_EVERY_TEST,
        **kwargs
    )
