// Every operator with one tensor that is not as it should be. A step whose
// tensor has another rank, dtype, stride or address, or may not be written, and
// an operator that is made with such a tensor, is refused by name or is
// executed; what is executed has the bits that dense tensors of the same
// elements have. A plan that asserts what its operator has not checked ends
// this test where checks are on, and one that ignores a stride fails it
// everywhere. op_matrix_overlap_test.cc has the tensors in one memory.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_matrix_testutil.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

// The least number of cases for each given tensor: 8 other dtypes, a rank, two
// extents, 8 strides, no view, a read-only view and a null one.
constexpr int64_t kStepsPerTensor = 20;
// The least number for each tensor among the arguments, which have no strides.
constexpr int64_t kMakesPerTensor = 10;

// Operators that refuse any step here: lengths and steps that agree with one
// another are in tests of their own.
bool NeverRuns(const std::string& name) {
  static const auto* const names =
      new std::set<std::string>{"cpu_attention_with_kv_cache",
                                "extend_attention_cpu",
                                "flash_attn_varlen_func",
                                "multi_head_latent_attention",
                                "paged_attention",
                                "varlen_attention"};
  return names->count(name) > 0;
}

class OpMatrixTest : public testing::TestWithParam<std::string> {
 protected:
  void TryStep(const MatrixOp& op, const MadeOp& any, const StepChange& change);
  // A step that is refused whichever implementation runs.
  void TryInvalid(const MatrixOp& op, const MadeOp& any,
                  const StepChange& change);
  void TryMake(const MatrixOp& op, const MakeChange& change);
  // The operator for the extents that the step has; where the step has none of
  // its own, or no operator is made for them, the operator of the example.
  MadeOp TwinOf(const MatrixOp& op, const StepChange& change);

  void ExpectCases(int64_t floor) {
    std::printf("%s: %lld cases, %lld executed, %lld refused\n",
                GetParam().c_str(), static_cast<long long>(cases_),
                static_cast<long long>(executed_),
                static_cast<long long>(refused_));
    EXPECT_GE(cases_, floor);
    EXPECT_EQ(cases_, executed_ + refused_);
  }

  InlineExecutor executor_;
  bool dense_runs_ = false;  // the step that is not changed
  int64_t cases_ = 0, executed_ = 0, refused_ = 0;
};

void OpMatrixTest::TryInvalid(const MatrixOp& op, const MadeOp& any,
                              const StepChange& change) {
  const StepTensors step(op, change);
  const std::vector<std::vector<uint8_t>> before = step.Read();
  ++refused_;
  const absl::Status refusal = any.CheckArgs(step.views());
  for (const absl::Status& status :
       {refusal, any.Prepare(step.views(), executor_)}) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(IsRefusalOf(op.name, status));
  }
  if (refusal.ok()) return;
  EXPECT_EQ(any.CheckAndExecute(step.views(), Workspace(), executor_), refusal);
  EXPECT_EQ(step.Read(), before) << "a refused step wrote: " << refusal;
}

MadeOp OpMatrixTest::TwinOf(const MatrixOp& op, const StepChange& change) {
  if (!change.resized) return *op.Make();
  std::vector<TensorMeta> metas = op.given.metas;
  NamedArgs args = op.args;
  for (size_t t = 0; t < metas.size(); ++t) {
    if (op.given.places[t] != change.place) continue;
    metas[t] = change.meta;
    for (auto& [name, arg] : args) {
      if (name == op.given.names[t]) arg = change.meta;
    }
  }
  auto twin = op.Make(args);
  if (!twin.ok()) return *op.Make();
  const auto given = GivenTensors::Of(AllOps(), op.name, args);
  if (!given.ok() || given->metas != metas) return *op.Make();
  return *std::move(twin);
}

