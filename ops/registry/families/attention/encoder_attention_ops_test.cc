// mm_encoder_attn by name, against attention in double, and what it refuses.

#include "quern/ops/registry/families/attention/encoder_attention_ops.h"

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
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr const char* kProviders[] = {"simd", "reference"};

struct Case {
  Heads heads;
  int64_t batch = 1;
  std::vector<int32_t> lengths;  // of the sequences of one of the batch
  bool with_cu = true;
  bool split = false;  // [batch, tokens, heads, dim]
};

class EncoderAttentionOpsTest : public OpFixture {
 protected:
  EncoderAttentionOpsTest() {
    EXPECT_EQ(RegisterEncoderAttentionOps(registry_), absl::OkStatus());
  }

  // [batch, tokens, heads, dim] or [batch, tokens, heads * dim], columns of a
  // matrix with rows of `stride`.
  template <typename T>
  static AnyTensorView View(T* data, const Case& c, int64_t tokens,
                            int64_t heads, int64_t stride) {
    const int64_t dim = c.heads.head_dim;
    if (c.split) {
      return TensorView<T, 4>(data, {c.batch, tokens, heads, dim},
                              {tokens * stride, stride, dim, 1});
    }
    return TensorView<T, 3>(data, {c.batch, tokens, heads * dim},
                            {tokens * stride, stride, 1});
  }
  static TensorMeta MetaOf(const AnyTensorView& v) {
    TensorMeta meta = {v.dtype(), {}};
    for (int d = 0; d < v.rank(); ++d) meta.extents.push_back(v.extent(d));
    return meta;
  }

  template <typename T>
  void ExpectMatchesReference(const Case& c) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << " batch " << c.batch << " dim "
                 << c.heads.head_dim << " split " << c.split);
    const Heads& h = c.heads;
    const int64_t q_row = h.q_heads * h.head_dim;
    const int64_t kv_row = h.kv_heads * h.head_dim;
    const int64_t stride = q_row + 2 * kv_row;
    std::vector<int32_t> cu = {0};
    for (const int32_t length : c.lengths) cu.push_back(cu.back() + length);
    const int64_t tokens = cu.back();
    // Query, key and value as columns of one projection.
    std::vector<T> qkv;
    std::vector<Sequence> batch;
    for (int64_t b = 0; b < c.batch; ++b) {
      for (const int32_t length : c.lengths) {
        batch.push_back(RandomSequence<T, T>(
            rng_, h, {int64_t{length}, int64_t{length}, false}));
        const Sequence& s = batch.back();
        for (int64_t t = 0; t < length; ++t) {
          const auto add = [&](const std::vector<double>& from, int64_t row) {
            for (int64_t i = 0; i < row; ++i) {
              qkv.push_back(
                  FromDouble<T>(from[static_cast<size_t>(t * row + i)]));
            }
          };
          add(s.q, q_row);
          add(s.k, kv_row);
          add(s.v, kv_row);
        }
      }
    }
    const ReferenceAttentionResult want = Reference(h, batch);
    AttentionSpec spec;
    spec.kv =
        TokenLayout(DTypeOf<T>, h.kv_heads, h.head_dim, h.head_dim).value();
    spec.q_heads = h.q_heads;
    spec.q_dtype = spec.out_dtype = DTypeOf<T>;
    const Bounds bounds(h, LongestKv(batch), UnitRoundoff<T>(),
                        PagedAttentionPlan::Create(spec).value());
    const T* const data = qkv.data();
    const AnyTensorView q = View(data, c, tokens, h.q_heads, stride);
    const AnyTensorView k = View(data + q_row, c, tokens, h.kv_heads, stride);
    const AnyTensorView v =
        View(data + q_row + kv_row, c, tokens, h.kv_heads, stride);
    for (const char* provider : kProviders) {
      SCOPED_TRACE(provider);
      GuardBuffer<T> out(c.batch * tokens * q_row);
      NamedArgs args = {{"query", MetaOf(q)},      {"key", MetaOf(k)},
                        {"value", MetaOf(v)},      {"num_heads", h.q_heads},
                        {"head_size", h.head_dim}, {"num_kv_heads", h.kv_heads},
                        {"scale", h.scale},        {"max_seqlen", 9}};
      std::vector<NamedTensor> named = {
          {"query", q},
          {"key", k},
          {"value", v},
          {"out", View(out.data(), c, tokens, h.q_heads, q_row)}};
      if (c.with_cu) {
        const auto size = static_cast<int64_t>(cu.size());
        args.emplace_back("cu_seqlens", TensorMeta{DType::kI32, {size}});
        named.emplace_back("cu_seqlens",
                           DenseVector<const int32_t>(cu.data(), size));
      }
      const MadeOp op = Make(provider, "mm_encoder_attn", args);
      std::vector<AnyTensorView> tensors;
      ASSERT_EQ(op.tensors.Arrange(named, tensors), absl::OkStatus());
      ASSERT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
      Run(op, named);
      EXPECT_TRUE(AllClose(out.ToVector(), want.out, bounds.out));
    }
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(EncoderAttentionOpsTest);

