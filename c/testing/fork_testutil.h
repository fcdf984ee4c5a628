#ifndef QUERN_C_TESTING_FORK_TESTUTIL_H_
#define QUERN_C_TESTING_FORK_TESTUTIL_H_

// Test utility: parallel_for of an executor, as it should be and as it must not
// be.

#include <cstdint>

#include "quern/c/quern.h"

namespace quern {

// Runs the tasks backwards, on two workers in turn.
inline void ForkWell(void*, int64_t n, quern_task run, void* context) {
  for (int64_t t = n; t-- > 0;) run(context, t, static_cast<int32_t>(t % 2));
}

// Leaves tasks out, runs others twice, and makes tasks and a worker up.
inline void ForkBadly(void*, int64_t n, quern_task run, void* context) {
  for (int64_t t = -1; t <= n; t += 2) run(context, t, 0);
  run(context, 0, 1);
  run(context, 0, 2);
}

}  // namespace quern

#endif  // QUERN_C_TESTING_FORK_TESTUTIL_H_
