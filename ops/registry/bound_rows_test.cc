#include "quern/ops/registry/bound_rows.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

using Dims = AnyTensorView::Dims;

AnyTensorView Floats(std::vector<float>& data, int rank, const Dims& extents,
                     const Dims& strides) {
  return AnyTensorView(DType::kF32, static_cast<void*>(data.data()), rank,
                       extents, strides);
}
AnyTensorView Vector(std::vector<float>& data) {
  return Floats(data, 1, {static_cast<int64_t>(data.size())}, {1});
}
AnyTensorView Codes(std::vector<uint8_t>& data, DType dtype, int64_t rows,
                    int64_t cols) {
  return AnyTensorView(dtype, static_cast<void*>(data.data()), 2, {rows, cols},
                       {cols, 1});
}

TEST(AsRowsTest, JoinsDimensionsOfOneStride) {
  std::vector<float> data(8);
  struct Case {
    int rank;
    Dims extents;
    Dims strides;
    int64_t rows;
    int64_t stride;  // 0: not checked
  };
  const Case cases[] = {
      {1, {8}, {1}, 1, 0},
      {3, {2, 3, 8}, {24, 8, 1}, 6, 8},
      {3, {2, 3, 8}, {48, 16, 1}, 6, 16},
      {3, {0, 3, 8}, {24, 8, 1}, 0, 0},
      {3, {3, 0, 8}, {24, 8, 1}, 0, 0},
      // Dimensions of extent 1, whose strides are meaningless.
      {3, {4, 1, 64}, {64, 0, 1}, 4, 64},
      {3, {1, 4, 64}, {7, 80, 1}, 4, 80},
      {4, {2, 3, 1, 8}, {48, 16, 5, 1}, 6, 16},
      {4, {2, 1, 3, 8}, {48, 5, 16, 1}, 6, 16},
      {5, {1, 1, 1, 1, 8}, {9, 9, 9, 9, 1}, 1, 0},
  };
  for (const Case& c : cases) {
    const AnyTensorView rows =
        AsRows(Floats(data, c.rank, c.extents, c.strides));
    ASSERT_EQ(rows.rank(), 2);
    EXPECT_EQ(rows.extent(0), c.rows);
    EXPECT_EQ(rows.extent(1), c.extents[static_cast<size_t>(c.rank) - 1]);
    if (c.stride != 0) {
      EXPECT_EQ(rows.stride(0), c.stride);
    }
  }
}

TEST(AsRowsTest, LeavesWhatIsNotOneStride) {
  std::vector<float> data(8);
  constexpr int64_t kHalf = int64_t{1} << 32;
  // A slice [2, 1, 3, 64] of a dense [2, 1, 5, 64].
  EXPECT_EQ(AsRows(Floats(data, 4, {2, 1, 3, 64}, {320, 320, 64, 1})).rank(),
            4);
  EXPECT_EQ(AsRows(Floats(data, 3, {2, 3, 8}, {25, 8, 1})).rank(), 3);
  EXPECT_EQ(AsRows(Floats(data, 3, {2, 3, 8}, {24, 9, 1})).rank(), 3);
  EXPECT_EQ(AsRows(Floats(data, 3, {kHalf, kHalf, 8}, {0, 0, 1})).rank(), 3);
  EXPECT_EQ(AsRows(Floats(data, 3, {-1, -4, 8}, {32, 8, 1})).rank(), 3);
  EXPECT_EQ(AsRows(AnyTensorView()).rank(), 0);
  // Views of more dimensions than AnyTensorView holds are returned unchanged.
  EXPECT_EQ(AsRows(Floats(data, 6, {1, 1, 1, 1, 8}, {8, 8, 8, 8, 1})).rank(),
            6);
  EXPECT_EQ(AsRows(Floats(data, -1, {8}, {1})).rank(), -1);
}

