"""Abseil's sources below absl::Status, compiled as two files instead of 101.

absl::Status needs cords, cords need mutexes, and mutexes need time and stack
traces: a program that has StatusOr compiles 101 files of Abseil, most of which
take longer to parse headers than to compile what they hold. Every target keeps its
headers, its deps and its visibility; its sources move to @com_google_absl//:units,
to which it is linked. A repository that brings its own Abseil is not touched.
"""

load("@rules_cc//cc:cc_library.bzl", _cc_library = "cc_library")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load("//third_party:unity.bzl", "joined_source")
load("//third_party/abseil:extensions.bzl", "ABSEIL_PACKAGES")

# Unit -> its sources below absl/.
_UNITS = {
    "all_but_strings": [
        "base/internal/cycleclock.cc",
        "base/internal/low_level_alloc.cc",
        "base/internal/raw_logging.cc",
        "base/internal/spinlock.cc",
        "base/internal/spinlock_wait.cc",
        "base/internal/strerror.cc",
        "base/internal/sysinfo.cc",
        "base/internal/thread_identity.cc",
        "base/internal/throw_delegate.cc",
        "base/internal/unscaledcycleclock.cc",
        "base/log_severity.cc",
        "crc/crc32c.cc",
        "crc/internal/cpu_detect.cc",
        "crc/internal/crc.cc",
        "crc/internal/crc_cord_state.cc",
        "crc/internal/crc_memcpy_fallback.cc",
        "crc/internal/crc_memcpy_x86_arm_combined.cc",
        "crc/internal/crc_non_temporal_memcpy.cc",
        "crc/internal/crc_x86_arm_combined.cc",
        "debugging/internal/address_is_readable.cc",
        "debugging/internal/decode_rust_punycode.cc",
        "debugging/internal/demangle.cc",
        "debugging/internal/demangle_rust.cc",
        "debugging/internal/elf_mem_image.cc",
        "debugging/internal/utf8_for_code_point.cc",
        "debugging/internal/vdso_support.cc",
        "debugging/stacktrace.cc",
        "debugging/symbolize.cc",
        "numeric/int128.cc",
        "profiling/internal/exponential_biased.cc",
        "status/internal/status_internal.cc",
        "status/status.cc",
        "status/status_payload_printer.cc",
        "status/statusor.cc",
        "synchronization/barrier.cc",
        "synchronization/blocking_counter.cc",
        "synchronization/internal/create_thread_identity.cc",
        "synchronization/internal/futex_waiter.cc",
        "synchronization/internal/graphcycles.cc",
        "synchronization/internal/kernel_timeout.cc",
        "synchronization/internal/per_thread_sem.cc",
        "synchronization/internal/pthread_waiter.cc",
        "synchronization/internal/sem_waiter.cc",
        "synchronization/internal/stdcpp_waiter.cc",
        "synchronization/internal/waiter_base.cc",
        "synchronization/internal/win32_waiter.cc",
        "synchronization/mutex.cc",
        "synchronization/notification.cc",
        "time/civil_time.cc",
        "time/clock.cc",
        "time/duration.cc",
        "time/format.cc",
        "time/internal/cctz/src/civil_time_detail.cc",
        "time/internal/cctz/src/time_zone_fixed.cc",
        "time/internal/cctz/src/time_zone_format.cc",
        "time/internal/cctz/src/time_zone_if.cc",
        "time/internal/cctz/src/time_zone_impl.cc",
        "time/internal/cctz/src/time_zone_info.cc",
        "time/internal/cctz/src/time_zone_libc.cc",
        "time/internal/cctz/src/time_zone_lookup.cc",
        "time/internal/cctz/src/time_zone_posix.cc",
        "time/internal/cctz/src/zone_info_source.cc",
        "time/time.cc",
        "types/bad_optional_access.cc",
        "types/bad_variant_access.cc",
    ],
    "strings": [
        "strings/ascii.cc",
        "strings/charconv.cc",
        "strings/cord.cc",
        "strings/cord_analysis.cc",
        "strings/cord_buffer.cc",
        "strings/escaping.cc",
        "strings/internal/charconv_bigint.cc",
        "strings/internal/charconv_parse.cc",
        "strings/internal/cord_internal.cc",
        "strings/internal/cord_rep_btree.cc",
        "strings/internal/cord_rep_btree_navigator.cc",
        "strings/internal/cord_rep_btree_reader.cc",
        "strings/internal/cord_rep_consume.cc",
        "strings/internal/cord_rep_crc.cc",
        "strings/internal/cordz_functions.cc",
        "strings/internal/cordz_handle.cc",
        "strings/internal/cordz_info.cc",
        "strings/internal/damerau_levenshtein_distance.cc",
        "strings/internal/escaping.cc",
        "strings/internal/memutil.cc",
        "strings/internal/ostringstream.cc",
        "strings/internal/str_format/arg.cc",
        "strings/internal/str_format/bind.cc",
        "strings/internal/str_format/extension.cc",
        "strings/internal/str_format/float_conversion.cc",
        "strings/internal/str_format/output.cc",
        "strings/internal/str_format/parser.cc",
        "strings/internal/stringify_sink.cc",
        "strings/internal/utf8.cc",
        "strings/match.cc",
        "strings/numbers.cc",
        "strings/str_cat.cc",
        "strings/str_replace.cc",
        "strings/str_split.cc",
        "strings/string_view.cc",
        "strings/substitute.cc",
    ],
}

