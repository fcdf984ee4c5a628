"""What Bazel 4.2 has built in, under names that may be assigned to others."""

BUILTIN_CC_INFO = CcInfo
