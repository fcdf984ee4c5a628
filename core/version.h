#ifndef QUERN_CORE_VERSION_H_
#define QUERN_CORE_VERSION_H_

// The version of these sources, for programs that compile against more than
// one:
//
//   #if QUERN_VERSION_MAJOR == 0 && QUERN_VERSION_MINOR < 3
//
// Versions follow SemVer (https://semver.org); docs/bazel.md says what that
// promises. MODULE.bazel has the same version.

#define QUERN_VERSION_MAJOR 0
#define QUERN_VERSION_MINOR 2
#define QUERN_VERSION_PATCH 0
#define QUERN_VERSION_STRING "0.2.0"

#endif  // QUERN_CORE_VERSION_H_
