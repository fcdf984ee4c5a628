// What vLLM's operators of attention refuse, when they are made and when they
// are given tensors.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/vllm/attention_ops.h"
#include "quern/ops/registry/vllm/attention_testutil.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

class VllmAttentionRefusalTest : public VllmAttentionFixture {};
QUERN_INSTANTIATE_ISA_TEST(VllmAttentionRefusalTest);

TEST_P(VllmAttentionRefusalTest, RefusesWhenMade) {
  StepCase c;
  c.heads = Grouped(16);
  StepData<float, float> d = DataOf<float, float>(c, kStep);
  SchedulerMetadata metadata;
  const OpDispatcher ops(registry_, OpPolicy());
  const NamedArgs attention =
      AttentionArgs(c, d, DType::kF32, DType::kF32, DType::kF32, &metadata);
  const NamedArgs write = {
      {"key", TensorMeta{DType::kF32, {3, 2, 16}}},
      {"value", TensorMeta{DType::kF32, {3, 2, 16}}},
      {"key_cache", TensorMeta{DType::kF32, {8, 2, 16, 16}}},
      {"value_cache", TensorMeta{DType::kF32, {8, 2, 16, 16}}},
      {"slot_mapping", TensorMeta{DType::kI64, {3}}}};
  const NamedArgs schedule = {{"num_req", 4},
                              {"num_heads_q", 4},
                              {"num_heads_kv", 2},
                              {"head_dim", 16},
                              {"seq_lens", TensorMeta{DType::kI32, {4}}},
                              {"dtype", "f32"},
                              {"query_start_loc", TensorMeta{DType::kI32, {5}}},
                              {"causal", true},
                              {"scheduler_metadata", &metadata}};
  const TensorMeta bytes = {DType::kU8, {8, 2, 16, 16}};
  NamedArgs fp8 = write;
  for (auto& [name, value] : fp8) {
    if (name == "key_cache" || name == "value_cache") value = bytes;
  }
  fp8.emplace_back("kv_cache_dtype", "fp8");
  const struct {
    const char* op;
    const NamedArgs& args;
    const char* name;
    OpArg value;
    const char* words;
  } kCases[] = {
      {"cpu_attn_get_scheduler_metadata", schedule, "num_req", 3,
       "num_req=3; need 4"},
      {"cpu_attn_get_scheduler_metadata", schedule, "num_heads_q", 3,
       "q_heads=3"},
      {"cpu_attn_get_scheduler_metadata", schedule, "head_dim", 0,
       "head_dim=0"},
      {"cpu_attn_get_scheduler_metadata", schedule, "window_size", 0,
       "window_size=0; need 1 or more keys"},
      {"cpu_attn_get_scheduler_metadata", schedule, "isa_hint", "avx2",
       "isa_hint=\"avx2\"; need one of auto, amx, vec"},
      {"cpu_attn_get_scheduler_metadata", schedule, "dtype", "half", "dtype"},
      {"cpu_attn_get_scheduler_metadata", schedule, "query_start_loc",
       TensorMeta{DType::kI32, {4}}, "query_start_loc is i32[4]; need [5]"},
      {"cpu_attn_get_scheduler_metadata", schedule, "dynamic_causal",
       TensorMeta{DType::kU8, {3}}, "dynamic_causal is u8[3]; need [4]"},
      {"cpu_attn_reshape_and_cache", write, "isa", "sse", "isa=\"sse\""},
      {"cpu_attn_reshape_and_cache", write, "k_scale", 2.0,
       "k_scale=2; need 1 with kv_cache_dtype auto"},
      {"cpu_attn_reshape_and_cache", write, "kv_cache_dtype", "int8",
       "kv_cache_dtype=\"int8\"; need auto, fp8"},
      {"cpu_attn_reshape_and_cache", write, "kv_cache_dtype", "fp8",
       "key_cache is f32; need u8 or f8e4m3"},
      {"cpu_attn_reshape_and_cache", write, "key_cache", bytes, "of one dtype"},
      {"cpu_attn_reshape_and_cache", write, "slot_mapping",
       TensorMeta{DType::kI32, {3}}, "slot_mapping is i32[3]; need i64"},
      {"cpu_attn_reshape_and_cache", write, "key",
       TensorMeta{DType::kF32, {3, 1, 16}},
       "key is f32[3, 1, 16]; need [3, 2, 16]"},
      {"cpu_attention_with_kv_cache", attention, "query",
       TensorMeta{DType::kF32, {9, 4, 8}},
       "query is f32[9, 4, 8]; need [9, 4, 16]"},
      {"cpu_attention_with_kv_cache", attention, "query",
       TensorMeta{DType::kF32, {9, 3, 16}},
       "output is f32[9, 4, 16]; need [9, 3, 16]"},
      {"cpu_attention_with_kv_cache", attention, "block_table",
       TensorMeta{DType::kI64, {4, 4}}, "block_table is i64[4, 4]; need i32"},
      {"cpu_attention_with_kv_cache", attention, "s_aux",
       TensorMeta{DType::kF32, {3}}, "s_aux is f32[3]; need [4]"},
      {"cpu_attention_with_kv_cache", attention, "alibi_slopes",
       TensorMeta{DType::kBF16, {4}}, "alibi_slopes is bf16[4]; need f32"},
      {"cpu_attention_with_kv_cache", attention, "sliding_window", -2,
       "sliding_window=-2; need 1 or more keys"},
      {"cpu_attention_with_kv_cache", attention, "dynamic_causal",
       TensorMeta{DType::kU8, {3}}, "dynamic_causal is u8[3]; need [4]"},
      {"cpu_attention_with_kv_cache", attention, "query_start_loc",
       TensorMeta{DType::kI64, {5}}, "query_start_loc is i64[5]; need i32"},
      {"cpu_attn_get_scheduler_metadata", schedule, "seq_lens",
       TensorMeta{DType::kI64, {4}}, "seq_lens is i64[4]; need i32"},
      {"cpu_attn_reshape_and_cache", write, "value_cache",
       TensorMeta{DType::kF32, {8, 2, 8, 16}},
       "need key_cache and value_cache [pages, kv_heads, page_size,"},
      {"cpu_attn_reshape_and_cache", fp8, "k_scale", 0.0,
       "k_scale=0; need a finite number from 2^-125 on"},
      {"cpu_attn_reshape_and_cache", fp8, "v_scale", -1.0, "v_scale=-1; need"},
      {"cpu_attn_reshape_and_cache", fp8, "kv_cache_dtype", "auto",
       "key_cache is u8; need f32, bf16 or f16 with kv_cache_dtype auto"},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(std::string(refused.op) + " " + refused.name);
    EXPECT_TRUE(ops.Make(refused.op, refused.args).ok());
    NamedArgs args;
    for (const auto& arg : refused.args) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make(refused.op, args).status(), refused.words);
  }
  EXPECT_RAN_ON(*Make("simd", "cpu_attn_reshape_and_cache", write).op);
}

