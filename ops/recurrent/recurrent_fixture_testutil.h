#ifndef QUERN_OPS_RECURRENT_RECURRENT_FIXTURE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_RECURRENT_FIXTURE_TESTUTIL_H_

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/ops/recurrent/sequences_testutil.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {

// Makes plans of one operator and runs them on test data, which have
// args(sequences).
template <typename AnyPlan>
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
    const auto args = data.args(sequences);
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.Execute(args, executor));
  }
  template <typename Data>
  void Run(const AnyPlan& plan, const Data& data, const Sequences& sequences) {
    InlineExecutor executor;
    Run(plan, data, sequences, executor);
  }
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_RECURRENT_FIXTURE_TESTUTIL_H_
