"""A benchmark and the test that it still runs.

quern_cc_benchmark(name = "foo_bench", srcs = ["foo_bench.cc"], deps = [...])
declares

  :foo_bench             the Google Benchmark binary, tagged "benchmark"
  :foo_bench_smoke_test  runs each case once; fails on SkipWithError

The sources are compiled once for both and must not define main().
"""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")

def quern_cc_benchmark(name, srcs, deps, smoke_args = [], smoke_size = "small", **kwargs):
    """Declares a benchmark binary and its smoke test.

    Args:
      name: of the binary.
      srcs: sources with BENCHMARK(...) cases.
      deps: what they include; @com_google_benchmark is added.
      smoke_args: e.g. a --benchmark_filter that leaves out cases too large.
      smoke_size: size of the smoke test.
      **kwargs: for all targets.
    """
    cc_library(
        name = name + "_cases",
        testonly = True,
        srcs = srcs,
        tags = ["benchmark"],
        visibility = ["//visibility:private"],
        deps = deps + ["@com_google_benchmark//:benchmark"],
        alwayslink = True,
        **kwargs
    )
    cc_binary(
        name = name,
        testonly = True,
        tags = ["benchmark"],
        deps = [
            ":" + name + "_cases",
            "@com_google_benchmark//:benchmark_main",
        ],
        **kwargs
    )
    cc_test(
        name = name + "_smoke_test",
        size = smoke_size,
        args = smoke_args,
        tags = ["benchmark"],
        deps = [
            ":" + name + "_cases",
            Label("//testing:benchmark_smoke_main"),
        ],
        **kwargs
    )
