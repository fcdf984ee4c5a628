// SGLang's rotary operators by its names, against their formulas, with the
// cases of its own tests.

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

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr char kRotary[] = "rotary_embedding_cpu";
constexpr char kMultimodal[] = "multimodal_rotary_embedding_cpu";

class SglangRopeTest : public RowsFixture {
 protected:
  SglangRopeTest() {
    EXPECT_EQ(RegisterSglangRopeOps(registry_), absl::OkStatus());
  }
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
        const AnyMatrix table = Random(dtype, 9, kRot, 2, 0);
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
        const AnyMatrix table = Random(DType::kF32, 9, kDim, 2, 0);
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
        const AnyMatrix c = Random(of_table, kTokens, kDim, 2, 0);
        const AnyMatrix s = Random(of_table, kTokens, kDim, 2, 0);
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

TEST_F(SglangRopeTest, Refuses) {
  ExpectRefused({
      {kRotary, "positions", TensorMeta{DType::kI64, {5}},
       "positions are i64[5]; need one for each of 4 tokens"},
      {kRotary, "query", F32({128}), "query is f32[128] and key is "},
      {kRotary, "query", F32({4, 2, 64}), "query is f32[4, 2, 64] and key is"},
      {kRotary, "query", F32({3, 128}), "query is f32[3, 128] and key is"},
      {kRotary, "head_size", int64_t{63},
       "query has 128 columns and key 64; need multiples of head_size=63"},
      {kRotary, "head_size", int64_t{0}, "head_size=0; need head_size >= 2"},
      {kRotary, "cos_sin_cache", F32({128, 66}), "rot_dim=66; need 2 <= "},
      {kRotary, "cos_sin_cache", F32({128, 31}), "rot_dim=31; need an even"},
      {kMultimodal, "positions", TensorMeta{DType::kI64, {2, 4}},
       "positions are i64[2, 4]; need [tokens] or [3, tokens]"},
      {kMultimodal, "section_h", int64_t{11},
       "sections have 31 pairs; need 32"},
      {"apply_rotary_pos_emb_cpu", "cos", F32({4, 32}),
       "cos is f32[4, 32]; need [4, 64]"},
  });
}

}  // namespace
}  // namespace quern
