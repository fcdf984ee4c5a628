// varlen_attention by name, against attention in double, and what it refuses.

#include "quern/ops/registry/families/attention/varlen_attention_ops.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/attention/token_cache.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr const char* kProviders[] = {"simd", "reference"};

// Queries and keys of a sequence.
using Length = std::pair<int32_t, int32_t>;

class VarlenAttentionOpsTest : public OpFixture {
 protected:
  VarlenAttentionOpsTest() {
    EXPECT_EQ(RegisterVarlenAttentionOps(registry_), absl::OkStatus());
  }

  template <typename T>
  void ExpectMatchesReference(const Heads& h, bool causal,
                              const std::vector<Length>& lengths) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << " dim " << h.head_dim << " by "
                 << h.v_head_dim << " causal " << causal);
    const int64_t v_dim = h.v_head_dim == 0 ? h.head_dim : h.v_head_dim;
    std::vector<int32_t> cu_q = {0}, cu_k = {0};
    std::vector<Sequence> batch;
    std::vector<T> q, k, v;
    const auto add = [](const std::vector<double>& from, std::vector<T>& to) {
      for (const double x : from) to.push_back(FromDouble<T>(x));
    };
    for (const auto& [queries, keys] : lengths) {
      cu_q.push_back(cu_q.back() + queries);
      cu_k.push_back(cu_k.back() + keys);
      batch.push_back(RandomSequence<T, T>(
          rng_, h, {int64_t{queries}, int64_t{keys}, causal}));
      add(batch.back().q, q);
      add(batch.back().k, k);
      add(batch.back().v, v);
    }
    const ReferenceAttentionResult want = Reference(h, batch);
    AttentionSpec spec;
    spec.kv = TokenLayout(DTypeOf<T>, h.kv_heads, h.head_dim, v_dim).value();
    spec.q_heads = h.q_heads;
    spec.q_dtype = spec.out_dtype = DTypeOf<T>;
    const Bounds bounds(h, LongestKv(batch), UnitRoundoff<T>(),
                        PagedAttentionPlan::Create(spec).value());
    const int64_t tokens = cu_q.back(), kv_tokens = cu_k.back();
    const auto ends = static_cast<int64_t>(cu_q.size());
    for (const char* provider : kProviders) {
      SCOPED_TRACE(provider);
      GuardBuffer<T> out(tokens * h.q_heads * v_dim);
      const MadeOp op = Make(
          provider, "varlen_attention",
          {{"query", TensorMeta{DTypeOf<T>, {tokens, h.q_heads, h.head_dim}}},
           {"key", TensorMeta{DTypeOf<T>, {kv_tokens, h.kv_heads, h.head_dim}}},
           {"value", TensorMeta{DTypeOf<T>, {kv_tokens, h.kv_heads, v_dim}}},
           {"cu_seqlens_q", TensorMeta{DType::kI32, {ends}}},
           {"cu_seqlens_k", TensorMeta{DType::kI32, {ends}}},
           {"causal", causal},
           {"scale", h.scale}});
      const std::vector<NamedTensor> named = {
          {"query",
           DenseTensor<const T, 3>(q.data(), {tokens, h.q_heads, h.head_dim})},
          {"key", DenseTensor<const T, 3>(k.data(),
                                          {kv_tokens, h.kv_heads, h.head_dim})},
          {"value",
           DenseTensor<const T, 3>(v.data(), {kv_tokens, h.kv_heads, v_dim})},
          {"cu_seqlens_q", DenseVector<const int32_t>(cu_q.data(), ends)},
          {"cu_seqlens_k", DenseVector<const int32_t>(cu_k.data(), ends)},
          {"out", DenseTensor<T, 3>(out.data(), {tokens, h.q_heads, v_dim})}};
      std::vector<AnyTensorView> tensors;
      ASSERT_EQ(op.tensors.Arrange(named, tensors), absl::OkStatus());
      ASSERT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
      Run(op, named);
      EXPECT_TRUE(AllClose(out.ToVector(), want.out, bounds.out));
      if (h.scale != 0 || (causal && cu_q != cu_k)) continue;
      // SGLang's name has the bits.
      GuardBuffer<T> again(tokens * h.q_heads * v_dim);
      const MadeOp sglang = Make(
          provider, "flash_attn_varlen_func",
          {{"q", TensorMeta{DTypeOf<T>, {tokens, h.q_heads, h.head_dim}}},
           {"k", TensorMeta{DTypeOf<T>, {kv_tokens, h.kv_heads, h.head_dim}}},
           {"v", TensorMeta{DTypeOf<T>, {kv_tokens, h.kv_heads, v_dim}}},
           {"cu_seqlens_q", TensorMeta{DType::kI32, {ends}}},
           {"cu_seqlens_k", TensorMeta{DType::kI32, {ends}}},
           {"max_seqlen_q", 1},
           {"max_seqlen_k", 1},
           {"causal", causal}});
      tensors.back() =
          DenseTensor<T, 3>(again.data(), {tokens, h.q_heads, v_dim});
      std::vector<NamedTensor> theirs = named;
      const char* const names[] = {"q", "k", "v"};
      for (size_t i = 0; i < 3; ++i) theirs[i].first = names[i];
      theirs.back().second = tensors.back();
      ASSERT_EQ(sglang.op->Prepare(tensors, executor_), absl::OkStatus());
      Run(sglang, theirs);
      EXPECT_TRUE(AllEqual(again.ToVector(), out.ToVector()));
    }
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(VarlenAttentionOpsTest);