void OpMatrixTest::TryStep(const MatrixOp& op, const MadeOp& any,
                           const StepChange& change) {
  SCOPED_TRACE(op.Print() + ": " + change.what);
  ++cases_;
  if (change.want == Want::kInvalid) return TryInvalid(op, any, change);
  const MadeOp made = *op.Make();
  const StepTensors step(op, change);
  const std::vector<std::vector<uint8_t>> before = step.Read();
  const absl::Status status = RunStep(made, step.views(), executor_);
  const absl::Status refusal = made.CheckArgs(step.views());
  if (!refusal.ok()) {
    EXPECT_EQ(made.CheckAndExecute(step.views(), Workspace(), executor_),
              refusal);
  }
  if (change.want == Want::kLikeDense) {
    EXPECT_EQ(status.ok(), dense_runs_) << status;
  }
  const std::vector<std::vector<uint8_t>> after = step.Read();
  if (!status.ok()) {
    ++refused_;
    EXPECT_TRUE(IsRefusalOf(op.name, status));
    EXPECT_EQ(after, before) << "a refused step wrote: " << status;
    return;
  }
  ++executed_;
  EXPECT_NE(change.want, Want::kRefused) << "the step was executed";
  if (change.want == Want::kRefused) return;
  EXPECT_TRUE(step.GapsAreIntact());
  const StepTensors dense = step.DenseTwin(before);
  const absl::Status of_dense =
      RunStep(TwinOf(op, change), dense.views(), executor_);
  EXPECT_EQ(of_dense, absl::OkStatus()) << "dense tensors are refused";
  if (!of_dense.ok()) return;
  const std::vector<std::vector<uint8_t>> want = dense.Read();
  for (size_t t = 0; t < op.given.size(); ++t) {
    EXPECT_EQ(after[t], want[t]) << op.given.names[t];
    if (op.given.written[t]) continue;
    EXPECT_EQ(after[t], before[t]) << op.given.names[t] << " was written";
  }
}

TEST_P(OpMatrixTest, AStepIsRefusedOrHasTheBitsOfDenseTensors) {
  int64_t floor = 0;
  for (const MatrixOp& op : MatrixOpsOf(GetParam())) {
    const MadeOp any = *op.Make();
    const std::vector<StepChange> changes = StepChanges(op);
    ASSERT_FALSE(changes.empty()) << op.Print();
    const int64_t executed = executed_;
    for (size_t i = 0; i < changes.size(); ++i) {
      TryStep(op, any, changes[i]);
      if (i == 0) dense_runs_ = executed_ > executed;
    }
    floor += kStepsPerTensor * static_cast<int64_t>(op.given.size());
  }
  EXPECT_GE(floor, kStepsPerTensor);
  ExpectCases(floor);
  EXPECT_EQ(executed_ == 0, NeverRuns(GetParam()));
  EXPECT_GT(refused_, kStepsPerTensor / 2);
}

void OpMatrixTest::TryMake(const MatrixOp& op, const MakeChange& change) {
  SCOPED_TRACE(op.Print() + ": " + change.what);
  ++cases_;
  const auto made = op.Make(change.args);
  if (!made.ok()) {
    ++refused_;
    EXPECT_TRUE(IsRefusalOf(op.name, made.status()));
    return;
  }
  EXPECT_FALSE(change.must_be_refused);
  const auto changed = op.With(change.args);
  ASSERT_TRUE(changed.ok()) << changed.status();
  const StepTensors step(*changed), again(*changed);
  const absl::Status status = RunStep(*made, step.views(), executor_);
  if (!status.ok()) {
    ++refused_;
    EXPECT_TRUE(IsRefusalOf(op.name, status));
    return;
  }
  ++executed_;
  EXPECT_TRUE(step.GapsAreIntact());
  // Another operator of the same arguments has the same bits.
  EXPECT_EQ(RunStep(*changed->Make(), again.views(), executor_),
            absl::OkStatus());
  EXPECT_EQ(step.Read(), again.Read());
}

TEST_P(OpMatrixTest, IsMadeWithOtherTensorsOrRefused) {
  int64_t floor = 0;
  for (const MatrixOp& op : MatrixOpsOf(GetParam())) {
    for (const auto& [name, arg] : op.args) {
      if (std::holds_alternative<TensorMeta>(arg)) floor += kMakesPerTensor;
    }
    for (const MakeChange& change : MakeChanges(op)) TryMake(op, change);
  }
  EXPECT_GE(floor, kMakesPerTensor);
  ExpectCases(floor);
}

std::string NameOf(const testing::TestParamInfo<std::string>& info) {
  return info.param;
}
INSTANTIATE_TEST_SUITE_P(Ops, OpMatrixTest, testing::ValuesIn(AllOps().Names()),
                         NameOf);

TEST(OpMatrixRegistryTest, HasEveryOperatorAndItsPackedWeights) {
  EXPECT_GE(AllOps().Names().size(), 85u);
  std::set<std::string> packed;
  for (const std::string& name : AllOps().Names()) {
    for (const MatrixOp& op : MatrixOpsOf(name)) {
      for (size_t t = 0; t < op.given.size(); ++t) {
        if (IsPackedWeight(op, t)) packed.insert(name);
      }
    }
  }
  EXPECT_GE(packed.size(), 14u);
}

}  // namespace
}  // namespace quern
