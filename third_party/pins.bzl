"""Every version and every sha256 of third-party code, in one place."""

load("//third_party/abseil:extensions.bzl", "ABSEIL_EXTENSIONS")

# Archives that are built from source. Debian has the same bytes as upstream for
# Highway, benchmark and Eigen, and repacked ones for the others, which
# therefore have two hashes.
ARCHIVES = {
    "com_google_absl": dict(
        urls = ["https://github.com/abseil/abseil-cpp/releases/download/20240722.0/abseil-cpp-20240722.0.tar.gz"],
        sha256 = "f50e5ac311a81382da7fa75b97310e4b9006474f9560ac46f54a9967f07d4ae3",
        strip_prefix = "abseil-cpp-20240722.0",
        debian_source = "abseil=20240722.0-4",
        debian_file = "abseil_20240722.0.orig.tar.gz",
        debian_sha256 = "df6d1f5ef540725f3851201176a60486aab332410788465c9877910bb471c34a",
        debian_strip_prefix = "abseil-20240722.0",
        extend = ABSEIL_EXTENSIONS,
    ),
    "com_google_benchmark": dict(
        urls = ["https://github.com/google/benchmark/archive/refs/tags/v1.9.1.tar.gz"],
        sha256 = "32131c08ee31eeff2c8968d7e874f3cb648034377dfc32a4c377fa8796d84981",
        strip_prefix = "benchmark-1.9.1",
        debian_source = "benchmark=1.9.1-1",
        debian_file = "benchmark_1.9.1.orig.tar.gz",
        debian_sha256 = "32131c08ee31eeff2c8968d7e874f3cb648034377dfc32a4c377fa8796d84981",
        build_file = Label("//third_party/benchmark:benchmark.BUILD"),
    ),
    "com_google_googletest": dict(
        urls = ["https://github.com/google/googletest/releases/download/v1.16.0/googletest-1.16.0.tar.gz"],
        sha256 = "78c676fc63881529bf97bf9d45948d905a66833fbfa5318ea2cd7478cb98f399",
        strip_prefix = "googletest-1.16.0",
        debian_source = "googletest=1.16.0-1",
        debian_file = "googletest_1.16.0.orig.tar.gz",
        debian_sha256 = "2f54382b5d13d6cd0be2afc524f1e510d37f8ba78c2d439c5bea64ef37e30d01",
        build_file = Label("//third_party/googletest:googletest.BUILD"),
    ),
    "eigen": dict(
        urls = ["https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.bz2"],
        sha256 = "b4c198460eba6f28d34894e3a5710998818515104d6e74e5cc331ce31e46e626",
        strip_prefix = "eigen-3.4.0",
        debian_source = "eigen3=3.4.0-5",
        debian_file = "eigen3_3.4.0.orig.tar.bz2",
        debian_sha256 = "b4c198460eba6f28d34894e3a5710998818515104d6e74e5cc331ce31e46e626",
        build_file = Label("//third_party/eigen:eigen.BUILD"),
    ),
    "highway": dict(
        urls = ["https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz"],
        sha256 = "7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343",
        strip_prefix = "highway-1.2.0",
        debian_source = "highway=1.2.0-2",
        debian_file = "highway_1.2.0.orig.tar.gz",
        debian_sha256 = "7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343",
        build_file = Label("//third_party/highway:highway.BUILD"),
    ),
    "onednn": dict(
        urls = ["https://github.com/uxlfoundation/oneDNN/archive/refs/tags/v3.7.2.tar.gz"],
        sha256 = "21068e8cd2bf4077916bf31452eab5ac9998e620e1b22630a88f79c334857a5c",
        strip_prefix = "oneDNN-3.7.2",
        debian_source = "onednn=3.7.2+ds-2",
        debian_file = "onednn_3.7.2+ds.orig.tar.xz",
        debian_sha256 = "0cc51ca26c1af6a2bb1e71e378e7046f3ceb3e71791ee9d4e246d50f904a6ea6",
        build_file = Label("//third_party/onednn:onednn.BUILD"),
    ),
}

# Rules that Bazel 5 to 9 fetch. On Bazel 4.2, ./bazelw overrides them with the
# distribution's; see docs/bazel.md.
RULES = {
    "bazel_skylib": dict(
        urls = ["https://github.com/bazelbuild/bazel-skylib/releases/download/1.7.1/bazel-skylib-1.7.1.tar.gz"],
        sha256 = "bc283cdfcd526a52c3201279cda4bc298652efa898b10b4db0837dc51652756f",
    ),
    "platforms": dict(
        urls = ["https://github.com/bazelbuild/platforms/releases/download/1.0.0/platforms-1.0.0.tar.gz"],
        sha256 = "3384eb1c30762704fbe38e440204e114154086c8fc8a8c2e3e28441028c019a8",
    ),
    "rules_cc": dict(
        urls = ["https://github.com/bazelbuild/rules_cc/releases/download/0.0.17/rules_cc-0.0.17.tar.gz"],
        sha256 = "abc605dd850f813bb37004b77db20106a19311a96b2da1c92b789da529d28fe1",
        strip_prefix = "rules_cc-0.0.17",
    ),
}
