// SGLang's operators of attention by name, against attention in double, over
// buffers of poison, and what they refuse.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/paged_attention_testutil.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/sglang_ops.h"
#include "quern/ops/registry/token_cache.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr const char* kProviders[] = {"simd", "reference"};
constexpr int64_t kRequests = 6, kContext = 80;  // of req_to_token

struct Case {
  Heads heads;
  int64_t window = 0;
  bool cross = false;
  bool encoder = false;   // tokens of an encoder before those of the request
  bool new_keys = false;  // written by the operator
  bool trees = false;     // new tokens are drafts
  int64_t pad = 0;        // poison behind each head
};

// A step as SGLang's tensors.
template <typename T>
struct Step {
  std::vector<Sequence> batch;
  std::vector<T> q, new_k, new_v, k, v;
  std::vector<int64_t> loc, pool, seq_lens, encoder_lens;
  std::vector<int32_t> table, extend_lens, starts;
  std::vector<uint8_t> tree_mask;
  int64_t slots = 0;
};

// The tensors of a step, [tokens, heads, dim] with `pad` elements of poison
// behind each head, between guard pages.
template <typename T>
struct Buffers {
  Buffers(const Case& c, const Step<T>& s)
      : heads(c.heads),
        q(Rows(s.q, heads.head_dim, c.pad)),
        k(Rows(s.k, heads.head_dim, c.pad)),
        v(Rows(s.v, ValueDim(heads), c.pad)),
        new_k(Rows(s.new_k, heads.head_dim, c.pad)),
        new_v(Rows(s.new_v, ValueDim(heads), c.pad)),
        out(q->view().extent(0), ValueDim(heads), ValueDim(heads) + c.pad) {}

  static std::unique_ptr<StridedMatrix<T>> Rows(const std::vector<T>& values,
                                                int64_t dim, int64_t pad) {
    return std::make_unique<StridedMatrix<T>>(
        values, static_cast<int64_t>(values.size()) / dim, dim, dim + pad);
  }
  static TensorView<T, 3> View(StridedMatrix<T>& rows, int64_t heads) {
    const MatrixView<T> v = rows.view();
    return {v.data(),
            {v.extent(0) / heads, heads, v.extent(1)},
            {heads * v.stride(0), v.stride(0), 1}};
  }

  Heads heads;
  std::unique_ptr<StridedMatrix<T>> q, k, v, new_k, new_v;
  StridedMatrix<T> out;
};

class SglangAttentionOpsTest : public OpFixture {
 protected:
  SglangAttentionOpsTest() {
    EXPECT_EQ(RegisterSglangAttentionOps(registry_), absl::OkStatus());
  }

