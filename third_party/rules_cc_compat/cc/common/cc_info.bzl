"""CcInfo, as rules_cc 0.0.17 exports it."""

load(":builtins.bzl", "BUILTIN_CC_INFO")

CcInfo = BUILTIN_CC_INFO
