// vLLM's operators of attention by name: one step through all three against
// attention in double.

#include "quern/ops/registry/vllm/attention_ops.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/cache/page_table.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/vllm/attention_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

class VllmAttentionOpsTest : public VllmAttentionFixture {};
QUERN_INSTANTIATE_ISA_TEST(VllmAttentionOpsTest);

TEST_P(VllmAttentionOpsTest, AStepMatchesTheReference) {
  // Pages in pairs and in plain rows: of whole groups, of none, odd head_dim.
  for (const int64_t page_size : {16, 32, 5}) {
    StepCase c;
    c.heads = Grouped(16);
    c.page_size = page_size;
    ExpectMatchesReference<float, float, float>(c, kStep);
    ExpectMatchesReference<BFloat16, BFloat16, BFloat16>(c, kStep);
    ExpectMatchesReference<Float16, Float16, Float16>(c, kStep);
    c.heads = Grouped(13, 24);
    ExpectMatchesReference<float, BFloat16, float>(c, kStep);
  }
}

TEST_P(VllmAttentionOpsTest, EveryFeatureMatchesTheReference) {
  StepCase c;
  c.heads = Grouped(16);
  c.heads.scale = 0.5f;
  c.heads.soft_cap = 3;
  c.heads.sinks = {-1, 0, 1, 2};
  ExpectMatchesReference<float, float, float>(c, kStep);
  ExpectMatchesReference<BFloat16, BFloat16, BFloat16>(c, kStep);
  c.heads.soft_cap = 0;
  c.heads.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  ExpectMatchesReference<float, BFloat16, float>(c, kStep);
  // A window of one key shows the query's own.
  for (const int64_t window : {1, 7, 1000}) {
    c.window = window;
    ExpectMatchesReference<float, float, float>(c, kStep);
  }
}

TEST_P(VllmAttentionOpsTest, CausalFlagsOfRequestsMatchTheReference) {
  StepCase c;
  c.heads = Grouped(16);
  c.dynamic = true;
  const std::vector<Lengths> mixed = {{5, 37}, {4, 18, false}, {6, 6, false}};
  ExpectMatchesReference<float, float, float>(c, mixed);
  c.window = 3;
  ExpectMatchesReference<float, float, float>(c, mixed);
}

TEST_P(VllmAttentionOpsTest, Fp8CachesMeanTheirCodesTimesTheScales) {
  StepCase c;
  c.heads = Grouped(16);
  c.k_scale = 0.5f;
  c.v_scale = 0.25f;
  for (const int64_t page_size : {16, 3}) {
    c.page_size = page_size;
    for (const char* e4m3 : {"fp8", "fp8_e4m3"}) {
      c.kv_cache_dtype = e4m3;
      ExpectMatchesReference<BFloat16, Float8E4M3, float>(c, kStep);
    }
    c.kv_cache_dtype = "fp8_e5m2";
    ExpectMatchesReference<float, Float8E5M2, float>(c, kStep);
  }
}

// The pages before a window may be missing, and vLLM's null block stands for
// them as well.
TEST_P(VllmAttentionOpsTest, PagesBeforeTheWindowAreNotRead) {
  StepCase c;
  c.heads = Grouped(16);
  c.window = 4;
  for (const int32_t gone : {kNoPage, 0}) {
    StepData<float, float> d = DataOf<float, float>(c, {{2, 60}});
    std::vector<float> want, got;
    RunStep("simd", c, d, &want);
    // Query 58 sees the keys from 55 on, in page 3.
    for (size_t p = 0; p < 3; ++p) d.table[p] = gone;
    RunStep("simd", c, d, &got);
    EXPECT_TRUE(AllBitsEqual(got, want));
  }
}

TEST_P(VllmAttentionOpsTest, TheLimitsNeedNoLessThanAStep) {
  StepCase c;
  c.heads = Grouped(16);
  StepData<float, float> d = DataOf<float, float>(c, kStep);
  SchedulerMetadata metadata;
  Schedule(c, d, DType::kF32, &metadata);
  const MadeOp op = Make(
      "simd", "cpu_attention_with_kv_cache",
      AttentionArgs(c, d, DType::kF32, DType::kF32, DType::kF32, &metadata));
  const int64_t step = *op.op->WorkspaceBytes(9, 2);
  metadata.limits.max_sequences = 4;
  metadata.limits.max_kv_len = 37;
  EXPECT_GE(*op.op->WorkspaceBytes(9, 2), step);
  metadata.limits.max_kv_len = -1;
  ExpectRefusal(op.op->WorkspaceBytes(9, 2).status(), "max_kv_len=-1");
}

// Every step within the limits runs in the workspace of the limits, which lies
// between guard pages.
TEST_P(VllmAttentionOpsTest, OneWorkspaceServesAllStepsWithinTheLimits) {
  constexpr int64_t kMostTokens = 9;
  StepCase c;
  c.heads = Grouped(16);
  limits_.max_sequences = 4;
  limits_.max_kv_len = 700;
  int64_t bytes = 0;
  for (const char* provider : kAttentionProviders) {
    StepData<float, float> d = DataOf<float, float>(c, {{1, 1}});
    SchedulerMetadata metadata;
    metadata.limits = limits_;
    Schedule(c, d, DType::kF32, &metadata);
    const MadeOp op = Make(
        provider, "cpu_attention_with_kv_cache",
        AttentionArgs(c, d, DType::kF32, DType::kF32, DType::kF32, &metadata));
    bytes = std::max(bytes, op.op->WorkspaceBytes(kMostTokens, 1).value());
  }
  GuardBuffer<float> memory(RoundUp(bytes, AlignedBuffer::kAlignment) / 4);
  shared_.emplace(memory.data(), static_cast<size_t>(bytes));
  const std::vector<std::vector<Lengths>> steps = {
      kStep,
      {{1, 700}},                            // the longest sequence
      {{1, 700}, {1, 1}, {1, 700}, {1, 9}},  // the most of them
      {{9, 9}},                              // a whole prompt
      {{9, 700}},
      {{3, 640}, {0, 700}, {6, 513}},
      {{1, 1}}};
  for (const std::vector<Lengths>& step : steps) {
    SCOPED_TRACE(testing::Message() << step.size() << " requests, the first of "
                                    << step[0].kv_len << " keys");
    ExpectMatchesReference<float, float, float>(c, step);
  }
}

}  // namespace
}  // namespace quern
