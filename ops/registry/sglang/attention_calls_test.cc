// Calls of attention that SGLang makes and that are no plain step: the values
// are the beginnings of the keys, two tokens have one slot, slots come without
// keys, keys come with cross attention, and new keys have heads of their own.
// Each gives the bits of the plain step that means the same.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/sglang/attention_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int64_t kRequests = 3, kHeads = 4, kDim = 24, kValueDim = 16,
                  kSlots = 32, kContext = 8;

TensorView<const float, 3> Tensor(const std::vector<float>& x, int64_t heads,
                                  int64_t dim) {
  const auto tokens = static_cast<int64_t>(x.size()) / heads / dim;
  return {x.data(), {tokens, heads, dim}, {heads * dim, dim, 1}};
}
TensorView<float, 3> Tensor(std::vector<float>& x, int64_t heads, int64_t dim) {
  const auto tokens = static_cast<int64_t>(x.size()) / heads / dim;
  return {x.data(), {tokens, heads, dim}, {heads * dim, dim, 1}};
}

class SglangAttentionCallsTest : public SglangAttentionFixture {
 protected:
  struct Call {
    NamedArgs args;
    std::vector<NamedTensor> named;

    template <typename T>
    void Add(const char* name, const TensorView<T, 3>& view) {
      AddTensor<T>(args, named, name, view);
    }
    template <typename T>
    void Add(const char* name, const std::vector<T>& v) {
      AddVector(args, named, name, v);
    }
  };

  std::vector<float> Reals(int64_t count) {
    return UniformReals<float>(rng_, count, -1, 1);
  }

  // Three requests of 5, 1 and 8 tokens, in slots 8 b + t.
  Call Step(const char* query, const std::vector<float>& q, const char* output,
            std::vector<float>& out) {
    table_.clear();
    for (int32_t i = 0; i < kRequests * kContext; ++i) table_.push_back(i);
    Call call;
    call.args = {
        {"sm_scale", 0.25},
        {"req_to_token", TensorMeta{DType::kI32, {kRequests, kContext}}}};
    call.named = {{"req_to_token", DenseMatrix<const int32_t>(
                                       table_.data(), kRequests, kContext)}};
    call.Add(query, Tensor(q, kHeads, kDim));
    call.Add(output, Tensor(out, kHeads, kValueDim));
    call.Add("req_pool_indices", pool_);
    call.Add("seq_lens", lens_);
    return call;
  }

  void Execute(const char* provider, const char* name, const Call& call) {
    const MadeOp op = Make(provider, name, call.args);
    ASSERT_NE(op.op, nullptr);
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(op.tensors.Arrange(call.named, tensors), absl::OkStatus());
    ASSERT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
    Run(op, call.named);
  }

  // Output and keys after decode_attention_cpu with these new keys.
  struct Result {
    std::vector<float> out, k;
  };
  Result Decode(const char* provider, const std::vector<float>& q,
                const std::vector<float>& k, const std::vector<float>& v,
                const std::vector<float>& key, const std::vector<float>& value,
                const std::vector<int64_t>& loc) {
    Result r = {std::vector<float>(kRequests * kHeads * kValueDim), k};
    std::vector<float> values = v;
    Call call = Step("query", q, "output", r.out);
    call.Add("k_buffer", Tensor(r.k, 1, kDim));
    call.Add("v_buffer", Tensor(values, 1, kValueDim));
    if (!key.empty()) {
      call.Add("key", Tensor(key, 1, kDim));
      call.Add("value", Tensor(value, 1, kValueDim));
    }
    if (!loc.empty()) call.Add("loc", loc);
    Execute(provider, "decode_attention_cpu", call);
    return r;
  }

  // The first elements of each row.
  static std::vector<float> Beginnings(const std::vector<float>& rows) {
    std::vector<float> to;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i % kDim < kValueDim) to.push_back(rows[i]);
    }
    return to;
  }

  const std::vector<int64_t> pool_ = {0, 1, 2}, lens_ = {5, 1, 8};
  std::vector<int32_t> table_;
};
QUERN_INSTANTIATE_ISA_TEST(SglangAttentionCallsTest);

