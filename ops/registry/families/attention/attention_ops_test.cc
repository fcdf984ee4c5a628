// write_kv and paged_attention by name: simd must have the bits of the wrapped
// plans, and the reference must agree with it.

#include "quern/ops/registry/families/attention/attention_ops.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/cache/write_kv.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Floats = std::vector<float>;

struct CacheCase {
  DType dtype;
  KvScaling scaling;
  KvForm form;
};

class AttentionOpsTest : public OpFixture {
 protected:
  AttentionOpsTest() {
    EXPECT_EQ(RegisterAttentionOps(registry_), absl::OkStatus());
  }

  static constexpr int64_t kQueryHeads = 4, kKvHeads = 2, kHeadDim = 16;
  static constexpr int64_t kPages = 8, kPageSize = 16, kLatentDim = 12;
  // Two sequences: the tail of a prompt, and a decode step.
  const std::vector<int64_t> q_lens_ = {5, 1};
  const std::vector<int64_t> kv_lens_ = {37, 18};
  static constexpr int64_t kTokens = 6, kKeys = 37 + 18;

  void SetUpCache(const CacheCase& c) {
    KvLayoutSpec spec;
    spec.dtype = c.dtype;
    spec.kv_heads = kKvHeads;
    spec.head_dim = kHeadDim;
    if (c.form == KvForm::kLatent) spec.v_head_dim = kLatentDim;
    spec.page_size = kPageSize;
    spec.form = c.form;
    spec.scaling = c.scaling;
    auto layout = KvLayout::Create(spec);
    ASSERT_TRUE(layout.ok()) << layout.status();
    layout_ = *layout;
    storage_.Clear();
    storage_.Append({6, 1, 3});
    storage_.Append({0, 5});
    step_.pages = *storage_.Build(kPageSize, kPages);
    slots_.resize(kKeys);
    ASSERT_EQ(
        step_.pages.SlotMapping(kv_lens_, kv_lens_, absl::MakeSpan(slots_)),
        absl::OkStatus());
  }
  KvCache NewCache() {
    auto cache = KvCache::Create(layout_, kPages, 1);
    EXPECT_TRUE(cache.ok());
    // All pages start as zeros, because padding is compared as well.
    std::memset(cache->Layer(0).k().data, 0, cache->bytes());
    return *std::move(cache);
  }
  static std::vector<uint8_t> BytesOf(KvCache& cache) {
    const uint8_t* const data = cache.Layer(0).k().data;
    return std::vector<uint8_t>(data, data + cache.bytes());
  }
  TensorMeta CacheMeta() const {
    return {DType::kU8, {kPages, layout_.page_bytes()}};
  }
  // What write_kv calls key, or value: two parts of a key in the latent form.
  int64_t PartDim(bool value) const {
    if (layout_.form() != KvForm::kLatent) return kHeadDim;
    return value ? kHeadDim - kLatentDim : kLatentDim;
  }
  // Keys, or values, as columns of wider rows.
  AnyTensorView Columns(Floats& rows, bool value) const {
    return TensorView<float, 3>(rows.data() + (value ? kKvHeads * kHeadDim : 0),
                                {kKeys, kKvHeads, PartDim(value)},
                                {2 * kKvHeads * kHeadDim, kHeadDim, 1});
  }
  void Write(const std::string& provider, Floats& rows, KvCache& cache) {
    const auto part = [&](bool value) {
      return TensorMeta{DType::kF32, {kKeys, kKvHeads, PartDim(value)}};
    };
    const MadeOp op = Make(provider, "write_kv",
                           {{"key", part(false)},
                            {"value", part(true)},
                            {"slots", TensorMeta{DType::kI64, {kKeys}}},
                            {"cache", CacheMeta()},
                            {"layout", &layout_}});
    Run(op, {{"key", Columns(rows, false)},
             {"value", Columns(rows, true)},
             {"slots", DenseVector<const int64_t>(slots_.data(), kKeys)},
             {"cache", CachePages(cache.Layer(0))}});
  }

