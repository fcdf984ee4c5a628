#ifndef QUERN_CORE_VERSION_H_
#define QUERN_CORE_VERSION_H_

// The version of these sources, for programs that compile against more than
// one:
//
//   #if QUERN_VERSION_MAJOR == 0 && QUERN_VERSION_MINOR < 4
//
// Versions follow SemVer (https://semver.org); docs/bazel.md says what that
// promises. The string ends in -dev in sources between two releases; the
// numbers are then those of the release to come. Whatever else has the version
// is compared with this file by //core:version_test or derived from it.

#define QUERN_VERSION_MAJOR 0
#define QUERN_VERSION_MINOR 4
#define QUERN_VERSION_PATCH 0
#define QUERN_VERSION_STRING "0.4.0-dev"

#endif  // QUERN_CORE_VERSION_H_
