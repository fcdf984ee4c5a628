// Attention through the C interface has the bits of C++.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/c/quern.h"
#include "quern/c/testing/attention_testutil.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/cache/write_kv.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using AttentionInCTest = AttentionInC;

// The same layer in C++.
struct InCpp {
  InCpp() {
    KvLayoutSpec layout;
    layout.dtype = DType::kBF16;
    layout.kv_heads = kKvHeads;
    layout.head_dim = kHeadDim;
    layout.page_size = kPageSize;
    spec.kv = *KvLayout::Create(layout);
    spec.q_heads = kQueryHeads;
    cache = *KvCache::Create(spec.kv, kPages, kLayers);
    std::memset(cache.Layer(kLayer).k().data, 0, Bytes().size());
  }
  absl::Span<const uint8_t> Bytes() {
    return {cache.Layer(kLayer).k().data,
            static_cast<size_t>(kPages * spec.kv.page_bytes())};
  }

  void Run(const Lengths& q_lens, const Lengths& kv_lens,
           const std::vector<std::vector<int32_t>>& page_ids, float* q,
           float* k, float* v, float* out, Lengths& slots) {
    PageTableStorage table;
    for (const auto& ids : page_ids) table.Append(ids);
    const PageTable pages = *table.Build(kPageSize, kPages);
    ASSERT_TRUE(pages.SlotMapping(q_lens, kv_lens, absl::MakeSpan(slots)).ok());
    WriteKvSpec write_spec;
    write_spec.kv = spec.kv;
    const auto tokens = static_cast<int64_t>(slots.size());
    const auto heads = [&](float* data, int64_t count) {
      return DenseTensor<float, 3>(data, {tokens, count, kHeadDim});
    };
    InlineExecutor executor;
    WriteKvPlan::Create(write_spec)
        ->Execute({heads(k, kKvHeads),
                   heads(v, kKvHeads),
                   slots,
                   cache.Layer(kLayer),
                   {},
                   {},
                   {}},
                  executor);
    AttentionScheduleStorage storage;
    const auto schedule =
        AttentionSchedule::Build(spec, q_lens, kv_lens, 1, storage);
    const auto plan = PagedAttentionPlan::Create(spec);
    auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(*schedule, 1));
    plan->Execute({heads(q, kQueryHeads),
                   cache.Layer(kLayer),
                   pages,
                   *schedule,
                   heads(out, kQueryHeads),
                   {},
                   {},
                   {}},
                  Workspace(*memory), executor);
  }

  AttentionSpec spec;
  KvCache cache;
};

TEST_F(AttentionInCTest, HasTheBitsOfCppInTwoSteps) {
  InCpp cpp;
  TestRng rng;
  quern_tensor pages;
  ASSERT_C_OK(quern_kv_cache_pages(cache_, kLayer, &pages), cache_);
  ASSERT_EQ(pages.ndim, 2);
  ASSERT_EQ(pages.shape[0], kPages);
  ASSERT_EQ(static_cast<size_t>(pages.shape[0] * pages.shape[1]),
            cpp.Bytes().size());
  quern_tensor before;
  ASSERT_C_OK(quern_kv_cache_pages(cache_, kLayer - 1, &before), cache_);
  ASSERT_EQ(static_cast<uint8_t*>(before.data) + cpp.Bytes().size(),
            pages.data);
  std::memset(pages.data, 0, cpp.Bytes().size());
  const struct {
    Lengths q_lens, kv_lens;
  } steps[] = {{{20, 3}, {20, 3}}, {{1, 1}, {21, 4}}};
  for (const auto& step : steps) {
    SCOPED_TRACE(step.q_lens[0]);
    const quern_step in_c = StepOf(step.q_lens, step.kv_lens);
    ASSERT_C_OK(quern_schedule_build(schedule_, &in_c), schedule_);
    const int64_t tokens = in_c.num_slots;
    auto q = UniformReals<float>(rng, tokens * kQueryHeads * kHeadDim, -2, 2);
    auto k = UniformReals<float>(rng, tokens * kKvHeads * kHeadDim, -2, 2);
    auto v = UniformReals<float>(rng, tokens * kKvHeads * kHeadDim, -2, 2);
    std::vector<float> out(q.size(), -1), want(q.size(), -2);
    Lengths want_slots(slots_.size());
    cpp.Run(step.q_lens, step.kv_lens, {{6, 1}, {0}}, q.data(), k.data(),
            v.data(), want.data(), want_slots);
    EXPECT_EQ(slots_, want_slots);

    TensorInC key(DType::kF32, k.data(), {tokens, kKvHeads, kHeadDim});
    TensorInC value(DType::kF32, v.data(), {tokens, kKvHeads, kHeadDim});
    TensorInC slots(DType::kI64, slots_.data(), {tokens});
    quern_op* const write =
        Make("write_kv", {quern_tensor_argument("key", key.get()),
                          quern_tensor_argument("value", value.get()),
                          quern_tensor_argument("slots", slots.get()),
                          quern_tensor_argument("cache", &pages),
                          quern_object_argument("layout", cache_)});
    const quern_operand written[] = {{"key", key.get(), QUERN_READ_ONLY},
                                     {"value", value.get(), QUERN_READ_ONLY},
                                     {"slots", slots.get(), QUERN_READ_ONLY},
                                     {"cache", &pages, 0}};
    ASSERT_C_OK(quern_op_execute(write, written, 4, nullptr, 0, nullptr),
                write);
    EXPECT_EQ(std::memcmp(pages.data, cpp.Bytes().data(), cpp.Bytes().size()),
              0);

    TensorInC query(DType::kF32, q.data(), {tokens, kQueryHeads, kHeadDim});
    TensorInC result(DType::kF32, out.data(), {tokens, kQueryHeads, kHeadDim});
    quern_op* const attend =
        Make("paged_attention", {quern_tensor_argument("query", query.get()),
                                 quern_tensor_argument("cache", &pages),
                                 quern_object_argument("layout", cache_),
                                 quern_object_argument("step", schedule_)});
    int64_t bytes = 0;
    ASSERT_C_OK(quern_op_workspace_bytes(attend, tokens, nullptr, &bytes),
                attend);
    auto memory = AlignedBuffer::Create(bytes);
    ASSERT_TRUE(memory.ok());
    const quern_operand attended[] = {{"query", query.get(), QUERN_READ_ONLY},
                                      {"cache", &pages, QUERN_READ_ONLY},
                                      {"out", result.get(), 0}};
    ASSERT_C_OK(quern_op_execute(attend, attended, 3, memory->data(),
                                 memory->bytes(), nullptr),
                attend);
    EXPECT_EQ(out, want);
  }
  EXPECT_EQ(ExplanationOf(cache_),
            "KV cache in bf16, paired, 2 heads of 16, 2 layers of 8 pages of "
            "16 tokens");
  EXPECT_EQ(ExplanationOf(schedule_).rfind(
                "schedule of 2 sequences, 2 new tokens, ", 0),
            0u)
      << ExplanationOf(schedule_);
}

