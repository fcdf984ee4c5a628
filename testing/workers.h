#ifndef QUERN_TESTING_WORKERS_H_
#define QUERN_TESTING_WORKERS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "gtest/gtest.h"
#include "quern/core/hwy_executor.h"

namespace quern {

// A pool whose threads have all started. Threads allocate while they start, and
// some do it after Create has returned: EXPECT_NO_ALLOCATION around the first
// use of a pool once counted that as the kernel's.
inline std::unique_ptr<HwyExecutor> Workers(int workers) {
  auto executor = HwyExecutor::Create(workers);
  if (!executor.ok()) {
    ADD_FAILURE() << executor.status();
    return nullptr;
  }
  // Ends when all workers have been there; idle is said by the last thread.
  (*executor)->ParallelFor(workers, [](int64_t, int) {});
  while (!(*executor)->idle()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return *std::move(executor);
}

}  // namespace quern

#endif  // QUERN_TESTING_WORKERS_H_
