#ifndef CORE_CHECK_H_
#define CORE_CHECK_H_

#include <cstdio>

#include "absl/status/status.h"

// Returns whether `status` is OK, and prints it otherwise.
inline bool Check(const absl::Status& status) {
  if (status.ok()) return true;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return false;
}

#endif  // CORE_CHECK_H_