  TestRng rng_;
  KvLayout layout_;
  PageTableStorage storage_;
  AttentionScheduleStorage schedule_storage_;
  AttentionStep step_;
  std::vector<int64_t> slots_;
};
QUERN_INSTANTIATE_ISA_TEST(AttentionOpsTest);

constexpr CacheCase kCaches[] = {
    {DType::kF32, KvScaling::kNone, KvForm::kPaired},
    {DType::kBF16, KvScaling::kNone, KvForm::kPaired},
    {DType::kBF16, KvScaling::kNone, KvForm::kPlain},
    {DType::kF16, KvScaling::kNone, KvForm::kPaired},
    {DType::kI8, KvScaling::kPerTokenHead, KvForm::kPaired},
    {DType::kF8E4M3, KvScaling::kPerTokenHead, KvForm::kPlain},
    {DType::kF8E5M2, KvScaling::kNone, KvForm::kPaired},
    {DType::kBF16, KvScaling::kNone, KvForm::kLatent},
    {DType::kF8E4M3, KvScaling::kPerBlock, KvForm::kLatent},
};

TEST_P(AttentionOpsTest, WritesTheBitsOfThePlan) {
  for (const CacheCase& c : kCaches) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(c.dtype) << " " << KvFormName(c.form));
    SetUpCache(c);
    slots_[7] = -1;  // padding
    Floats rows =
        UniformReals<float>(rng_, kKeys * 2 * kKvHeads * kHeadDim, -3, 3);
    WriteKvSpec spec;
    spec.kv = layout_;
    KvCache want = NewCache();
    WriteKvPlan::Create(spec)->Execute({Columns(rows, false),
                                        Columns(rows, true),
                                        slots_,
                                        want.Layer(0),
                                        {},
                                        {},
                                        {}},
                                       executor_);
    for (const char* provider : {"simd", "reference"}) {
      KvCache got = NewCache();
      Write(provider, rows, got);
      EXPECT_EQ(BytesOf(got), BytesOf(want)) << provider;
    }
  }
}

struct AttentionCase {
  int64_t window_left;
  double soft_cap;
  bool alibi, sinks;
  DType query, out;
  bool drafts = false;
};

