// The arguments of rotary operators reach their plans, as op_args_test.cc says.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/registry/op_args_testutil.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/rope/apply_rotary.h"
#include "quern/ops/rope/dual_chunk_rotary.h"
#include "quern/ops/rope/mrope.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

class OpArgsRopeTest : public OpArgsFixture {};

AnyTensorView Heads(Floats& data, int64_t tokens, int64_t head_dim) {
  return DenseTensor(
      data.data(),
      std::array<int64_t, 3>{
          tokens, static_cast<int64_t>(data.size()) / tokens / head_dim,
          head_dim});
}

// A spec with head_dim = kCols.
RotaryEmbeddingSpec Rotary(int64_t rot_dim, bool is_neox) {
  RotaryEmbeddingSpec spec;
  spec.head_dim = kCols;
  spec.rot_dim = rot_dim;
  spec.max_positions = 40;
  spec.base = 100;
  spec.style = is_neox ? RotaryStyle::kHalves : RotaryStyle::kPairs;
  return spec;
}

TEST_F(OpArgsRopeTest, OfRotaryEmbeddings) {
  std::vector<int32_t> positions = {39, 0, 7, 1, 5, 3, 30, 2, 11};
  const IndexView at = DenseVector<const int32_t>(positions.data(), kRows);
  const AnyTensorView at_view =
      DenseVector<const int32_t>(positions.data(), kRows);
  const TensorMeta heads = F32({kRows, 2, kCols});
  for (const bool is_neox : {false, true}) {
    Floats q = Reals(kRows * 2 * kCols), k = Reals(kRows * 2 * kCols);
    NamedArgs args = {{"query", heads},
                      {"key", heads},
                      {"max_position", int64_t{40}},
                      {"rot_dim", int64_t{12}},
                      {"base", 100.0},
                      {"is_neox", is_neox}};
    const RotaryEmbeddingSpec spec = Rotary(12, is_neox);
    const auto view = [](Floats& data) { return Heads(data, kRows, kCols); };

    NamedArgs rope = args;
    rope.emplace_back("positions", TensorMeta{DType::kI32, {kRows}});
    Floats q_got = q, k_got = k, q_want = q, k_want = k;
    Run("rotary_embedding", rope, {at_view, view(q_got), view(k_got)});
    Made(RotaryEmbeddingPlan::Create(spec))
        .ExecuteQk(at, view(q_want), view(k_want), executor_);
    EXPECT_EQ(q_got, q_want);
    EXPECT_EQ(k_got, k_want);

    for (const bool interleaved : {false, true}) {
      NamedArgs mrope = args;
      mrope.emplace_back("positions", TensorMeta{DType::kI32, {3, kRows}});
      mrope.emplace_back("section_t", int64_t{3});
      mrope.emplace_back("section_h", int64_t{2});
      mrope.emplace_back("section_w", int64_t{1});
      mrope.emplace_back("interleaved", interleaved);
      q_got = q_want = q;
      k_got = k_want = k;
      Run("mrope", mrope,
          {DenseMatrix<const int32_t>(positions.data(), 3, kRows), view(q_got),
           view(k_got)});
      MropeSpec mrope_spec;
      mrope_spec.rotary = spec;
      mrope_spec.sections = {3, 2, 1};
      mrope_spec.order =
          interleaved ? MropeOrder::kInterleaved : MropeOrder::kContiguous;
      Made(MropePlan::Create(mrope_spec))
          .ExecuteQk(DenseVector<const int32_t>(positions.data(), 3 * kRows),
                     view(q_want), view(k_want), executor_);
      EXPECT_EQ(q_got, q_want);
      EXPECT_EQ(k_got, k_want);
    }

    NamedArgs dual = rope;
    dual.emplace_back("chunk_size", int64_t{7});
    dual.emplace_back("local_size", int64_t{2});
    q_got = q_want = Floats(5 * q.size());
    k_got = k_want = Floats(k.size());
    Run("dual_chunk_rotary_embedding", dual,
        {at_view, view(q), view(k), view(q_got), view(k_got)});
    DualChunkRotarySpec dual_spec;
    dual_spec.rotary = spec;
    dual_spec.chunk = 7;
    dual_spec.local = 2;
    Made(DualChunkRotaryPlan::Create(dual_spec))
        .Execute({at, view(q), view(k), view(q_want), view(k_want)}, executor_);
    EXPECT_EQ(q_got, q_want);
    EXPECT_EQ(k_got, k_want);

    Floats c = Reals(kRows * kCols / 2), s = Reals(kRows * kCols / 2);
    q_got = q_want = Floats(q.size());
    const TensorMeta table = F32({kRows, kCols / 2});
    Run("apply_rotary_emb",
        {{"x", heads},
         {"cos", table},
         {"sin", table},
         {"is_neox_style", is_neox}},
        {view(q), Matrix(c, kCols / 2), Matrix(s, kCols / 2), view(q_got)});
    ApplyRotarySpec apply;
    apply.head_dim = kCols;
    apply.style = spec.style;
    Made(ApplyRotaryPlan::Create(apply))
        .Execute(view(q), Matrix(c, kCols / 2), Matrix(s, kCols / 2),
                 view(q_want), executor_);
    EXPECT_EQ(q_got, q_want);
  }
}

// Tests the option of the reference to round once. By default it rounds each
// product and each sum.
TEST_F(OpArgsRopeTest, TurnsInF32WhereThatIsAsked) {
  const int64_t n = kRows * kCols;
  auto x = UniformReals<BFloat16>(rng_, n, -3, 3);
  auto c = UniformReals<BFloat16>(rng_, n, -1, 1);
  const TensorMeta meta = {DType::kBF16, {kRows, 1, kCols}};
  const TensorMeta table = {DType::kBF16, {kRows, kCols / 2}};
  const OpDispatcher ops(registry_, OpPolicy());
  std::vector<BFloat16> out[3];
  for (const size_t i : {size_t{0}, size_t{1}, size_t{2}}) {
    out[i].resize(x.size());
    const auto made =
        ops.MakeFrom(i == 2 ? "simd" : "reference", "apply_rotary_emb",
                     {{"x", meta},
                      {"cos", table},
                      {"sin", table},
                      {"enable_fp32_compute", i == 1}});
    ASSERT_TRUE(made.ok()) << made.status();
    const auto view = [](std::vector<BFloat16>& data) {
      return DenseTensor(data.data(), std::array<int64_t, 3>{kRows, 1, kCols});
    };
    const std::vector<AnyTensorView> tensors = {
        view(x), DenseMatrix(c.data(), kRows, kCols / 2),
        DenseMatrix(c.data() + n / 2, kRows, kCols / 2), view(out[i])};
    ASSERT_EQ(made->op->CheckArgs(tensors), absl::OkStatus());
    made->op->Execute(tensors, executor_);
  }
  int by_steps = 0, at_once = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    by_steps += BitsOf(out[0][i]) != BitsOf(out[2][i]);
    at_once += BitsOf(out[1][i]) != BitsOf(out[2][i]);
  }
  EXPECT_GT(by_steps, 5);
  EXPECT_LE(at_once, 1);  // 1 allows for a tie
}

}  // namespace
}  // namespace quern
