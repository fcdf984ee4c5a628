#ifndef QUERN_OPS_REGISTRY_VLLM_ATTENTION_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_VLLM_ATTENTION_TESTUTIL_H_

// Fixture of tests of vLLM's operators of attention: one step of a batch as the
// tensors that vLLM has, through all three operators, over caches of poison.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/vllm/attention_ops.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"

namespace quern {

inline constexpr const char* kAttentionProviders[] = {"simd", "reference"};

struct StepCase {
  Heads heads;
  int64_t page_size = 16;
  int64_t window = -1;
  std::string kv_cache_dtype = "auto";
  float k_scale = 1, v_scale = 1;
  bool dynamic = false;  // whether causal flags come as dynamic_causal
};

// What a step of one batch is made of: tensors as vLLM has them.
template <typename Q, typename Kv>
struct StepData {
  using Row = std::conditional_t<sizeof(Kv) == 1, float, Kv>;
  std::vector<Sequence> batch;
  std::vector<Q> q;
  std::vector<Row> k, v;
  std::vector<int64_t> slots;
  std::vector<int32_t> starts = {0}, seq_lens, table;
  std::vector<uint8_t> causal;
  int64_t keys = 0, columns = 0, pages = 0;
};

class VllmAttentionFixture : public OpFixture {
 protected:
  VllmAttentionFixture() {
    EXPECT_EQ(RegisterVllmAttentionOps(registry_), absl::OkStatus());
  }

  // Numbers, and pages in no order. What follows a request's pages in the table
  // is no page.
  template <typename Q, typename Kv>
  StepData<Q, Kv> DataOf(const StepCase& c, const std::vector<Lengths>& all) {
    StepData<Q, Kv> d;
    for (const Lengths& length : all) {
      const auto pages = DivCeil(length.kv_len, c.page_size);
      d.columns = std::max(d.columns, pages + 1);
      d.pages += pages + 1;
    }
    std::vector<int32_t> ids;
    for (int64_t p = 0; p < d.pages; ++p) {
      ids.push_back(static_cast<int32_t>(p));
    }
    rng_.Shuffle(ids);
    for (const Lengths& length : all) {
      Sequence s = RandomSequence<Q, Kv>(rng_, c.heads, length);
      for (double& x : s.k) x *= static_cast<double>(c.k_scale);
      for (double& x : s.v) x *= static_cast<double>(c.v_scale);
      for (const double x : s.q) d.q.push_back(FromDouble<Q>(x));
      using Row = typename StepData<Q, Kv>::Row;
      for (const double x : s.k) d.k.push_back(FromDouble<Row>(x));
      for (const double x : s.v) d.v.push_back(FromDouble<Row>(x));
      const size_t row = d.table.size();
      d.table.resize(row + static_cast<size_t>(d.columns), 1 << 30);
      for (int64_t t = 0; t < length.kv_len; ++t) {
        if (t % c.page_size == 0) {
          d.table[row + static_cast<size_t>(t / c.page_size)] = ids.back();
          ids.pop_back();
        }
        d.slots.push_back(d.table[row + static_cast<size_t>(t / c.page_size)] *
                              c.page_size +
                          t % c.page_size);
      }
      d.keys += length.kv_len;
      d.starts.push_back(d.starts.back() + static_cast<int32_t>(length.q_len));
      d.seq_lens.push_back(static_cast<int32_t>(length.kv_len));
      d.causal.push_back(length.causal ? 1 : 0);
      d.batch.push_back(std::move(s));
    }
    return d;
  }

  // [pages, kv_heads, page_size, dim] with room between heads and pages.
  static AnyTensorView CacheView(DType dtype, void* data, int64_t pages,
                                 const StepCase& c, int64_t dim) {
    const int64_t head = 2 * c.page_size * dim;
    return AnyTensorView(dtype, data, 4,
                         {pages, c.heads.kv_heads, c.page_size, dim},
                         {c.heads.kv_heads * head, head, dim, 1});
  }