TEST_P(AttentionOpsTest, AttendsWithTheBitsOfThePlan) {
  const std::unique_ptr<HwyExecutor> two =
      *HwyExecutor::Create(2, HwyExecutor::Sharing::kAll);
  for (const CacheCase& cache_case : kCaches) {
    for (const AttentionCase& c :
         {AttentionCase{kNoWindow, 0, false, false, DType::kF32, DType::kF32},
          AttentionCase{9, 30, false, true, DType::kBF16, DType::kBF16},
          AttentionCase{2, 0, false, false, DType::kF32, DType::kF32, true},
          AttentionCase{kNoWindow, 0, true, false, DType::kBF16,
                        DType::kF32}}) {
      SCOPED_TRACE(testing::Message() << DTypeName(cache_case.dtype) << " "
                                      << KvFormName(cache_case.form)
                                      << " window " << c.window_left);
      SetUpCache(cache_case);
      Floats rows =
          UniformReals<float>(rng_, kKeys * 2 * kKvHeads * kHeadDim, -3, 3);
      KvCache cache = NewCache();
      Write("simd", rows, cache);

      AttentionSpec spec;
      spec.kv = layout_;
      spec.q_heads = kQueryHeads;
      spec.q_dtype = c.query;
      spec.out_dtype = c.out;
      spec.scale = 0.25f;
      spec.window_left = c.window_left;
      spec.soft_cap = static_cast<float>(c.soft_cap);
      const auto plan = PagedAttentionPlan::Create(spec);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const std::vector<int64_t> draft_lens = {4, 0};
      const std::vector<uint64_t> masks = {0b1, 0b11, 0b101, 0b0111};
      AttentionBatch batch;
      batch.q_lens = q_lens_;
      batch.kv_lens = kv_lens_;
      if (c.drafts) {
        batch.draft_lens = draft_lens;
        batch.draft_masks = masks;
      }
      step_.schedule = *AttentionSchedule::Build(spec, batch, AttentionTiles(),
                                                 2, schedule_storage_);
      const int64_t out_dim = layout_.v_head_dim();
      const int64_t count = kTokens * kQueryHeads * out_dim;
      const int64_t query_count = kTokens * kQueryHeads * kHeadDim;
      const auto size = static_cast<int64_t>(SizeOf(c.out));
      const auto view = [&](DType dtype, int64_t dim, void* data) {
        return AnyTensorView(dtype, data, 3, {kTokens, kQueryHeads, dim},
                             {kQueryHeads * dim, dim, 1});
      };
      Floats q32 = UniformReals<float>(rng_, query_count, -2, 2);
      std::vector<BFloat16> q16 =
          UniformReals<BFloat16>(rng_, query_count, -2, 2);
      const AnyTensorView query = c.query == DType::kF32
                                      ? view(c.query, kHeadDim, q32.data())
                                      : view(c.query, kHeadDim, q16.data());
      const Floats slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
      const Floats sinks = {-1, 0, 1, 2};
      std::vector<uint8_t> want(static_cast<size_t>(count * size)), got(want);
      Floats want_lse(kTokens * kQueryHeads), lse(want_lse.size(), 99);
      auto memory = AlignedBuffer::Create(
          *plan->WorkspaceBytes(step_.schedule, two->num_workers()));
      plan->Execute({query, cache.Layer(0), step_.pages, step_.schedule,
                     view(c.out, out_dim, want.data()),
                     DenseMatrix(want_lse.data(), kTokens, kQueryHeads),
                     c.alibi ? slopes : absl::Span<const float>(),
                     c.sinks ? sinks : absl::Span<const float>()},
                    Workspace(*memory), *two);

      const TensorMeta heads = {DType::kF32, {kQueryHeads}};
      NamedArgs args = {
          {"query", TensorMeta{c.query, {kTokens, kQueryHeads, kHeadDim}}},
          {"cache", CacheMeta()},
          {"layout", &layout_},
          {"step", &step_},
          {"scale", 0.25},
          {"window_left", c.window_left},
          {"soft_cap", c.soft_cap},
          {"out_dtype", DTypeName(c.out)}};
      std::vector<NamedTensor> named = {
          {"query", query},
          {"cache", CachePages(cache.Layer(0))},
          {"out", view(c.out, out_dim, got.data())}};
      if (c.alibi) {
        args.emplace_back("alibi_slopes", heads);
        named.emplace_back("alibi_slopes",
                           DenseVector<const float>(slopes.data(), 4));
      }
      if (c.sinks) {
        args.emplace_back("sinks", heads);
        named.emplace_back("sinks", DenseVector<const float>(sinks.data(), 4));
      }
      Run(Make("simd", "paged_attention", args), named);
      EXPECT_EQ(got, want);
      args.emplace_back("lse", TensorMeta{DType::kF32, {kTokens, kQueryHeads}});
      named.emplace_back("lse", DenseMatrix(lse.data(), kTokens, kQueryHeads));
      Run(Make("simd", "paged_attention", args), named);
      EXPECT_EQ(got, want);
      EXPECT_EQ(lse, want_lse);

      Run(Make("reference", "paged_attention", args), named);
      for (size_t i = 0; i < lse.size(); ++i) {
        EXPECT_NEAR(lse[i], want_lse[i], 1e-4) << i;
      }
      for (int64_t i = 0; i < count; ++i) {
        const auto value = [&](const std::vector<uint8_t>& bytes) {
          return c.out == DType::kF32
                     ? double{reinterpret_cast<const float*>(bytes.data())[i]}
                     : ToDouble(
                           reinterpret_cast<const BFloat16*>(bytes.data())[i]);
        };
        // Values are up to 3, and bf16 weights and results have 8 bits.
        EXPECT_NEAR(value(got), value(want),
                    c.query == DType::kF32 ? 1e-4 : 0.05)
            << i;
      }
    }
  }
}

