// SGLang's rotary operators and copies by its names, against their formulas,
// with the cases of its own tests.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/sglang/rows_ops.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr char kRotary[] = "rotary_embedding_cpu";
constexpr char kMultimodal[] = "multimodal_rotary_embedding_cpu";

class SglangRopeTest : public testing::Test {
 protected:
  SglangRopeTest() {
    EXPECT_EQ(RegisterSglangRopeOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangCopyOps(registry_), absl::OkStatus());
  }

  AnyMatrix Random(DType dtype, int64_t rows, int64_t cols, int64_t gap = 3) {
    return AnyMatrix(dtype, ToDoubles(UniformReals(rng_, rows * cols, -2, 2)),
                     rows, cols, cols + gap);
  }
  // Makes the operator for tensors like these, and runs it.
  absl::Status Run(const std::string& provider, const std::string& op,
                   const std::vector<NamedTensor>& tensors,
                   NamedArgs args = {}) {
    const OpDispatcher ops(registry_, OpPolicy());
    for (const auto& [name, view] : tensors) {
      if (name.substr(0, 3) == "out") continue;
      TensorMeta meta{view.dtype(), {}};
      for (int d = 0; d < view.rank(); ++d) {
        meta.extents.push_back(view.extent(d));
      }
      args.emplace_back(name, meta);
    }
    auto made = ops.MakeFrom(provider, op, args);
    if (!made.ok()) return made.status();
    std::vector<AnyTensorView> views;
    const absl::Status bound = made->Bind(tensors, views);
    if (!bound.ok()) return bound;
    const absl::Status checked = made->CheckArgs(views);
    if (!checked.ok()) return checked;
    made->op->Execute(views, Workspace(), executor_);
    return absl::OkStatus();
  }

  OpRegistry registry_;
  ManyWorkers executor_{3};
  TestRng rng_;
};

// Products of numbers below 2 in f32, or rounded to 16 bits one by one, and the
// rounding of the result.
testing::AssertionResult Near(const AnyMatrix& have, DType dtype,
                              const Doubles& want, bool reference) {
  const double steps = reference ? 4 : 0;
  const double rounding = dtype == DType::kBF16  ? 0x1p-8
                          : dtype == DType::kF16 ? 0x1p-11
                                                 : 0x1p-22;
  return AllWithin(have.doubles(), want, [&](double value, int64_t) {
    return ResultBound(dtype, value, 0x1p-22) + 4e-6 + steps * 4 * rounding;
  });
}

// Turns x[tokens, heads * n] by rows of a table [positions, rot].
Doubles Turned(Doubles x, int64_t heads, int64_t n, int64_t rot, bool neox,
               const Doubles& table, const std::vector<int64_t>& rows) {
  for (size_t head = 0; head * static_cast<size_t>(n) < x.size(); ++head) {
    const int64_t p = rows[head / static_cast<size_t>(heads)] * rot;
    for (int64_t j = 0; j < rot / 2; ++j) {
      double* const from = x.data() + head * static_cast<size_t>(n);
      double& a = from[neox ? j : 2 * j];
      double& b = from[neox ? rot / 2 + j : 2 * j + 1];
      const double c = table[static_cast<size_t>(p + j)];
      const double s = table[static_cast<size_t>(p + rot / 2 + j)];
      const double old = a;
      a = a * c - b * s;
      b = b * c + old * s;
    }
  }
  return x;
}