// Runs operators by both providers, "simd" and "reference".
class RegistryRowsTest : public testing::Test {
 protected:
  RegistryRowsTest() { EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus()); }

  template <class Fn>
  void ForBoth(const std::string& name, const NamedArgs& args, const Fn& fn) {
    const auto none = OpPolicy::Parse("none");
    for (const OpPolicy& policy : {OpPolicy(), *none}) {
      const OpDispatcher ops(registry_, policy);
      const auto made = ops.Make(name, args);
      ASSERT_TRUE(made.ok()) << made.status();
      SCOPED_TRACE(made->provider);
      fn(*made->op);
    }
  }
  void Execute(const BoundOp& op, const std::vector<AnyTensorView>& tensors) {
    ASSERT_EQ(op.CheckArgs(tensors), absl::OkStatus());
    op.Execute(tensors, executor_);
  }

  OpRegistry registry_;
  InlineExecutor executor_;
};

TEST_F(RegistryRowsTest, TakesRowsAndRefusesSlices) {
  const TensorMeta meta = {DType::kF32, {4, 1, 64}};
  ForBoth("gelu", {{"x", meta}}, [&](const BoundOp& op) {
    std::vector<float> x(4 * 64), out(4 * 64, -9.0f);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 100.0f + static_cast<float>(i);
    Execute(op, {Floats(x, 3, {4, 1, 64}, {64, 0, 1}),
                 Floats(out, 3, {4, 1, 64}, {64, 0, 1})});
    EXPECT_EQ(out, x);  // far from 0, where silu(x) = x
    std::vector<float> y(640), z(640);
    EXPECT_EQ(op.CheckArgs({Floats(y, 4, {2, 1, 3, 64}, {320, 320, 64, 1}),
                            Floats(z, 4, {2, 1, 3, 64}, {320, 320, 64, 1})})
                  .code(),
              absl::StatusCode::kInvalidArgument);
  });
}

TEST_F(RegistryRowsTest, CountsTensorsByName) {
  const auto expect = [&](const std::string& op, const TensorMeta& x,
                          const std::string& words) {
    ForBoth(op, {{"x", x}}, [&](const BoundOp& bound) {
      const absl::Status status = bound.CheckArgs({AnyTensorView()});
      EXPECT_TRUE(absl::StrContains(status.message(), words)) << status;
    });
  };
  const TensorMeta x = {DType::kF32, {2, 8}};
  expect("gelu", x, "gelu: tensors=1; need 2, as the schema has");
  expect("silu_and_mul", x, "silu_and_mul: tensors=1; need 2");
}

TEST_F(RegistryRowsTest, InfersTheRowsOfNoColumns) {
  const auto shapes = registry_.InferShapes(
      "rms_norm_quant", {{"x", TensorMeta{DType::kF32, {4, 3, 0}}}});
  ASSERT_TRUE(shapes.ok()) << shapes.status();
  EXPECT_EQ((*shapes)[1], (TensorMeta{DType::kF32, {12}}));
}

TEST_F(RegistryRowsTest, RefusesShapesBeyondInt64) {
  // 5 * heads would overflow to 4.
  const TensorMeta heads = {DType::kF32, {1, 0x3333333333333334, 64}};
  const absl::Status copies =
      registry_
          .InferShapes("dual_chunk_rotary_embedding",
                       {{"positions", TensorMeta{DType::kI32, {1}}},
                        {"query", heads},
                        {"key", TensorMeta{DType::kF32, {1, 1, 64}}},
                        {"max_position", int64_t{8}},
                        {"chunk_size", int64_t{4}},
                        {"local_size", int64_t{1}}})
          .status();
  EXPECT_TRUE(absl::StrContains(copies.message(),
                                "query has 3689348814741910324 heads; need 5"))
      << copies;
  constexpr int64_t kHalf = int64_t{1} << 32;
  const absl::Status rows =
      registry_
          .InferShapes("rms_norm_quant",
                       {{"x", TensorMeta{DType::kF32, {kHalf, kHalf, 8}}}})
          .status();
  EXPECT_TRUE(absl::StrContains(rows.message(), "x has 2^63 rows or more"))
      << rows;
}