TEST_P(AttentionOpsTest, SaysHowMuchWorkspaceEveryStepNeeds) {
  SetUpCache(kCaches[1]);
  AttentionSpec spec;
  spec.kv = layout_;
  spec.q_heads = kQueryHeads;
  const auto plan = PagedAttentionPlan::Create(spec);
  const MadeOp op =
      Make("simd", "paged_attention",
           {{"query", TensorMeta{DType::kF32, {1, kQueryHeads, kHeadDim}}},
            {"cache", CacheMeta()},
            {"layout", &layout_},
            {"step", &step_}});
  step_.schedule =
      *AttentionSchedule::Build(spec, q_lens_, kv_lens_, 2, schedule_storage_);
  EXPECT_EQ(*op.op->WorkspaceBytes(kTokens, 2),
            *plan->WorkspaceBytes(step_.schedule, 2));
  step_.limits.max_sequences = 3;
  step_.limits.max_kv_len = 1000;
  AttentionLimits limits = step_.limits;
  limits.max_tokens = 77;
  EXPECT_EQ(*op.op->WorkspaceBytes(77, 2), *plan->WorkspaceBytes(limits, 2));

  // The limits are not the step's, and too small for it.
  step_.limits.max_sequences = step_.limits.max_kv_len = 1;
  EXPECT_GE(*op.op->WorkspaceBytes(1, 1),
            *plan->WorkspaceBytes(step_.schedule, 1));
}

TEST_P(AttentionOpsTest, RefusesByName) {
  SetUpCache(kCaches[1]);
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta heads = {DType::kF32, {kKeys, kKvHeads, kHeadDim}};
  const TensorMeta slots = {DType::kI64, {kKeys}};
  Make("simd", "write_kv",
       {{"key", heads},
        {"value", heads},
        {"slots", slots},
        {"cache", CacheMeta()},
        {"layout", &layout_}});
  TensorMeta small = CacheMeta();
  small.extents[1] -= 1;
  ExpectRefusal(ops.Make("write_kv", {{"key", heads},
                                      {"value", heads},
                                      {"slots", slots},
                                      {"cache", small},
                                      {"layout", &layout_}})
                    .status(),
                "; need [n, " + std::to_string(layout_.page_bytes()) + "]");
  ExpectRefusal(
      ops.Make("write_kv", {{"key", heads},
                            {"value", heads},
                            {"slots", TensorMeta{DType::kI64, {kKeys - 1}}},
                            {"cache", CacheMeta()},
                            {"layout", &layout_}})
          .status(),
      "slots is i64[54]; need [55]");
  KvLayoutSpec per_head;
  per_head.dtype = DType::kI8;
  per_head.kv_heads = kKvHeads;
  per_head.head_dim = kHeadDim;
  per_head.page_size = kPageSize;
  per_head.scaling = KvScaling::kPerHead;
  const KvLayout outside = *KvLayout::Create(per_head);
  ExpectRefusal(
      ops.Make("write_kv",
               {{"key", heads},
                {"value", heads},
                {"slots", slots},
                {"cache", TensorMeta{DType::kU8, {8, outside.page_bytes()}}},
                {"layout", &outside}})
          .status(),
      absl::StatusCode::kUnimplemented,
      "scaling is per_head; need none, or per_token_head or per_block");
  ExpectRefusal(ops.Make("paged_attention",
                         {{"query", TensorMeta{DType::kF32, {1, 4, kHeadDim}}},
                          {"cache", CacheMeta()},
                          {"layout", &layout_}})
                    .status(),
                "paged_attention: step is missing; need AttentionStep");
  ExpectRefusal(ops.Make("paged_attention",
                         {{"query", TensorMeta{DType::kF32, {1, 4, 8}}},
                          {"cache", CacheMeta()},
                          {"layout", &layout_},
                          {"step", &step_}})
                    .status(),
                "query is f32[1, 4, 8]; need [1, 4, 16]");
}

}  // namespace
}  // namespace quern