TEST_F(SglangRopeTest, RotaryOfMatricesHeadsAndBatches) {
  constexpr int64_t kTokens = 6, kHeads = 4, kKeys = 2, kDim = 40, kRot = 32;
  std::vector<int64_t> positions = {3, 0, 8, 8, 1, 5};
  for (const char* provider : {"simd", "reference"}) {
    const bool reference = provider[0] == 'r';
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const bool neox : {false, true}) {
        const AnyMatrix table = Random(dtype, 9, kRot, 0);
        for (const int rank : {2, 3, 4}) {
          SCOPED_TRACE(testing::Message()
                       << provider << DTypeName(dtype) << neox << rank);
          const AnyMatrix q = Random(dtype, kTokens, kHeads * kDim);
          const AnyMatrix k = Random(dtype, kTokens, kKeys * kDim);
          const AnyMatrix q_out(dtype, kTokens, kHeads * kDim,
                                kHeads * kDim + 1);
          const AnyMatrix k_out(dtype, kTokens, kKeys * kDim, kKeys * kDim);
          const auto shaped = [&](const AnyMatrix& m, int64_t heads) {
            if (rank == 2) return m.view();
            if (rank == 3) return m.heads(heads, kDim, kDim);
            const int64_t row = m.view().stride(0);
            return AnyTensorView(dtype, m.view().mutable_data(), 4,
                                 {2, kTokens / 2, heads, kDim},
                                 {kTokens / 2 * row, row, kDim, 1});
          };
          std::vector<NamedTensor> tensors = {
              {"positions", DenseVector(positions.data(), kTokens)},
              {"query", shaped(q, kHeads)},
              {"key", shaped(k, kKeys)},
              {"cos_sin_cache", table.const_view()},
              {"out0", shaped(q_out, kHeads)},
              {"out1", shaped(k_out, kKeys)}};
          const NamedArgs args = {{"head_size", kDim}, {"is_neox", neox}};
          ASSERT_EQ(Run(provider, kRotary, tensors, args), absl::OkStatus());
          const Doubles want_q = Turned(q.doubles(), kHeads, kDim, kRot, neox,
                                        table.doubles(), positions);
          const Doubles want_k = Turned(k.doubles(), kKeys, kDim, kRot, neox,
                                        table.doubles(), positions);
          EXPECT_TRUE(Near(q_out, dtype, want_q, reference));
          EXPECT_TRUE(Near(k_out, dtype, want_k, reference));
          tensors[4].second = shaped(q, kHeads);  // in place
          tensors[5].second = shaped(k, kKeys);
          ASSERT_EQ(Run(provider, kRotary, tensors, args), absl::OkStatus());
          EXPECT_EQ(q.bits(), q_out.bits());
          EXPECT_EQ(k.bits(), k_out.bits());
        }
      }
    }
  }
}

TEST_F(SglangRopeTest, MultimodalPositions) {
  constexpr int64_t kTokens = 3, kDim = 32, kStride = 5;
  // Rows of positions with a gap of two.
  std::vector<int64_t> at = {1, 2, 3, 99, 99, 4, 5, 6, 99, 99, 7, 8, 0};
  for (const char* provider : {"simd", "reference"}) {
    for (const bool neox : {false, true}) {
      for (const int form : {0, 1, 2}) {  // text, sections, interleaved
        SCOPED_TRACE(testing::Message() << provider << neox << form);
        const AnyMatrix table = Random(DType::kF32, 9, kDim, 0);
        const AnyMatrix q = Random(DType::kF32, kTokens, 2 * kDim);
        const AnyMatrix k = Random(DType::kF32, kTokens, kDim);
        const Doubles q_in = q.doubles(), all = table.doubles();
        const AnyTensorView positions =
            form == 0 ? AnyTensorView(DenseVector(at.data(), kTokens))
                      : AnyTensorView(MatrixView<int64_t>(
                            at.data(), {3, kTokens}, {kStride, 1}));
        ASSERT_EQ(Run(provider, kMultimodal,
                      {{"positions", positions},
                       {"query", q.view()},
                       {"key", k.view()},
                       {"cos_sin_cache", table.const_view()},
                       {"out0", q.view()},
                       {"out1", k.view()}},
                      {{"head_size", kDim},
                       {"section_t", int64_t{6}},
                       {"section_h", int64_t{6}},
                       {"section_w", int64_t{4}},
                       {"mrope_interleaved", form == 2},
                       {"is_neox", neox}}),
                  absl::OkStatus());
        Doubles want = q_in;
        for (int64_t row = 0; row < 2 * kTokens; ++row) {
          for (int64_t j = 0; j < kDim / 2; ++j) {
            int64_t s = j < 6 ? 0 : j < 12 ? 1 : 2;
            if (form == 2) {
              const int64_t sections[] = {6, 6, 4};
              s = j < 3 * sections[j % 3] ? j % 3 : 0;
            }
            if (form == 0) s = 0;
            const auto p = at[static_cast<size_t>(s * kStride + row / 2)];
            const double c = all[static_cast<size_t>(p * kDim + j)];
            const double v = all[static_cast<size_t>(p * kDim + kDim / 2 + j)];
            const auto a = static_cast<size_t>(row * kDim + (neox ? j : 2 * j));
            const auto b = static_cast<size_t>(
                row * kDim + (neox ? kDim / 2 + j : 2 * j + 1));
            want[a] = q_in[a] * c - q_in[b] * v;
            want[b] = q_in[b] * c + q_in[a] * v;
          }
        }
        EXPECT_TRUE(Near(q, DType::kF32, want, false));
      }
    }
  }
}

