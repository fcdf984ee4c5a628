"""A test once per instruction set of oneDNN.

oneDNN reads the cap before its first use, so the cap is an environment variable.
On a CPU that has nothing above the cap the test prints SKIPPED and runs nothing,
because DEFAULT is the same test there. All tests share one compilation.
"""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")

def onednn_isa_test(name, isas, deps):
    """Declares name_avx2 and so on, of name.cc.

    Args:
      name: of the tests, without the instruction set.
      isas: values of ONEDNN_MAX_CPU_ISA.
      deps: what name.cc includes, but for GoogleTest.
    """
    cc_library(
        name = name + "_cases",
        testonly = True,
        srcs = [name + ".cc"],
        deps = deps + ["@com_google_googletest//:gtest"],
        alwayslink = True,
    )
    for isa in isas:
        cc_test(
            name = name + "_" + isa.lower(),
            size = "medium",
            env = {"ONEDNN_MAX_CPU_ISA": isa},
            # .ci/run leaves these out under sanitizers, which do not see oneDNN.
            tags = [] if isa == "DEFAULT" else ["onednn_cap"],
            deps = [
                ":" + name + "_cases",
                "//gemm/onednn:isa_test_main",
                "//testing:tsan_suppressions",
            ],
        )