TEST(IndicesOfTest, HasNoneOf2To63ElementsOrMore) {
  int32_t id = 7;
  const auto ids = [&](int64_t rows, int64_t columns) {
    return AnyTensorView(DType::kI32, static_cast<void*>(&id), 2,
                         {rows, columns}, {columns, 1});
  };
  constexpr int64_t kRows = int64_t{1} << 62;
  EXPECT_EQ(IndicesOf(ids(1, 1)).size(), 1);
  EXPECT_EQ(IndicesOf(ids(kRows, 1)).size(), kRows);
  EXPECT_EQ(IndicesOf(ids(kRows, 3)).size(), 0);
  EXPECT_EQ(IndicesOf(ids(kRows, 3), kRows, 1).size(), kRows);
  EXPECT_EQ(IndicesOf(ids(kRows, 3), kRows, 3).size(), 0);
}

TEST_F(RegistryRowsTest, NormsWithoutTheWeightThatWasNotPromised) {
  ForBoth("rms_norm_quant",
          {{"x", TensorMeta{DType::kF32, {1, 4}}},
           {"q_dtype", std::string("int8")}},
          [&](const BoundOp& op) {
            std::vector<float> x = {1, -1, 1, -1}, weight = {1, 2, 4, 8};
            std::vector<float> scales(1);
            std::vector<uint8_t> q(4);
            Execute(op, {Floats(x, 2, {1, 4}, {4, 1}), Vector(weight),
                         Codes(q, DType::kI8, 1, 4), Vector(scales)});
            EXPECT_EQ(q, (std::vector<uint8_t>{127, 129, 127, 129}));
          });
}

TEST_F(RegistryRowsTest, DoesNotLookAtWhatWasNotPromised) {
  const TensorMeta meta = {DType::kF32, {1, 4}};
  const std::vector<float> ones = {1, -1, 1, -1};
  std::vector<float> weight = {1, 2, 4, 8}, x = ones, r = {0, 0, 0, 0};
  ForBoth("rms_norm", {{"x", meta}, {"eps", 0.0}}, [&](const BoundOp& op) {
    std::vector<float> out(4);
    Execute(op, {Floats(x, 2, {1, 4}, {4, 1}), Vector(weight),
                 Floats(out, 2, {1, 4}, {4, 1})});
    EXPECT_EQ(out, ones);
  });
  ForBoth("fused_add_rms_norm", {{"x", meta}, {"residual", meta}, {"eps", 0.0}},
          [&](const BoundOp& op) {
            Execute(op, {Floats(x, 2, {1, 4}, {4, 1}),
                         Floats(r, 2, {1, 4}, {4, 1}), Vector(weight)});
            EXPECT_EQ(x, ones);
            r = {0, 0, 0, 0};
          });
  ForBoth("rms_norm_gated",
          {{"x", meta}, {"weight", TensorMeta{DType::kF32, {4}}}, {"eps", 0.0}},
          [&](const BoundOp& op) {
            std::vector<float> z(4), out(4);
            Execute(op,
                    {Floats(x, 2, {1, 4}, {4, 1}), Floats(z, 2, {1, 4}, {4, 1}),
                     Vector(weight), Floats(out, 2, {1, 4}, {4, 1})});
            EXPECT_EQ(out, (std::vector<float>{1, -2, 4, -8}));
          });
}