  // Makes the schedule, whose tensors are `d`'s.
  template <typename Data>
  void Schedule(const StepCase& c, Data& d, DType q_dtype,
                SchedulerMetadata* metadata) {
    const auto requests = static_cast<int64_t>(d.seq_lens.size());
    NamedArgs args = {
        {"num_req", requests},
        {"num_heads_q", c.heads.q_heads},
        {"num_heads_kv", c.heads.kv_heads},
        {"head_dim", c.heads.head_dim},
        {"seq_lens", TensorMeta{DType::kI32, {requests}}},
        {"dtype", DTypeName(q_dtype)},
        {"query_start_loc", TensorMeta{DType::kI32, {requests + 1}}},
        {"causal", true},
        {"window_size", c.window},
        {"isa_hint", "vec"},
        {"enable_kv_split", true},
        {"scheduler_metadata", metadata}};
    std::vector<NamedTensor> named = StepTensorsOf(c, d);
    if (c.dynamic) {
      args.emplace_back("dynamic_causal", TensorMeta{DType::kU8, {requests}});
    }
    const MadeOp op =
        Make("reference", "cpu_attn_get_scheduler_metadata", args);
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(op.Bind(named, tensors), absl::OkStatus());
    ASSERT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
    op.op->Execute(tensors, executor_);
  }
  template <typename Data>
  static std::vector<NamedTensor> StepTensorsOf(const StepCase& c, Data& d) {
    const auto requests = static_cast<int64_t>(d.seq_lens.size());
    std::vector<NamedTensor> named = {
        {"seq_lens", DenseVector<const int32_t>(d.seq_lens.data(), requests)},
        {"query_start_loc",
         DenseVector<const int32_t>(d.starts.data(), requests + 1)}};
    if (c.dynamic) {
      named.emplace_back("dynamic_causal",
                         DenseVector<const uint8_t>(d.causal.data(), requests));
    }
    return named;
  }

  // The arguments of the attention, whose output is [tokens, q_heads, v_dim].
  template <typename Data>
  NamedArgs AttentionArgs(const StepCase& c, const Data& d, DType q, DType kv,
                          DType out, SchedulerMetadata* metadata) {
    const Heads& h = c.heads;
    const int64_t tokens = d.starts.back();
    const auto requests = static_cast<int64_t>(d.seq_lens.size());
    const auto cache = [&](int64_t dim) {
      return TensorMeta{kv, {d.pages, h.kv_heads, c.page_size, dim}};
    };
    NamedArgs args = {
        {"query", TensorMeta{q, {tokens, h.q_heads, h.head_dim}}},
        {"key_cache", cache(h.head_dim)},
        {"value_cache", cache(ValueDim(h))},
        {"output", TensorMeta{out, {tokens, h.q_heads, ValueDim(h)}}},
        {"query_start_loc", TensorMeta{DType::kI32, {requests + 1}}},
        {"seq_lens", TensorMeta{DType::kI32, {requests}}},
        {"scale", h.scale},
        {"causal", true},
        {"sliding_window", c.window},
        {"block_table", TensorMeta{DType::kI32, {requests, d.columns}}},
        {"softcap", h.soft_cap},
        {"scheduler_metadata", metadata},
        {"k_scale", c.k_scale},
        {"v_scale", c.v_scale},
        {"kv_cache_dtype", c.kv_cache_dtype}};
    if (c.dynamic) {
      args.emplace_back("dynamic_causal", TensorMeta{DType::kU8, {requests}});
    }
    if (!h.alibi_slopes.empty()) {
      args.emplace_back("alibi_slopes", TensorMeta{DType::kF32, {h.q_heads}});
    }
    if (!h.sinks.empty()) {
      args.emplace_back("s_aux", TensorMeta{DType::kBF16, {h.q_heads}});
    }
    return args;
  }