TEST_P(SglangAttentionCallsTest, WhereValuesBeginKeysTheKeysAloneAreWritten) {
  const auto q = Reals(kRequests * kHeads * kDim), k = Reals(kSlots * kDim);
  const auto key = Reals(kRequests * kDim);
  const std::vector<int64_t> loc = {4, 8, 23};
  for (const char* provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    const Result want =
        Decode(provider, q, k, Beginnings(k), key, Beginnings(key), loc);
    Result have = {std::vector<float>(want.out.size()), k};
    const std::vector<float> unread(kRequests * kValueDim, 7);
    Call call = Step("query", q, "output", have.out);
    const TensorView<float, 3> keys = Tensor(have.k, 1, kDim);
    call.Add("k_buffer", keys);
    call.Add("v_buffer",
             TensorView<float, 3>(keys.data(), {kSlots, 1, kValueDim},
                                  {kDim, kDim, 1}));
    call.Add("key", Tensor(key, 1, kDim));
    call.Add("value", Tensor(unread, 1, kValueDim));
    call.Add("loc", loc);
    Execute(provider, "decode_attention_cpu", call);
    EXPECT_EQ(have.out, want.out);
    EXPECT_EQ(have.k, want.k);
  }
}

TEST_P(SglangAttentionCallsTest, TheLastOfTwoTokensStaysInTheirSlot) {
  const auto q = Reals(kRequests * kHeads * kDim), k = Reals(kSlots * kDim);
  const auto v = Reals(kSlots * kValueDim);
  const auto key = Reals(kRequests * kDim);
  const auto value = Reals(kRequests * kValueDim);
  for (const char* provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    const Result want = Decode(provider, q, k, v, key, value, {-1, 3, 20});
    const Result have = Decode(provider, q, k, v, key, value, {3, 3, 20});
    EXPECT_EQ(have.out, want.out);
    EXPECT_EQ(have.k, want.k);
  }
}

TEST_P(SglangAttentionCallsTest, SlotsWithoutKeysAreNotRead) {
  const auto q = Reals(kRequests * kHeads * kDim), k = Reals(kSlots * kDim);
  const auto v = Reals(kSlots * kValueDim);
  const Result want = Decode("simd", q, k, v, {}, {}, {});
  const Result have = Decode("simd", q, k, v, {}, {}, {1 << 20, -5});
  EXPECT_EQ(have.out, want.out);
  EXPECT_EQ(have.k, k);
}

// Two new tokens of each request but the second.
TEST_P(SglangAttentionCallsTest, CrossAttentionDoesNotReadNewKeys) {
  const std::vector<int32_t> q_lens = {2, 1, 2}, starts = {0, 2, 3};
  const std::vector<int64_t> encoder_lens = {3, 7, 1};
  const auto q = Reals(5 * kHeads * kDim), v = Reals(kSlots * kValueDim);
  const auto k = Reals(kSlots * kDim), key = Reals(5 * kDim);
  const auto value = Reals(5 * kValueDim);
  std::vector<float> outs[2];
  for (const bool given : {false, true}) {
    std::vector<float>& out = outs[given ? 1 : 0];
    out.resize(5 * kHeads * kValueDim);
    std::vector<float> keys = k, values = v;
    Call call = Step("q_extend", q, "o_extend", out);
    call.args.emplace_back("is_cross_attn", true);
    call.Add("k_buffer", Tensor(keys, 1, kDim));
    call.Add("v_buffer", Tensor(values, 1, kValueDim));
    call.Add("extend_seq_lens", q_lens);
    call.Add("extend_start_loc", starts);
    call.Add("encoder_lens", encoder_lens);
    if (given) {
      call.Add("k_extend", Tensor(key, 1, kDim));
      call.Add("v_extend", Tensor(value, 1, kValueDim));
    }
    Execute("simd", "extend_attention_cpu", call);
    EXPECT_EQ(keys, k);
  }
  EXPECT_EQ(outs[1], outs[0]);
}

