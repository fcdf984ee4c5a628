#include "quern/ops/registry/op_tensors.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

// mine(x, s, k): writes s and returns out; k is left out.
OpTensors TensorsOf(const OpRules& rules, const std::vector<int64_t>& x) {
  const auto schema = OpSchema::Parse(
      "mine(Tensor x, Tensor(a1!) s, Tensor? k, float eps=1.0) -> Tensor");
  EXPECT_TRUE(schema.ok()) << schema.status();
  const std::vector<OpArg> args = {TensorMeta{DType::kF32, x},
                                   TensorMeta{DType::kF32, {2, 4}}, OpArg(),
                                   OpArg(1.0)};
  const std::vector<TensorMeta> returns = {{DType::kF32, {2, 4}}};
  return OpTensors(*schema, rules, args, returns);
}

TEST(OpTensorsTest, RefusesAnotherRankThanTheOperatorWasMadeWith) {
  float x[8] = {}, s[8] = {}, out[8] = {};
  const OpTensors tensors = TensorsOf({}, {2, 4});
  EXPECT_EQ(tensors.Check({DenseMatrix(x, 2, 4),
                           DenseMatrix(s, 2, 4),
                           {},
                           DenseMatrix(out, 2, 4)}),
            absl::OkStatus());
  ExpectRefusal(tensors.Check({DenseTensor<float, 3>(x, {1, 2, 4}),
                               DenseMatrix(s, 2, 4),
                               {},
                               DenseMatrix(out, 2, 4)}),
                "mine: x has rank 3; need 2, as the operator was made");
  ExpectRefusal(tensors.Check({DenseMatrix(x, 2, 4),
                               DenseMatrix(s, 2, 4),
                               {},
                               DenseVector(out, 8)}),
                "mine: out has rank 1; need 2, as the operator was made");
}

TEST(OpTensorsTest, RefusesWhatIsWrittenWithinAnotherTensor) {
  float memory[40] = {};
  const auto at = [&](int i) { return DenseMatrix(memory + i, 2, 4); };
  const OpTensors strict = TensorsOf({}, {2, 4});
  EXPECT_EQ(strict.Check({at(0), at(8), {}, at(16)}), absl::OkStatus());
  ExpectRefusal(strict.Check({at(0), at(8), {}, at(0)}),
                "mine: out overlaps x; need no element in common");
  ExpectRefusal(strict.Check({at(0), at(7), {}, at(16)}),
                "mine: s overlaps x; need no element in common");
  ExpectRefusal(strict.Check({at(0), at(8), {}, at(15)}),
                "mine: out overlaps s; need no element in common");
  // A declared pair is the operator's to check, and no other is.
  OpRules rules;
  rules.in_place = {{"out", "x"}};
  const OpTensors declared = TensorsOf(rules, {2, 4});
  EXPECT_EQ(declared.Check({at(0), at(8), {}, at(0)}), absl::OkStatus());
  ExpectRefusal(declared.Check({at(0), at(7), {}, at(0)}), "s overlaps x");
  // Strides that no operator takes.
  const AnyTensorView down(DType::kF32, static_cast<void*>(memory + 12), 2,
                           {2, 4}, {-8, 1});
  ExpectRefusal(strict.Check({down, at(20), {}, at(0)}), "out overlaps x");
  EXPECT_EQ(strict.Check({down, at(20), {}, at(30)}), absl::OkStatus());
}

TEST(OpTensorsTest, CountsRowsOfTheTensorThatTheRulesName) {
  const auto shape = [](AnyTensorView::Dims extents, int rank) {
    return AnyTensorView(DType::kF32, static_cast<void*>(nullptr), rank,
                         extents, {});
  };
  const AnyTensorView x = shape({2, 3, 4}, 3), s = shape({7, 4}, 2);
  OpTensors tensors = TensorsOf({}, {5, 3, 4});
  EXPECT_EQ(tensors.Rows({x, s, {}, {}}), 2);
  EXPECT_EQ(tensors.made_rows(), 5);
  tensors = TensorsOf({{}, OpRows::kLeading}, {5, 3, 4});
  EXPECT_EQ(tensors.Rows({x, s, {}, {}}), 6);
  EXPECT_EQ(tensors.made_rows(), 15);
  tensors = TensorsOf({{}, OpRows::kFirst, "s"}, {5, 3, 4});
  EXPECT_EQ(tensors.Rows({x, s, {}, {}}), 7);
  EXPECT_EQ(tensors.made_rows(), 2);
  // A vector is a single row of its last dimension.
  EXPECT_EQ(TensorsOf({{}, OpRows::kLeading}, {4}).made_rows(), 1);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(TensorsOf({{}, OpRows::kLeading}, {kMost, 2, 4}).made_rows(),
            kMost);
  EXPECT_EQ(TensorsOf({{}, OpRows::kLeading}, {kMost, 2, 0, 4}).made_rows(), 0);
}

TEST(OpTensorsTest, RefusalsHaveTheOperatorsNameAndTheSchemasWords) {
  OpRules rules;
  rules.words = {{"q", "query"}, {"groups", "num_groups"}};
  const auto of = [&](const absl::Status& status) {
    return std::string(InWordsOf("mine", rules, status).message());
  };
  EXPECT_EQ(of(InvalidArgument("plan", "q.extent(0)=1; need 2")),
            "mine: query.extent(0)=1; need 2");
  EXPECT_EQ(of(InvalidArgument("mine", "groups=3")), "mine: num_groups=3");
  EXPECT_EQ(of(InvalidArgument("plan", "q=0; need 1 <= q <= 8, as q is")),
            "mine: query=0; need 1 <= query <= 8, as q is");
  EXPECT_EQ(of(InvalidArgument("plan", "q_norm is null")),
            "mine: q_norm is null");
  EXPECT_EQ(of(InvalidArgument("mine", "out_dtype: dtype 'half' is unknown")),
            "mine: out_dtype: dtype 'half' is unknown");
  EXPECT_EQ(of(absl::NotFoundError("no such thing")), "mine: no such thing");
  EXPECT_EQ(InWordsOf("mine", rules, absl::OkStatus()), absl::OkStatus());
}

TEST(OpArgTest, SaysWhatATensorIsAndWhatIsNeeded) {
  const TensorMeta x = {DType::kBF16, {4, 64}};
  EXPECT_EQ(PrintMeta(x), "bf16[4, 64]");
  EXPECT_EQ(CheckExtents("op", "x", x, {4, 64}), absl::OkStatus());
  ExpectRefusal(CheckExtents("op", "x", x, {3, 64}, ", as y is"),
                "op: x is bf16[4, 64]; need [3, 64], as y is");
  EXPECT_EQ(CheckMeta("op", "x", x, x), absl::OkStatus());
  ExpectRefusal(CheckMeta("op", "x", x, {DType::kF32, {4, 64}}),
                "op: x is bf16[4, 64]; need f32[4, 64]");
}

}  // namespace
}  // namespace quern