  template <typename T>
  Step<T> StepOf(const Case& c, const std::vector<Lengths>& lengths) {
    const Heads& h = c.heads;
    const int64_t k_row = h.kv_heads * h.head_dim;
    const int64_t v_row = h.kv_heads * ValueDim(h);
    Step<T> s;
    s.slots = kRequests * kContext;
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < s.slots; ++i) {
      ids.push_back(static_cast<int32_t>(i));
    }
    rng_.Shuffle(ids);
    s.table.assign(static_cast<size_t>(kRequests * kContext), -1);
    s.k = GuardBuffer<T>(s.slots * k_row).ToVector();  // poison
    s.v = GuardBuffer<T>(s.slots * v_row).ToVector();
    int32_t start = 0;
    for (size_t b = 0; b < lengths.size(); ++b) {
      Lengths length = lengths[b];
      length.causal = !c.cross;
      Sequence one = RandomSequence<T, T>(rng_, h, length);
      for (const double x : one.q) s.q.push_back(FromDouble<T>(x));
      for (int64_t i = 0; c.trees && i < length.q_len; ++i) {
        uint64_t mask = 0;
        for (int64_t j = 0; j < length.q_len; ++j) {
          const bool sees = j <= i && rng_.Integer(0, 2) > 0;
          s.tree_mask.push_back(sees ? 7 : 0);
          if (sees) mask |= uint64_t{1} << j;
        }
        one.draft_masks.push_back(mask);
      }
      s.pool.push_back(static_cast<int64_t>(lengths.size() - b));
      const int64_t skipped = c.encoder && !c.cross ? 7 : 0;
      s.encoder_lens.push_back(c.cross ? length.kv_len : skipped);
      s.seq_lens.push_back(c.cross ? 1000 : length.kv_len);
      s.extend_lens.push_back(static_cast<int32_t>(length.q_len));
      s.starts.push_back(start);
      start += static_cast<int32_t>(length.q_len);
      for (int64_t t = 0; t < length.kv_len; ++t) {
        const int32_t slot = ids.back();
        ids.pop_back();
        s.table[static_cast<size_t>(s.pool.back() * kContext + skipped + t)] =
            slot;
        const bool is_new = c.new_keys && t >= length.kv_len - length.q_len;
        if (is_new) s.loc.push_back(slot);
        const auto copy = [&](const std::vector<double>& from, int64_t row,
                              std::vector<T>& added, std::vector<T>& buffer) {
          for (int64_t i = 0; i < row; ++i) {
            const T x = FromDouble<T>(from[static_cast<size_t>(t * row + i)]);
            if (is_new) {
              added.push_back(x);
            } else {
              buffer[static_cast<size_t>(slot * row + i)] = x;
            }
          }
        };
        copy(one.k, k_row, s.new_k, s.k);
        copy(one.v, v_row, s.new_v, s.v);
      }
      s.batch.push_back(std::move(one));
    }
    return s;
  }

  // Arguments and tensors of one of the operators.
  template <typename T>
  static void AddTensor(NamedArgs& args, std::vector<NamedTensor>& named,
                        const char* name, const TensorView<T, 3>& view) {
    args.emplace_back(
        name, TensorMeta{DTypeOf<T>,
                         {view.extent(0), view.extent(1), view.extent(2)}});
    named.emplace_back(name, view);
  }
  template <typename T>
  static void AddVector(NamedArgs& args, std::vector<NamedTensor>& named,
                        const char* name, const std::vector<T>& v) {
    const auto size = static_cast<int64_t>(v.size());
    args.emplace_back(name, TensorMeta{DTypeOf<T>, {size}});
    named.emplace_back(name, DenseVector<const T>(v.data(), size));
  }

  template <typename T>
  void SetUpCall(bool decode, const Case& c, Step<T>& s, Buffers<T>& b,
                 const std::vector<BFloat16>& sinks, NamedArgs& args,
                 std::vector<NamedTensor>& named) {
    using View = Buffers<T>;
    const Heads& h = c.heads;
    args = {{"sm_scale", h.scale},
            {"logit_cap", h.soft_cap},
            {"is_cross_attn", c.cross},
            {"sliding_window", c.window}};
    AddTensor<const T>(args, named, decode ? "query" : "q_extend",
                       View::View(*b.q, h.q_heads));
    AddTensor<T>(args, named, "k_buffer", View::View(*b.k, h.kv_heads));
    AddTensor<T>(args, named, "v_buffer", View::View(*b.v, h.kv_heads));
    AddTensor<T>(args, named, decode ? "output" : "o_extend",
                 View::View(b.out, h.q_heads));
    if (c.new_keys) {
      AddTensor<const T>(args, named, decode ? "key" : "k_extend",
                         View::View(*b.new_k, h.kv_heads));
      AddTensor<const T>(args, named, decode ? "value" : "v_extend",
                         View::View(*b.new_v, h.kv_heads));
      if (decode) AddVector(args, named, "loc", s.loc);
    }
    args.emplace_back("req_to_token",
                      TensorMeta{DType::kI32, {kRequests, kContext}});
    named.emplace_back(
        "req_to_token",
        DenseMatrix<const int32_t>(s.table.data(), kRequests, kContext));
    AddVector(args, named, "req_pool_indices", s.pool);
    AddVector(args, named, "seq_lens", s.seq_lens);
    if (!decode) {
      AddVector(args, named, "extend_seq_lens", s.extend_lens);
      AddVector(args, named, "extend_start_loc", s.starts);
      args.emplace_back("max_len_extend", 9);
    }
    if (c.cross || c.encoder) {
      AddVector(args, named, "encoder_lens", s.encoder_lens);
    }
    if (!sinks.empty()) AddVector(args, named, "sinks", sinks);
    if (c.trees) AddVector(args, named, "tree_mask", s.tree_mask);
  }

  template <typename T>
  void ExpectMatchesReference(bool decode, Case c,
                              const std::vector<Lengths>& lengths) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << (decode ? " decode" : " extend")
                 << " window " << c.window << " cross " << c.cross
                 << " encoder " << c.encoder << " new keys " << c.new_keys);
    c.heads.window_left = c.window > 0 ? c.window - 1 : kNoWindow;
    c.heads.window_right = c.heads.window_left;
    Step<T> s = StepOf<T>(c, lengths);
    std::vector<BFloat16> sinks;
    for (const float x : c.heads.sinks) {
      sinks.push_back(FromDouble<BFloat16>(static_cast<double>(x)));
    }
    const ReferenceAttentionResult want = Reference(c.heads, s.batch);
    AttentionSpec spec;
    spec.kv = TokenLayout(DTypeOf<T>, c.heads.kv_heads, c.heads.head_dim,
                          ValueDim(c.heads))
                  .value();
    spec.q_heads = c.heads.q_heads;
    spec.q_dtype = spec.out_dtype = DTypeOf<T>;
    const Bounds bounds(c.heads, LongestKv(s.batch), UnitRoundoff<T>(),
                        PagedAttentionPlan::Create(spec).value());
    for (const char* provider : kProviders) {
      SCOPED_TRACE(provider);
      Buffers<T> buffers(c, s);
      NamedArgs args;
      std::vector<NamedTensor> named;
      SetUpCall(decode, c, s, buffers, sinks, args, named);
      const MadeOp op =
          Make(provider,
               decode ? "decode_attention_cpu" : "extend_attention_cpu", args);
      std::vector<AnyTensorView> tensors;
      ASSERT_EQ(op.tensors.Arrange(named, tensors), absl::OkStatus());
      ASSERT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
      Run(op, named, 1);
      EXPECT_TRUE(AllClose(buffers.out.ToDense(), want.out, bounds.out));
    }
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(SglangAttentionOpsTest);

