// What Execute of attention takes is never more than WorkspaceBytes said, for 1
// to 256 workers: each run has a workspace of exactly that size in a
// GuardBuffer (attention/testing/paged_attention_testutil.h).

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/attention/varlen_attention.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

constexpr int kMostWorkers = 256;

Heads SmallHeads() {
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = 20;
  return heads;
}

class AttentionWorkspaceTest : public IsaTest {
 protected:
  template <typename Q, typename Kv>
  void ExpectPagedStays(const Heads& heads, Variant variant,
                        const std::vector<Lengths>& lengths, int step) {
    TestRng rng;
    std::vector<Sequence> batch;
    for (const Lengths& length : lengths) {
      batch.push_back(RandomSequence<Q, Kv>(rng, heads, length));
    }
    using Run = Attention<Q, Kv, float>;
    const Run alone(heads, variant, batch);
    EXPECT_RAN_ON(alone.plan());
    const auto want = alone.result();
    for (int workers = 1; workers <= kMostWorkers; workers += step) {
      ManyWorkers executor(workers);
      variant.executor = &executor;
      variant.schedule_workers = workers;
      const Run run(heads, variant, batch);
      ASSERT_TRUE(AllBitsEqual(run.result().out, want.out))
          << workers << " workers";
      if (workers == 1 || workers == 256) {
        ExpectBytesGrow(run.plan(), run.args().schedule);
      }
      // A schedule for one, executed by many.
      variant.schedule_workers = 1;
      const Run other(heads, variant, batch);
      ASSERT_TRUE(AllBitsEqual(other.result().out, want.out))
          << workers << " workers, planned for one";
    }
  }

  // A workspace for many workers serves fewer.
  template <typename Plan>
  void ExpectBytesGrow(const Plan& plan, const AttentionSchedule& schedule) {
    int64_t fewer = 0;
    for (int workers = 1; workers <= kMostWorkers; ++workers) {
      const auto bytes = plan.WorkspaceBytes(schedule, workers);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      ASSERT_GE(*bytes, fewer) << workers << " workers";
      fewer = *bytes;
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(AttentionWorkspaceTest);

TEST_P(AttentionWorkspaceTest, PagedAttentionTakesWhatItSaid) {
  ExpectPagedStays<BFloat16, BFloat16>(
      SmallHeads(), Variant(), {{1, 600}, {5, 40}, {0, 10}, {33, 33}, {1, 0}},
      15);
}

TEST_P(AttentionWorkspaceTest, PagedAttentionOfEveryFormTakesWhatItSaid) {
  Variant variant;
  variant.form = KvForm::kPaired;
  ExpectPagedStays<BFloat16, BFloat16>(SmallHeads(), variant,
                                       {{1, 600}, {17, 40}}, 51);
  variant.form = KvForm::kPlain;
  variant.scaling = KvScaling::kPerTokenHead;
  ExpectPagedStays<float, int8_t>(SmallHeads(), variant, {{1, 600}, {17, 40}},
                                  51);
  variant = Variant();
  variant.prefix_groups = {{0, 3, 256}};
  variant.prefix_members = {0, 1, 2};
  std::vector<Lengths> shared(3, Lengths{1, 600});
  ExpectPagedStays<float, float>(SmallHeads(), variant, shared, 51);
}

TEST_P(AttentionWorkspaceTest, VarlenAttentionTakesWhatItSaid) {
  TestRng rng;
  VarlenAttentionSpec spec;
  spec.q_heads = 4;
  spec.kv_heads = 2;
  spec.head_dim = 20;
  const auto plan = VarlenAttentionPlan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_RAN_ON(*plan);
  const std::vector<int32_t> cu_q = {0, 1, 1, 34, 134};
  const std::vector<int32_t> cu_kv = {0, 600, 607, 640, 740};
  const auto q = UniformReals<float>(rng, 134 * 4 * 20);
  const auto k = UniformReals<float>(rng, 740 * 2 * 20);
  const auto v = UniformReals<float>(rng, 740 * 2 * 20);
  std::vector<float> want;
  for (int workers = 1; workers <= kMostWorkers; workers += 5) {
    VarlenAttentionStorage storage;
    VarlenAttentionArgs args;
    args.schedule =
        plan->BuildSchedule(cu_q, cu_kv, VarlenMask::kCausal, workers, storage)
            .value();
    args.q = TensorView<const float, 3>(q.data(), {134, 4, 20}, {80, 20, 1});
    args.k = TensorView<const float, 3>(k.data(), {740, 2, 20}, {40, 20, 1});
    args.v = TensorView<const float, 3>(v.data(), {740, 2, 20}, {40, 20, 1});
    GuardBuffer<float> out(134 * 4 * 20);
    args.out = TensorView<float, 3>(out.data(), {134, 4, 20}, {80, 20, 1});
    ASSERT_EQ(plan->CheckArgs(args), absl::OkStatus());
    GuardBuffer<uint8_t> memory(
        plan->WorkspaceBytes(args.schedule, workers).value());
    ManyWorkers executor(workers);
    plan->Execute(args,
                  Workspace(memory.data(), static_cast<size_t>(memory.size())),
                  executor);
    if (want.empty()) want = out.ToVector();
    ASSERT_TRUE(AllBitsEqual(out.ToVector(), want)) << workers << " workers";
    if (workers % 100 == 1) ExpectBytesGrow(*plan, args.schedule);
  }
}

}  // namespace
}  // namespace quern