TEST_F(SglangRopeTest, AnglesOfEachElement) {
  constexpr int64_t kTokens = 5, kHeads = 3, kDim = 48;
  for (const char* provider : {"simd", "reference"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool wide : {false, true}) {
        SCOPED_TRACE(testing::Message() << provider << DTypeName(dtype));
        const DType of_table = wide ? DType::kF32 : dtype;
        const AnyMatrix c = Random(of_table, kTokens, kDim, 0);
        const AnyMatrix s = Random(of_table, kTokens, kDim, 0);
        const AnyMatrix q = Random(dtype, kTokens, kHeads * kDim);
        const AnyMatrix k = Random(dtype, kTokens, kHeads * kDim);
        const Doubles in = q.doubles(), cs = c.doubles(), ss = s.doubles();
        ASSERT_EQ(Run(provider, "apply_rotary_pos_emb_cpu",
                      {{"query", q.heads(kHeads, kDim, kDim)},
                       {"key", k.heads(kHeads, kDim, kDim)},
                       {"cos", c.const_view()},
                       {"sin", s.const_view()},
                       {"out0", q.heads(kHeads, kDim, kDim)},
                       {"out1", k.heads(kHeads, kDim, kDim)}}),
                  absl::OkStatus());
        Doubles want = in;
        for (int64_t row = 0; row < kTokens * kHeads; ++row) {
          for (int64_t i = 0; i < kDim; ++i) {
            const int64_t other = (i + kDim / 2) % kDim;
            const auto at = static_cast<size_t>(row / kHeads * kDim + i);
            const double sign = i < kDim / 2 ? -1 : 1;
            want[static_cast<size_t>(row * kDim + i)] =
                in[static_cast<size_t>(row * kDim + i)] * cs[at] +
                sign * in[static_cast<size_t>(row * kDim + other)] * ss[at];
          }
        }
        EXPECT_TRUE(Near(q, dtype, want, false));
      }
    }
  }
}