Heads Grouped(int64_t head_dim, int64_t v_head_dim = 0) {
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = head_dim;
  heads.v_head_dim = v_head_dim;
  return heads;
}
const std::vector<Lengths> kDecode = {{1, 37}, {1, 1}, {1, 70}};
const std::vector<Lengths> kExtend = {{5, 37}, {3, 3}, {1, 70}};

TEST_P(SglangAttentionOpsTest, AStepMatchesTheReference) {
  for (const bool new_keys : {false, true}) {
    for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{16, 16},
                                     std::pair<int64_t, int64_t>{33, 24}}) {
      Case c;
      c.heads = Grouped(dim, v_dim);
      c.new_keys = new_keys;
      ExpectMatchesReference<float>(true, c, kDecode);
      ExpectMatchesReference<BFloat16>(true, c, kDecode);
      ExpectMatchesReference<float>(false, c, kExtend);
      ExpectMatchesReference<Float16>(false, c, kExtend);
    }
  }
}

// Heads and tokens may have any strides in every tensor.
TEST_P(SglangAttentionOpsTest, StridedViewsMatchTheReference) {
  for (const bool new_keys : {false, true}) {
    for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{16, 16},
                                     std::pair<int64_t, int64_t>{33, 24}}) {
      Case c;
      c.heads = Grouped(dim, v_dim);
      c.new_keys = new_keys;
      c.pad = 5;
      ExpectMatchesReference<float>(true, c, kDecode);
      ExpectMatchesReference<BFloat16>(false, c, kExtend);
      ExpectMatchesReference<Float16>(true, c, kDecode);
    }
  }
}

TEST_P(SglangAttentionOpsTest, EveryFeatureMatchesTheReference) {
  Case c;
  c.heads = Grouped(16);
  c.heads.scale = 0.5f;
  c.heads.soft_cap = 3;
  c.heads.sinks = {-1, 0, 1, 2};
  for (const int64_t window : {0, 1, 10}) {
    c.window = window;
    ExpectMatchesReference<float>(true, c, kDecode);
    ExpectMatchesReference<float>(false, c, kExtend);
  }
}

TEST_P(SglangAttentionOpsTest, EncodersMatchTheReference) {
  Case c;
  c.heads = Grouped(16);
  c.encoder = true;
  ExpectMatchesReference<float>(true, c, kDecode);
  ExpectMatchesReference<float>(false, c, kExtend);
  c.cross = true;
  // More queries than keys.
  ExpectMatchesReference<float>(true, c, kDecode);
  ExpectMatchesReference<float>(false, c, {{5, 37}, {7, 3}});
}

TEST_P(SglangAttentionOpsTest, TreesMatchTheReference) {
  Case c = {Grouped(16)};
  c.trees = true;
  for (const int64_t window : {0, 1, 4}) {
    c.window = window;
    c.new_keys = window == 4;
    ExpectMatchesReference<float>(false, c, {{9, 37}, {9, 9}, {9, 70}});
    ExpectMatchesReference<BFloat16>(false, c, {{64, 66}});
    ExpectMatchesReference<float>(false, c, {{1, 37}, {1, 1}});
  }
}

