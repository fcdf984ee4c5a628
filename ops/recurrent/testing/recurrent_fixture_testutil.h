#ifndef QUERN_OPS_RECURRENT_TESTING_RECURRENT_FIXTURE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_TESTING_RECURRENT_FIXTURE_TESTUTIL_H_

#include <cstddef>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {

// Makes plans of one operator and runs them on test data, which have
// args(sequences). kWorkspace: Execute takes a workspace.
template <typename AnyPlan, bool kWorkspace = true>
class RecurrentFixture : public IsaTest {
 protected:
  template <typename Spec>
  AnyPlan Plan(const Spec& spec) {
    auto plan = AnyPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }
  template <typename Data>
  void Run(const AnyPlan& plan, const Data& data, const Sequences& sequences,
           Executor& executor) {
    Execute(plan, data.args(sequences), executor);
  }
  template <typename Data>
  void Run(const AnyPlan& plan, const Data& data, const Sequences& sequences) {
    InlineExecutor executor;
    Run(plan, data, sequences, executor);
  }
  // On a workspace of exactly as many bytes as the plan asks for, all NaN.
  template <typename Args>
  void Execute(const AnyPlan& plan, const Args& args, Executor& executor) {
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    if constexpr (kWorkspace) {
      const auto bytes =
          plan.WorkspaceBytes(args.out.extent(0), executor.num_workers());
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      GuardBuffer<float> memory(*bytes / 4);
      const Workspace workspace(memory.data(), static_cast<size_t>(*bytes));
      EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
    } else {
      EXPECT_NO_ALLOCATION(plan.Execute(args, executor));
    }
  }
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_TESTING_RECURRENT_FIXTURE_TESTUTIL_H_