// A prefill of MLA: two heads of new keys, and buffers of one head that are not
// read.
TEST_P(SglangAttentionCallsTest, NewKeysOfOtherHeadsAreReadAlone) {
  const std::vector<int32_t> starts = {0, 5, 6};
  std::vector<int32_t> q_lens = {5, 1, 8};
  const auto q = Reals(14 * kHeads * kDim), key = Reals(14 * 2 * kDim);
  const auto value = Reals(14 * 2 * kValueDim);
  for (const char* provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    std::vector<float> outs[2];
    for (const int64_t heads : {2, 1}) {
      std::vector<float>& out = outs[heads - 1];
      out.resize(14 * kHeads * kValueDim);
      std::vector<float> keys = Reals(kSlots * heads * kDim);
      std::vector<float> values = Reals(kSlots * heads * kValueDim);
      const std::vector<float> before = keys;
      Call call = Step("q_extend", q, "o_extend", out);
      call.Add("k_buffer", Tensor(keys, heads, kDim));
      call.Add("v_buffer", Tensor(values, heads, kValueDim));
      call.Add("extend_seq_lens", q_lens);
      call.Add("extend_start_loc", starts);
      call.Add("k_extend", Tensor(key, 2, kDim));
      call.Add("v_extend", Tensor(value, 2, kValueDim));
      Execute(provider, "extend_attention_cpu", call);
      EXPECT_EQ(keys == before, heads == 1);
      if (heads == 2) continue;
      // With keys before the new ones the heads would have to agree.
      const MadeOp op = Make(provider, "extend_attention_cpu", call.args);
      std::vector<AnyTensorView> tensors;
      ASSERT_EQ(op.tensors.Arrange(call.named, tensors), absl::OkStatus());
      q_lens[2] = 7;
      ExpectRefusal(op.Prepare(tensors, executor_),
                    "extend_attention_cpu: request 2 has 8 keys, of which 7 "
                    "are new; need new ones alone, of 14, because k_extend has "
                    "other heads than k_buffer");
      q_lens[2] = 8;
    }
    EXPECT_EQ(outs[0], outs[1]);
  }
}

TEST_P(SglangAttentionCallsTest, RefusesOtherSlotsThanPrepareWasGiven) {
  const auto q = Reals(kRequests * kHeads * kDim),
             key = Reals(kRequests * kDim);
  const auto value = Reals(kRequests * kValueDim);
  std::vector<float> k = Reals(kSlots * kDim), v = Reals(kSlots * kValueDim);
  std::vector<float> out(kRequests * kHeads * kValueDim);
  std::vector<int64_t> loc = {4, 8, 23};
  Call call = Step("query", q, "output", out);
  call.Add("k_buffer", Tensor(k, 1, kDim));
  call.Add("v_buffer", Tensor(v, 1, kValueDim));
  call.Add("key", Tensor(key, 1, kDim));
  call.Add("value", Tensor(value, 1, kValueDim));
  const OpDispatcher ops(registry_, OpPolicy());
  ExpectRefusal(
      ops.Make("decode_attention_cpu", call.args).status(),
      "decode_attention_cpu: loc is missing; need i64[3], the slots of "
      "key and value");
  call.Add("loc", loc);
  const MadeOp op = Make("simd", "decode_attention_cpu", call.args);
  std::vector<AnyTensorView> tensors;
  ASSERT_EQ(op.tensors.Arrange(call.named, tensors), absl::OkStatus());
  ASSERT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
  EXPECT_EQ(op.CheckArgs(tensors), absl::OkStatus());
  loc[1] = 9;
  ExpectRefusal(op.CheckArgs(tensors), "loc[1]=9; Prepare was given 8");
}

}  // namespace
}  // namespace quern