// A result one element away from its input overlaps it without being in place.
TEST_F(RegistryRowsTest, RefusesWhatOverlaps) {
  std::vector<float> data(64), weight(4);
  const auto rows = [&](int64_t at, int64_t cols) {
    return AnyTensorView(DType::kF32, static_cast<void*>(data.data() + at), 2,
                         {2, cols}, {8, 1});
  };
  const auto expect = [&](const char* name, NamedArgs args, int64_t cols,
                          const std::vector<AnyTensorView>& tensors) {
    SCOPED_TRACE(name);
    args.emplace_back("x", TensorMeta{DType::kF32, {2, cols}});
    ForBoth(name, args, [&](const BoundOp& op) {
      const absl::Status status = op.CheckArgs(tensors);
      EXPECT_TRUE(absl::StrContains(status.message(), "overlaps")) << status;
    });
  };
  const TensorMeta meta = {DType::kF32, {2, 4}}, w = {DType::kF32, {4}};
  expect("gelu", {}, 4, {rows(0, 4), rows(1, 4)});
  expect("silu_and_mul", {}, 8, {rows(0, 8), rows(1, 4)});
  expect("rms_norm", {{"weight", w}}, 4,
         {rows(0, 4), Vector(weight), rows(1, 4)});
  expect("fused_add_rms_norm", {{"residual", meta}}, 4,
         {rows(0, 4), rows(0, 4), AnyTensorView()});
  expect("rms_norm_gated", {{"z", meta}, {"weight", w}}, 4,
         {rows(0, 4), rows(16, 4), Vector(weight), rows(15, 4)});
}

TEST_F(RegistryRowsTest, Int8ScalesHaveTheirLeast) {
  const float tiny = std::ldexp(1.0f, -121);
  for (const float w : {tiny, std::ldexp(1.0f, -130)}) {
    ForBoth("rms_norm_quant",
            {{"x", TensorMeta{DType::kF32, {1, 2}}},
             {"weight", TensorMeta{DType::kF32, {2}}},
             {"q_dtype", std::string("int8")}},
            [&](const BoundOp& op) {
              std::vector<float> x = {1, -1}, weight = {w, w}, scales(1);
              std::vector<uint8_t> q(2);
              Execute(op, {Floats(x, 2, {1, 2}, {2, 1}), Vector(weight),
                           Codes(q, DType::kI8, 1, 2), Vector(scales)});
              EXPECT_EQ(scales[0], w == tiny ? std::ldexp(1.0f, -125) : 1.0f);
            });
  }
}

TEST_F(RegistryRowsTest, ScalesOfNothing) {
  std::vector<float> none(1);
  std::vector<uint8_t> q(1);
  std::vector<float> first;
  ForBoth("quant_fp8",
          {{"x", TensorMeta{DType::kF32, {0, 8}}},
           {"granularity", std::string("tensor")}},
          [&](const BoundOp& op) {
            std::vector<float> scales = {-1.0f};
            Execute(op, {Floats(none, 2, {0, 8}, {8, 1}),
                         Codes(q, DType::kF8E4M3, 0, 8), Vector(scales)});
            first.push_back(scales[0]);
          });
  ASSERT_EQ(first.size(), 2u);
  EXPECT_GT(first[0], 0.0f);
  EXPECT_EQ(first[1], first[0]);
  // Without columns there are no groups.
  ForBoth("quant_fp8",
          {{"x", TensorMeta{DType::kF32, {2, 0}}},
           {"granularity", std::string("group")}},
          [&](const BoundOp& op) {
            std::vector<float> scales = {-1.0f};
            Execute(op, {Floats(none, 2, {2, 0}, {0, 1}),
                         Codes(q, DType::kF8E4M3, 2, 0),
                         Floats(scales, 2, {2, 0}, {0, 1})});
            EXPECT_EQ(scales[0], -1.0f);
          });
}

