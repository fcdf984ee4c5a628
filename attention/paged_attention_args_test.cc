// Which arguments and pages paged attention refuses.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
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

// A plan, and arguments that it accepts.
class PagedAttentionArgsTest : public testing::Test {
 protected:
  PagedAttentionArgsTest() {
    pages.Append({1, 0});
    pages.Append({2});
    good.q = TensorView<const float, 3>(q.data(), {3, 4, 8}, {32, 8, 1});
    good.out = TensorView<float, 3>(out.data(), {3, 4, 4}, {16, 4, 1});
    good.lse = DenseMatrix(lse.data(), 3, 4);
    good.kv = KvCacheView(spec.kv, 3, cache.data());
    good.pages = pages.Build(16, 3).value();
    good.schedule =
        AttentionSchedule::Build(spec, {1, 2}, {20, 16}, 1, storage).value();
    EXPECT_TRUE(plan.CheckArgs(good).ok()) << plan.CheckArgs(good);
  }

  void ExpectRefused(const PagedAttentionArgs& args, const char* words) {
    const absl::Status status = plan.CheckArgs(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(status.message(), HasSubstr(words));
  }

  const AttentionSpec spec = GoodSpec();
  const PagedAttentionPlan plan = PagedAttentionPlan::Create(spec).value();
  AttentionScheduleStorage storage;
  PageTableStorage pages;
  std::vector<float> q = std::vector<float>(3 * 4 * 8);
  std::vector<float> out = std::vector<float>(3 * 4 * 4);
  std::vector<float> lse = std::vector<float>(3 * 4);
  std::vector<uint8_t> cache =
      std::vector<uint8_t>(static_cast<size_t>(3 * spec.kv.page_bytes()));
  PagedAttentionArgs good;
};

TEST_F(PagedAttentionArgsTest, RefusesRowsThatDoNotFit) {
  const std::vector<BFloat16> bf16(3 * 4 * 8);
  PagedAttentionArgs args = good;
  args.q = TensorView<const float, 3>(q.data(), {2, 4, 8}, {32, 8, 1});
  ExpectRefused(args, "q.extent(0)=2; need 3");
  args.q = TensorView<const float, 3>(q.data(), {3, 2, 8}, {32, 8, 1});
  ExpectRefused(args, "q.extent(1)=2; need 4");
  args.q = TensorView<const float, 3>(q.data(), {3, 4, 4}, {32, 8, 1});
  ExpectRefused(args, "q.extent(2)=4; need 8");
  args.q = DenseMatrix<const float>(q.data(), 3, 32);
  ExpectRefused(args, "q.rank=2; need 3");
  args.q = TensorView<const BFloat16, 3>(bf16.data(), {3, 4, 8}, {32, 8, 1});
  ExpectRefused(args, "q is bf16; need f32");
  args.q = AnyTensorView(DType::kF32, static_cast<const void*>(q.data()), 3,
                         {3, 4, 8}, {32, 1, 4});
  ExpectRefused(args, "q has stride 4 in dimension 2; need 1");
  args = good;
  args.out = TensorView<const float, 3>(out.data(), {3, 4, 4}, {16, 4, 1});
  ExpectRefused(args, "out is read-only");
  args.out = TensorView<float, 3>(q.data(), {3, 4, 8}, {32, 8, 1});
  ExpectRefused(args, "out.extent(2)=8; need 4");
  args = good;
  args.lse = DenseMatrix(lse.data(), 4, 3);
  ExpectRefused(args, "lse.extent(0)=4; need 3");
  args.lse = MatrixView<float>(lse.data(), {3, 4}, {3, 1});
  ExpectRefused(args, "lse has stride 3 in dimension 0; need 4");
  args.lse = DenseMatrix(out.data() + 47, 3, 4);
  ExpectRefused(args, "lse overlaps out");
  args.lse = DenseMatrix(q.data(), 3, 4);
  ExpectRefused(args, "lse overlaps q");
  args = good;
  args.q = TensorView<const float, 3>(nullptr, {3, 4, 8}, {32, 8, 1});
  ExpectRefused(args, "q is null");
  args.q = TensorView<const float, 3>(q.data(), {3, 4, 8}, {32, -8, 1});
  ExpectRefused(args, "q has stride -8 in dimension 1");
  args = good;
  args.out = TensorView<float, 3>(nullptr, {3, 4, 4}, {16, 4, 1});
  ExpectRefused(args, "out is null");
  args.out = TensorView<float, 3>(out.data(), {3, 4, 4}, {0, 0, 1});
  ExpectRefused(args, "out has strides 0 and 0; need rows of 4");
  args.out = TensorView<float, 3>(out.data(), {3, 4, 4}, {15, 4, 1});
  ExpectRefused(args, "out has strides 15 and 4");
  args.out = TensorView<float, 3>(out.data(), {3, 4, 4}, {4, 12, 1});
  EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);  // by head
  args.out = TensorView<float, 3>(q.data() + 95, {3, 4, 4}, {16, 4, 1});
  ExpectRefused(args, "out overlaps q");
  auto* in_cache = reinterpret_cast<float*>(cache.data());
  args.out = TensorView<float, 3>(in_cache, {3, 4, 4}, {16, 4, 1});
  ExpectRefused(args, "keys of the cache overlaps out");
  args = good;
  args.lse = DenseMatrix(in_cache, 3, 4);
  ExpectRefused(args, "keys of the cache overlaps lse");
  args = good;
  const std::vector<float> three(3);
  args.alibi_slopes = three;
  ExpectRefused(args, "alibi_slopes.size()=3; need 4");
  args = good;
  args.sinks = three;
  ExpectRefused(args, "sinks.size()=3; need 4");
}