Heads HeadsOf(int64_t q_heads, int64_t kv_heads, int64_t head_dim) {
  Heads heads;
  heads.q_heads = q_heads;
  heads.kv_heads = kv_heads;
  heads.head_dim = head_dim;
  return heads;
}

TEST_P(EncoderAttentionOpsTest, MatchesTheReference) {
  for (const bool split : {false, true}) {
    // Vision towers have heads of 72 and 80.
    for (const Heads& heads :
         {HeadsOf(2, 2, 16), HeadsOf(4, 1, 72), HeadsOf(6, 2, 80)}) {
      Case c;
      c.heads = heads;
      c.split = split;
      c.batch = 3;
      c.lengths = {17};
      c.with_cu = false;
      ExpectMatchesReference<float>(c);
      ExpectMatchesReference<BFloat16>(c);
      c.batch = 1;
      c.with_cu = true;
      c.lengths = {2, 0, 3, 40};
      ExpectMatchesReference<float>(c);
      ExpectMatchesReference<Float16>(c);
    }
  }
}

TEST_P(EncoderAttentionOpsTest, EachOfTheBatchIsCutAlike) {
  Case c;
  c.heads = HeadsOf(4, 2, 16);
  c.heads.scale = 0.5f;
  c.batch = 2;
  c.lengths = {5, 1, 9};
  ExpectMatchesReference<float>(c);
  c.lengths = {1};
  ExpectMatchesReference<float>(c);
}

