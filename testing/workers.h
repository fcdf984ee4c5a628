#ifndef QUERN_TESTING_WORKERS_H_
#define QUERN_TESTING_WORKERS_H_

#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "quern/core/threads/hwy_executor.h"

namespace quern {

// A pool of so many workers, or a failure of the running test.
inline std::unique_ptr<HwyExecutor> Workers(int workers) {
  auto executor = HwyExecutor::Create(workers, HwyExecutor::Sharing::kAll);
  if (!executor.ok()) {
    ADD_FAILURE() << executor.status();
    return nullptr;
  }
  return *std::move(executor);
}

}  // namespace quern

#endif  // QUERN_TESTING_WORKERS_H_