TEST_F(PagedAttentionArgsTest, RefusesSlopesWithDrafts) {
  const std::vector<int64_t> q_lens = {1, 2}, kv_lens = {20, 16};
  const std::vector<int64_t> draft_lens = {0, 2};
  const std::vector<uint64_t> masks = {1, 3};
  AttentionBatch batch = {q_lens, kv_lens, {}, {}, {}, draft_lens, masks};
  AttentionScheduleStorage drafts;
  PagedAttentionArgs args = good;
  args.schedule =
      AttentionSchedule::Build(spec, batch, AttentionTiles(), 1, drafts)
          .value();
  EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
  const std::vector<float> slopes(4);
  args.alibi_slopes = slopes;
  const absl::Status status = plan.CheckArgs(args);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(),
              HasSubstr("alibi_slopes are given, and the schedule has 2 drafts"
                        "; need one or the other"));
}

TEST_F(PagedAttentionArgsTest, RefusesAnotherCacheOrOtherPages) {
  PageTableStorage few_pages, many_pages;
  few_pages.Append({1});
  few_pages.Append({2});
  many_pages.Append({1, 7});
  many_pages.Append({2});
  PagedAttentionArgs args = good;
  args.kv = KvCacheView(spec.kv, 3, nullptr);
  ExpectRefused(args, "the keys of the cache are null; need memory for 3");
  args = good;
  KvLayoutSpec other_layout;
  other_layout.dtype = DType::kF16;
  other_layout.kv_heads = 2;
  other_layout.head_dim = 8;
  other_layout.v_head_dim = 4;
  other_layout.page_size = 16;
  args.kv =
      KvCacheView(KvLayout::Create(other_layout).value(), 3, cache.data());
  ExpectRefused(args, "another layout");
  args = good;
  args.pages = pages.Build(8, 3).value();
  ExpectRefused(args, "pages.page_size=8; need 16");
  args.pages = many_pages.Build(16, 8).value();
  ExpectRefused(args, "pages.num_pages=8");
  args.pages = few_pages.Build(16, 3).value();
  ExpectRefused(args, "sequence 0: kv_len=20; need kv_len <= 16");
  args.pages = PageTable();
  ExpectRefused(args, "pages.num_sequences=0; need 2");
}