# Names of internal linkage that several sources of a unit define.
_DISTINCT = ["kAsciiToInt", "kDigits", "kMaxCodePoint", "unix_epoch"]

_IN_UNITS = {"absl/" + src: True for srcs in _UNITS.values() for src in srcs}

def cc_library(name, srcs = [], deps = [], **kwargs):
    """Replaces cc_library in Abseil's BUILD files.

    Args:
      name: of the library.
      srcs: of cc_library. Those that a unit has are left out.
      deps: of cc_library.
      **kwargs: of cc_library.
    """
    if type(srcs) == type([]):
        taken = [src for src in srcs if "%s/%s" % (native.package_name(), src) in _IN_UNITS]
        if taken:
            native.exports_files(taken)
            srcs = [src for src in srcs if src not in taken]
            deps = deps + ["//:linked_units"]
    _cc_library(name = name, srcs = srcs, deps = deps, **kwargs)

def headers():
    """Declares :headers, what a unit may include of a package."""
    native.filegroup(
        name = "headers",
        srcs = native.glob(["**/*.h", "**/*.inc"], allow_empty = True),
        visibility = ["//visibility:public"],
    )

# The label of a source, whose package is the longest that its path begins with.
def _label(src):
    package = ""
    for p in ABSEIL_PACKAGES:
        if src.startswith(p + "/") and len(p) > len(package):
            package = p
    return "//%s:%s" % (package, src[len(package) + 1:])

# A library without its headers, which those who link it do not include.
def _linked_impl(ctx):
    return [CcInfo(linking_context = ctx.attr.library[CcInfo].linking_context)]

_linked = rule(
    implementation = _linked_impl,
    attrs = {"library": attr.label(mandatory = True, providers = [CcInfo])},
)

def units():
    """Declares :linked_units in the root of Abseil's archive."""
    for name, srcs in _UNITS.items():
        joined_source(
            name = "unit_" + name,
            srcs = [_label("absl/" + src) for src in srcs],
            distinct = _DISTINCT,
        )
    _cc_library(
        name = "units",
        srcs = [":unit_" + name for name in _UNITS],
        features = ["-layering_check"],
        # Its sources include headers beside them.
        includes = ["absl/time/internal/cctz/src"],
        linkopts = ["-pthread"],
        textual_hdrs = ["//%s:headers" % package for package in ABSEIL_PACKAGES],
    )
    _linked(name = "linked_units", library = ":units")
