// What paged attention refuses, but for the arguments of
// paged_attention_args_test.cc.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/testing/schedule_testutil.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

TEST(PagedAttentionPlanTest, RefusesASpecThatMakesNoSense) {
  using Change = void (*)(AttentionSpec&);
  const struct {
    Change change;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {[](AttentionSpec& s) { s.kv = KvLayout(); },
       absl::StatusCode::kInvalidArgument, "kv layout is empty"},
      {[](AttentionSpec& s) { s.q_heads = 0; },
       absl::StatusCode::kInvalidArgument, "q_heads=0; need 1 <= q_heads"},
      {[](AttentionSpec& s) { s.q_heads = -4; },
       absl::StatusCode::kInvalidArgument, "q_heads=-4"},
      {[](AttentionSpec& s) { s.q_heads = 5; },
       absl::StatusCode::kInvalidArgument,
       "q_heads=5; need a multiple of kv_heads=2"},
      {[](AttentionSpec& s) { s.q_dtype = DType::kI8; },
       absl::StatusCode::kUnimplemented,
       "q_dtype is i8; need f32, bf16 or f16"},
      {[](AttentionSpec& s) { s.out_dtype = DType::kF8E5M2; },
       absl::StatusCode::kUnimplemented,
       "out_dtype is f8e5m2; need f32, bf16 or f16"},
      {[](AttentionSpec& s) { s.window_left = -2; },
       absl::StatusCode::kInvalidArgument, "window_left=-2; need"},
      {[](AttentionSpec& s) { s.soft_cap = -1; },
       absl::StatusCode::kInvalidArgument,
       "soft_cap=-1; need 0 or a number above it of at most 1e38"},
      {[](AttentionSpec& s) { s.soft_cap = std::nanf(""); },
       absl::StatusCode::kInvalidArgument, "soft_cap=nan"},
      {[](AttentionSpec& s) { s.scale = std::nanf(""); },
       absl::StatusCode::kInvalidArgument, "need a finite number"},
      {[](AttentionSpec& s) { s.scale = -3e38f; },
       absl::StatusCode::kInvalidArgument, "scale=-3e+38; need a finite"},
      {[](AttentionSpec& s) { s.soft_cap = 3e38f; },
       absl::StatusCode::kInvalidArgument, "soft_cap=3e+38; need 0"},
  };
  for (const auto& c : kCases) {
    AttentionSpec spec = GoodSpec();
    c.change(spec);
    const absl::Status status = PagedAttentionPlan::Create(spec).status();
    EXPECT_EQ(status.code(), c.code) << c.words;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
    EXPECT_THAT(status.message(), HasSubstr("paged_attention: "));
  }
}

// Debug builds call CheckArgs inside Execute, which allocates nothing.
TEST(PagedAttentionPlanTest, ChecksWithoutAllocating) {
  KvLayoutSpec layout;
  layout.dtype = DType::kI8;
  layout.scaling = KvScaling::kPerTokenHead;
  layout.kv_heads = 2;
  layout.page_size = 16;
  layout.head_dim = 8;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = 4;
  const auto plan = PagedAttentionPlan::Create(spec).value();
  AttentionScheduleStorage storage;
  PageTableStorage pages;
  pages.Append({1, 0});
  pages.Append({2});
  const std::vector<float> q(3 * 4 * 8);
  std::vector<float> out(3 * 4 * 8), lse(3 * 4);
  std::vector<float> cache(static_cast<size_t>(3 * spec.kv.page_bytes()));
  PagedAttentionArgs args;
  args.q = TensorView<const float, 3>(q.data(), {3, 4, 8}, {32, 8, 1});
  args.out = TensorView<float, 3>(out.data(), {3, 4, 8}, {32, 8, 1});
  args.lse = DenseMatrix(lse.data(), 3, 4);
  args.kv = KvCacheView(spec.kv, 3, cache.data());
  args.pages = pages.Build(16, 3).value();
  args.schedule =
      AttentionSchedule::Build(spec, {1, 2}, {20, 16}, 1, storage).value();
  absl::Status status;
  EXPECT_NO_ALLOCATION(status = plan.CheckArgs(args));
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PagedAttentionPlanDeathTest, ChecksItsArgumentsInDebugBuilds) {
#ifndef NDEBUG
  const AttentionSpec spec = GoodSpec();
  const auto plan = PagedAttentionPlan::Create(spec).value();
  AttentionScheduleStorage storage;
  PageTableStorage pages;
  pages.Append({0});
  const std::vector<float> q(4 * 8);
  std::vector<float> out(4 * 4);
  std::vector<float> cache(static_cast<size_t>(spec.kv.page_bytes()));
  PagedAttentionArgs args;
  args.q = TensorView<const float, 3>(q.data(), {1, 4, 8}, {32, 8, 1});
  args.out = TensorView<float, 3>(out.data(), {1, 4, 4}, {16, 4, 1});
  args.kv = KvCacheView(spec.kv, 1, cache.data());
  args.pages = pages.Build(16, 1).value();
  args.schedule = AttentionSchedule::Build(spec, {1}, {17}, 1, storage).value();
  AlignedBuffer scratch =
      AlignedBuffer::Create(plan.WorkspaceBytes(args.schedule, 1).value())
          .value();
  InlineExecutor executor;
  EXPECT_DEATH(plan.Execute(args, Workspace(scratch), executor),
               "paged_attention: sequence 0: kv_len=17; need kv_len <= 16");
#else
  GTEST_SKIP() << "QUERN_DCHECK is off";
#endif
}