// Splits made by index arithmetic: each element is its own column.
TEST_F(SglangRopeTest, SplitsProjections) {
  constexpr int64_t kTokens = 3;
  // Key heads, value heads, and elements of a head of each.
  constexpr int64_t kShapes[][4] = {{2, 4, 8, 8}, {2, 6, 5, 7}, {3, 3, 4, 9}};
  for (const auto& [hk, hv, dk, dv] : kShapes) {
    for (const bool contiguous : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(testing::Message() << hk << hv << dk << dv << contiguous);
        const int64_t group = hv / hk;
        const AnyMatrix qkvz =
            Random(dtype, kTokens, 2 * hk * dk + 2 * hv * dv);
        const AnyMatrix ba = Random(dtype, kTokens, 2 * hv);
        const AnyMatrix qkv(dtype, kTokens, 2 * hk * dk + hv * dv,
                            2 * hk * dk + hv * dv + 1);
        const AnyMatrix z(dtype, kTokens, hv * dv, hv * dv + 2);
        const AnyMatrix b(dtype, kTokens, hv, hv + 3);
        const AnyMatrix a(dtype, kTokens, hv, hv);
        ASSERT_EQ(
            Run("reference",
                contiguous ? "fused_qkvzba_split_reshape_cat_contiguous_cpu"
                           : "fused_qkvzba_split_reshape_cat_cpu",
                {{"mixed_qkvz", qkvz.const_view()},
                 {"mixed_ba", ba.const_view()},
                 {"out0", qkv.view()},
                 {"out1", z.heads(hv, dv, dv)},
                 {"out2", b.view()},
                 {"out3", a.view()}},
                {{"num_heads_qk", hk},
                 {"num_heads_v", hv},
                 {"head_qk", dk},
                 {"head_v", dv}}),
            absl::OkStatus());
        const Doubles in = qkvz.doubles(), in_ba = ba.doubles();
        Doubles want_qkv, want_z, want_b, want_a;
        for (int64_t t = 0; t < kTokens; ++t) {
          const int64_t row = t * (2 * hk * dk + 2 * hv * dv);
          const int64_t head = 2 * dk + 2 * group * dv;
          const auto add = [&](Doubles& to, int64_t from, int64_t count) {
            for (int64_t i = 0; i < count; ++i) {
              to.push_back(in[static_cast<size_t>(row + from + i)]);
            }
          };
          if (contiguous) {
            add(want_qkv, 0, 2 * hk * dk + hv * dv);
            add(want_z, 2 * hk * dk + hv * dv, hv * dv);
          } else {
            for (int64_t h = 0; h < hk; ++h) add(want_qkv, h * head, dk);
            for (int64_t h = 0; h < hk; ++h) add(want_qkv, h * head + dk, dk);
            for (int64_t h = 0; h < hk; ++h) {
              add(want_qkv, h * head + 2 * dk, group * dv);
              add(want_z, h * head + 2 * dk + group * dv, group * dv);
            }
          }
          for (int64_t h = 0; h < hv; ++h) {
            const int64_t at =
                contiguous ? h : h / group * 2 * group + h % group;
            const int64_t step = contiguous ? hv : group;
            want_b.push_back(in_ba[static_cast<size_t>(t * 2 * hv + at)]);
            want_a.push_back(
                in_ba[static_cast<size_t>(t * 2 * hv + at + step)]);
          }
        }
        EXPECT_TRUE(AllEqual(qkv.doubles(), want_qkv));
        EXPECT_TRUE(AllEqual(z.doubles(), want_z));
        EXPECT_TRUE(AllEqual(b.doubles(), want_b));
        EXPECT_TRUE(AllEqual(a.doubles(), want_a));
      }
    }
  }
}

// The last of two tokens with one index is kept, and other slots stay.
TEST_F(SglangRopeTest, StoresRows) {
  constexpr int64_t kTokens = 5, kSlots = 9, kHeads = 3, kDim = 7;
  std::vector<int64_t> wide = {8, 2, 0, 2, 5};
  std::vector<int32_t> narrow(wide.begin(), wide.end());
  for (const bool is_wide : {false, true}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const AnyMatrix k = Random(dtype, kTokens, kHeads * kDim);
      const AnyMatrix v = Random(dtype, kTokens, kHeads * kDim, 5);
      const AnyMatrix kc = Random(dtype, kSlots, kHeads * kDim, 1);
      const AnyMatrix vc = Random(dtype, kSlots, kHeads * kDim, 0);
      const auto want = [&](const AnyMatrix& cache, const AnyMatrix& rows) {
        std::vector<uint32_t> bits = cache.bits();
        const std::vector<uint32_t> from = rows.bits();
        for (size_t t = 0; t < kTokens; ++t) {
          for (int64_t i = 0; i < kHeads * kDim; ++i) {
            bits[static_cast<size_t>(wide[t] * kHeads * kDim + i)] =
                from[t * kHeads * kDim + static_cast<size_t>(i)];
          }
        }
        return bits;
      };
      const auto want_k = want(kc, k), want_v = want(vc, v);
      const AnyTensorView indices =
          is_wide ? AnyTensorView(DenseVector(wide.data(), kTokens))
                  : AnyTensorView(DenseVector(narrow.data(), kTokens));
      ASSERT_EQ(Run("reference", "store_cache_cpu",
                    {{"k", k.heads(kHeads, kDim, kDim)},
                     {"v", v.heads(kHeads, kDim, kDim)},
                     {"k_cache", kc.heads(kHeads, kDim, kDim)},
                     {"v_cache", vc.heads(kHeads, kDim, kDim)},
                     {"indices", indices}},
                    {{"row_dim", kHeads * kDim}}),
                absl::OkStatus());
      EXPECT_EQ(kc.bits(), want_k);
      EXPECT_EQ(vc.bits(), want_v);
      wide[0] = kSlots;
      if (is_wide) {
        ExpectRefusal(Run("reference", "store_cache_cpu",
                          {{"k", k.heads(kHeads, kDim, kDim)},
                           {"v", v.heads(kHeads, kDim, kDim)},
                           {"k_cache", kc.heads(kHeads, kDim, kDim)},
                           {"v_cache", vc.heads(kHeads, kDim, kDim)},
                           {"indices", indices}}),
                      "indices[0]=9; need 0 <= index < 9");
        EXPECT_EQ(kc.bits(), want_k);
      }
      wide[0] = 8;
    }
  }
}