TEST_P(VllmAttentionRefusalTest, RefusesAScheduleOfOtherLengths) {
  StepCase c;
  c.heads = Grouped(16);
  StepData<float, float> d = DataOf<float, float>(c, kStep);
  SchedulerMetadata metadata;
  const MadeOp op = Make(
      "simd", "cpu_attention_with_kv_cache",
      AttentionArgs(c, d, DType::kF32, DType::kF32, DType::kF32, &metadata));
  std::vector<float> cache(static_cast<size_t>(d.pages * 2 * 2 * 16 * 16));
  std::vector<float> values(cache), out(static_cast<size_t>(9 * 4 * 16));
  const auto bind = [&](int64_t table_stride) {
    std::vector<NamedTensor> named = StepTensorsOf(c, d);
    named.emplace_back("query",
                       DenseTensor<const float, 3>(d.q.data(), {9, 4, 16}));
    named.emplace_back("key_cache",
                       CacheView(DType::kF32, cache.data(), d.pages, c, 16));
    named.emplace_back("value_cache",
                       CacheView(DType::kF32, values.data(), d.pages, c, 16));
    named.emplace_back("output", DenseTensor<float, 3>(out.data(), {9, 4, 16}));
    named.emplace_back("block_table",
                       MatrixView<const int32_t>(
                           d.table.data(), {4, table_stride}, {d.columns, 1}));
    std::vector<AnyTensorView> tensors;
    return op.Bind(named, tensors);
  };
  ExpectRefusal(bind(d.columns), "requests of scheduler_metadata=0; need 4");
  Schedule(c, d, DType::kF32, &metadata);
  EXPECT_EQ(bind(d.columns), absl::OkStatus());
  ExpectRefusal(bind(2), "block_table has 2 columns; need 3 for request 0");
  const int32_t page = d.table[1];
  for (const int32_t wrong : {-1, static_cast<int32_t>(d.pages)}) {
    d.table[1] = wrong;
    ExpectRefusal(bind(d.columns), "block_table[0][1]=");
  }
  d.table[1] = page;
  d.seq_lens[1] += 1;
  ExpectRefusal(bind(d.columns), "request 1 is not that of scheduler_metadata");
  d.seq_lens[1] -= 1;
  d.starts[1] += 1;
  ExpectRefusal(bind(d.columns), "request 0 is not that of scheduler_metadata");
}