TEST_F(PagedAttentionArgsTest, RefusesTheScheduleOfAnotherSpec) {
  AttentionScheduleStorage other_storage;
  PagedAttentionArgs args = good;
  AttentionSpec other = spec;
  other.q_heads = 8;
  args.schedule =
      AttentionSchedule::Build(other, {1, 2}, {20, 16}, 1, other_storage)
          .value();
  ExpectRefused(args, "schedule.group=4; need 2");
  other = spec;
  other.window_left = 7;
  args.schedule =
      AttentionSchedule::Build(other, {1, 2}, {20, 16}, 1, other_storage)
          .value();
  ExpectRefused(args, "sequence 0 of the schedule sees 7 tokens before");
  other = spec;
  other.window_right = 3;
  const uint8_t bidirectional[] = {1, 0};
  args.schedule =
      AttentionSchedule::Build(other, {{1, 2}, {20, 16}, bidirectional},
                               AttentionTiles(), 1, other_storage)
          .value();
  ExpectRefused(args, "sequence 1 of the schedule sees 1073741824 tokens");
}

// The pages of a step, for which Execute stops rather than read through
// kNoPage.
TEST(CheckPagesTest, RefusesMissingPagesThatAQuerySees) {
  AttentionSpec spec = GoodSpec();
  AttentionScheduleStorage storage;
  // Keys 0 to 31 of sequence 1 are gone.
  PageTableStorage pages;
  pages.Append({1});
  pages.Append({kNoPage, kNoPage, 2, 0});
  const PageTable table = pages.Build(16, 3).value();
  const auto build = [&](absl::Span<const int64_t> q_lens,
                         absl::Span<const int64_t> kv_lens) {
    return AttentionSchedule::Build(spec, q_lens, kv_lens, 1, storage).value();
  };
  const struct {
    int64_t window_left;
    std::vector<int64_t> q_lens;
    std::vector<int64_t> kv_lens;
    const char* words;  // null: accepted
  } kCases[] = {
      {kNoWindow,
       {1, 1},
       {16, 50},
       "sequence 1: page 0 is missing; need the pages of all keys from 0 on"},
      {17, {1, 1}, {16, 50}, nullptr},
      {18,
       {1, 1},
       {16, 50},
       "sequence 1: page 1 is missing; need the pages of all keys from 31 on, "
       "which its queries see"},
      {17, {1, 2}, {16, 50}, "sequence 1: page 1 is missing"},
      {17, {1, 2}, {16, 51}, nullptr},
      {17, {1, 2}, {17, 51}, "sequence 0: kv_len=17; need kv_len <= 16"},
      // Nobody asks, or nothing is there.
      {kNoWindow, {1, 0}, {16, 50}, nullptr},
      {kNoWindow, {1, 1}, {16, 0}, nullptr},
  };
  for (const auto& c : kCases) {
    spec.window_left = c.window_left;
    const absl::Status status = CheckPages(build(c.q_lens, c.kv_lens), table);
    if (c.words == nullptr) {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(c.words));
  }
  spec.window_left = 17;
  const AttentionSchedule good = build({1, 1}, {16, 50});
  EXPECT_NO_ALLOCATION((void)CheckPages(good, table));

  spec.window_left = kNoWindow;
  const auto plan = PagedAttentionPlan::Create(spec).value();
  const std::vector<float> q(2 * 4 * 8);
  std::vector<float> out(2 * 4 * 4);
  std::vector<uint8_t> cache(static_cast<size_t>(3 * spec.kv.page_bytes()));
  PagedAttentionArgs args;
  args.q = TensorView<const float, 3>(q.data(), {2, 4, 8}, {32, 8, 1});
  args.out = TensorView<float, 3>(out.data(), {2, 4, 4}, {16, 4, 1});
  args.kv = KvCacheView(spec.kv, 3, cache.data());
  args.pages = table;
  args.schedule = build({1, 1}, {16, 50});
  EXPECT_THAT(plan.CheckArgs(args).message(),
              HasSubstr("sequence 1: page 0 is missing"));
  AlignedBuffer scratch =
      AlignedBuffer::Create(plan.WorkspaceBytes(args.schedule, 1).value())
          .value();
  InlineExecutor executor;
  EXPECT_DEATH(plan.Execute(args, Workspace(scratch), executor),
               "check failed|page 0 is missing");
}

}  // namespace
}  // namespace quern