// A scale of a whole tensor is [1], as vLLM has it, and may be given as that.
TEST_F(RegistryRowsTest, AScaleOfATensorIsAVector) {
  std::vector<float> x = {448, -896, 224, 0}, scales = {-1.0f};
  std::vector<uint8_t> q(4), fixed(4);
  const TensorMeta meta = {DType::kF32, {2, 2}}, one = {DType::kF32, {1}};
  const auto metas = registry_.InferShapes(
      "quant_fp8", {{"x", meta}, {"granularity", std::string("tensor")}});
  ASSERT_TRUE(metas.ok()) << metas.status();
  EXPECT_EQ((*metas)[1], one);
  ForBoth("quant_fp8", {{"x", meta}, {"granularity", std::string("tensor")}},
          [&](const BoundOp& op) {
            Execute(op, {Floats(x, 2, {2, 2}, {2, 1}),
                         Codes(q, DType::kF8E4M3, 2, 2), Vector(scales)});
            EXPECT_EQ(scales[0], 2.0f);
          });
  ForBoth("static_quant_fp8", {{"x", meta}, {"scale", one}},
          [&](const BoundOp& op) {
            Execute(op, {Floats(x, 2, {2, 2}, {2, 1}), Vector(scales),
                         Codes(fixed, DType::kF8E4M3, 2, 2)});
            EXPECT_EQ(fixed, q);
          });
}

TEST_F(RegistryRowsTest, RefusesARankThatNoViewHas) {
  ForBoth("silu_and_mul", {{"x", TensorMeta{DType::kF32, {1, 8}}}},
          [](const BoundOp& op) {
            std::vector<float> x(8), out(4);
            const AnyTensorView views[] = {
                Floats(x, 6, {1, 1, 1, 1, 8}, {8, 8, 8, 8, 1}),
                Floats(out, 2, {1, 4}, {4, 1})};
            EXPECT_EQ(op.CheckArgs(views).message(),
                      "silu_and_mul: x has rank 6; need 1 <= rank <= 5");
          });
}

TEST_F(RegistryRowsTest, ChecksItsArgumentsInDebugBuilds) {
#ifndef NDEBUG
  ForBoth("silu_and_mul", {{"x", TensorMeta{DType::kF32, {1, 8}}}},
          [](const BoundOp& op) {
            std::vector<float> x(8);
            InlineExecutor executor;
            const AnyTensorView one = Floats(x, 2, {1, 8}, {8, 1});
            EXPECT_DEATH(op.Execute({&one, 1}, executor),
                         "silu_and_mul: tensors=1; need 2");
          });
#else
  GTEST_SKIP() << "QUERN_DCHECK is off";
#endif
}

// Strides that must not matter: scales that are a column of a column-major
// matrix, and a vector of one position.
TEST_F(RegistryRowsTest, TakesStridesThatDoNotCount) {
  ForBoth("quant_fp8", {{"x", TensorMeta{DType::kF32, {4, 1}}}},
          [&](const BoundOp& op) {
            std::vector<float> x = {448, 896, -1792, 448};
            std::vector<float> scales(8, -1.0f);
            std::vector<uint8_t> q(4);
            Execute(op, {Floats(x, 2, {4, 1}, {1, 1}),
                         Codes(q, DType::kF8E4M3, 4, 1),
                         Floats(scales, 2, {4, 1}, {1, 4})});
            EXPECT_EQ(scales, (std::vector<float>{1, 2, 4, 1, -1, -1, -1, -1}));
          });
  ForBoth("rotary_embedding",
          {{"positions", TensorMeta{DType::kI32, {1}}},
           {"query", TensorMeta{DType::kF32, {1, 1, 2}}},
           {"max_position", int64_t{4}}},
          [&](const BoundOp& op) {
            std::vector<float> x = {1, 0};
            const int32_t position = 3;
            Execute(op, {AnyTensorView(DType::kI32,
                                       static_cast<const void*>(&position), 1,
                                       {1}, {2}),
                         Floats(x, 3, {1, 1, 2}, {2, 2, 1}), AnyTensorView()});
            EXPECT_NEAR(x[0], std::cos(3.0), 1e-6);
          });
}

}  // namespace
}  // namespace quern
