#ifndef QUERN_OPS_REGISTRY_SGLANG_ATTENTION_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_SGLANG_ATTENTION_TESTUTIL_H_

// Steps of SGLang's operators of attention, over buffers of poison, and the
// verdict of attention in double.

#include <cstddef>
#include <cstdint>
#include <memory>
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
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"

namespace quern {

inline Heads SglangHeads(int64_t head_dim, int64_t v_head_dim = 0) {
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = head_dim;
  heads.v_head_dim = v_head_dim;
  return heads;
}
inline const std::vector<Lengths> kSglangDecode = {{1, 37}, {1, 1}, {1, 70}};
inline const std::vector<Lengths> kSglangExtend = {{5, 37}, {3, 3}, {1, 70}};

inline constexpr int64_t kSglangRequests = 6,
                         kSglangContext = 80;  // of req_to_token

struct SglangCase {
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
struct SglangStep {
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
struct SglangBuffers {
  SglangBuffers(const SglangCase& c, const SglangStep<T>& s)
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

class SglangAttentionFixture : public OpFixture {
 protected:
  SglangAttentionFixture() {
    EXPECT_EQ(RegisterSglangAttentionOps(registry_), absl::OkStatus());
  }

  template <typename T>
  SglangStep<T> StepOf(const SglangCase& c,
                       const std::vector<Lengths>& lengths) {
    const Heads& h = c.heads;
    const int64_t k_row = h.kv_heads * h.head_dim;
    const int64_t v_row = h.kv_heads * ValueDim(h);
    SglangStep<T> s;
    s.slots = kSglangRequests * kSglangContext;
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < s.slots; ++i) {
      ids.push_back(static_cast<int32_t>(i));
    }
    rng_.Shuffle(ids);
    s.table.assign(static_cast<size_t>(kSglangRequests * kSglangContext), -1);
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
        s.table[static_cast<size_t>(s.pool.back() * kSglangContext + skipped +
                                    t)] = slot;
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
  void SetUpCall(bool decode, const SglangCase& c, SglangStep<T>& s,
                 SglangBuffers<T>& b, const std::vector<BFloat16>& sinks,
                 NamedArgs& args, std::vector<NamedTensor>& named) {
    using View = SglangBuffers<T>;
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
    args.emplace_back(
        "req_to_token",
        TensorMeta{DType::kI32, {kSglangRequests, kSglangContext}});
    named.emplace_back("req_to_token",
                       DenseMatrix<const int32_t>(
                           s.table.data(), kSglangRequests, kSglangContext));
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
  void ExpectMatchesReference(bool decode, SglangCase c,
                              const std::vector<Lengths>& lengths) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << (decode ? " decode" : " extend")
                 << " window " << c.window << " cross " << c.cross
                 << " encoder " << c.encoder << " new keys " << c.new_keys);
    c.heads.window_left = c.window > 0 ? c.window - 1 : kNoWindow;
    c.heads.window_right = c.heads.window_left;
    SglangStep<T> s = StepOf<T>(c, lengths);
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
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(provider);
      SglangBuffers<T> buffers(c, s);
      NamedArgs args;
      std::vector<NamedTensor> named;
      SetUpCall(decode, c, s, buffers, sinks, args, named);
      const MadeOp op =
          Make(provider,
               decode ? "decode_attention_cpu" : "extend_attention_cpu", args);
      std::vector<AnyTensorView> tensors;
      ASSERT_EQ(op.tensors.Arrange(named, tensors), absl::OkStatus());
      ASSERT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
      Run(op, named);
      EXPECT_TRUE(AllClose(buffers.out.ToDense(), want.out, bounds.out));
    }
  }

  TestRng rng_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_ATTENTION_TESTUTIL_H_
