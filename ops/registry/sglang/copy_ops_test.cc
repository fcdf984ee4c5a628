// SGLang's copies by its names, against index arithmetic.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/sglang/rows_ops.h"
#include "quern/ops/registry/sglang/rows_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr char kSplit[] = "fused_qkvzba_split_reshape_cat_cpu";

class SglangCopyTest : public RowsFixture {
 protected:
  SglangCopyTest() {
    EXPECT_EQ(RegisterSglangCopyOps(registry_), absl::OkStatus());
  }
};

// Splits made by index arithmetic: each element is its own column.
TEST_F(SglangCopyTest, SplitsProjections) {
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
TEST_F(SglangCopyTest, StoresRows) {
  constexpr int64_t kTokens = 5, kSlots = 9, kHeads = 3, kDim = 7;
  std::vector<int64_t> wide = {8, 2, 0, 2, 5};
  std::vector<int32_t> narrow(wide.begin(), wide.end());
  for (const bool is_wide : {false, true}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const AnyMatrix k = Random(dtype, kTokens, kHeads * kDim);
      const AnyMatrix v = Random(dtype, kTokens, kHeads * kDim, 2, 5);
      const AnyMatrix kc = Random(dtype, kSlots, kHeads * kDim, 2, 1);
      const AnyMatrix vc = Random(dtype, kSlots, kHeads * kDim, 2, 0);
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

TEST_F(SglangCopyTest, Refuses) {
  ExpectRefused({
      {kSplit, "num_heads_qk", int64_t{3},
       "num_heads_v=4; need a multiple of num_heads_qk=3"},
      {kSplit, "head_v", int64_t{15}, "mixed_qkvz is f32[4, 160]; need "},
      {kSplit, "head_qk", int64_t{0}, "head_qk=0; need 1 <= head_qk"},
      {kSplit, "mixed_ba", F32({4, 9}), "mixed_ba is f32[4, 9]; need "},
      {"store_cache_cpu", "row_dim", int64_t{31},
       "row_dim=31; need 2 times 16, a row of k, or 0"},
      {"store_cache_cpu", "v", F32({4, 2, 15}), "v is f32[4, 2, 15]; need"},
      {"store_cache_cpu", "k_cache", F32({16, 2, 15}),
       "k_cache is f32[16, 2, 15]; need [16, 2, 16]"},
      {"store_cache_cpu", "indices", TensorMeta{DType::kI32, {3}},
       "indices is i32[3]; need [4]"},
  });
}

}  // namespace
}  // namespace quern
