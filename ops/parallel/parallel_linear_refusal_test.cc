#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

TEST(ColumnParallelLinear, Refuses) {
  InlineExecutor executor;
  auto group = ThreadCommunicator::CreateGroup(4);
  ASSERT_TRUE(group.ok());
  const AnyMatrix w(DType::kBF16, 32, 8, 8), b(DType::kF32, 1, 32, 32);
  struct Case {
    ColumnParallelLinearSpec spec;
    std::string words;
  };
  const auto with = [](std::vector<ColumnOutput> outputs) {
    ColumnParallelLinearSpec spec;
    spec.outputs = std::move(outputs);
    spec.k = 8;
    return spec;
  };
  std::vector<Case> cases = {
      {with({}), "outputs=0; need outputs >= 1"},
      {with({{32}, {0}}), "outputs[1].size=0; need 1 <="},
      {with({{32, 0}}), "outputs[0].unit=0; need 1 <="},
      {with({{32, 5}}), "outputs[0].size=32; need a multiple of unit=5"},
      {with({{30}}),
       "outputs[0] has 30 units of 1 columns; need a multiple of the 4 ranks"},
      {with({{32, 16}}), "outputs[0] has 2 units of 16 columns"},
      {with({{24, 8, true}}),
       "outputs[0] has 3 units of 8 columns; need a multiple of the 4 "
       "ranks, or a number that divides them"},
      {with({{28}}), "weights"},
  };
  cases.push_back({with({{32, 16, true}}), "outputs[0] is replicated"});
  cases.back().spec.gather_output = true;
  cases.push_back({with({{32}}), "activation is gated; need two outputs"});
  cases.back().spec.activation = LinearActivation::kSiluAndMul;
  cases.push_back({with({{16}, {12}, {4}}),
                   "activation is gated; need two outputs of equal size"});
  cases.back().spec.activation = LinearActivation::kGeluAndMul;
  // With four ranks, each has all 16 columns of the replicated unit, and 4
  // columns of the other output.
  cases.push_back(
      {with({{16, 16, true}, {16}}),
       "activation is gated; the rank has 16 columns of gate and 4 of up"});
  cases.back().spec.activation = LinearActivation::kGeluAndMul;
  cases.push_back({with({{32}}), "bias is skipped; need activation=none"});
  cases.back().spec.activation = LinearActivation::kSilu;
  cases.back().spec.bias = BiasUse::kSkip;
  cases.push_back({with({{32}}), "k=0; need 1 <= k"});
  cases.back().spec.k = 0;
  cases.push_back({with({{32}}), "weights"});  // kShard needs 8 rows
  cases.back().spec.part = WeightPart::kShard;
  for (const Case& c : cases) {
    ExpectRefusal(
        ColumnParallelLinearPlan::Create(c.spec, w.const_view(), b.vector(),
                                         *(*group)[1], executor)
            .status(),
        "column_parallel_linear: " + c.words);
  }
  ExpectRefusal(
      ColumnParallelLinearPlan::Create(
          with({{32}}), w.const_view(),
          AnyMatrix(DType::kF32, 1, 31, 31).vector(), *(*group)[1], executor)
          .status(),
      "column_parallel_linear: bias");
}

TEST(RowParallelLinear, Refuses) {
  InlineExecutor executor;
  auto group = ThreadCommunicator::CreateGroup(4);
  ASSERT_TRUE(group.ok());
  const AnyMatrix w(DType::kBF16, 8, 32, 32), b(DType::kF32, 1, 8, 8);
  struct Case {
    int64_t n, k;
    bool reduce;
    WeightPart part;
    std::string words;
  };
  for (const Case& c : {
           Case{0, 32, true, WeightPart::kFull, "n=0; need 1 <= n"},
           Case{8, 0, true, WeightPart::kFull, "k=0; need 1 <= k"},
           Case{8, 30, true, WeightPart::kFull,
                "k=30; need a multiple of the 4 ranks"},
           Case{8, 32, false, WeightPart::kFull,
                "reduce_results=false with a bias"},
           Case{8, 32, true, WeightPart::kShard, "weights"},
           Case{8, 36, true, WeightPart::kFull, "weights"},
       }) {
    RowParallelLinearSpec spec;
    spec.n = c.n;
    spec.k = c.k;
    spec.reduce_results = c.reduce;
    spec.part = c.part;
    ExpectRefusal(RowParallelLinearPlan::Create(
                      spec, w.const_view(), b.vector(), *(*group)[2], executor)
                      .status(),
                  "row_parallel_linear: " + c.words);
  }
  // reduce_results = false is legal without a bias.
  RowParallelLinearSpec spec;
  spec.n = 8;
  spec.k = 32;
  spec.reduce_results = false;
  const auto plan = RowParallelLinearPlan::Create(
      spec, w.const_view(), AnyTensorView(), *(*group)[2], executor);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const AnyMatrix x(DType::kBF16, 3, 8, 8), y(DType::kBF16, 3, 8, 8);
  const AnyMatrix wide(DType::kBF16, 3, 32, 32), f32(DType::kF32, 3, 8, 8);
  EXPECT_EQ(plan->CheckArgs(x.const_view(), y.view()), absl::OkStatus());
  ExpectRefusal(plan->CheckArgs(wide.const_view(), y.view()),
                "row_parallel_linear: x");
  ExpectRefusal(plan->CheckArgs(x.const_view(), wide.view()),
                "row_parallel_linear: y");
  ExpectRefusal(plan->CheckArgs(x.const_view(), f32.view()),
                "row_parallel_linear: y");
  ExpectRefusal(plan->CheckArgs(y.view(), y.view()), "overlap");
}

TEST(ReplicatedLinear, Refuses) {
  InlineExecutor executor;
  const AnyMatrix w(DType::kBF16, 8, 32, 32);
  const std::vector<int8_t> i8(8 * 32);
  const AnyTensorView codes = DenseMatrix(i8.data(), 8, 32);
  ReplicatedLinearSpec spec;
  spec.n = 8;
  spec.k = 32;
  const auto create = [&](const AnyTensorView& weights) {
    return ReplicatedLinearPlan::Create(spec, weights, AnyTensorView(),
                                        executor);
  };
  const auto plan = create(w.const_view());
  ASSERT_TRUE(plan.ok()) << plan.status();
  ExpectRefusal(plan->WorkspaceBytes(-1, 1).status(),
                "linear: max_m=-1; need max_m >= 0");
  ExpectRefusal(plan->WorkspaceBytes(1, 0).status(),
                "linear: max_workers=0; need 1 <= max_workers <= 65536");
  ExpectRefusal(create(codes).status(), "replicated_linear: weights");
  spec.w = DType::kI8;
  ExpectRefusal(create(codes).status(), absl::StatusCode::kUnimplemented,
                "replicated_linear: w is i8; need f32 or bf16 or f16");
  spec.w = DType::kBF16;
  spec.kernels = "no_such_kernels";
  ExpectRefusal(create(w.const_view()).status(), "no_such_kernels");
  spec.kernels = "onednn";  // onednn is not linked here
  ExpectRefusal(create(w.const_view()).status(),
                absl::StatusCode::kUnimplemented, "gemm/onednn");
  spec.k = 0;
  ExpectRefusal(create(w.const_view()).status(),
                "replicated_linear: k=0; need 1 <= k");
}

}  // namespace
}  // namespace quern