TEST_P(VllmAttentionRefusalTest, RefusesLengthsThatAreNone) {
  StepCase c;
  c.heads = Grouped(16);
  SchedulerMetadata metadata;
  const MadeOp op = Make("reference", "cpu_attn_get_scheduler_metadata",
                         {{"num_req", 2},
                          {"num_heads_q", 4},
                          {"num_heads_kv", 2},
                          {"head_dim", 16},
                          {"seq_lens", TensorMeta{DType::kI32, {2}}},
                          {"dtype", "f32"},
                          {"query_start_loc", TensorMeta{DType::kI32, {3}}},
                          {"causal", true},
                          {"scheduler_metadata", &metadata}});
  const auto refusal = [&](std::vector<int32_t> seq_lens,
                           std::vector<int32_t> starts) {
    std::vector<AnyTensorView> tensors;
    EXPECT_EQ(
        op.Bind(
            {{"seq_lens", DenseVector<const int32_t>(seq_lens.data(), 2)},
             {"query_start_loc", DenseVector<const int32_t>(starts.data(), 3)}},
            tensors),
        absl::OkStatus());
    return op.op->Prepare(tensors, executor_);
  };
  EXPECT_EQ(refusal({4, 5}, {0, 1, 2}), absl::OkStatus());
  EXPECT_EQ(metadata.schedule.num_tokens(), 2);
  ExpectRefusal(refusal({4, 5}, {1, 2, 3}), "query_start_loc[0]=1; need 0");
  ExpectRefusal(refusal({4, 5}, {0, 2, 1}),
                "query_start_loc[2]=1; need at least 2");
  ExpectRefusal(refusal({4, 1}, {0, 2, 4}), "q_len");
  ExpectRefusal(refusal({-1, 1}, {0, 0, 1}), "kv_len");
  // A refusal leaves no schedule behind.
  EXPECT_EQ(metadata.schedule.num_tokens(), 0);
  EXPECT_RAN_ON(*Make("simd", "cpu_attn_reshape_and_cache",
                      {{"key", TensorMeta{DType::kF32, {3, 2, 16}}},
                       {"value", TensorMeta{DType::kF32, {3, 2, 16}}},
                       {"key_cache", TensorMeta{DType::kF32, {8, 2, 16, 16}}},
                       {"value_cache", TensorMeta{DType::kF32, {8, 2, 16, 16}}},
                       {"slot_mapping", TensorMeta{DType::kI64, {3}}}})
                     .op);
}

// vLLM has both in one tensor [pages, heads, 2 * page, dim].
TEST_P(VllmAttentionRefusalTest, KeysAndValuesMayAlternateFromHeadToHead) {
  constexpr int64_t kPages = 2, kHeads = 3, kPage = 16, kDim = 16;
  constexpr int64_t kHalf = kPage * kDim;
  const TensorMeta rows = {DType::kF32, {4, kHeads, kDim}};
  const TensorMeta cache = {DType::kF32, {kPages, kHeads, kPage, kDim}};
  const MadeOp made = Make("simd", "cpu_attn_reshape_and_cache",
                           {{"key", rows},
                            {"value", rows},
                            {"key_cache", cache},
                            {"value_cache", cache},
                            {"slot_mapping", TensorMeta{DType::kI64, {4}}}});
  std::vector<float> memory(2 * kPages * kHeads * kHalf + 1);
  std::vector<float> x(4 * kHeads * kDim);
  const int64_t slots[] = {0, 17, 5, 31};
  const auto half = [&](int64_t from) {
    return AnyTensorView(DType::kF32, static_cast<void*>(memory.data() + from),
                         4, {kPages, kHeads, kPage, kDim},
                         {2 * kHeads * kHalf, 2 * kHalf, kDim, 1});
  };
  const AnyTensorView input(DType::kF32, static_cast<const void*>(x.data()), 3,
                            {4, kHeads, kDim}, {kHeads * kDim, kDim, 1});
  const AnyTensorView at(DType::kI64, static_cast<const void*>(slots), 1, {4},
                         {1});
  const auto check = [&](int64_t values_from) {
    const AnyTensorView tensors[] = {input, input, half(0), half(values_from),
                                     at};
    return made.CheckArgs(tensors);
  };
  EXPECT_EQ(check(kHalf), absl::OkStatus());
  ExpectRefusal(check(kHalf + 1), "key_cache");
  ExpectRefusal(check(kHalf - 1), "key_cache");
}

}  // namespace
}  // namespace quern
