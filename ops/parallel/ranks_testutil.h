#ifndef QUERN_OPS_PARALLEL_RANKS_TESTUTIL_H_
#define QUERN_OPS_PARALLEL_RANKS_TESTUTIL_H_

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/testing/no_alloc.h"

namespace quern {

// Calls fn(communicator) for each of `ranks` ranks, each on its own thread.
inline void RunRanks(int ranks,
                     absl::FunctionRef<void(ThreadCommunicator&)> fn) {
  auto group = ThreadCommunicator::CreateGroup(ranks);
  ASSERT_TRUE(group.ok()) << group.status();
  std::vector<std::thread> threads;
  for (const auto& communicator : *group) {
    threads.emplace_back([&fn, c = communicator.get()] { fn(*c); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Memory for the workspace that `plan` needs for max_m rows.
template <typename Plan>
AlignedBuffer ScratchOf(const Plan& plan, int64_t max_m,
                        const Executor& executor) {
  const auto bytes = plan.WorkspaceBytes(max_m, executor.num_workers());
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  auto scratch = AlignedBuffer::Create(bytes.value_or(0));
  EXPECT_TRUE(scratch.ok()) << scratch.status();
  return *std::move(scratch);
}

// Expects `calls` to allocate nothing the second time, on all ranks. The first
// time, a thread may allocate when it first waits.
inline void ExpectNoAllocation(ThreadCommunicator& c,
                               absl::FunctionRef<void()> calls) {
  calls();
  c.Barrier();
  if (c.rank() == 0) {
    // The barrier makes the other ranks finish before the scope ends.
    EXPECT_NO_ALLOCATION(calls(); c.Barrier());
  } else {
    calls();
    c.Barrier();
  }
  c.Barrier();
}

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_RANKS_TESTUTIL_H_