  // One step by one provider, into out.
  template <typename Q, typename Kv, typename Out>
  void RunStep(const std::string& provider, const StepCase& c,
               StepData<Q, Kv>& d, std::vector<Out>* out) {
    const Heads& h = c.heads;
    // vLLM gives fp8 caches as bytes.
    const DType stored = sizeof(Kv) == 1 ? DType::kU8 : DTypeOf<Kv>;
    const int64_t heads = d.pages * h.kv_heads * 2 * c.page_size;
    GuardBuffer<Kv> keys(heads * h.head_dim), values(heads * ValueDim(h));
    const AnyTensorView key_cache =
        CacheView(stored, keys.data(), d.pages, c, h.head_dim);
    const AnyTensorView value_cache =
        CacheView(stored, values.data(), d.pages, c, ValueDim(h));
    using Row = typename StepData<Q, Kv>::Row;
    const MadeOp write = Make(
        provider, "cpu_attn_reshape_and_cache",
        {{"key", TensorMeta{DTypeOf<Row>, {d.keys, h.kv_heads, h.head_dim}}},
         {"value", TensorMeta{DTypeOf<Row>, {d.keys, h.kv_heads, ValueDim(h)}}},
         {"key_cache",
          TensorMeta{stored, {d.pages, h.kv_heads, c.page_size, h.head_dim}}},
         {"value_cache",
          TensorMeta{stored, {d.pages, h.kv_heads, c.page_size, ValueDim(h)}}},
         {"slot_mapping", TensorMeta{DType::kI64, {d.keys}}},
         {"isa", "amx"},
         {"k_scale", c.k_scale},
         {"v_scale", c.v_scale},
         {"kv_cache_dtype", c.kv_cache_dtype}});
    Run(write,
        {{"key", DenseTensor<const Row, 3>(d.k.data(),
                                           {d.keys, h.kv_heads, h.head_dim})},
         {"value", DenseTensor<const Row, 3>(
                       d.v.data(), {d.keys, h.kv_heads, ValueDim(h)})},
         {"key_cache", key_cache},
         {"value_cache", value_cache},
         {"slot_mapping", DenseVector<const int64_t>(d.slots.data(), d.keys)}});

    SchedulerMetadata metadata;
    metadata.limits = limits_;
    Schedule(c, d, DTypeOf<Q>, &metadata);
    const auto requests = static_cast<int64_t>(d.seq_lens.size());
    const int64_t tokens = d.starts.back();
    std::vector<BFloat16> sinks;
    for (const float x : h.sinks) sinks.push_back(FromDouble<BFloat16>(x));
    out->assign(static_cast<size_t>(tokens * h.q_heads * ValueDim(h)), Out{});
    const MadeOp attend =
        Make(provider, "cpu_attention_with_kv_cache",
             AttentionArgs(c, d, DTypeOf<Q>, stored, DTypeOf<Out>, &metadata));
    std::vector<NamedTensor> named = StepTensorsOf(c, d);
    named.emplace_back(
        "query",
        DenseTensor<const Q, 3>(d.q.data(), {tokens, h.q_heads, h.head_dim}));
    named.emplace_back("key_cache", key_cache);
    named.emplace_back("value_cache", value_cache);
    named.emplace_back(
        "output",
        DenseTensor<Out, 3>(out->data(), {tokens, h.q_heads, ValueDim(h)}));
    named.emplace_back("block_table", DenseMatrix<const int32_t>(
                                          d.table.data(), requests, d.columns));
    if (!h.alibi_slopes.empty()) {
      named.emplace_back("alibi_slopes", DenseVector<const float>(
                                             h.alibi_slopes.data(), h.q_heads));
    }
    if (!sinks.empty()) {
      named.emplace_back("s_aux",
                         DenseVector<const BFloat16>(sinks.data(), h.q_heads));
    }
    if (!shared_.has_value()) return Run(attend, named);
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(attend.Bind(named, tensors), absl::OkStatus());
    attend.op->Execute(tensors, *shared_, executor_);
  }

  template <typename Q, typename Kv, typename Out>
  void ExpectMatchesReference(StepCase c, const std::vector<Lengths>& lengths) {
    // The reference's window does not count the query.
    c.heads.window_left = c.window == -1 ? kNoWindow : c.window - 1;
    c.heads.window_right = c.heads.window_left;
    StepData<Q, Kv> d = DataOf<Q, Kv>(c, lengths);
    const ReferenceAttentionResult want = Reference(c.heads, d.batch);
    KvLayoutSpec layout;
    layout.dtype = DTypeOf<Kv>;
    layout.kv_heads = c.heads.kv_heads;
    layout.head_dim = c.heads.head_dim;
    layout.page_size = c.page_size;
    AttentionSpec spec;
    spec.kv = KvLayout::Create(layout).value();
    spec.q_heads = c.heads.q_heads;
    spec.q_dtype = DTypeOf<Q>;
    spec.out_dtype = DTypeOf<Out>;
    const Bounds bounds(c.heads, LongestKv(d.batch), UnitRoundoff<Out>(),
                        PagedAttentionPlan::Create(spec).value());
    for (const char* provider : kAttentionProviders) {
      SCOPED_TRACE(testing::Message()
                   << provider << " page_size " << c.page_size << " head_dim "
                   << c.heads.head_dim << " window " << c.window);
      std::vector<Out> got;
      RunStep(provider, c, d, &got);
      EXPECT_TRUE(AllClose(got, want.out, bounds.out));
    }
  }

  TestRng rng_;
  // The limits of all steps, and where set the workspace of their attention.
  AttentionLimits limits_;
  std::optional<Workspace> shared_;
};

// A tail of a prompt, a decode step, a request without a query, a whole prompt.
inline const std::vector<Lengths> kStep = {{5, 37}, {1, 18}, {0, 9}, {3, 3}};

inline Heads Grouped(int64_t head_dim, int64_t v_head_dim = 0) {
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = head_dim;
  heads.v_head_dim = v_head_dim;
  return heads;
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_ATTENTION_TESTUTIL_H_