// One argument of the example in f32 is changed.
TEST_F(SglangRopeTest, Refuses) {
  const auto f32 = [](std::vector<int64_t> extents) {
    return TensorMeta{DType::kF32, std::move(extents)};
  };
  const char* const kSplit = "fused_qkvzba_split_reshape_cat_cpu";
  const struct {
    const char* op;
    std::string name;
    OpArg value;
    const char* words;  // behind the operator's name
  } kCases[] = {
      {kRotary, "positions", TensorMeta{DType::kI64, {5}},
       "positions are i64[5]; need one for each of 4 tokens"},
      {kRotary, "query", f32({128}), "query is f32[128] and key is "},
      {kRotary, "query", f32({4, 2, 64}), "query is f32[4, 2, 64] and key is"},
      {kRotary, "query", f32({3, 128}), "query is f32[3, 128] and key is"},
      {kRotary, "head_size", int64_t{63},
       "query has 128 columns and key 64; need multiples of head_size=63"},
      {kRotary, "head_size", int64_t{0}, "head_size=0; need head_size >= 2"},
      {kRotary, "cos_sin_cache", f32({128, 66}), "rot_dim=66; need 2 <= "},
      {kRotary, "cos_sin_cache", f32({128, 31}), "rot_dim=31; need an even"},
      {kMultimodal, "positions", TensorMeta{DType::kI64, {2, 4}},
       "positions are i64[2, 4]; need [tokens] or [3, tokens]"},
      {kMultimodal, "section_h", int64_t{11},
       "sections have 31 pairs; need 32"},
      {"apply_rotary_pos_emb_cpu", "cos", f32({4, 32}),
       "cos is f32[4, 32]; need [4, 64]"},
      {kSplit, "num_heads_qk", int64_t{3},
       "num_heads_v=4; need a multiple of num_heads_qk=3"},
      {kSplit, "head_v", int64_t{15}, "mixed_qkvz is f32[4, 160]; need "},
      {kSplit, "head_qk", int64_t{0}, "head_qk=0; need 1 <= head_qk"},
      {kSplit, "mixed_ba", f32({4, 9}), "mixed_ba is f32[4, 9]; need "},
      {"store_cache_cpu", "row_dim", int64_t{31},
       "row_dim=31; need 2 times 16, a row of k, or 0"},
      {"store_cache_cpu", "v", f32({4, 2, 15}), "v is f32[4, 2, 15]; need"},
      {"store_cache_cpu", "k_cache", f32({16, 2, 15}),
       "k_cache is f32[16, 2, 15]; need [16, 2, 16]"},
      {"store_cache_cpu", "indices", TensorMeta{DType::kI32, {3}},
       "indices is i32[3]; need [4]"},
  };
  const OpDispatcher ops(registry_, OpPolicy());
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.words);
    NamedArgs args = registry_.Find(c.op)->example(DType::kF32);
    for (auto& [field, old] : args) {
      if (field == c.name) old = c.value;
    }
    if (c.name == "row_dim") args.emplace_back(c.name, c.value);
    ExpectRefusal(ops.Make(c.op, args).status(),
                  std::string(c.op) + ": " + c.words);
  }
}

}  // namespace
}  // namespace quern