// A cache of no pages has no scales either.
TEST(PagedAttentionPlanTest, NoPageIsEnoughForNoKey) {
  KvLayoutSpec layout;
  layout.dtype = DType::kI8;
  layout.scaling = KvScaling::kPerTensor;
  layout.kv_heads = 1;
  layout.page_size = 16;
  layout.head_dim = 8;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = 1;
  const auto plan = PagedAttentionPlan::Create(spec).value();
  AttentionScheduleStorage storage;
  PageTableStorage pages;
  pages.Append({});
  const std::vector<float> q(8, 1.0f);
  std::vector<float> out(8, 1.0f);
  PagedAttentionArgs args;
  args.q = TensorView<const float, 3>(q.data(), {1, 1, 8}, {8, 8, 1});
  args.out = TensorView<float, 3>(out.data(), {1, 1, 8}, {8, 8, 1});
  args.kv = KvCacheView(spec.kv, 0, nullptr);
  args.pages = pages.Build(layout.page_size, 0).value();
  args.schedule = AttentionSchedule::Build(spec, {1}, {0}, 1, storage).value();
  ASSERT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
  const int64_t bytes = plan.WorkspaceBytes(args.schedule, 1).value();
  AlignedBuffer scratch = AlignedBuffer::Create(bytes).value();
  InlineExecutor executor;
  plan.Execute(args, Workspace(scratch.data(), bytes), executor);
  for (const float value : out) EXPECT_EQ(value, 0.0f);
}

TEST(PagedAttentionPlanTest, RefusesPrefixesOfOtherPages) {
  KvLayoutSpec layout;
  layout.kv_heads = 1;
  layout.head_dim = 8;
  layout.page_size = 128;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = 1;
  const PagedAttentionPlan plan = PagedAttentionPlan::Create(spec).value();
  constexpr int64_t kPages = 8;
  std::vector<float> cache(static_cast<size_t>(kPages * spec.kv.page_bytes()));
  std::vector<float> q(3 * 8), out(3 * 8);
  const std::vector<int64_t> q_lens = {1, 1, 1}, kv_lens = {300, 260, 384};
  const std::vector<PrefixGroup> groups = {{0, 2, 256}};
  const std::vector<int32_t> members = {2, 0};
  AttentionScheduleStorage storage;
  PagedAttentionArgs args;
  args.schedule =
      AttentionSchedule::Build(spec, {q_lens, kv_lens, {}, groups, members},
                               AttentionTiles(), 1, storage)
          .value();
  args.q = TensorView<const float, 3>(q.data(), {3, 1, 8}, {8, 8, 1});
  args.out = TensorView<float, 3>(out.data(), {3, 1, 8}, {8, 8, 1});
  args.kv = KvCacheView(spec.kv, kPages, cache.data());
  const auto check = [&](const std::vector<int32_t>& ids) {
    PageTableStorage pages;
    pages.page_ids = ids;
    pages.indptr = {0, 3, 6, 9};
    args.pages = pages.Build(layout.page_size, kPages).value();
    return plan.CheckArgs(args);
  };
  const absl::Status same = check({0, 1, 2, 3, 4, 5, 0, 1, 6});
  EXPECT_TRUE(same.ok()) << same;
  const absl::Status other = check({0, 2, 2, 3, 4, 5, 0, 1, 6});
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      other.message(),
      ::testing::HasSubstr("sequences 2 and 0 share a prefix of 256 tokens in "
                           "the schedule, but 1 and 2 are their pages 1; need "
                           "the same"));
}

TEST(PagedAttentionPlanTest, RefusesAWorkspaceTooLargeToCount) {
  KvLayoutSpec layout;
  layout.kv_heads = 1;
  layout.head_dim = 1 << 30;
  layout.page_size = 1;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = 2147483647;
  const auto plan = PagedAttentionPlan::Create(spec).value();
  AttentionScheduleStorage storage;
  const auto schedule =
      AttentionSchedule::Build(spec, {1}, {1}, 1, storage).value();
  const auto bytes = plan.WorkspaceBytes(schedule, 100);
  EXPECT_EQ(bytes.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(bytes.status().message(), HasSubstr("100 workers"));
}

TEST(PagedAttentionPlanTest, RefusesAWorkspaceForNobody) {
  const auto plan = PagedAttentionPlan::Create(GoodSpec()).value();
  const auto bytes = plan.WorkspaceBytes(AttentionSchedule(), 0);
  EXPECT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(bytes.status().message(), HasSubstr("num_workers=0"));
  EXPECT_EQ(plan.WorkspaceBytes(AttentionSchedule(), 2).value(), 0);
}

}  // namespace
}  // namespace quern