// A step of one new token: the query, and the operator that attends over zeroed
// pages of layer 0.
class OneTokenInCTest : public AttentionInC {
 protected:
  void MakeStep(int64_t kv_len) {
    ASSERT_C_OK(quern_kv_cache_pages(cache_, 0, &cache_pages_), cache_);
    std::memset(
        cache_pages_.data, 0,
        static_cast<size_t>(cache_pages_.shape[0] * cache_pages_.shape[1]));
    kv_lens_ = {kv_len};
    step_ = StepOf(q_lens_, kv_lens_);
    ASSERT_C_OK(quern_schedule_build(schedule_, &step_), schedule_);
    attend_ =
        Make("paged_attention", {quern_tensor_argument("query", query_.get()),
                                 quern_tensor_argument("cache", &cache_pages_),
                                 quern_object_argument("layout", cache_),
                                 quern_object_argument("step", schedule_)});
    ASSERT_C_OK(quern_op_workspace_bytes(attend_, 1, nullptr, &bytes_),
                attend_);
  }
  // Any number of threads may attend, each with memory of its own.
  quern_status Attend(std::vector<float>& out, AlignedBuffer& memory) {
    TensorInC result(DType::kF32, out.data(), {1, kQueryHeads, kHeadDim});
    const quern_operand operands[] = {{"query", query_.get(), QUERN_READ_ONLY},
                                      {"cache", &cache_pages_, QUERN_READ_ONLY},
                                      {"out", result.get(), 0}};
    return quern_op_execute(attend_, operands, 3, memory.data(), memory.bytes(),
                            nullptr);
  }

  const Lengths q_lens_ = {1};
  Lengths kv_lens_;
  quern_step step_ = {};
  quern_tensor cache_pages_ = {};
  std::vector<float> q_ = std::vector<float>(kQueryHeads * kHeadDim);
  TensorInC query_{DType::kF32, q_.data(), {1, kQueryHeads, kHeadDim}};
  quern_op* attend_ = nullptr;
  int64_t bytes_ = 0;
};

// An operator keeps the cache and the schedule that it was made with.
TEST_F(OneTokenInCTest, KeepsDestroyedObjectsOfAnOperator) {
  MakeStep(1);
  ASSERT_FALSE(HasFatalFailure());
  auto memory = AlignedBuffer::Create(bytes_);
  ASSERT_C_OK(quern_destroy(cache_), cache_);
  ASSERT_C_OK(quern_destroy(schedule_), schedule_);
  std::vector<float> out(q_.size(), -1);
  ASSERT_C_OK(Attend(out, *memory), attend_);
  EXPECT_EQ(out, std::vector<float>(out.size(), 0.0f));
  ExpectRefused(quern_schedule_build(schedule_, &step_), schedule_,
                QUERN_FAILED_PRECONDITION, "the schedule was destroyed");
  quern_schedule* schedule = nullptr;
  ExpectRefused(quern_schedule_create(library_.get(), cache_,
                                      &schedule_options_, &schedule),
                library_.get(), QUERN_FAILED_PRECONDITION,
                "the KV cache was destroyed");
}

// One thread builds steps while others attend: each call is done or refused,
// and an execution never sees half a step.
TEST_F(OneTokenInCTest, BuildsNoStepDuringAnExecution) {
  MakeStep(20);
  ASSERT_FALSE(HasFatalFailure());
  std::atomic<int> done{0}, refused{0}, other{0};
  const auto count = [&](quern_status status) {
    (status == QUERN_OK                    ? done
     : status == QUERN_FAILED_PRECONDITION ? refused
                                           : other)
        .fetch_add(1);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      std::vector<float> out(q_.size());
      auto memory = AlignedBuffer::Create(bytes_);
      for (int i = 0; i < 500; ++i) count(Attend(out, *memory));
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < 500; ++i) {
      count(quern_schedule_build(schedule_, &step_));
    }
    count(quern_destroy(schedule_));
    count(quern_destroy(cache_));
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(other.load(), 0) << MessageOf(attend_) << MessageOf(schedule_);
  EXPECT_EQ(done.load() + refused.load(), 3 * 500 + 2);
}

}  // namespace
}  // namespace quern