Heads HeadsOf(int64_t q_heads, int64_t kv_heads, int64_t head_dim,
              int64_t v_head_dim = 0) {
  Heads heads;
  heads.q_heads = q_heads;
  heads.kv_heads = kv_heads;
  heads.head_dim = head_dim;
  heads.v_head_dim = v_head_dim;
  return heads;
}

TEST_P(VarlenAttentionOpsTest, MatchesTheReference) {
  for (const Heads& heads :
       {HeadsOf(2, 2, 16), HeadsOf(4, 1, 48, 32), HeadsOf(6, 2, 80)}) {
    const std::vector<Length> any = {{2, 17}, {0, 3}, {40, 5}, {1, 0}, {3, 3}};
    ExpectMatchesReference<float>(heads, false, any);
    ExpectMatchesReference<BFloat16>(heads, false, any);
    const std::vector<Length> causal = {{17, 17}, {1, 40}, {0, 0}, {5, 300}};
    ExpectMatchesReference<float>(heads, true, causal);
    ExpectMatchesReference<Float16>(heads, true, causal);
  }
  Heads scaled = HeadsOf(2, 1, 16);
  scaled.scale = 0.5f;
  ExpectMatchesReference<float>(scaled, true, {{9, 9}});
}

// A causal sequence of SGLang's has keys beyond its last query, which ours
// sees.
TEST_P(VarlenAttentionOpsTest, SglangsCausalNeedsEqualLengths) {
  const NamedArgs args = {{"q", TensorMeta{DType::kF32, {2, 1, 16}}},
                          {"k", TensorMeta{DType::kF32, {3, 1, 16}}},
                          {"v", TensorMeta{DType::kF32, {3, 1, 16}}},
                          {"cu_seqlens_q", TensorMeta{DType::kI32, {2}}},
                          {"cu_seqlens_k", TensorMeta{DType::kI32, {2}}},
                          {"max_seqlen_q", 2},
                          {"max_seqlen_k", 3},
                          {"causal", true}};
  const MadeOp op = Make("simd", "flash_attn_varlen_func", args);
  const std::vector<float> x(48);
  std::vector<float> out(32);
  const int32_t cu_q[] = {0, 2}, cu_k[] = {0, 3};
  ExpectRefusal(
      op.op->Prepare({DenseTensor<const float, 3>(x.data(), {2, 1, 16}),
                      DenseTensor<const float, 3>(x.data(), {3, 1, 16}),
                      DenseTensor<const float, 3>(x.data(), {3, 1, 16}),
                      DenseVector<const int32_t>(cu_q, 2),
                      DenseVector<const int32_t>(cu_k, 2),
                      DenseTensor<float, 3>(out.data(), {2, 1, 16})},
                     executor_),
      "cu_seqlens_k is not cu_seqlens_q; need it with causal");
}

