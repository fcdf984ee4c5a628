// What GroupedLinearPlan refuses, and in what words.

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/grouped_linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;

class GroupedLinearRefusalTest : public testing::Test {
 protected:
  LinearWeights Weights(WeightCase format, int64_t n, int64_t k,
                        bool bias = false, Act act = Act::kNone) {
    Shape s{0, n, k};
    s.bias = bias;
    s.act = act;
    return RealWeights(rng_, format, s).Pack(executor_);
  }
  absl::Status Create(const GroupedLinearSpec& spec,
                      const std::vector<LinearWeights>& weights) {
    return GroupedLinearPlan::Create(spec, weights).status();
  }

  TestRng rng_;
  InlineExecutor executor_;
};

TEST_F(GroupedLinearRefusalTest, WeightsThatAreNotOfOneKind) {
  const WeightCase bf16 = {WeightFormat::kBF16};
  const LinearWeights first = Weights(bf16, 32, 64);
  const WeightCase i4 = {WeightFormat::kI4Group};
  const WeightCase i4_zeros = {WeightFormat::kI4Group, WeightLayout::kNK, true};
  const GroupedLinearSpec spec;
  ExpectRefusal(Create(spec, {}), "number of weights=0");
  ExpectRefusal(Create(spec, {LinearWeights()}), "n of the weights=0");
  ExpectRefusal(Create(spec, {first, Weights(bf16, 33, 64)}),
                "n of weights[1] is 33; need 32, as weights[0] has");
  ExpectRefusal(Create(spec, {first, first, Weights(bf16, 32, 65)}),
                "k of weights[2] is 65");
  ExpectRefusal(Create(spec, {first, Weights({WeightFormat::kF32}, 32, 64)}),
                "format of weights[1] is f32; need bf16");
  ExpectRefusal(Create(spec, {first, Weights(bf16, 32, 64, true)}),
                "weights[1] has bias; weights[0] has none");
  ExpectRefusal(Create(spec, {Weights(bf16, 32, 64, true), first}),
                "weights[1] has no bias; weights[0] has");
  ExpectRefusal(Create(spec, {Weights(i4, 32, 64), Weights(i4_zeros, 32, 64)}),
                "weights[1] has zero points");
  ExpectRefusal(
      Create(spec, {first, Weights(bf16, 32, 64, false, Act::kSiluAndMul)}),
      "gated of weights[1] is 1");
}

TEST_F(GroupedLinearRefusalTest, SpecsThatTheLinearRefuses) {
  const LinearWeights bf16 = Weights({WeightFormat::kBF16}, 32, 64);
  GroupedLinearSpec spec;
  spec.activation = Act::kSiluAndMul;
  ExpectRefusal(Create(spec, {bf16}), "grouped_linear: activation is");
  spec = {};
  spec.a = DType::kI8;
  ExpectRefusal(Create(spec, {Weights({WeightFormat::kI8Channel}, 32, 64)}),
                absl::StatusCode::kUnimplemented, "grouped_linear: a");
  spec = {};
  spec.c = DType::kI32;
  ExpectRefusal(Create(spec, {bf16}), absl::StatusCode::kUnimplemented, "c");
}

TEST_F(GroupedLinearRefusalTest, RowsAndWorkersThatThereAreNot) {
  const auto plan =
      GroupedLinearPlan::Create({}, {Weights({WeightFormat::kBF16}, 16, 32)});
  ASSERT_EQ(plan.status(), absl::OkStatus());
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(), "max_rows=-1");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(), "max_workers=0");
  ExpectRefusal(
      plan->WorkspaceBytes(std::numeric_limits<int64_t>::max() / 2, 4).status(),
      absl::StatusCode::kResourceExhausted, "need at most 2147483647");
  EXPECT_EQ(plan->WorkspaceBytes(GroupedLinearPlan::kMaxRows, 65536).status(),
            absl::OkStatus());
}

