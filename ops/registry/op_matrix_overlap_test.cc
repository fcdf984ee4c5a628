// Every operator with two tensors in one memory: at one address, or so that one
// begins in the last element of the other. A pair of which one is written is
// refused, unless it is declared in place (OpRules); a declared pair is refused
// or gives the bits that tensors in memory of their own give. Two tensors that
// are read may lie anywhere. Lists of indices are refused by the operator's own
// CheckArgs as well, because a plan in C++ checks them once and reads them
// again while it writes.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_matrix_testutil.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

using Names = std::set<std::string>;  // of a pair of tensors

class OpMatrixOverlapTest : public testing::TestWithParam<std::string> {
 protected:
  void TryWritten(const MatrixOp& op, const SharedPair& pair);
  void TryDeclared(const MatrixOp& op, const SharedPair& pair);
  void TryRead(const MatrixOp& op, const SharedPair& pair);

  InlineExecutor executor_;
  std::set<Names> in_place_;  // pairs that were executed so
  int64_t cases_ = 0, executed_ = 0;
};

void OpMatrixOverlapTest::TryWritten(const MatrixOp& op,
                                     const SharedPair& pair) {
  const SharedStep step(op, pair);
  const MadeOp made = *op.Make();
  for (const absl::Status& status :
       {made.CheckArgs(step.views()), made.Prepare(step.views(), executor_)}) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(IsRefusalOf(op.name, status));
    EXPECT_TRUE(absl::StrContains(status.message(), " overlaps ")) << status;
  }
  const DType dtype = op.given.metas[pair.second].dtype;
  if (dtype == DType::kI32 || dtype == DType::kI64) {
    EXPECT_FALSE(made.op->CheckArgs(step.views()).ok());
  }
}

void OpMatrixOverlapTest::TryDeclared(const MatrixOp& op,
                                      const SharedPair& pair) {
  const SharedStep step(op, pair);
  const absl::Status status = RunStep(*op.Make(), step.views(), executor_);
  if (!status.ok()) {
    EXPECT_TRUE(IsRefusalOf(op.name, status));
    EXPECT_TRUE(step.SharedIsUnchanged()) << "a refused step wrote";
    return;
  }
  ++executed_;
  in_place_.insert({op.given.names[pair.first], op.given.names[pair.second]});
  ASSERT_EQ(RunStep(*op.Make(), step.apart(), executor_), absl::OkStatus());
  for (size_t t = 0; t < op.given.size(); ++t) {
    if (t == pair.second) continue;  // the first one was written over it
    EXPECT_EQ(step.Read(t), step.ReadApart(t)) << op.given.names[t];
  }
}

void OpMatrixOverlapTest::TryRead(const MatrixOp& op, const SharedPair& pair) {
  const SharedStep step(op, pair);
  const absl::Status status = RunStep(*op.Make(), step.views(), executor_);
  const absl::Status apart = RunStep(*op.Make(), step.apart(), executor_);
  EXPECT_EQ(status, apart) << "two tensors that are read may share memory";
  EXPECT_TRUE(step.SharedIsUnchanged());
  if (!status.ok()) {
    EXPECT_TRUE(IsRefusalOf(op.name, status));
    return;
  }
  ++executed_;
  if (!apart.ok()) return;
  for (size_t t = 0; t < op.given.size(); ++t) {
    EXPECT_EQ(step.Read(t), step.ReadApart(t)) << op.given.names[t];
  }
}

TEST_P(OpMatrixOverlapTest, WhatIsWrittenLiesApartUnlessItIsDeclaredInPlace) {
  int64_t floor = 0;
  for (const MatrixOp& op : MatrixOpsOf(GetParam())) {
    const auto size = static_cast<int64_t>(op.given.size());
    for (const bool written : op.given.written) {
      if (written) floor += size - 1;
    }
    for (const SharedPair& pair : SharedPairs(op)) {
      SCOPED_TRACE(op.Print() + ": " + pair.what);
      ++cases_;
      if (!pair.written) {
        TryRead(op, pair);
      } else if (pair.declared) {
        TryDeclared(op, pair);
      } else {
        TryWritten(op, pair);
      }
    }
  }
  std::printf("%s: %lld pairs in one memory, %lld executed\n",
              GetParam().c_str(), static_cast<long long>(cases_),
              static_cast<long long>(executed_));
  EXPECT_GE(cases_, floor);

  // Every declaration is of use whose tensors the example has. A dense result
  // is not where half of a wider tensor is.
  const OpDefinition& definition = *AllOps().Find(GetParam());
  const auto given =
      GivenTensors::Of(AllOps(), GetParam(), definition.example(DType::kF32));
  ASSERT_TRUE(given.ok()) << given.status();
  const auto find = [&](const std::string& tensor) -> const TensorMeta* {
    for (size_t t = 0; t < given->size(); ++t) {
      if (given->names[t] == tensor) return &given->metas[t];
    }
    return nullptr;
  };
  for (const auto& [a, b] : definition.rules.in_place) {
    const TensorMeta *one = find(a), *two = find(b);
    if (one == nullptr || two == nullptr || !(*one == *two)) continue;
    // These read the slots of a step that agrees with itself.
    if (a == "k_buffer" || b == "k_buffer") continue;
    EXPECT_EQ(in_place_.count({a, b}), 1u) << a << ", " << b;
  }
}

std::string NameOf(const testing::TestParamInfo<std::string>& info) {
  return info.param;
}
INSTANTIATE_TEST_SUITE_P(Ops, OpMatrixOverlapTest,
                         testing::ValuesIn(AllOps().Names()), NameOf);

}  // namespace
}  // namespace quern