TEST_P(VarlenAttentionOpsTest, RefusesByName) {
  const MadeOp op = Make("simd", "varlen_attention",
                         {{"query", TensorMeta{DType::kF32, {5, 2, 16}}},
                          {"key", TensorMeta{DType::kF32, {7, 1, 16}}},
                          {"value", TensorMeta{DType::kF32, {7, 1, 16}}},
                          {"cu_seqlens_q", TensorMeta{DType::kI32, {3}}},
                          {"cu_seqlens_k", TensorMeta{DType::kI32, {3}}},
                          {"causal", true}});
  EXPECT_RAN_ON(*op.op);
  std::vector<float> q(5 * 2 * 16), kv(7 * 16), out(q.size());
  std::vector<int32_t> cu_q = {0, 2, 5}, cu_k = {0, 2, 7};
  int64_t values = 7;
  const auto tensors = [&] {
    return std::vector<AnyTensorView>{
        DenseTensor<const float, 3>(q.data(), {5, 2, 16}),
        DenseTensor<const float, 3>(kv.data(), {7, 1, 16}),
        DenseTensor<const float, 3>(kv.data(), {values, 1, 16}),
        DenseVector<const int32_t>(cu_q.data(), 3),
        DenseVector<const int32_t>(cu_k.data(), 3),
        DenseTensor<float, 3>(out.data(), {5, 2, 16})};
  };
  ExpectRefusal(op.CheckArgs(tensors()), absl::StatusCode::kFailedPrecondition,
                "has no schedule; need a call of Prepare before");
  EXPECT_EQ(op.op->Prepare(tensors(), executor_), absl::OkStatus());
  EXPECT_EQ(op.CheckArgs(tensors()), absl::OkStatus());
  values = 6;
  ExpectRefusal(op.CheckArgs(tensors()), "value");
  values = 7;
  cu_k[1] = 3;
  ExpectRefusal(op.CheckArgs(tensors()),
                "cu_seqlens_k is not what Prepare was given");
  cu_k[1] = 2;
  cu_q[1] = 1;
  ExpectRefusal(op.CheckArgs(tensors()),
                "cu_seqlens_q is not what Prepare was given");
  const struct {
    std::vector<int32_t> q, k;
    std::string words;
  } kWrong[] = {
      {{1, 2, 5}, {0, 2, 7}, "cu_seqlens_q does not ascend from 0 to 5"},
      {{0, 6, 5}, {0, 2, 7}, "cu_seqlens_q does not ascend from 0 to 5"},
      {{0, 2, 4}, {0, 2, 7}, "cu_seqlens_q does not ascend from 0 to 5"},
      {{0, 2, 5}, {0, 2, 8}, "cu_seqlens_k does not ascend from 0 to 7"},
      {{0, 2, 5}, {0, -1, 7}, "cu_seqlens_k does not ascend from 0 to 7"},
      // Three queries of two keys.
      {{0, 3, 5}, {0, 2, 7}, "sequence 0: q_len=3, kv_len=2"},
  };
  for (const auto& wrong : kWrong) {
    cu_q = wrong.q;
    cu_k = wrong.k;
    ExpectRefusal(op.op->Prepare(tensors(), executor_), wrong.words);
    ExpectRefusal(op.op->CheckArgs(tensors()),
                  absl::StatusCode::kFailedPrecondition, "has no schedule");
  }
}

}  // namespace
}  // namespace quern