TEST_P(EncoderAttentionOpsTest, RefusesByName) {
  const OpDispatcher ops(registry_, OpPolicy());
  const NamedArgs good = {{"query", TensorMeta{DType::kF32, {2, 4, 64}}},
                          {"key", TensorMeta{DType::kF32, {2, 4, 32}}},
                          {"value", TensorMeta{DType::kF32, {2, 4, 2, 16}}},
                          {"num_heads", 4},
                          {"head_size", 16},
                          {"num_kv_heads", 2}};
  const struct {
    const char* name;
    OpArg value;
    const char* words;
  } kCases[] = {
      {"query", TensorMeta{DType::kF32, {4, 64}}, "query has rank 2"},
      {"query", TensorMeta{DType::kF32, {2, 4, 63}},
       "query is f32[2, 4, 63]; need [2, 4, 4, 16] or [2, 4, 64] of f32"},
      {"key", TensorMeta{DType::kF32, {2, 5, 32}},
       "key is f32[2, 5, 32]; need [2, 4, 2, 16] or [2, 4, 32] of f32"},
      {"value", TensorMeta{DType::kBF16, {2, 4, 32}}, "] of f32"},
      {"cu_seqlens", TensorMeta{DType::kI64, {3}},
       "cu_seqlens is i64[3]; need i32"},
      {"num_heads", 0, "num_heads=0"},
      {"head_size", -1, "head_size=-1"},
      {"num_kv_heads", -1, "num_kv_heads=-1"},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(refused.words);
    NamedArgs args;
    for (const auto& arg : good) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make("mm_encoder_attn", args).status(), refused.words);
  }
  NamedArgs uneven = {{"query", TensorMeta{DType::kF32, {2, 4, 64}}},
                      {"key", TensorMeta{DType::kF32, {2, 4, 48}}},
                      {"value", TensorMeta{DType::kF32, {2, 4, 48}}},
                      {"num_heads", 4},
                      {"head_size", 16},
                      {"num_kv_heads", 3}};
  ExpectRefusal(ops.Make("mm_encoder_attn", uneven).status(), "q_heads=4");

  NamedArgs with_cu = good;
  with_cu.emplace_back("cu_seqlens", TensorMeta{DType::kI32, {3}});
  const MadeOp op = Make("simd", "mm_encoder_attn", with_cu);
  EXPECT_RAN_ON(*op.op);
  std::vector<float> q(2 * 4 * 64), kv(2 * 4 * 32), out(q.size());
  std::vector<int32_t> cu = {0, 1, 4};
  int64_t batch_stride = 256;
  const auto tensors = [&] {
    return std::vector<AnyTensorView>{
        TensorView<const float, 3>(q.data(), {2, 4, 64}, {batch_stride, 64, 1}),
        DenseTensor<const float, 3>(kv.data(), {2, 4, 32}),
        DenseTensor<const float, 4>(kv.data(), {2, 4, 2, 16}),
        DenseVector<const int32_t>(cu.data(), 3),
        DenseTensor<float, 3>(out.data(), {2, 4, 64})};
  };
  ExpectRefusal(op.CheckArgs(tensors()), absl::StatusCode::kFailedPrecondition,
                "has no schedule; need a call of Prepare before");
  EXPECT_EQ(op.op->Prepare(tensors(), executor_), absl::OkStatus());
  EXPECT_EQ(op.CheckArgs(tensors()), absl::OkStatus());
  cu[1] = 2;
  ExpectRefusal(op.CheckArgs(tensors()),
                "cu_seqlens is not what Prepare was given");
  for (const std::vector<int32_t>& wrong :
       {std::vector<int32_t>{1, 2, 4}, {0, 2, 5}, {0, 5, 4}}) {
    cu = wrong;
    ExpectRefusal(op.op->Prepare(tensors(), executor_),
                  "cu_seqlens does not ascend from 0 to the 4 tokens");
  }
  cu = {0, 1, 4};
  EXPECT_EQ(op.op->Prepare(tensors(), executor_), absl::OkStatus());
  std::vector<AnyTensorView> others = tensors();
  others[3] = AnyTensorView();
  ExpectRefusal(op.op->CheckArgs(others),
                "mm_encoder_attn: cu_seqlens is missing; Prepare was given it");
  others = tensors();
  others[0] = DenseTensor<const float, 3>(q.data(), {1, 4, 64});
  ExpectRefusal(op.CheckArgs(others), "query is [1, 4, ..]; Prepare was given");
  const std::pair<size_t, std::string> fields[] = {
      {0, "query is not [batch, tokens, 4, 16] or [batch, tokens, 64]"},
      {1, "key is not [batch, tokens, 2, 16] or [batch, tokens, 32]"},
      {2, "value has rank 3; need 4, as the operator was made"},
      {4, "out is not [batch, tokens, 4, 16]"}};
  std::vector<float> apart(2 * 4 * 48);
  for (const auto& [at, words] : fields) {
    others = tensors();
    others[at] = DenseTensor<float, 3>(apart.data(), {2, 4, 48});
    ExpectRefusal(op.CheckArgs(others), "mm_encoder_attn: " + words);
  }
  others = tensors();
  constexpr int64_t kMany = int64_t{1} << 16;
  others[0] = TensorView<const float, 3>(q.data(), {kMany, kMany, 64},
                                         {64 * kMany, 64, 1});
  ExpectRefusal(op.op->Prepare(others, executor_),
                "query has 4294967296 tokens; need fewer than 2^31");
  others = tensors();
  others[0] = AnyTensorView(DType::kF32, static_cast<const void*>(q.data()), 3,
                            {2, 4, 64}, {256, 64, int64_t{1} << 60});
  ExpectRefusal(op.op->Prepare(others, executor_),
                "query has stride 1152921504606846976 in its last dimension; "
                "the 16 elements of a head are more than 2^63 apart");
  batch_stride = 200;
  ExpectRefusal(op.op->Prepare(tensors(), executor_),
                "query has strides 200 and 64 of batch and tokens");
}

}  // namespace
}  // namespace quern