TEST_F(GroupedLinearRefusalTest, Arguments) {
  const LinearWeights weights = Weights({WeightFormat::kBF16}, 16, 32);
  const auto plan = GroupedLinearPlan::Create({}, {weights, weights});
  ASSERT_EQ(plan.status(), absl::OkStatus());
  std::vector<BF> a(size_t{6 * 32}), c(size_t{6 * 16});
  std::vector<int32_t> offsets = {0, 2, 5}, index = {0, 1, 2, 3, 11};
  GroupedLinearArgs good;
  good.a = DenseMatrix(a.data(), 6, 32);
  good.c = DenseMatrix(c.data(), 6, 16);
  good.offsets = DenseVector<const int32_t>(offsets.data(), 3);
  good.index = DenseVector<const int32_t>(index.data(), 5);
  good.rows_per_index = 2;
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());

  const auto refused = [&](const std::string& words, const auto& change) {
    GroupedLinearArgs args = good;
    const auto kept = std::make_pair(offsets, index);
    change(args);
    ExpectRefusal(plan->CheckArgs(args), words);
    offsets = kept.first;
    index = kept.second;
  };
  refused("a is", [&](auto& args) {
    args.a = DenseMatrix(reinterpret_cast<Float16*>(a.data()), 6, 32);
  });
  refused("a", [&](auto& args) { args.a = DenseMatrix(a.data(), 6, 31); });
  refused("c", [&](auto& args) { args.c = DenseMatrix(c.data(), 6, 15); });
  refused("c", [&](auto& args) { args.c = DenseMatrix(a.data(), 6, 16); });
  refused("offsets", [&](auto& args) {
    args.offsets = DenseVector<const int32_t>(offsets.data(), 2);
  });
  refused("offsets[0]=1; need 0", [&](auto&) { offsets[0] = 1; });
  refused("offsets[2]=1; need 2 or more", [&](auto&) { offsets[2] = 1; });
  refused("offsets[2]=7; need 2 or more, and at most the 6 rows of c",
          [&](auto&) { offsets[2] = 7; });
  refused("offsets[1]=-1", [&](auto&) { offsets[1] = -1; });
  refused("rows_per_index=0", [&](auto& args) { args.rows_per_index = 0; });
  refused("index[3]=-1; need 0 <= index / 2 < 6",
          [&](auto&) { index[3] = -1; });
  refused("index[0]=12; need 0 <= index / 2 < 6",
          [&](auto&) { index[0] = 12; });
  refused("extent of index=4", [&](auto& args) {
    args.index = DenseVector<const int32_t>(index.data(), 4);
  });
  refused("rows of a=4", [&](auto& args) {
    args.index = {};
    args.a = DenseMatrix(a.data(), 4, 32);
  });
  refused("index", [&](auto& args) {
    args.index = DenseVector(reinterpret_cast<const int32_t*>(c.data()), 5);
  });
  // What is behind the rows is not looked at.
  index.push_back(-77);
  good.index = DenseVector<const int32_t>(index.data(), 6);
  EXPECT_EQ(plan->CheckArgs(good), absl::OkStatus());
}

TEST_F(GroupedLinearRefusalTest, ExecuteChecksItsArgumentsInDebugBuilds) {
#ifndef NDEBUG
  const auto plan =
      GroupedLinearPlan::Create({}, {Weights({WeightFormat::kBF16}, 16, 32)});
  ASSERT_EQ(plan.status(), absl::OkStatus());
  std::vector<BF> a(size_t{2 * 32}), c(size_t{2 * 16});
  const std::vector<int32_t> offsets = {0, 3};
  GroupedLinearArgs args;
  args.a = DenseMatrix(a.data(), 2, 32);
  args.c = DenseMatrix(c.data(), 2, 16);
  args.offsets = DenseVector(offsets.data(), 2);
  EXPECT_DEATH(plan->Execute(args, Workspace(), executor_),
               "offsets\\[1\\]=3; need 0 or more, and at most the 2 rows");
#else
  GTEST_SKIP() << "QUERN_DCHECK is off";
#endif
}

}  // namespace
}  // namespace quern