TEST_P(SglangAttentionOpsTest, RefusesTreesThatItHasNotSeen) {
  Case c;
  c.heads = Grouped(16);
  c.trees = true;
  Step<float> s = StepOf<float>(c, {{2, 37}, {2, 9}});
  s.tree_mask = {1, 0, 1, 1, 1, 0, 0, 1};
  Buffers<float> buffers(c, s);
  NamedArgs args;
  std::vector<NamedTensor> named;
  SetUpCall(false, c, s, buffers, {}, args, named);
  const MadeOp op = Make("simd", "extend_attention_cpu", args);
  std::vector<AnyTensorView> tensors;
  ASSERT_EQ(op.tensors.Arrange(named, tensors), absl::OkStatus());
  EXPECT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
  EXPECT_EQ(op.CheckArgs(tensors), absl::OkStatus());
  s.tree_mask[6] = 1;
  ExpectRefusal(op.CheckArgs(tensors),
                "row 3 of tree_mask is not the one that Prepare was given");
  s.extend_lens = {1, 3};
  s.starts = {0, 1};
  ExpectRefusal(op.op->Prepare(tensors, executor_),
                "new tokens of request 0=1; need 2, as tree_mask has drafts");
}

TEST_P(SglangAttentionOpsTest, RefusesWhenMadeAndWhenPrepared) {
  Case c;
  c.heads = Grouped(16);
  Step<float> s = StepOf<float>(c, kExtend);
  Buffers<float> buffers(c, s);
  NamedArgs good;
  std::vector<NamedTensor> named;
  SetUpCall(false, c, s, buffers, {}, good, named);
  const OpDispatcher ops(registry_, OpPolicy());
  const struct {
    const char* name;
    OpArg value;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {"q_extend", TensorMeta{DType::kF32, {9, 4, 8}},
       absl::StatusCode::kInvalidArgument,
       "the query is not [tokens, q_heads, 16]"},
      {"o_extend", TensorMeta{DType::kF32, {9, 4, 8}},
       absl::StatusCode::kInvalidArgument, "the output is not [9, 4, 16]"},
      {"k_buffer", TensorMeta{DType::kU8, {480, 2, 16}},
       absl::StatusCode::kInvalidArgument, "of one dtype"},
      {"seq_lens", TensorMeta{DType::kF32, {3}},
       absl::StatusCode::kUnimplemented, "seq_lens is f32"},
      {"req_pool_indices", TensorMeta{DType::kI64, {2}},
       absl::StatusCode::kInvalidArgument, "req_pool_indices is not [3]"},
      {"extend_start_loc", TensorMeta{DType::kI32, {4}},
       absl::StatusCode::kInvalidArgument, "extend_start_loc is not [3]"},
      {"k_extend", TensorMeta{DType::kF32, {9, 2, 16}},
       absl::StatusCode::kInvalidArgument, "need both new keys and new values"},
      {"sinks", TensorMeta{DType::kF32, {3}},
       absl::StatusCode::kInvalidArgument, "sinks is not [4]"},
      {"is_cross_attn", true, absl::StatusCode::kInvalidArgument,
       "encoder_lens is missing; need it with is_cross_attn"},
      {"tree_mask", TensorMeta{DType::kU8, {81}},
       absl::StatusCode::kInvalidArgument,
       "tree_mask is not u8[27], a row of 3 for each new token"},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(refused.words);
    NamedArgs args;
    for (const auto& arg : good) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make("extend_attention_cpu", args).status(), refused.code,
                  refused.words);
  }

  const MadeOp op = Make("simd", "extend_attention_cpu", good);
  EXPECT_RAN_ON(*op.op);
  std::vector<AnyTensorView> tensors;
  ASSERT_EQ(op.tensors.Arrange(named, tensors), absl::OkStatus());
  ExpectRefusal(op.CheckArgs(tensors), absl::StatusCode::kFailedPrecondition,
                "has no schedule; need a call of Prepare before");
  const auto prepare = [&] { return op.op->Prepare(tensors, executor_); };
  EXPECT_EQ(prepare(), absl::OkStatus());
  EXPECT_EQ(op.CheckArgs(tensors), absl::OkStatus());
  s.seq_lens[1] += 1;
  ExpectRefusal(op.CheckArgs(tensors), "request 1 has 3 new tokens of 4; Prep");
  ExpectRefusal(prepare(), "need a slot of 480");  // -1 in the table
  s.seq_lens[1] = 81;
  ExpectRefusal(prepare(), "need at most the 80 tokens of req_to_token");
  s.seq_lens[1] = 2;
  ExpectRefusal(prepare(), "q_len");
  s.seq_lens[1] = 3;
  s.pool[0] = kRequests;
  ExpectRefusal(prepare(), "req_pool_indices[0]=6; need a row of the 6");
  s.pool[0] = 3;
  s.starts[2] = 7;
  ExpectRefusal(prepare(), "extend_start_loc[2]=7; need 8");
  // After a refusal, nothing is prepared.
  ExpectRefusal(op.CheckArgs(tensors), absl::StatusCode::kFailedPrecondition,
                "has no schedule");
}

}  // namespace
}  // namespace quern
